//! Tables for the terminal: the first column to the left, numbers to the right.

use std::fmt;
use std::io::IsTerminal;

/// Rows of cells under a header; a row of one cell is a heading inside the table.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new<T: Into<String>>(header: impl IntoIterator<Item = T>) -> Self {
        Table { rows: vec![header.into_iter().map(Into::into).collect()] }
    }

    /// Adds a row.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows[0].len();
        let full = || self.rows.iter().filter(|row| row.len() == columns);
        (0..columns).map(|i| full().map(|row| row[i].chars().count()).max().unwrap_or(0)).collect()
    }
}

/// Columns of the terminal that stdout goes to, if it does.
pub fn terminal_width() -> Option<usize> {
    let terminal = std::io::stdout().is_terminal();
    console::Term::stdout().size_checked().filter(|_| terminal).map(|(_, columns)| usize::from(columns))
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let widths = self.widths();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).enumerate().map(|(i, (cell, &width))| match i {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            writeln!(f, "  {}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_line_up_on_the_right_and_headings_do_not_widen_a_column() {
        let mut table = Table::new(["", "bytes"]);
        table.row(["a heading that is long"]);
        table.row(["a – b", "7"]);
        table.row(["c", "123456"]);
        assert_eq!(
            table.to_string().lines().collect::<Vec<_>>(),
            ["          bytes", "  a heading that is long", "  a – b       7", "  c      123456"]
        );
    }
}
