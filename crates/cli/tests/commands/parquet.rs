//! `prepare` reads every row of a Parquet file, or says which rows it could not read.

use std::fs::{self, File};
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use parquet::column::writer::ColumnCloseResult;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

use crate::support::{folder, kintsugi, stdout, under};

/// A row: its text, or the definition level of a null.
type Row<'a> = Result<&'a str, i16>;

/// The column `doc.text`, which is null at level 0 if there is no `doc`, and at level 1 if that has no `text`.
const NESTED: &str = "message rows { optional group doc { optional binary text (UTF8); } }";

/// The column `text`, which is null at level 0.
const FLAT: &str = "message rows { optional binary text (UTF8); }";

/// Writes row groups.
fn write(path: &Path, schema: &str, groups: &[&[Row]]) {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::default()).unwrap();
    for rows in groups {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = rows.iter().flatten().map(|text| ByteArray::from(*text)).collect();
        let typed = column.typed::<ByteArrayType>();
        let defined = typed.get_descriptor().max_def_level();
        let levels: Vec<i16> = rows.iter().map(|row| row.err().unwrap_or(defined)).collect();
        typed.write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// Copies a file with one row group, whose metadata then says that it has `rows` rows.
fn with_row_count(from: &Path, to: &Path, rows: u64) {
    let reader = SerializedFileReader::new(File::open(from).unwrap()).unwrap();
    let schema = reader.metadata().file_metadata().schema_descr().root_schema_ptr();
    let metadata = reader.metadata().row_group(0).column(0).clone();
    let bytes_written = metadata.compressed_size() as u64;
    let close = ColumnCloseResult {
        bytes_written,
        rows_written: rows,
        metadata,
        bloom_filter: None,
        column_index: None,
        offset_index: None,
    };
    let mut writer = SerializedFileWriter::new(File::create(to).unwrap(), schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    group.append_column(&File::open(from).unwrap(), close).unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

/// Arguments that tokenize by bytes, so that the tokens are the text.
const BYTES: [&str; 5] = ["--out", "out", "--tokenizer", "bytes", "--overwrite"];

fn prepare(folder: &Path, arguments: &[&str]) -> Output {
    kintsugi(folder, &[&["prepare"], &BYTES[..], arguments].concat())
}

fn summary(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

/// The texts that the tokens in `folder/out.bin` are.
fn written(folder: &Path) -> Vec<String> {
    let bytes = fs::read(folder.join("out.bin")).unwrap();
    let tokens: Vec<u16> =
        bytes.chunks_exact(2).map(|token| u16::from_le_bytes([token[0], token[1]])).collect();
    let text = |tokens: &[u16]| tokens.iter().map(|&token| char::from(token as u8)).collect();
    tokens
        .split_inclusive(|&token| token == 256)
        .map(|document| text(&document[..document.len() - 1]))
        .collect()
}

fn refused(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn null_rows_are_told_by_number_across_row_groups() {
    let folder = folder("parquet-nulls");
    let texts: Vec<String> = (0..30).map(|n| format!("text {n}")).collect();
    let rows: Vec<Row> = texts.iter().map(|text| Ok(text.as_str())).collect();
    write(&folder.join("a.parquet"), NESTED, &[&rows, &[], &[Err(0), Ok("after"), Err(1)], &[Ok("last")]]);
    let arguments = ["a.parquet", "--json-key", "doc.text", "--append-eod"];
    let summary = summary(&prepare(&folder, &[&arguments[..], &["--json"]].concat()));
    assert_eq!((&summary["documents"], &summary["bad_lines"]), (&json!(32), &json!(2)));
    let expected: Vec<&str> = texts.iter().map(String::as_str).chain(["after", "last"]).collect();
    assert_eq!(written(&folder), expected);
    let text = stdout(&prepare(&folder, &arguments));
    for row in [31, 33] {
        assert!(text.contains(&format!("a.parquet, row {row}: the row has no text\n")), "{text}");
    }
    write(&folder.join("a.parquet"), FLAT, &[&[Err(0), Ok("a")]]);
    let said = refused(&prepare(&folder, &["a.parquet"]));
    assert!(said.contains("1 of its 2 rows are bad, more than 10 %; the first is row 1: "), "{said}");
}

#[test]
fn a_row_group_with_other_rows_than_it_says_is_an_error() {
    let folder = folder("parquet-row-count");
    let (from, to) = (folder.join("from.parquet"), folder.join("a.parquet"));
    write(&from, FLAT, &[&[Ok("text"); 300]]);
    for (rows, found) in [(301, "fewer"), (299, "more"), (5, "more")] {
        with_row_count(&from, &to, rows);
        let said = refused(&prepare(&folder, &["a.parquet"]));
        let expected = format!("row group 1 has {found} rows than the {rows} that the file's metadata says");
        assert!(said.contains("a.parquet") && said.contains(&expected), "{said}");
        assert!(!folder.join("out.bin").exists());
    }
    with_row_count(&from, &to, 300);
    assert_eq!(summary(&prepare(&folder, &["a.parquet", "--json"]))["documents"], 300);
}

#[test]
fn a_page_whose_checksum_differs_is_an_error() {
    let folder = folder("parquet-checksum");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checksums.parquet");
    let mut bytes = fs::read(fixture).unwrap();
    fs::write(folder.join("a.parquet"), &bytes).unwrap();
    assert_eq!(summary(&prepare(&folder, &["a.parquet", "--json"]))["documents"], 40);
    fs::remove_file(folder.join("out.bin")).unwrap();
    // A letter becomes another, which would be a text as good as the first.
    let place = bytes.windows(3).position(|word| word == b"owl").unwrap();
    bytes[place] = b'a';
    fs::write(folder.join("a.parquet"), &bytes).unwrap();
    let said = refused(&prepare(&folder, &["a.parquet"]));
    assert!(said.contains("a.parquet") && said.contains("CRC"), "{said}");
    assert!(!folder.join("out.bin").exists());
}

#[test]
fn rows_that_repeat_a_long_text_take_no_more_memory_than_a_piece() {
    let folder = folder("parquet-memory");
    // The page has the text once, in its dictionary. 120 rows of it and their tokens are 360 MiB.
    let long = "a long text ".repeat((1 << 20) / 12);
    write(&folder.join("a.parquet"), FLAT, &[&[Ok(long.as_str()); 120], &[Err(0); 5]]);
    let arguments = ["prepare", "a.parquet", "--workers", "1", "--json"];
    let output = under(&folder, "-v 409600", &[&arguments, &BYTES[..]].concat());
    let summary = summary(&output);
    assert_eq!((&summary["documents"], &summary["bad_lines"]), (&json!(120), &json!(5)));
    fs::remove_file(folder.join("out.bin")).unwrap();
}

#[test]
fn all_files_are_read_to_their_end_in_memory_that_is_used_again() {
    let folder = folder("parquet-many");
    let long = "word ".repeat(100_000);
    for name in ["a.parquet", "b.parquet", "c.parquet"] {
        write(&folder.join(name), FLAT, &[&[Ok(long.as_str()); 20]]);
    }
    let arguments = ["a.parquet", "b.parquet", "c.parquet", "--workers", "1", "--json"];
    assert_eq!(summary(&prepare(&folder, &arguments))["documents"], 60);
}
