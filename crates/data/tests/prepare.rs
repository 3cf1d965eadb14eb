//! Preparation of token files: the output does not depend on the number of workers, and is complete or absent.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::Compression;
use flate2::write::GzEncoder;
use kintsugi_data::prepare::{Input, PrepareOptions, PrepareProgress, PrepareSummary, prepare};
use kintsugi_data::{DataError, TokenFile, Tokenizer};

/// An empty folder for one test.
fn folder(name: &str) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = format!("{name}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("prepare").join(name);
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn options(folder: &Path, inputs: &[&str]) -> PrepareOptions {
    let inputs: Vec<String> = inputs.iter().map(|name| folder.join(name).display().to_string()).collect();
    PrepareOptions {
        inputs: Input::find(&inputs).unwrap(),
        out: folder.join("out/corpus"),
        json_key: "text".to_owned(),
        end_of_document: Some(256),
        strict: false,
        allow_bad_lines: false,
        overwrite: false,
        workers: 2,
        validation: 0.0,
    }
}

fn run(options: &PrepareOptions) -> Result<PrepareSummary, DataError> {
    prepare(options, &Tokenizer::open("bytes").unwrap(), |_| true)
}

/// The tokens of the files, with `|` at the end of each document.
fn text(prefix: &Path) -> String {
    let file = TokenFile::open(prefix).unwrap();
    let mut tokens = vec![0; file.tokens() as usize];
    file.read(0, 257, &mut tokens).unwrap();
    let bytes = tokens.into_iter().map(|token| u8::try_from(token).unwrap_or(b'|')).collect();
    String::from_utf8(bytes).unwrap()
}

/// Writes this many JSON lines, each with a text of its own.
fn write_lines(path: &Path, lines: Range<usize>) {
    let lines = lines.map(|line| format!("{{\"text\": \"{}\"}}\n", format!("line {line} ").repeat(150)));
    fs::write(path, lines.collect::<String>()).unwrap();
}

#[test]
fn drawn_documents_are_last_and_their_share_is_recorded() {
    let folder = folder("drawn");
    write_lines(&folder.join("a.jsonl"), 0..1000);
    write_lines(&folder.join("b.jsonl"), 1000..2000);
    // A document of several pieces, and not the shortest.
    fs::write(folder.join("c.txt"), "one text\n".repeat(130_000)).unwrap();
    let inputs = ["a.jsonl", "c.txt", "b.jsonl"];
    let in_order = options(&folder, &inputs);
    run(&in_order).unwrap();
    let expected: Vec<String> = text(&in_order.out).split_inclusive('|').map(str::to_owned).collect();
    let drawn = PrepareOptions { out: folder.join("drawn"), validation: 0.1, ..options(&folder, &inputs) };
    let summary = run(&drawn).unwrap();
    let found: Vec<String> = text(&drawn.out).split_inclusive('|').map(str::to_owned).collect();
    let validation = summary.validation.expect("2001 documents are enough");
    assert!((198..=202).contains(&validation.documents), "{validation:?}");
    let (training, last) = found.split_at(found.len() - validation.documents as usize);
    assert_eq!(validation.tokens as usize, last.iter().map(String::len).sum::<usize>());
    // Both parts keep the order of the text, and together have every document once.
    let numbers = |part: &[String]| -> Vec<usize> {
        part.iter().map(|document| expected.iter().position(|other| other == document).unwrap()).collect()
    };
    let (training, last) = (numbers(training), numbers(last));
    assert!([&training, &last].iter().all(|part| part.is_sorted()));
    let mut all = [training, last.clone()].concat();
    all.sort_unstable();
    assert_eq!(all, (0..2001).collect::<Vec<_>>());
    // They come from all of the corpus, and not from its end.
    for part in 0..4 {
        let within = last.iter().filter(|&&document| document / 500 == part).count();
        assert!((48..=52).contains(&within), "{within} of part {part}");
    }
    let file = TokenFile::open(&drawn.out).unwrap();
    file.check_documents().unwrap();
    assert_eq!(file.documents(), 2001);
    let boundary = file.tokens() - validation.tokens;
    assert_eq!(file.validation_start(None).unwrap(), boundary);
    assert_eq!(file.document_from(boundary).unwrap(), boundary, "it is the start of a document");
    assert!(left(&drawn).iter().all(|name| !name.contains("partial")), "nothing unfinished is left");
    let again = PrepareOptions { out: folder.join("again"), workers: 1, ..drawn.clone() };
    run(&again).unwrap();
    assert_eq!(fs::read(folder.join("again.bin")).unwrap(), fs::read(folder.join("drawn.bin")).unwrap());
    assert_eq!(fs::read(folder.join("again.idx")).unwrap(), fs::read(folder.join("drawn.idx")).unwrap());
}

#[test]
fn few_documents_keep_the_split_of_the_last_tokens() {
    let folder = folder("few-drawn");
    write_lines(&folder.join("a.jsonl"), 0..20);
    let drawn = PrepareOptions { validation: 0.01, ..options(&folder, &["a.jsonl"]) };
    assert_eq!(run(&drawn).unwrap().validation, None);
    let file = TokenFile::open(&drawn.out).unwrap();
    assert_eq!(file.about().unwrap().validation, None);
    assert_eq!(file.validation_start(None), file.validation_start(Some(0.01)));
    let in_order = PrepareOptions { out: folder.join("in-order"), validation: 0.0, ..drawn.clone() };
    run(&in_order).unwrap();
    assert_eq!(text(&drawn.out), text(&in_order.out));
}

/// All files in the output folder.
fn left(options: &PrepareOptions) -> Vec<String> {
    let entries = fs::read_dir(options.out.parent().unwrap()).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The files of a successful preparation: the tokens, and their tokenizer.
const FILES: [&str; 5] =
    ["corpus.bin", "corpus.idx", "corpus.meta.json", "corpus.tokenizer.json", "corpus.tokenizer_config.json"];

#[test]
fn documents_are_packed_in_the_order_of_the_inputs() {
    let folder = folder("order");
    fs::write(folder.join("a.txt"), "first\nfile\n").unwrap();
    fs::write(
        folder.join("b.jsonl"),
        "{\"text\": \"one\"}\n{\"text\": \"\"}\n{\"id\": 1, \"text\": \"two\"}\n",
    )
    .unwrap();
    fs::write(folder.join("empty.txt"), "").unwrap();
    let options = options(&folder, &["b.jsonl", "empty.txt", "a.txt"]);
    let summary = run(&options).unwrap();
    assert_eq!(text(&options.out), "one|two|first\nfile\n|");
    let file = TokenFile::open(&options.out).unwrap();
    assert_eq!((summary.files, summary.documents, summary.tokens), (3, 3, 20));
    assert_eq!((file.documents(), file.tokens()), (3, 20));
    assert_eq!((summary.empty_documents, summary.bad_lines), (1, 0));
    assert_eq!((summary.vocab, summary.token_type.as_str()), (257, "u16"));
    assert_eq!(left(&options), FILES);
    let starts = [0, 1, 4, 5, 8, 9].map(|at| file.document_from(at).unwrap());
    assert_eq!(starts, [0, 4, 4, 8, 8, 20]);
}

#[test]
fn the_number_of_workers_makes_no_difference() {
    let folder = folder("workers");
    let line = |n: usize| format!("{{\"text\": \"document {n} {}\"}}\n", "word ".repeat(n % 50));
    fs::write(folder.join("a.jsonl"), (0..40_000).map(line).collect::<String>()).unwrap();
    fs::write(folder.join("b.txt"), "some text\n".repeat(300_000)).unwrap();
    let written = [1, 2, 7].map(|workers| {
        let mut options = options(&folder, &["a.jsonl", "b.txt"]);
        (options.workers, options.overwrite) = (workers, true);
        let mut seen = Vec::new();
        let tokenizer = Tokenizer::open("bytes").unwrap();
        let summary = prepare(&options, &tokenizer, |progress: &PrepareProgress| {
            seen.push((progress.text, progress.tokens));
            true
        });
        assert!(seen.is_sorted(), "{seen:?}");
        assert_eq!(seen.last().unwrap().0, summary.unwrap().text_bytes);
        [".bin", ".idx"].map(|suffix| fs::read(folder.join(format!("out/corpus{suffix}"))).unwrap())
    });
    assert!(written[0] == written[1] && written[1] == written[2]);
    // A long text is several sequences but one document.
    assert_eq!(TokenFile::open(&folder.join("out/corpus")).unwrap().documents(), 40_001);
}

#[test]
fn bad_lines_are_counted_and_strict_stops_at_the_first() {
    let folder = folder("bad");
    let good = "{\"text\": \"x\"}\n".repeat(30);
    fs::write(folder.join("a.jsonl"), format!("{good}oops\n{good}{}", "nope\n".repeat(40))).unwrap();
    let mut options = options(&folder, &["a.jsonl"]);
    let said = run(&options).unwrap_err().to_string();
    assert!(
        said.contains("a.jsonl: 41 of its 101 lines are bad, more than 10 %; the first is line 31: "),
        "{said}"
    );
    assert_eq!(left(&options), Vec::<String>::new());
    options.allow_bad_lines = true;
    let summary = run(&options).unwrap();
    assert_eq!((summary.documents, summary.bad_lines, summary.bad.len()), (60, 41, 20));
    assert_eq!((summary.bad[0].line, summary.bad[1].line), (31, 62));
    (options.strict, options.overwrite) = (true, true);
    let before = fs::read(folder.join("out/corpus.bin")).unwrap();
    let said = run(&options).unwrap_err().to_string();
    assert!(said.ends_with("a.jsonl, line 31: expected value in column 1"), "{said}");
    assert_eq!(fs::read(folder.join("out/corpus.bin")).unwrap(), before, "what was there stays");
    assert_eq!(left(&options), FILES);
}

/// The first half of a gzip file with JSON lines.
fn half_of_a_gzip() -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    for number in 0..20_000_u32 {
        writeln!(encoder, "{{\"text\": \"{}\"}}", number.wrapping_mul(2_654_435_761)).unwrap();
    }
    let mut bytes = encoder.finish().unwrap();
    bytes.truncate(bytes.len() / 2);
    bytes
}

#[test]
fn a_failed_preparation_leaves_no_files() {
    let folder = folder("failed");
    fs::write(folder.join("a.txt"), "text\n".repeat(1_000_000)).unwrap();
    fs::write(folder.join("b.jsonl.gz"), half_of_a_gzip()).unwrap();
    fs::write(folder.join("c.jsonl"), "bad\n").unwrap();
    let failed = options(&folder, &["a.txt", "b.jsonl.gz"]);
    let said = run(&failed).unwrap_err().to_string();
    assert!(said.contains("b.jsonl.gz: "), "{said}");
    assert_eq!(left(&failed), Vec::<String>::new());
    let mut empty = options(&folder, &["c.jsonl"]);
    empty.allow_bad_lines = true;
    let said = run(&empty).unwrap_err().to_string();
    assert!(said.starts_with("there is no text in the file: 1 bad line; "), "{said}");
    assert_eq!(left(&empty), Vec::<String>::new());
    let stopped = options(&folder, &["a.txt"]);
    let tokenizer = Tokenizer::open("bytes").unwrap();
    let said = prepare(&stopped, &tokenizer, |progress| progress.text < 2_000_000).unwrap_err().to_string();
    assert_eq!(said, "stopped when asked to");
    assert_eq!(left(&stopped), Vec::<String>::new());
}

#[test]
fn existing_files_are_not_overwritten() {
    let folder = folder("safe");
    fs::write(folder.join("a.txt"), "text").unwrap();
    let mut options = options(&folder, &["a.txt"]);
    run(&options).unwrap();
    let said = run(&options).unwrap_err().to_string();
    assert!(said.ends_with("corpus.bin: it exists; choose another --out, or add --overwrite"), "{said}");
    options.overwrite = true;
    run(&options).unwrap();
    // An input with the name of an output.
    for name in ["mine.bin", "mine.tokenizer.json"] {
        let text = "{\"text\": \"text\"}";
        fs::write(folder.join(name), text).unwrap();
        options.inputs = Input::find(&[folder.join(name).display().to_string()]).unwrap();
        options.out = folder.join("mine");
        let said = run(&options).unwrap_err().to_string();
        assert!(said.ends_with("it is one of the inputs; choose another --out"), "{said}");
        assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), text);
    }
}
