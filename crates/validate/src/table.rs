//! Tables of measurements: comma-separated values with a header.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use csv::{ReaderBuilder, StringRecord};
use kintsugi_spec::input;

/// One row, by the names of the columns.
#[derive(Clone, Debug, Default)]
pub struct Row(HashMap<String, String>);

impl Row {
    /// A cell; empty if there is no such column.
    pub fn text(&self, column: &str) -> &str {
        self.0.get(column).map_or("", String::as_str)
    }

    /// A cell as a number, if it is one.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.text(column).parse().ok()
    }

    /// Sets a cell.
    pub fn set(&mut self, column: &str, cell: String) {
        self.0.insert(column.to_owned(), cell);
    }

    /// The names of the columns.
    pub fn columns(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

/// The rows of a file.
pub fn read(path: &Path) -> io::Result<Vec<Row>> {
    Ok(rows(&input::text(path, input::MAX_WRITTEN_BY_HAND)?)?)
}

/// The rows of a text. Lines that begin with `#` state its origin.
pub fn rows(text: &str) -> csv::Result<Vec<Row>> {
    let mut reader = ReaderBuilder::new().comment(Some(b'#')).flexible(true).from_reader(text.as_bytes());
    let header = reader.headers()?.clone();
    let cell = |record: &StringRecord, i| record.get(i).unwrap_or_default().to_owned();
    let row = |record: StringRecord| {
        Row(header.iter().enumerate().map(|(i, column)| (column.to_owned(), cell(&record, i))).collect())
    };
    reader.records().map(|record| record.map(row)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_cells_by_column() {
        let rows = rows("# source\nname,note,tp\na,\"b, c\",4\nshort\nd,e,2,more\n").unwrap();
        let cells = |row: &Row| ["name", "note", "tp", "none"].map(|column| row.text(column).to_owned());
        assert_eq!(
            rows.iter().map(cells).collect::<Vec<_>>(),
            [["a", "b, c", "4", ""], ["short", "", "", ""], ["d", "e", "2", ""],]
        );
    }
}
