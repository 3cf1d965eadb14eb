//! Tables for the terminal: the first column is aligned left, the others right.

use std::fmt;
use std::io::IsTerminal;

/// Rows of cells with a header. A row with one cell is a heading inside the table.
pub struct Table {
    rows: Vec<Vec<String>>,
}

/// How a table that is too wide is narrowed.
#[derive(Clone, Copy)]
pub struct Fit<'a> {
    /// Columns to leave out, the least important one first.
    pub least: &'a [&'a str],
    /// A column of sentences, which is truncated before any column is left out.
    pub sentences: Option<&'a str>,
}

/// Characters that remain of a truncated sentence.
const MIN_SENTENCE: usize = 24;

impl Table {
    /// A table with these columns.
    pub fn new<T: Into<String>>(header: impl IntoIterator<Item = T>) -> Self {
        Table { rows: vec![header.into_iter().map(Into::into).collect()] }
    }

    /// Adds a row.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Narrows the table to the width of the terminal. Returns how many columns are left out.
    pub fn fit_terminal(&mut self, fit: Fit) -> usize {
        terminal_width().map_or(0, |width| self.fit(width, fit))
    }

    /// Removes columns that `fit` allows until the table is at most `width` characters wide. Returns how many it removed.
    fn fit(&mut self, width: usize, fit: Fit) -> usize {
        let columns = self.rows[0].len();
        let mut least = fit.least.iter();
        loop {
            self.shorten(width, fit.sentences);
            if self.width() <= width {
                break;
            }
            let Some(&name) = least.next() else { break };
            self.drop_column(name);
        }
        for heading in self.rows.iter_mut().skip(1).filter(|row| row.len() == 1) {
            heading[0] = cut(&heading[0], width.saturating_sub(INDENT));
        }
        columns - self.rows[0].len()
    }

    /// Truncates sentences that make the table wider than `width`.
    fn shorten(&mut self, width: usize, name: Option<&str>) {
        let Some(column) = name.and_then(|name| self.column(name)) else { return };
        let excess = self.width().saturating_sub(width);
        let length = self.widths()[column].saturating_sub(excess).max(MIN_SENTENCE);
        let columns = self.rows[0].len();
        for row in self.rows.iter_mut().filter(|row| row.len() == columns) {
            row[column] = cut(&row[column], length);
        }
    }

    /// Removes a column, if the table has it.
    fn drop_column(&mut self, name: &str) {
        let Some(column) = self.column(name) else { return };
        let columns = self.rows[0].len();
        for row in self.rows.iter_mut().filter(|row| row.len() == columns) {
            row.remove(column);
        }
    }

    fn column(&self, name: &str) -> Option<usize> {
        self.rows[0].iter().position(|column| column == name)
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows[0].len();
        let full = || self.rows.iter().filter(|row| row.len() == columns);
        (0..columns).map(|i| full().map(|row| row[i].chars().count()).max().unwrap_or(0)).collect()
    }

    /// Characters of the longest line, without headings.
    fn width(&self) -> usize {
        let widths = self.widths();
        INDENT + widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
    }
}

/// Characters before the first column.
const INDENT: usize = 2;
/// Characters between two columns.
const GAP: usize = 2;

/// The text, or its beginning and "…" if it is longer than `length` characters.
fn cut(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.to_owned();
    }
    let beginning: String = text.chars().take(length.saturating_sub(1)).collect();
    format!("{}…", beginning.trim_end())
}

/// A line with the number of columns that are left out, if any.
pub fn left_out(columns: usize) -> String {
    match columns {
        0 => String::new(),
        1 => "  1 column does not fit this width; --json has it\n".to_owned(),
        _ => format!("  {columns} columns do not fit this width; --json has them\n"),
    }
}

/// Width of the terminal on stdout, or the variable `COLUMNS` if it is set.
pub fn terminal_width() -> Option<usize> {
    let given = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let terminal = || std::io::stdout().is_terminal().then(console::Term::stdout)?.size_checked();
    given.or_else(|| terminal().map(|(_, columns)| usize::from(columns)))
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

    /// The table within a width, and how many columns are left out.
    fn fitted(width: usize) -> (String, usize) {
        let mut table = Table::new(["", "tp", "gather", "step", "why"]);
        table.row(["1", "8", "micro-batch", "1.234 s", "the best"]);
        table.row(["2", "4", "micro-batch", "2.345 s", "a sentence that goes on for quite a while"]);
        table.row(["3 is refused, and this says why in a sentence of its own"]);
        let left_out = table.fit(width, Fit { least: &["gather", "absent", "why"], sentences: Some("why") });
        assert!(table.to_string().lines().all(|line| line.chars().count() <= width), "{width}\n{table}");
        (table.to_string(), left_out)
    }

    #[test]
    fn a_table_that_is_too_wide_cuts_sentences_off_and_leaves_columns_out() {
        let (whole, dropped) = fitted(72);
        assert!(dropped == 0 && whole.contains("for quite a while"), "{whole}");
        let (shorter, dropped) = fitted(60);
        assert!(dropped == 0 && shorter.contains('…') && shorter.contains("gather"), "{shorter}");
        let (without_gather, dropped) = fitted(45);
        assert!(dropped == 1 && !without_gather.contains("gather"), "{without_gather}");
        let (narrow, dropped) = fitted(30);
        assert!(dropped == 2 && !narrow.contains("best") && narrow.contains("1.234 s"), "{narrow}");
        assert_eq!(left_out(2), "  2 columns do not fit this width; --json has them\n");
    }
}
