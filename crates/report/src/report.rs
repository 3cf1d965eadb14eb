//! A report as data: what the page shows, in order.

use kintsugi_draw::chart::Chart;
use serde::Serialize;

use crate::{RunAxis, TimelineData};

/// A page.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Its heading.
    pub title: String,
    /// Below the heading.
    pub subtitle: String,
    /// What a reader should know first.
    pub notes: Vec<String>,
    /// The runs that charts refer to by their number, with their axes.
    pub runs: Vec<RunAxis>,
    /// The sections.
    pub sections: Vec<Section>,
}

/// A part of a page.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    /// Its heading.
    pub title: String,
    /// What it shows.
    pub items: Vec<Item>,
}

/// Something on a page.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Item {
    /// A chart.
    Chart(Box<Chart>),
    /// What ranks did in a step.
    Timeline(Box<TimelineData>),
    /// A table.
    Table(TableData),
    /// A text that is shown on demand.
    Text(TextData),
}

/// A table. The first cell of a row is its name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TableData {
    /// Its heading.
    pub title: String,
    /// The question that it answers.
    pub question: String,
    /// The names of the columns.
    pub header: Vec<String>,
    /// The rows.
    pub rows: Vec<Vec<String>>,
    /// Whether the rows are the runs of the report, in order. Their names then have the colours of their curves.
    pub of_runs: bool,
}

/// A text.
#[derive(Clone, Debug, Serialize)]
pub struct TextData {
    /// Its heading.
    pub title: String,
    /// The text.
    pub text: String,
}

impl Report {
    /// Adds a section, unless it is empty.
    pub(crate) fn section(&mut self, title: &str, items: Vec<Item>) {
        if !items.is_empty() {
            self.sections.push(Section { title: title.to_owned(), items });
        }
    }
}

impl From<Chart> for Item {
    fn from(chart: Chart) -> Self {
        Item::Chart(Box::new(chart))
    }
}

impl From<TimelineData> for Item {
    fn from(timeline: TimelineData) -> Self {
        Item::Timeline(Box::new(timeline))
    }
}

impl From<TableData> for Item {
    fn from(table: TableData) -> Self {
        Item::Table(table)
    }
}
