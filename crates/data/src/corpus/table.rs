//! The text column of a Parquet file, a page at a time.

use std::collections::VecDeque;
use std::error::Error;
use std::fs::File;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::basic::{ConvertedType, LogicalType, Type};
use parquet::column::reader::{ColumnReaderImpl, get_typed_column_reader};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::{ColumnDescriptor, SchemaDescriptor};

use super::RefusedLine;
use super::chunks::{MAX_BYTES, PIECE, TextChunk};
use super::inputs::Input;
use crate::DataError;
use crate::guard::catch_panic;

/// Rows that are decoded at once. Their values borrow the page.
const ROWS: usize = 256;

/// The most rows of a chunk. Null rows count, since they take memory although they have no bytes.
const MAX_ROWS: usize = 1 << 16;

/// A Parquet file that is being read.
pub(super) struct Table {
    file: SerializedFileReader<File>,
    /// The index of the text column, and the definition level of its values that are not null.
    column: usize,
    defined: i16,
    /// The row group to open next.
    group: usize,
    /// The text column of the open row group.
    values: Option<ColumnReaderImpl<ByteArrayType>>,
    /// Rows of the open row group that are not decoded yet.
    left: u64,
    /// Rows that are decoded but not in a chunk yet.
    rows: VecDeque<Option<ByteArray>>,
    /// Bytes of the file before the open row group, and the counter of the bytes.
    bytes: u64,
    counter: Arc<AtomicU64>,
}

impl Table {
    /// Opens the column with this name. Counts the bytes of finished row groups in `counter`.
    pub(super) fn open(input: &Input, name: &str, counter: &Arc<AtomicU64>) -> Result<Table, DataError> {
        let file = File::open(&input.path).map_err(|error| DataError::file("read", &input.path, error))?;
        let file = catch_panic("parquet", || SerializedFileReader::new(file))
            .map_err(|error| DataError::file("read", &input.path, error))?;
        let schema = file.metadata().file_metadata().schema_descr();
        let column = find(schema, name).map_err(|error| DataError::file("use", &input.path, error))?;
        let defined = schema.column(column).max_def_level();
        Ok(Table {
            column,
            defined,
            group: 0,
            values: None,
            left: 0,
            rows: VecDeque::new(),
            bytes: input.bytes,
            counter: Arc::clone(counter),
            file,
        })
    }

    /// Adds rows to `chunk` until it is full or the file ends. The first row is `chunk.line`.
    pub(super) fn fill(&mut self, chunk: &mut TextChunk) -> Result<(), Box<dyn Error + Send + Sync>> {
        catch_panic("parquet", || self.add_rows(chunk))
    }

    fn add_rows(&mut self, chunk: &mut TextChunk) -> Result<(), ParquetError> {
        let mut row = chunk.line;
        while chunk.bytes.len() < PIECE && chunk.rows.len() + chunk.refused.len() < MAX_ROWS {
            if let Some(value) = self.rows.pop_front() {
                add_row(chunk, row, value);
                row += 1;
            } else if self.values.is_some() {
                self.decode_rows()?;
            } else if !self.next_group()? {
                chunk.ends = true;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Decodes the next rows of the open row group, or closes it at its end. Counts the rows, because the library ends a column
    /// at an empty page.
    fn decode_rows(&mut self) -> Result<(), ParquetError> {
        let reader = self.values.as_mut().expect("a row group is open");
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let (rows, ..) = reader.read_records(ROWS, Some(&mut levels), None, &mut values)?;
        let left = self.left.checked_sub(rows as u64);
        match left {
            Some(0) if rows == 0 => self.values = None,
            Some(left) if rows > 0 => self.left = left,
            _ => {
                let expected = self.file.metadata().row_group(self.group - 1).num_rows();
                let found = if rows == 0 { "fewer" } else { "more" };
                return Err(ParquetError::General(format!(
                    "row group {} has {found} rows than the {expected} that the file's metadata says; the file is damaged",
                    self.group
                )));
            }
        }
        let mut present = values.into_iter();
        // A column without nulls has no levels.
        for level in levels.iter().chain(iter::repeat(&self.defined)).take(rows) {
            self.rows.push_back(if *level < self.defined { None } else { present.next() });
        }
        Ok(())
    }

    /// Opens the column in the next row group. Returns `false` if there is none.
    fn next_group(&mut self) -> Result<bool, ParquetError> {
        let groups = self.file.metadata().row_groups();
        let done = match self.group.checked_sub(1) {
            _ if self.group == groups.len() => self.bytes,
            None => 0,
            Some(last) => u64::try_from(groups[last].compressed_size()).unwrap_or(0).min(self.bytes),
        };
        self.bytes -= done;
        self.counter.fetch_add(done, Ordering::Relaxed);
        if self.group == groups.len() {
            return Ok(false);
        }
        self.left = u64::try_from(groups[self.group].num_rows()).unwrap_or(0);
        let column = self.file.get_row_group(self.group)?.get_column_reader(self.column)?;
        self.values = Some(get_typed_column_reader(column));
        self.group += 1;
        Ok(true)
    }
}

fn add_row(chunk: &mut TextChunk, row: u64, value: Option<ByteArray>) {
    let reason = match value {
        None => "the row has no text".to_owned(),
        Some(value) if value.len() > MAX_BYTES => {
            format!("the text is longer than {} MiB", MAX_BYTES >> 20)
        }
        Some(value) => {
            chunk.bytes.extend_from_slice(value.data());
            chunk.rows.push((row, chunk.bytes.len()));
            return;
        }
    };
    chunk.refused.push(RefusedLine { file: chunk.file, line: row, reason });
}

/// Why a column cannot be used.
#[derive(Debug, thiserror::Error)]
enum ColumnError {
    #[error("it has no column \"{0}\"; none of its columns is text")]
    NoText(String),
    #[error("it has no column \"{name}\"; its text columns are {}; name one with --json-key", columns.join(", "))]
    Absent { name: String, columns: Vec<String> },
    #[error("its column \"{0}\" has lists of values, not text")]
    Lists(String),
    #[error("its column \"{name}\" has values of type {found}, not text")]
    Type { name: String, found: Type },
}

/// The index of the column with this name.
fn find(schema: &SchemaDescriptor, name: &str) -> Result<usize, ColumnError> {
    let columns = schema.columns();
    let Some(found) = columns.iter().position(|column| column.path().string() == name) else {
        let texts: Vec<String> =
            columns.iter().filter(|column| is_text(column)).map(|column| column.path().string()).collect();
        let name = name.to_owned();
        return Err(if texts.is_empty() {
            ColumnError::NoText(name)
        } else {
            ColumnError::Absent { name, columns: texts }
        });
    };
    let column = &columns[found];
    match column.physical_type() {
        _ if column.max_rep_level() > 0 => Err(ColumnError::Lists(name.to_owned())),
        Type::BYTE_ARRAY => Ok(found),
        found => Err(ColumnError::Type { name: name.to_owned(), found }),
    }
}

fn is_text(column: &ColumnDescriptor) -> bool {
    let text = matches!(column.logical_type_ref(), Some(LogicalType::String))
        || column.converted_type() == ConvertedType::UTF8;
    text && column.max_rep_level() == 0
}

#[cfg(test)]
mod tests {
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::super::tests::try_parsed;
    use super::*;

    /// A table of texts in row groups of these rows; nulls go into an `optional` column only.
    fn table(column: &str, groups: &[&[Option<&str>]]) -> Vec<u8> {
        let schema = parse_message_type(&format!("message rows {{ {column} binary text (UTF8); }}")).unwrap();
        let properties = WriterProperties::builder().set_data_page_size_limit(4096).build();
        let mut writer =
            SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties)).unwrap();
        for rows in groups {
            let mut group = writer.next_row_group().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            let values: Vec<ByteArray> = rows.iter().flatten().map(|text| ByteArray::from(*text)).collect();
            let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
            column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            column.close().unwrap();
            group.close().unwrap();
        }
        writer.into_inner().unwrap()
    }

    #[test]
    fn rows_are_documents_across_row_groups_and_pieces() {
        let long = "long ".repeat(50_000);
        let groups: [&[Option<&str>]; 4] =
            [&[Some("one\ntwo"), None, Some("")], &[], &[Some(long.as_str()); 9], &[None, Some("last")]];
        let (texts, bad) = try_parsed("a.parquet", &table("optional", &groups)).unwrap();
        assert_eq!(texts.len(), 12);
        assert_eq!((texts[0].as_str(), texts[1].as_str(), texts[11].as_str()), ("one\ntwo", "", "last"));
        assert!(texts[2..11].iter().all(|text| *text == long));
        let null = "the row has no text".to_owned();
        assert_eq!(bad, [(2, null.clone()), (13, null)]);
        assert_eq!(try_parsed("a.parquet", &table("optional", &[])).unwrap().0.len(), 0);
        let (texts, bad) =
            try_parsed("a.parquet", &table("required", &[&[Some("one"), Some("two")]])).unwrap();
        assert_eq!((texts, bad), (vec!["one".to_owned(), "two".to_owned()], Vec::new()));
    }

    #[test]
    fn a_damaged_table_is_an_error_or_other_rows() {
        let rows: Vec<String> = (0..200).map(|n| format!("row {n}")).collect();
        let rows: Vec<Option<&str>> = rows.iter().map(|row| Some(row.as_str())).collect();
        let bytes = table("optional", &[&rows]);
        for cut in [4, 11, bytes.len() / 2, bytes.len() - 1] {
            assert!(try_parsed("a.parquet", &bytes[..cut]).is_err(), "{cut}");
        }
        for place in 4..bytes.len() {
            let mut changed = bytes.clone();
            changed[place] ^= 0x41;
            try_parsed("a.parquet", &changed).ok();
        }
    }
}
