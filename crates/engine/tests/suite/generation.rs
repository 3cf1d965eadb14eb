//! Compares generation with KV caches to whole forwards, on one rank and on many.

use std::sync::{Arc, Mutex};

use kintsugi_comm::Connection;
use kintsugi_data::{DataError, Dataset, Demo, Split};
use kintsugi_engine::{
    EvaluateOptions, GenerateOptions, GenerationResult, Job, MemoryChoice, Sampling, TrainOptions, dataset,
    device, evaluate, generate, run_ranks, train, verify,
};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_rank::{InitialWeights, NewTokens, Purpose, StoredTensor, TokenSource, Tokens};
use kintsugi_simulate::{evaluation_memory, generation_memory};

const WEIGHTS: InitialWeights = InitialWeights { seed: 11 };

const FAMILIES: [&[&str]; 10] = [
    &["model.family=gpt"],
    &["model.family=neox", "model.rotary_fraction=0.5"],
    &["model.family=llama"],
    &["model.family=llama", "model.kv_heads=2", "model.tied=true"],
    &["model.family=qwen2", "model.kv_heads=2"],
    &["model.family=qwen3", "model.kv_heads=2"],
    &["model.family=smollm3", "model.no_rotary_every=2"],
    &["model.family=mistral", "model.sliding_window=8", "model.full_attention_every=2"],
    &["model.family=gemma2", "model.kv_heads=2", "model.sliding_window=8", "model.score_soft_cap=0.5"],
    &["model.family=olmo2", "model.kv_heads=2"],
];

/// A small model on one rank, with these settings.
fn plan(settings: &[&str]) -> Plan {
    const SMALL: &str = "
[model]
layers = 4
hidden = 32
heads = 4
vocab = 130
[batch]
sequence = 64
";
    ConfigSource::text(SMALL).sets(settings).plan().expect("a legal config")
}

fn sample(tokens: usize, index: u64) -> Vec<u32> {
    let mut sample = vec![0; tokens];
    Demo::new(5).sample(Split::Train, index, &mut sample).expect("the demo never fails");
    sample
}

/// Prompts of one to eleven tokens.
fn prompts() -> Vec<Vec<u32>> {
    [7, 1, 11, 4, 4].into_iter().zip(0..).map(|(tokens, index)| sample(tokens, index)).collect()
}

fn run(plan: &Plan, prompts: &[Vec<u32>], tokens: usize, sampling: Sampling) -> GenerationResult {
    let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let plan = plan.for_generation();
    let memory = generation_memory(&plan, device(&plan, Connection::Threads), &lengths, tokens);
    let memory = MemoryChoice::Slab(memory.iter().map(|memory| memory.reserved).collect());
    let options = GenerateOptions { tokens, end_at: vec![], vocab: plan.model.vocab, sampling, memory };
    let mut heard = vec![Vec::new(); prompts.len()];
    let generated = generate(&plan, &WEIGHTS, prompts, &options, |new| heard[new.prompt].push(new.token));
    let generated = generated.expect("no rank fails");
    assert_eq!(heard, generated.tokens, "every token was heard of");
    generated
}

/// Feeds a text in pieces and records the logits after each.
struct Pieces<'a> {
    text: &'a [u32],
    lengths: Vec<usize>,
    fed: usize,
    positions: Vec<u32>,
    last: [u32; 1],
    logits: Vec<Vec<f32>>,
}

impl TokenSource for Pieces<'_> {
    fn batch(&mut self, _: usize) -> Option<Tokens<'_>> {
        None
    }

    fn new_tokens(&mut self, _: usize) -> Option<NewTokens<'_>> {
        let new = self.lengths[self.logits.len()];
        let first = self.fed;
        self.fed += new;
        self.positions = (first as u32..self.fed as u32).collect();
        self.last = [new as u32 - 1];
        Some(NewTokens { tokens: &self.text[first..self.fed], positions: &self.positions, last: &self.last })
    }

    fn choose(&mut self, _: usize, logits: &[f32]) -> Option<Vec<u32>> {
        self.logits.push(logits.to_vec());
        Some(vec![0])
    }
}

/// The logits after each piece of a text.
fn logits(plan: &Plan, text: &[u32], pieces: &[usize]) -> Vec<Vec<f32>> {
    let job = Job::new(Arc::new(plan.clone()), MemoryChoice::Heap);
    let result = run_ranks(Purpose::Inference, &job, &job.world(), |worker| {
        worker.rank.load(&WEIGHTS, &[StoredTensor::Weights]).expect("made, not read");
        let (last, logits) = ([0], Vec::new());
        let mut source =
            Pieces { text, lengths: pieces.to_vec(), fed: 0, positions: Vec::new(), last, logits };
        worker.rank.start_generation(1, 1, text.len());
        for &piece in pieces {
            worker.rank.expect_tokens(piece);
            worker.run(&plan.generation(0, 1), &mut source, |_, _| {})?;
        }
        Ok(source.logits)
    });
    result.expect("no rank fails").remove(0)
}

fn assert_close(left: &[f32], right: &[f32]) {
    assert_eq!(left.len(), right.len());
    for (l, r) in left.iter().zip(right) {
        assert!((l - r).abs() < 1e-5, "{l} against {r}");
    }
}

#[test]
fn a_text_in_pieces_has_the_logits_of_the_whole() {
    let text = sample(40, 3);
    for family in FAMILIES {
        let plan = plan(family);
        let pieces = [20, 1, 1, 1, 7, 1, 9];
        let cached = logits(&plan, &text, &pieces);
        let mut end = 0;
        for (piece, cached) in pieces.iter().zip(&cached) {
            end += piece;
            assert_close(cached, &logits(&plan, &text, &[end])[0]);
        }
    }
}

/// Always the same sample.
struct One(Vec<u32>);

impl Dataset for One {
    fn vocab(&self) -> usize {
        130
    }

    fn floor(&self, _: usize) -> Option<f64> {
        None
    }

    fn sample(&self, _: Split, _: u64, out: &mut [u32]) -> Result<(), DataError> {
        out.copy_from_slice(&self.0);
        Ok(())
    }
}

#[test]
fn the_logits_are_those_that_training_has_its_loss_from() {
    let text = sample(65, 4);
    for family in FAMILIES {
        let plan = plan(family);
        let loss = |(logits, &target): (&Vec<f32>, &u32)| {
            let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            total.ln() - f64::from(logits[target as usize])
        };
        let cached = logits(&plan, &text[..64], &[1; 64]);
        let mean = cached.iter().zip(&text[1..]).map(loss).sum::<f64>() / 64.0;
        let memory = evaluation_memory(&plan, device(&plan, Connection::Threads));
        let memory = MemoryChoice::Slab(memory.iter().map(|memory| memory.reserved).collect());
        let options = EvaluateOptions { samples: Some(1), memory };
        let trained = evaluate(&plan, &WEIGHTS, &One(text.clone()), &options, |_| {}).expect("no rank fails");
        assert!((trained.loss - mean).abs() < 1e-6, "{} against {mean}", trained.loss);
        assert_eq!(trained.tokens, 64);
        assert!((trained.perplexity - mean.exp()).abs() < 1e-4 * mean.exp());
    }
}

#[test]
fn greedy_with_a_cache_is_greedy_without() {
    for family in FAMILIES {
        let plan = plan(family);
        let generated = run(&plan, &prompts(), 12, Sampling::GREEDY);
        for (prompt, tokens) in prompts().iter().zip(&generated.tokens) {
            assert_eq!(tokens.len(), 12);
            let mut text = prompt.clone();
            for &token in tokens {
                let logits = &logits(&plan, &text, &[text.len()])[0];
                assert_eq!(Sampling::GREEDY.choose(logits, 0, 0), token);
                text.push(token);
            }
        }
    }
}

#[test]
fn every_layout_generates_the_same() {
    const LAYOUTS: [&[&str]; 7] = [
        &["batch.micro=4"],
        &["parallel.tp=2"],
        &["parallel.pp=2"],
        &["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "batch.global=2"],
        &["parallel.dp=2", "batch.micro=3"],
        &["parallel.dp=8"],
        &[
            "parallel.tp=2",
            "parallel.pp=2",
            "parallel.dp=2",
            "parallel.sequence_parallel=true",
            "sharding.zero=3",
        ],
    ];
    let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 0.95, seed: 9 };
    for family in [FAMILIES[0], FAMILIES[1], FAMILIES[3]] {
        let one = run(&plan(family), &prompts(), 10, sampling).tokens;
        assert_ne!(one[3], one[4], "texts are drawn apart");
        for layout in LAYOUTS {
            let layout = plan(&[family, layout].concat());
            assert_eq!(run(&layout, &prompts(), 10, sampling).tokens, one, "{family:?} {:?}", layout.mesh);
        }
    }
}

#[test]
fn narrow_types_generate_too() {
    for compute in ["precision.compute=bf16", "precision.compute=fp16"] {
        let generated = run(&plan(&["model.family=llama", compute]), &prompts(), 5, Sampling::GREEDY);
        assert!(generated.tokens.iter().flatten().all(|&token| token < 130));
    }
}

#[test]
fn a_text_ends_where_it_is_told_to() {
    let plan = plan(FAMILIES[0]).for_generation();
    let generate = |tokens, end_at: Vec<u32>| {
        let memory = MemoryChoice::Heap;
        let options =
            GenerateOptions { tokens, end_at, vocab: plan.model.vocab, sampling: Sampling::GREEDY, memory };
        generate(&plan, &WEIGHTS, &prompts(), &options, |_| {}).expect("no rank fails").tokens
    };
    let free = generate(12, vec![]);
    let end = free[0][5];
    for (ended, free) in generate(12, vec![end]).iter().zip(&free) {
        let until = free.iter().position(|&token| token == end).map_or(12, |at| at + 1);
        assert_eq!(ended, &free[..until]);
    }
    assert_eq!(generate(0, vec![]), vec![Vec::<u32>::new(); 5]);
    assert!(generate(1, vec![]).iter().all(|text| text.len() == 1));
}

#[test]
fn what_cannot_be_generated_is_refused_in_a_sentence() {
    let refused = |family: &[&str], prompts: &[Vec<u32>], tokens, sampling| {
        let options = GenerateOptions {
            tokens,
            end_at: vec![],
            vocab: usize::MAX,
            sampling,
            memory: MemoryChoice::Heap,
        };
        let generated = generate(&plan(family).for_generation(), &WEIGHTS, prompts, &options, |_| {});
        generated.expect_err("a mistake").to_string()
    };
    let greedy = Sampling::GREEDY;
    assert_eq!(
        refused(FAMILIES[2], &[vec![1], vec![]], 1, greedy),
        "prompt 2 is empty; it needs at least one token"
    );
    assert_eq!(
        refused(FAMILIES[2], &[vec![1, 130]], 1, greedy),
        "prompt 1 has token 130, but the model's vocabulary has 130 tokens"
    );
    let long = [sample(60, 0)];
    assert_eq!(
        refused(FAMILIES[0], &long, 6, greedy),
        "prompt 1 has 60 tokens, and with 6 generated tokens it exceeds the model's 64 learned positions; shorten it or \
         generate fewer tokens"
    );
    assert_eq!(run(&plan(FAMILIES[0]), &long, 5, greedy).tokens[0].len(), 5, "the last one is never fed");
    assert_eq!(run(&plan(FAMILIES[2]), &long, 6, greedy).tokens[0].len(), 6, "rotary positions have no end");
    let hot = Sampling { temperature: -1.0, ..greedy };
    let said = "temperature = -1 must be at least 0; 0 always chooses the most probable token";
    assert_eq!(refused(FAMILIES[2], &[vec![1]], 1, hot), said);
    let none = Sampling { top_p: 0.0, ..greedy };
    assert_eq!(refused(FAMILIES[2], &[vec![1]], 1, none), "top-p = 0 must be above 0 and at most 1");
}

#[test]
fn an_evaluation_finds_what_training_found() {
    let settings = [
        "run.steps=3",
        "run.eval_every=3",
        "run.eval_tokens=512",
        "batch.micro=2",
        "batch.global=8",
        "batch.sequence=16",
    ];
    let family = [FAMILIES[3], &settings].concat();
    let trained = plan(&[&family[..], &["parallel.tp=2", "parallel.pp=2"]].concat());
    let options = TrainOptions::new(MemoryChoice::Heap);
    let outcome =
        train(&trained, &*dataset(&trained).expect("its data"), &options, |_| {}).expect("no rank fails");
    let expected = outcome.expect("rank 0 is here").validation_loss.expect("an evaluation at the end");
    let weights = verify::record(&trained, MemoryChoice::Heap, Connection::Threads, None)
        .expect("no rank fails")
        .expect("rank 0 is here")
        .weights;
    let evaluate = |plan: &Plan| {
        let options = EvaluateOptions { samples: Some(4 * 8), memory: MemoryChoice::Heap };
        let heard = Mutex::new(Vec::new());
        let demo = Demo::new(plan.run.seed);
        let found = evaluate(plan, &weights, &demo, &options, |loss| heard.lock().unwrap().push(loss));
        let found = found.expect("no rank fails");
        let heard = heard.into_inner().unwrap();
        assert_eq!((heard.len(), heard[3].to_bits()), (4, found.loss.to_bits()));
        found.loss
    };
    assert_eq!(evaluate(&trained).to_bits(), expected.to_bits(), "the same layout gives the same bits");
    for layout in
        [&["parallel.dp=2", "sharding.zero=3"][..], &["parallel.tp=2", "parallel.sequence_parallel=true"]]
    {
        let loss = evaluate(&plan(&[&family[..], layout].concat()));
        assert!((loss - expected).abs() < 1e-5, "{loss} against {expected}");
    }
}
