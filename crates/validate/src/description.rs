//! Descriptions of tables: which columns they have, and how these become the standard columns.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::table::Row;
use super::template::fill;

/// The rows of a table that belong together.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The name of the set; a template, so that a table may have several sets.
    pub name: String,
    /// The origin of the measurements, which is left out as a whole.
    pub source: String,
    /// Where the measurements were published.
    pub origin: String,
    /// What a row measures.
    #[serde(default)]
    pub kind: Kind,
    /// Columns by which the table is recognised.
    recognised: Vec<String>,
    /// Rows whose cell begins with one of these texts.
    #[serde(default)]
    only: BTreeMap<String, Vec<String>>,
    /// No rows whose cell begins with one of these texts.
    #[serde(default)]
    except: BTreeMap<String, Vec<String>>,
    /// No rows whose cell contains one of these texts.
    #[serde(default)]
    except_containing: BTreeMap<String, Vec<String>>,
    /// Standard columns with another name or unit, as templates.
    columns: BTreeMap<String, String>,
    /// Changes for some rows.
    #[serde(default)]
    when: Vec<When>,
    /// The stage whose memory was measured.
    #[serde(default)]
    pub memory_of: MemoryOf,
    /// How layers are assigned to stages.
    #[serde(default)]
    pub stages: Stages,
    /// The set that contains the same rows, if this one only repeats some of them.
    #[serde(default)]
    pub part_of: Option<String>,
}

/// What a row measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A step of a training.
    #[default]
    Step,
    /// A matrix product.
    Product,
    /// An all-reduce inside a node.
    AllReduce,
}

/// The stage whose memory was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum MemoryOf {
    /// The one that needs most.
    #[default]
    #[serde(rename = "fullest stage")]
    Fullest,
    /// The first.
    #[serde(rename = "first stage")]
    First,
    /// The last.
    #[serde(rename = "last stage")]
    Last,
}

/// How layers are assigned to stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Stages {
    /// As evenly as possible.
    #[default]
    #[serde(rename = "even")]
    Even,
    /// By the cost of layers and head, as nanotron does.
    #[serde(rename = "by cost")]
    ByCost,
}

/// Standard columns of the rows whose cell begins with a text.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct When {
    column: String,
    begins: String,
    columns: BTreeMap<String, String>,
}

/// All descriptions. The last one that recognises a table's columns is that of the standard header.
pub static DESCRIPTIONS: LazyLock<Vec<Description>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct File {
        set: Vec<Description>,
    }
    toml::from_str::<File>(include_str!("../data/sets.toml")).expect("the descriptions are legal").set
});

/// The descriptions of a table: all that recognise its columns, or the one of the standard header.
pub fn of(header: &[String]) -> Vec<&'static Description> {
    let (standard, published) = DESCRIPTIONS.split_last().expect("there are descriptions");
    let found: Vec<_> = published.iter().filter(|description| description.recognises(header)).collect();
    if found.is_empty() && standard.recognises(header) { vec![standard] } else { found }
}

impl Description {
    fn recognises(&self, header: &[String]) -> bool {
        self.recognised.iter().all(|column| header.contains(column))
    }

    /// The row with the standard columns, if it belongs to this set. Settings of several rules add up.
    pub fn standard(&self, row: &Row) -> Option<Row> {
        let any = |rules: &BTreeMap<String, Vec<String>>, test: fn(&str, &str) -> bool| {
            rules.iter().any(|(column, texts)| texts.iter().any(|text| test(row.text(column), text)))
        };
        let begins = |cell: &str, text: &str| cell.starts_with(text);
        let wanted = |(column, texts): (&String, &Vec<String>)| {
            texts.iter().any(|text| row.text(column).starts_with(text.as_str()))
        };
        if !self.only.iter().all(wanted)
            || any(&self.except, begins)
            || any(&self.except_containing, |cell, text| cell.contains(text))
        {
            return None;
        }
        let mut standard = row.clone();
        let mut settings = String::new();
        let rules = self.when.iter().filter(|when| row.text(&when.column).starts_with(&when.begins));
        for (column, template) in [&self.columns].into_iter().chain(rules.map(|when| &when.columns)).flatten()
        {
            let cell = fill(template, row);
            if column == "settings" {
                settings = format!("{settings} {cell}");
            } else {
                standard.set(column, cell);
            }
        }
        if !settings.is_empty() {
            standard.set("settings", settings);
        }
        standard.set("set", fill(&self.name, row));
        standard.set("source", fill(&self.source, row));
        Some(standard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::COLUMNS;

    #[test]
    fn descriptions_fill_standard_columns_only() {
        for description in DESCRIPTIONS.iter() {
            let whens = description.when.iter().map(|when| &when.columns);
            for column in [&description.columns].into_iter().chain(whens).flat_map(|columns| columns.keys()) {
                assert!(COLUMNS.contains(&column.as_str()), "{}: {column}", description.name);
            }
        }
    }
}
