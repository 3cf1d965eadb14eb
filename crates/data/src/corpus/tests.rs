//! Files are found, decompressed and divided into chunks without losing anything.

use std::convert::Infallible;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bzip2::write::BzEncoder;
use flate2::Compression as Level;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::{Input, RefusedLine, TextChunk, TextChunks, documents};
use crate::DataError;
use crate::testing::TestFolder;

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Level::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    compress_to_vec(text, CompressionLevel::Fastest)
}

fn bzip2(text: &[u8]) -> Vec<u8> {
    let mut encoder = BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// Names of the inputs within a folder.
fn found(folder: &TestFolder, arguments: &[&str]) -> Vec<String> {
    let arguments: Vec<String> =
        arguments.iter().map(|name| folder.join(name).display().to_string()).collect();
    let inputs = Input::find(&arguments).unwrap();
    inputs.iter().map(|input| input.path.strip_prefix(&**folder).unwrap().display().to_string()).collect()
}

/// All chunks of a file, concatenated, and their number.
fn read(path: &str) -> Result<(Vec<u8>, usize), String> {
    let inputs = Input::find(&[path.to_owned()]).map_err(|error| error.to_string())?;
    let counter = Arc::new(AtomicU64::new(0));
    let mut chunks = TextChunks::new(&inputs, "text", Arc::clone(&counter));
    let (mut chunk, mut whole, mut pieces, mut line) = (TextChunk::default(), Vec::new(), 0, 1);
    while chunks.next(&mut chunk).map_err(|error| error.to_string())? {
        assert_eq!((chunk.number, chunk.begins, chunk.line), (pieces, pieces == 0, line));
        line += memchr::memchr_iter(b'\n', &chunk.bytes).count() as u64;
        whole.extend_from_slice(&chunk.bytes);
        pieces += 1;
    }
    assert_eq!(counter.load(Ordering::Relaxed), inputs[0].bytes, "the whole file was read");
    Ok((whole, pieces as usize))
}

/// The documents of a file, and the lines that could not be used.
pub(super) type Parts = (Vec<String>, Vec<(u64, String)>);

fn parsed(name: &str, bytes: &[u8]) -> Parts {
    try_parsed(name, bytes).unwrap()
}

pub(super) fn try_parsed(name: &str, bytes: &[u8]) -> Result<Parts, DataError> {
    let folder = TestFolder::new("corpus-parsed");
    let inputs = Input::find(&[folder.write(name, bytes)])?;
    let counter = Arc::new(AtomicU64::new(0));
    let mut chunks = TextChunks::new(&inputs, "text", Arc::clone(&counter));
    let (mut chunk, mut texts, mut bad, mut lines) = (TextChunk::default(), Vec::new(), Vec::new(), 0);
    while chunks.next(&mut chunk)? {
        let keep = |_, text: &str| {
            texts.push(text.to_owned());
            Ok::<(), Infallible>(())
        };
        let Ok(parsed) = documents(&chunk, inputs[0].format, "text", keep);
        lines += parsed.lines as usize;
        bad.extend(parsed.refused.into_iter().map(|RefusedLine { line, reason, .. }| (line, reason)));
    }
    if !name.contains(".txt") {
        assert_eq!(lines, texts.len() + bad.len(), "every line is one or the other");
    }
    assert_eq!(counter.load(Ordering::Relaxed), inputs[0].bytes, "the whole file was read");
    Ok((texts, bad))
}

#[test]
fn folders_and_patterns_are_searched() {
    let folder = TestFolder::new("corpus-found");
    for name in ["b.txt", "a.jsonl", "sub/picture.png", ".hidden.txt", "odd"] {
        folder.write(name, "x");
    }
    folder.write("sub/c.md.gz", gzip(b"x"));
    folder.write("sub/d.json.zst", zstd(b"x"));
    assert_eq!(found(&folder, &["."]), ["a.jsonl", "b.txt", "sub/c.md.gz", "sub/d.json.zst"]);
    assert_eq!(found(&folder, &["sub", "odd", "b.txt"]), ["sub/c.md.gz", "sub/d.json.zst", "odd", "b.txt"]);
    assert_eq!(found(&folder, &["**/*.json*"]), ["a.jsonl", "sub/d.json.zst"]);
    let refused =
        |name: &str| Input::find(&[folder.join(name).display().to_string()]).unwrap_err().to_string();
    assert!(refused("absent.txt").contains("cannot read "));
    assert!(refused("*.csv").ends_with("no file matches"));
    std::os::unix::fs::symlink(&*folder, folder.join("sub/above")).unwrap();
    let elsewhere = TestFolder::new("corpus-linked");
    elsewhere.write("e.txt", "x");
    std::os::unix::fs::symlink(&*elsewhere, folder.join("sub/linked")).unwrap();
    for name in ["sub/b.meta.json", "sub/b.tokenizer.json", "tokenizer.json", "tokenizer_config.json"] {
        folder.write(name, "{}");
    }
    let linked = ["a.jsonl", "b.txt", "sub/c.md.gz", "sub/d.json.zst", "sub/linked/e.txt"];
    assert_eq!(found(&folder, &["."]), linked, "links are followed, and what belongs to tokens is no text");
    folder.write("bare/x.png", "x");
    assert!(refused("bare").contains("no file in it ends in .txt"));
}

#[test]
fn compressed_files_are_read_to_their_end() {
    let folder = TestFolder::new("corpus-compressed");
    let text = "line upon line\n".repeat(300_000);
    let (first, second) = text.as_bytes().split_at(1_000_000);
    let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
    let files = [
        ("plain.txt", text.as_bytes().to_vec()),
        ("one.txt.gz", gzip(text.as_bytes())),
        ("two.txt.gz", [gzip(first), gzip(second)].concat()),
        ("one.txt.zst", zstd(text.as_bytes())),
        ("two.txt.zst", [zstd(first), skippable.clone(), zstd(second)].concat()),
        ("skipped.txt.zst", [skippable, zstd(text.as_bytes())].concat()),
        ("one.txt.bz2", bzip2(text.as_bytes())),
        ("two.txt.bz2", [bzip2(first), bzip2(second)].concat()),
        ("gzip-called.txt", gzip(text.as_bytes())),
        ("gzip-called.txt.xz", gzip(text.as_bytes())),
    ];
    for (name, bytes) in files {
        let (whole, pieces) = read(&folder.write(name, &bytes)).unwrap();
        assert!(whole == text.as_bytes(), "{name}");
        assert_eq!(pieces, 5, "{name}");
    }
}

#[test]
fn compressed_files_that_are_cut_or_changed_are_errors() {
    let folder = TestFolder::new("corpus-corrupt");
    let text: Vec<u8> = (0..200_000_u32)
        .flat_map(|n| format!("line {}\n", n.wrapping_mul(2_654_435_761)).into_bytes())
        .collect();
    for (name, bytes) in [("a.txt.gz", gzip(&text)), ("a.txt.zst", zstd(&text)), ("a.txt.bz2", bzip2(&text))]
    {
        assert!(read(&folder.write(name, &bytes[..bytes.len() - 5])).is_err(), "{name}");
        assert!(read(&folder.write(name, &bytes[..bytes.len() / 2])).is_err(), "{name}");
        let mut changed = bytes.clone();
        changed[bytes.len() / 2] ^= 0x10;
        let said = read(&folder.write(name, &changed)).unwrap_err();
        assert!(said.contains(name), "{said}");
        let said = read(&folder.write(name, "not compressed at all, and long enough")).unwrap_err();
        assert!(said.ends_with("its name is that of a compressed file, but it is not compressed"), "{said}");
    }
}

#[test]
fn texts_are_cut_where_a_line_begins() {
    let folder = TestFolder::new("corpus-cuts");
    let text = "word, and another\n\n  more\n".repeat(100_000);
    let inputs = Input::find(&[folder.write("a.txt", &text)]).unwrap();
    let mut chunks = TextChunks::new(&inputs, "text", Arc::default());
    let mut chunk = TextChunk::default();
    while chunks.next(&mut chunk).unwrap() {
        assert!(chunk.bytes.starts_with(b"word"), "{:?}", String::from_utf8_lossy(&chunk.bytes[..20]));
        assert!(chunk.bytes.len() <= 1 << 20);
    }
    let (whole, _) = read(&folder.write("long.txt", "ä".repeat(5_000_000))).unwrap();
    assert!(whole == "ä".repeat(5_000_000).as_bytes());
}

#[test]
fn bad_lines_are_told_with_their_number() {
    let lines = b"\xef\xbb\xbf{\"text\": \"one\"}\n\nnot json\n{\"other\": 1}\r\n{\"text\": 5}\n[1]\n{\"text\": \"a\"} x\n\
                  {\"x\": {\"text\": \"in\"}, \"text\": \"t\\u0077o\"}\n{\"text\": \"\xff\"}\n{\"text\": \"last\"}";
    let (texts, bad) = parsed("a.jsonl", lines);
    assert_eq!(texts, ["one", "two", "last"]);
    let numbers: Vec<u64> = bad.iter().map(|(line, _)| *line).collect();
    assert_eq!(numbers, [3, 4, 5, 6, 7, 9], "{bad:?}");
    let reasons: Vec<&str> = bad.iter().map(|(_, reason)| reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "expected ident in column 2",
            "there is no key \"text\"",
            "invalid type: integer `5`, expected a string in column 10",
            "invalid type: sequence, expected a JSON object in column 0",
            "trailing characters in column 15",
            "the line is not UTF-8",
        ]
    );
    let (texts, bad) = parsed("a.txt", b"good\nb\xffd\nfine\n");
    assert_eq!(texts, ["good\nfine\n"]);
    assert_eq!(bad, [(2, "the line is not UTF-8".to_owned())]);
}

#[test]
fn a_line_is_refused_by_its_own_length() {
    let line = |letter: &str, bytes: usize| format!("{{\"text\": \"{}\"}}\n", letter.repeat(bytes));
    // The number of bytes read beyond the first line is not a power of two.
    let lines = [line("a", 2_900 << 10), line("b", 5 << 20), line("c", 9 << 20), line("d", 1)];
    let (texts, bad) = parsed("a.jsonl", lines.concat().as_bytes());
    assert_eq!(texts.iter().map(String::len).collect::<Vec<_>>(), [2_900 << 10, 5 << 20, 1]);
    assert_eq!(bad, [(3, "the line is longer than 8 MiB".to_owned())]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_lines_are_documents_or_told(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok((texts, bad)) = try_parsed("a.jsonl", &bytes) {
            prop_assert!(texts.len() + bad.len() <= bytes.split(|&byte| byte == b'\n').count());
        }
        try_parsed("a.txt", &bytes).ok();
    }

    #[test]
    fn any_bytes_are_unpacked_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let folder = TestFolder::new("corpus-any");
        for magic in [&b"\x1f\x8b\x08\0"[..], b"\x28\xb5\x2f\xfd", b"BZh91AY&SY", b"\xfd7zXZ\0", b"PAR1"] {
            let end = if magic == b"PAR1" { magic } else { b"" };
            let path = folder.write("a.txt", [magic, &bytes, end].concat());
            let Ok(inputs) = Input::find(&[path]) else { continue };
            let mut chunks = TextChunks::new(&inputs, "text", Arc::default());
            let mut chunk = TextChunk::default();
            while chunks.next(&mut chunk).unwrap_or(false) {}
        }
    }
}
