//! A broken document index: masks depend on it, so a run with masked documents refuses it.

use std::fs;

use crate::support::{folder, kintsugi, stdout, tiny};

/// Bytes of the header of an `.idx`.
const HEAD: usize = 34;

#[test]
fn a_broken_table_of_documents_is_refused_by_a_run_that_masks_them() {
    let folder = folder("documents-broken");
    let lines = (0..40).map(|n| format!("{{\"text\": \"document {n} has some words of its own\"}}\n"));
    fs::write(folder.join("text.jsonl"), lines.collect::<String>()).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "text.jsonl", "--out", "data", "--tokenizer", "bytes"]));
    let data = ["model.vocab=257", "data.source=data", "data.split=0.2", "run.steps=1", "run.keep=0"];
    let train = |mask: &'static str| tiny(&folder, &["train"], &[&data[..], &[mask]].concat());
    stdout(&train("data.mask_documents=true"));

    let path = folder.join("data.idx");
    let whole = fs::read(&path).unwrap();
    let number = |at: usize| u64::from_le_bytes(whole[at..at + 8].try_into().unwrap()) as usize;
    let (sequences, documents) = (number(18), number(26));
    assert_eq!((sequences, documents), (40, 41));
    let (pointers, table) = (HEAD + 4 * sequences, HEAD + 12 * sequences);
    let numbers =
        |bytes: &[u8]| -> Vec<[u8; 8]> { bytes.chunks_exact(8).map(|n| n.try_into().unwrap()).collect() };
    let descending: Vec<u8> = numbers(&whole[table..]).into_iter().rev().flatten().collect();
    let middle: Vec<u8> = {
        let mut all = numbers(&whole[table..]);
        all.swap(20, 21);
        all.concat()
    };
    for (broken, said) in [
        (
            descending,
            "sequence 40 in place 0 of the table of documents, expected 0: documents follow each other",
        ),
        (
            vec![0; 8 * documents],
            "sequence 0 in place 40 of the table of documents, expected 40: documents follow each other",
        ),
        (
            middle,
            "sequence 20 in place 21 of the table of documents, expected 21 to 40: documents follow each other",
        ),
    ] {
        let mut bytes = whole.clone();
        bytes[table..].copy_from_slice(&broken);
        fs::write(&path, bytes).unwrap();
        let output = train("data.mask_documents=true");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert_eq!(stderr.trim_end(), format!("error: data.idx: found {said}"));
        stdout(&train("data.mask_documents=false"));
    }
    // Sequences in which every document but the last begins at the first byte.
    let mut bytes = whole.clone();
    bytes[pointers..pointers + 8 * (sequences - 1)].fill(0);
    fs::write(&path, bytes).unwrap();
    let output = train("data.mask_documents=true");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.starts_with("error: data.idx: found byte 0 as the first of sequence 1, expected "),
        "{stderr}"
    );
}
