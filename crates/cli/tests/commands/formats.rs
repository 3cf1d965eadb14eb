//! `prepare` recognises formats by their first bytes, and refuses unknown ones by name.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{folder, kintsugi};

/// A test file: 300 rows with the columns id, body, lang and tags, or the same as JSON lines.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Tokenizes by bytes, so that the tokens are the text.
fn prepare(folder: &Path, inputs: &[&str], more: &[&str]) -> Result<Value, String> {
    let common = ["--out", "out/a", "--tokenizer", "bytes", "--json", "--overwrite"];
    let output = kintsugi(folder, &[&["prepare"], inputs, &common, more].concat());
    if output.status.success() {
        return Ok(serde_json::from_slice(&output.stdout).unwrap());
    }
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    Err(said)
}

/// The text of the tokens of `out/a`.
fn written(folder: &Path) -> String {
    let bytes = fs::read(folder.join("out/a.bin")).unwrap();
    String::from_utf8(bytes.chunks_exact(2).map(|token| token[0]).collect()).unwrap()
}

/// Whether anything was written.
fn nothing_written(folder: &Path) -> bool {
    fs::read_dir(folder.join("out")).map_or(true, |mut entries| entries.next().is_none())
}

/// The contents of the fixtures.
fn rows() -> String {
    let words = "the quick brown fox jumps over a lazy dog while seven owls watch it";
    let words: Vec<&str> = words.split(' ').collect();
    let row = |n: usize| {
        let line: Vec<&str> = (0..=n % 9).map(|i| words[(n * 7 + i) % words.len()]).collect();
        format!("row {n}: {}, é 漢字\n", line.join(" "))
    };
    (0..300).map(row).collect()
}

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn parquet_bzip2_and_xz_are_read_whatever_they_are_called() {
    let folder = folder("formats-read");
    for name in
        ["rows-snappy.parquet", "rows-zstd.parquet", "rows-gzip.parquet", "rows.jsonl.bz2", "rows.jsonl.xz"]
    {
        // The name without `.bz2` or `.xz` only says that the contents are JSON.
        let called = name.replace(".parquet", ".txt").replace(".bz2", "").replace(".xz", "");
        for called in [name, &called] {
            fs::copy(fixture(name), folder.join(called)).unwrap();
            let summary = prepare(&folder, &[called], &["--json-key", "body", "--validation", "0"]).unwrap();
            assert_eq!((&summary["documents"], &summary["bad_lines"]), (&json!(300), &json!(0)), "{called}");
            assert_eq!(written(&folder), rows(), "{called}");
            fs::remove_file(folder.join(called)).unwrap();
        }
    }
    fs::create_dir(folder.join("in")).unwrap();
    for name in ["rows-snappy.parquet", "rows.jsonl.bz2", "rows.jsonl.xz"] {
        fs::copy(fixture(name), folder.join("in").join(name)).unwrap();
    }
    let summary = prepare(&folder, &["in"], &["--json-key", "body"]).unwrap();
    assert_eq!((&summary["files"], &summary["documents"]), (&json!(3), &json!(900)));
}

#[test]
fn a_parquet_file_without_the_column_names_those_that_it_has() {
    let folder = folder("formats-column");
    fs::copy(fixture("rows-snappy.parquet"), folder.join("a.parquet")).unwrap();
    let refused = |key: &str| prepare(&folder, &["a.parquet"], &["--json-key", key]).unwrap_err();
    assert_eq!(
        refused("text"),
        "error: cannot use a.parquet: it has no column \"text\"; its text columns are body, lang; name one with \
         --json-key\n"
    );
    assert!(refused("id").ends_with("its column \"id\" has values of type INT64, not text\n"));
    assert!(nothing_written(&folder));
}

#[test]
fn what_is_no_text_is_refused_by_name_and_nothing_is_written() {
    let folder = folder("formats-refused");
    fs::write(folder.join("good.txt"), "good text\n".repeat(1000)).unwrap();
    let tar = [&[b'a'; 257][..], b"ustar\0", &[0; 249]].concat();
    let files: [(&str, Vec<u8>, &str); 14] = [
        ("utf16.txt", utf16("\u{feff}words in another encoding"), "UTF-16 text"),
        ("no-mark.jsonl", utf16("{\"text\": \"words in another encoding\"}\n"), "UTF-16 text"),
        (
            "utf32.txt",
            "\u{feff}abc".chars().flat_map(|c| u32::from(c).to_le_bytes()).collect(),
            "UTF-32 text",
        ),
        ("a.pdf", b"%PDF-1.7\n%text".to_vec(), "a PDF document"),
        ("b.zip", b"PK\x03\x04abc".to_vec(), "a zip archive"),
        ("c.7z", b"7z\xbc\xaf\x27\x1c\0\x04".to_vec(), "a 7z archive"),
        ("d.tar", tar, "a tar archive"),
        ("e.arrow", b"ARROW1\0\0abc".to_vec(), "an Arrow or Feather file"),
        ("f.sqlite", b"SQLite format 3\0abc".to_vec(), "an SQLite database"),
        ("g.npy", b"\x93NUMPY\x01\0".to_vec(), "a NumPy array"),
        ("h.pkl", b"\x80\x04\x95\0".to_vec(), "a Python pickle"),
        ("i.safetensors", b"\x02\0\0\0\0\0\0\0{}".to_vec(), "a safetensors file"),
        ("j.h5", b"\x89HDF\r\n\x1a\nabc".to_vec(), "an HDF5 file"),
        ("k", b"text, and then\0\x01\x02\x03\0\0\xff\xfe".to_vec(), "a binary file"),
    ];
    for (name, bytes, what) in files {
        fs::write(folder.join(name), bytes).unwrap();
        let said = prepare(&folder, &["good.txt", name], &[]).unwrap_err();
        assert!(said.starts_with(&format!("error: cannot use {name}: it is {what}")), "{said}");
        assert!(nothing_written(&folder), "{name}");
    }
    // A truncated file is an error because its end is missing, and a changed byte because of the checksum.
    let whole = fs::read(fixture("rows.jsonl.xz")).unwrap();
    let mut changed = whole.clone();
    changed[whole.len() / 2] ^= 0x10;
    for (name, bytes) in [("cut.jsonl.xz", &whole[..whole.len() - 40]), ("changed.jsonl.xz", &changed)] {
        fs::write(folder.join(name), bytes).unwrap();
        let said = prepare(&folder, &["good.txt", name], &["--json-key", "body"]).unwrap_err();
        assert!(said.contains(name), "{said}");
        assert!(nothing_written(&folder));
    }
}

#[test]
fn text_may_begin_like_a_parquet_file_or_with_a_byte_order_mark() {
    let folder = folder("formats-text");
    for (text, expected) in [
        ("PARENTS and children\n", "PARENTS and children\n"),
        ("PAR1 receptor\n", "PAR1 receptor\n"),
        ("\u{feff}one\r\ntwo\r\n", "one\r\ntwo\r\n"),
    ] {
        fs::write(folder.join("a.txt"), text).unwrap();
        assert_eq!(prepare(&folder, &["a.txt"], &[]).unwrap()["bad_lines"], 0);
        assert_eq!(written(&folder), expected);
    }
}

#[test]
fn a_file_of_bad_lines_is_refused_unless_they_are_allowed() {
    let folder = folder("formats-bad-lines");
    let lines = |good: usize, bad: usize| "{\"text\": \"x\"}\n".repeat(good) + &"bad\n".repeat(bad);
    fs::write(folder.join("one-in-ten.jsonl"), lines(9, 1)).unwrap();
    fs::write(folder.join("more.jsonl"), lines(17, 2)).unwrap();
    assert_eq!(prepare(&folder, &["one-in-ten.jsonl"], &[]).unwrap()["bad_lines"], 1);
    fs::remove_dir_all(folder.join("out")).unwrap();
    let both = ["one-in-ten.jsonl", "more.jsonl", "one-in-ten.jsonl"];
    assert_eq!(
        prepare(&folder, &both, &[]).unwrap_err(),
        "error: cannot use more.jsonl: 2 of its 19 lines are bad, more than 10 %; the first is line 18: expected value in \
         column 1; add --allow-bad-lines to skip them\n"
    );
    assert!(nothing_written(&folder));
    let summary = prepare(&folder, &both, &["--allow-bad-lines"]).unwrap();
    assert_eq!((&summary["documents"], &summary["bad_lines"]), (&json!(35), &json!(4)));
    // Text in another encoding without a byte-order mark.
    fs::write(folder.join("latin.txt"), b"caf\xe9\nna\xefve\nplain\n").unwrap();
    let said = prepare(&folder, &["latin.txt"], &[]).unwrap_err();
    assert!(said.contains("latin.txt: 2 of its 3 lines are bad"), "{said}");
}
