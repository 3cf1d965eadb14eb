//! Masked documents: a token does not attend to another document, with every layout.

use std::fs;
use std::path::PathBuf;

use kintsugi_comm::Connection;
use kintsugi_data::{Split, TokenFileInfo, TokenType, TokenWriter};
use kintsugi_engine::verify::{Bounds, compare, layouts, record, record_reference};
use kintsugi_engine::{EvaluateOptions, MemoryChoice, evaluate, evaluation_dataset};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_rank::InitialWeights;

const MODEL: &str = r#"
    [model]
    preset = "demo"
    layers = 4
    hidden = 32
    ffn = 64
    heads = 4
    vocab = 100
    [batch]
    sequence = 16
    micro = 1
    global = 8
    [data]
    split = 0.0
    [optimizer]
    lr = 1e-3
    warmup = 5
    [run]
    steps = 4
    eval_every = 0
"#;

/// Token files in a temporary folder.
struct Corpus(PathBuf);

impl Corpus {
    /// Documents of these lengths. All tokens are different, up to the size of the vocabulary.
    fn new(name: &str, lengths: impl IntoIterator<Item = u32>) -> Self {
        let folder = std::env::temp_dir().join(format!("kintsugi-documents-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let mut writer = TokenWriter::create(&folder.join("corpus"), TokenType::U16).expect("a new file");
        let (mut tokens, mut bytes) = (0_u64, Vec::new());
        for length in lengths {
            bytes.clear();
            let ids = (tokens..tokens + u64::from(length)).map(|token| (token * 37 % 97) as u32);
            TokenType::U16.write(&ids.collect::<Vec<_>>(), &mut bytes);
            writer.append(&bytes, &[length], true).expect("a document");
            tokens += u64::from(length);
        }
        let (documents, tokenizer) = (writer.documents(), "none".to_owned());
        writer
            .finish(&TokenFileInfo {
                vocab: 97,
                tokenizer,
                end_of_document: None,
                documents,
                tokens,
                validation: None,
            })
            .expect("whole files");
        Corpus(folder)
    }

    fn plan(&self, settings: &[String]) -> Plan {
        let source = format!("data.source={}", self.0.join("corpus").display());
        ConfigSource::text(MODEL).set(source).sets(settings).plan().expect("a legal config")
    }

    /// The mean loss of the initial weights over this many global batches.
    fn loss(&self, settings: &[&str], batches: u64) -> f64 {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let plan = self.plan(&settings);
        let samples = batches * plan.batch.global as u64;
        let options = EvaluateOptions { samples: Some(samples), memory: MemoryChoice::Heap };
        let dataset = evaluation_dataset(&plan, Split::Train).expect("the corpus");
        let evaluated = evaluate(&plan, &InitialWeights { seed: 1 }, &*dataset, &options, |_| {});
        evaluated.expect("no rank fails").loss
    }
}

impl Drop for Corpus {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Some of one token, some longer than a sample.
fn uneven() -> impl Iterator<Item = u32> {
    [3, 1, 7, 20, 1, 1, 5, 40, 2, 9].into_iter().cycle().take(200)
}

const MASKED: &str = "data.mask_documents=true";

#[test]
fn all_layouts_agree_with_one_rank() {
    let corpus = Corpus::new("layouts", uneven());
    let (mut reference, mut failed) = (None, Vec::new());
    for layout in layouts(true) {
        let settings = |more: &[String]| [&[MASKED.to_owned()], &layout.model[..], more].concat();
        let plan = corpus.plan(&settings(&layout.settings));
        let one = match reference.take() {
            Some((model, recording)) if model == layout.model => recording,
            _ => record_reference(&corpus.plan(&settings(&[])), MemoryChoice::Heap).expect("one rank"),
        };
        let difference = compare(
            &one,
            &record(&plan, MemoryChoice::Heap, Connection::Threads, None)
                .expect("no rank fails")
                .expect("rank 0 is here"),
        );
        if !Bounds::of(&plan).hold(&difference) {
            failed.push(format!("{layout}: {difference:?}"));
        }
        reference = Some((layout.model.clone(), one));
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_document_in_a_sample_is_a_sample_of_its_own() {
    // 16 documents of 8 tokens, and one token more as the last target.
    let corpus = Corpus::new("alone", [8; 16].into_iter().chain([1]));
    // Rotary embeddings depend only on the distance of two tokens.
    for family in ["model.family=llama", "model.family=neox"] {
        let alone = corpus.loss(&[family, "batch.sequence=8"], 2);
        let packed = corpus.loss(&[family], 1);
        assert!((packed - alone).abs() > 1e-4, "documents see each other: {packed}, and alone {alone}");
        for attention in ["memory.attention=flash", "memory.attention=plain"] {
            let masked = corpus.loss(&[family, attention, MASKED], 1);
            assert!((masked - alone).abs() < 1e-6, "{attention}: masked {masked}, alone {alone}");
        }
    }
}

#[test]
fn evaluation_is_the_same_on_every_layout() {
    let corpus = Corpus::new("evaluation", uneven());
    let one = corpus.loss(&[MASKED], 3);
    let layouts: [&[&str]; 4] = [
        &["parallel.tp=2", "parallel.sequence_parallel=true"],
        &["parallel.pp=4"],
        &["parallel.pp=2", "parallel.schedule=interleaved"],
        &["parallel.pp=2", "parallel.dp=2", "sharding.zero=3"],
    ];
    for layout in layouts {
        let loss = corpus.loss(&[&[MASKED], layout].concat(), 3);
        assert!((loss - one).abs() < 1e-6, "{layout:?}: {loss}, on one rank {one}");
    }
    let unmasked = corpus.loss(&[], 3);
    assert!((unmasked - one).abs() > 1e-5, "a mask that hides nothing: {one}, without it {unmasked}");
}
