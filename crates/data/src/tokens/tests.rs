//! Token files: written as Megatron writes them, and anything else refused.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::{TokenFile, TokenFileInfo, TokenType, TokenWriter};
use crate::testing::TestFolder;

/// Two documents of one and two sequences, as Megatron-LM's builder writes them: `[7, 8, 9]`, `[300], [1, 2]`.
const BIN: [u8; 12] = [7, 0, 8, 0, 9, 0, 44, 1, 1, 0, 2, 0];
#[rustfmt::skip]
const IDX: [u8; 34 + 3 * 12 + 3 * 8] = [
    b'M', b'M', b'I', b'D', b'I', b'D', b'X', 0, 0, // magic
    1, 0, 0, 0, 0, 0, 0, 0, // version
    8, // u16
    3, 0, 0, 0, 0, 0, 0, 0, // sequences
    3, 0, 0, 0, 0, 0, 0, 0, // document marks
    3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, // lengths
    0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, // places
    0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, // documents
];

fn about(tokens: u64) -> TokenFileInfo {
    TokenFileInfo {
        vocab: 301,
        tokenizer: "none".to_owned(),
        end_of_document: None,
        documents: 2,
        tokens,
        validation: None,
    }
}

fn write(prefix: &Path) {
    let mut writer = TokenWriter::create(prefix, TokenType::U16).unwrap();
    writer.append(&BIN[..6], &[3], true).unwrap();
    writer.append(&BIN[6..8], &[1], false).unwrap();
    writer.append(&BIN[8..], &[2], false).unwrap();
    writer.end_document().unwrap();
    writer.end_document().unwrap();
    writer.finish(&about(6)).unwrap();
}

/// Files with any contents.
fn files(folder: &TestFolder, bin: &[u8], idx: &[u8]) -> PathBuf {
    fs::write(folder.join("any.bin"), bin).unwrap();
    fs::write(folder.join("any.idx"), idx).unwrap();
    folder.join("any")
}

fn refused(bin: &[u8], idx: &[u8]) -> String {
    let folder = TestFolder::new("tokens-refused");
    let said = TokenFile::open(&files(&folder, bin, idx)).unwrap_err().to_string();
    said.replace(&format!("{}/", folder.display()), "")
}

#[test]
fn what_is_written_is_megatrons_format_byte_for_byte() {
    let folder = TestFolder::new("tokens-written");
    write(&folder.join("corpus.v1"));
    assert_eq!(fs::read(folder.join("corpus.v1.bin")).unwrap(), BIN);
    assert_eq!(fs::read(folder.join("corpus.v1.idx")).unwrap(), IDX);
    assert_eq!(fs::read_dir(&*folder).unwrap().count(), 3, "nothing half-written is left");
}

#[test]
fn megatrons_files_are_read() {
    let folder = TestFolder::new("tokens-read");
    let file = TokenFile::open(&files(&folder, &BIN, &IDX)).unwrap();
    assert_eq!((file.tokens(), file.documents(), file.token_type()), (6, 2, TokenType::U16));
    assert_eq!(file.about(), None);
    let mut tokens = [0; 4];
    file.read(2, 301, &mut tokens).unwrap();
    assert_eq!(tokens, [9, 300, 1, 2]);
    assert_eq!([0, 1, 3, 4, 6].map(|at| file.document_from(at).unwrap()), [0, 3, 3, 6, 6]);
    for name in ["any.bin", "any.idx"] {
        assert_eq!(TokenFile::open(&folder.join(name)).unwrap().tokens(), 6);
    }
}

/// Documents of these lengths, each of two sequences where it can be.
fn documents(prefix: &Path, lengths: &[u32]) -> TokenFile {
    let mut writer = TokenWriter::create(prefix, TokenType::U16).unwrap();
    for &length in lengths {
        for part in [length / 2, length - length / 2].into_iter().filter(|&part| part > 0) {
            writer.append(&vec![0; 2 * part as usize], &[part], false).unwrap();
        }
        writer.end_document().unwrap();
    }
    let tokens = lengths.iter().copied().map(u64::from).sum();
    writer.finish(&TokenFileInfo { documents: lengths.len() as u64, ..about(tokens) }).unwrap();
    TokenFile::open(prefix).unwrap()
}

#[test]
fn starts_are_where_the_index_has_documents() {
    let folder = TestFolder::new("tokens-starts");
    // They begin at 0, 3, 4, 9 and 11.
    let file = documents(&folder.join("a"), &[3, 1, 5, 2, 4]);
    let starts = |first, len| {
        let mut out = vec![99; len];
        file.read_starts(first, &mut out).unwrap();
        out
    };
    assert_eq!(starts(0, 15), [0, 0, 0, 3, 4, 4, 4, 4, 4, 9, 9, 11, 11, 11, 11]);
    assert_eq!(starts(1, 4), [0, 0, 2, 3], "it begins inside a document and ends inside another");
    assert_eq!(starts(3, 6), [0, 1, 1, 1, 1, 1], "it begins with a document of one token and ends at an end");
    assert_eq!(starts(5, 4), [0; 4], "all of it is inside a document");
    assert_eq!(starts(8, 1), [0]);
    assert_eq!(starts(12, 3), [0; 3], "it is the end of the last document");
    assert_eq!(file.document_starts().unwrap(), [0, 3, 4, 9, 11]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn starts_of_any_window_are_those_of_the_whole(
        lengths in prop::collection::vec(1..9_u32, 1..12),
        cut in (0.0..1.0, 0.0..1.0),
    ) {
        let folder = TestFolder::new("tokens-windows");
        let file = documents(&folder.join("a"), &lengths);
        let firsts = lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length)));
        let whole: Vec<u32> =
            firsts.zip(&lengths).flat_map(|(first, &length)| vec![first; length as usize]).collect();
        let first = (cut.0 * whole.len() as f64) as usize;
        let len = 1 + (cut.1 * (whole.len() - first) as f64) as usize;
        let window = &whole[first..whole.len().min(first + len)];
        let mut out = vec![99; window.len()];
        file.read_starts(first as u64, &mut out).unwrap();
        let expected: Vec<u32> = window.iter().map(|start| start.saturating_sub(first as u32)).collect();
        prop_assert_eq!(out, expected);
    }
}

#[test]
fn documents_out_of_order_are_refused() {
    let folder = TestFolder::new("tokens-order");
    let mut idx = IDX;
    // The second document begins with the last sequence, and the end before it.
    (idx[78], idx[86]) = (2, 1);
    let three = |idx: &[u8]| {
        let mut idx = idx.to_vec();
        idx[26] = 4;
        idx.extend(3_i64.to_le_bytes());
        TokenFile::open(&files(&folder, &BIN, &idx)).unwrap()
    };
    let said = three(&idx).read_starts(0, &mut [0; 6]).unwrap_err().to_string();
    let expected = "any.idx: found token 3 as the first of document 2, \
                    expected 4 or a later one: documents follow each other";
    assert!(said.ends_with(expected), "{said}");
}

#[test]
fn every_integer_type_is_read() {
    let folder = TestFolder::new("tokens-types");
    let types = [(1, 1), (2, 1), (3, 2), (4, 4), (5, 8), (8, 2)];
    for (code, size) in types {
        let mut idx = IDX[..34].to_vec();
        (idx[17], idx[18], idx[26]) = (code, 1, 2);
        idx.extend(3_i32.to_le_bytes());
        idx.extend([0_i64, 0, 1].iter().flat_map(|n| n.to_le_bytes()));
        let bin: Vec<u8> = [5_i64, 100, 7].iter().flat_map(|n| n.to_le_bytes()[..size].to_vec()).collect();
        let file = TokenFile::open(&files(&folder, &bin, &idx)).unwrap();
        let mut tokens = [0; 3];
        file.read(0, 101, &mut tokens).unwrap();
        assert_eq!(tokens, [5, 100, 7], "type {code}");
        assert_eq!(file.token_type().code(), code);
    }
}

#[test]
fn a_token_that_the_model_does_not_have_is_refused() {
    let folder = TestFolder::new("tokens-outside");
    let file = TokenFile::open(&files(&folder, &BIN, &IDX)).unwrap();
    let said = file.read(0, 300, &mut [0; 6]).unwrap_err().to_string();
    assert!(said.ends_with("any.bin: found token 300 at place 3, expected tokens from 0 to 299"), "{said}");
}

#[test]
fn what_is_truncated_or_something_else_is_refused() {
    let cut = &BIN[..10];
    assert_eq!(
        refused(cut, &IDX),
        "any.bin: found 10 bytes, expected 12, where the last of the 3 sequences of any.idx ends"
    );
    assert_eq!(refused(&BIN, &IDX[..20]), "any.idx: found 20 bytes, expected at least the 34 of a head");
    let said = refused(&BIN, &IDX[..90]);
    assert_eq!(said, "any.idx: found 90 bytes, expected 94 for 3 sequences and 3 document marks");
    let said = refused(&BIN, b"PK\x03\x04 this is some other file altogether");
    assert!(said.starts_with("any.idx: found a file that begins with \"PK"), "{said}");
    let changed = |at: usize, value: u8| {
        let mut idx = IDX;
        idx[at] = value;
        refused(&BIN, &idx)
    };
    assert_eq!(changed(9, 2), "any.idx: found version 2, expected version 1");
    let said = "any.idx: found tokens of type 7, expected 1 to 5 or 8, one of the whole numbers";
    assert_eq!(changed(17, 7), said);
    assert!(changed(25, 255).ends_with(
        "expected more than a file can have for 18374686479671623683 sequences and 3 document marks"
    ));
}

#[test]
fn a_description_of_other_tokens_is_refused() {
    let folder = TestFolder::new("tokens-about");
    write(&folder.join("a"));
    assert_eq!(TokenFile::open(&folder.join("a")).unwrap().about(), Some(&about(6)));
    fs::write(folder.join("a.meta.json"), serde_json::to_vec(&about(7)).unwrap()).unwrap();
    let said = TokenFile::open(&folder.join("a")).unwrap_err().to_string();
    assert!(said.ends_with("a.meta.json: found 7 tokens, expected the 6 of the .bin beside it"), "{said}");
    fs::write(folder.join("a.meta.json"), "{").unwrap();
    assert!(TokenFile::open(&folder.join("a")).is_err());
}

#[test]
fn two_writers_of_one_prefix_are_kept_apart() {
    let folder = TestFolder::new("tokens-two");
    let first = TokenWriter::create(&folder.join("a"), TokenType::U16).unwrap();
    let said = TokenWriter::create(&folder.join("a"), TokenType::U16).unwrap_err().to_string();
    assert!(said.ends_with("a.bin.partial: another process is writing it"), "{said}");
    drop(first);
    assert_eq!(fs::read_dir(&*folder).unwrap().count(), 0, "what was not finished is gone");
}

/// A valid index with some bytes changed: what a fuzzer would need long to find.
fn nearly_an_index() -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((0..IDX.len(), any::<u8>()), 0..6);
    (changes, 0..=IDX.len()).prop_map(|(changes, length)| {
        let mut idx = IDX.to_vec();
        for (at, value) in changes {
            idx[at] = value;
        }
        idx.truncate(if length % 3 == 0 { length } else { IDX.len() });
        idx
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_read_or_refused(
        idx in prop_oneof![nearly_an_index(), prop::collection::vec(any::<u8>(), 0..200)],
        bin in prop_oneof![Just(BIN.to_vec()), prop::collection::vec(any::<u8>(), 0..64)],
        meta in prop::option::of("\\PC{0,30}"),
        places in prop::collection::vec(any::<u64>(), 4),
    ) {
        let folder = TestFolder::new("tokens-any");
        let prefix = files(&folder, &bin, &idx);
        if let Some(text) = meta {
            fs::write(folder.join("any.meta.json"), text).unwrap();
        }
        if let Ok(file) = TokenFile::open(&prefix) {
            for place in places {
                file.document_from(place).ok();
                let inside = place % (file.tokens() + 1);
                file.read_starts(inside, &mut [0; 8]).ok();
                file.read(inside, 50_000, &mut [0; 8]).ok();
            }
        }
    }
}
