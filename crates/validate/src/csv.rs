//! Tables of comma-separated values, as spreadsheets write them: a header, and quotes around cells with commas.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use kintsugi_spec::input;

/// One row, by the names of the columns.
#[derive(Clone, Debug, Default)]
pub struct Row(HashMap<String, String>);

impl Row {
    /// A cell; empty where there is no such column.
    pub fn text(&self, column: &str) -> &str {
        self.0.get(column).map_or("", String::as_str)
    }

    /// A cell as a number, if it is one.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.text(column).parse().ok()
    }

    /// A cell as a count; 1 where it is empty.
    pub fn count(&self, column: &str) -> usize {
        self.number(column).map_or(1, |x| x as usize)
    }
}

/// The rows of a file.
pub fn read(path: &Path) -> io::Result<Vec<Row>> {
    Ok(rows(&input::text(path, input::MOST_WRITTEN_BY_HAND)?))
}

/// The rows of a text; lines that begin with `#` say where it comes from.
pub fn rows(text: &str) -> Vec<Row> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#')).map(cells);
    let header = lines.next().unwrap_or_default();
    lines.map(|cells| Row(header.iter().cloned().zip(cells).collect())).collect()
}

fn cells(line: &str) -> Vec<String> {
    let (mut cells, mut cell, mut quoted) = (Vec::new(), String::new(), false);
    for character in line.chars() {
        match character {
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(std::mem::take(&mut cell)),
            other => cell.push(other),
        }
    }
    cells.push(cell);
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_quotes_do_not_end_a_cell() {
        assert_eq!(cells("a,\"b, c\",,4"), ["a", "b, c", "", "4"]);
    }
}
