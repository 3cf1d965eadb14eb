//! Every key of the configuration, with its default and what it takes: read from the tables of `docs/configuration.md` and
//! `docs/clusters.md`, which are the only place where keys are described.

use toml::{Table, Value};

const CONFIGURATION: &str = include_str!("../../../../docs/configuration.md");
const CLUSTERS: &str = include_str!("../../../../docs/clusters.md");

/// A key of the configuration and its row in the documentation, as plain text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The table it is in, as in `cluster.device`.
    pub table: String,
    /// Its name in that table.
    pub name: String,
    /// The default: a value, a description if it depends on other keys, or `none`.
    pub default: String,
    /// What is allowed, and what it means.
    pub meaning: String,
}

impl Key {
    /// The key with its table, as `--set` takes it.
    pub fn path(&self) -> String {
        format!("{}.{}", self.table, self.name)
    }

    /// The default as a value, if it is one.
    pub fn default_value(&self) -> Option<Value> {
        let mut table = toml::from_str::<Table>(&format!("default = {}", self.default)).ok()?;
        table.remove("default").filter(|value| !value.is_datetime())
    }
}

/// Every key, table by table.
pub fn keys() -> Vec<Key> {
    let mut keys = rows(CONFIGURATION);
    for key in rows(CLUSTERS) {
        let after = keys.iter().rposition(|other| other.table.starts_with("cluster"));
        keys.insert(after.map_or(keys.len(), |last| last + 1), key);
    }
    keys
}

/// The rows of the tables of keys in a page.
fn rows(page: &str) -> Vec<Key> {
    let mut tables: Vec<String> = Vec::new();
    let mut keys = Vec::new();
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            tables = tables_under(heading);
        }
        let Some(row) = line.strip_prefix("| `").and_then(|row| row.strip_suffix(" |")) else { continue };
        let cells: Vec<&str> = row.splitn(3, " | ").map(str::trim).collect();
        let [name, default, meaning] = cells[..] else { continue };
        keys.extend(tables.iter().map(|table| {
            let path = format!("{table}.{}", name.trim_end_matches('`'));
            let (table, name) = path.rsplit_once('.').expect("a table and a key");
            Key { table: table.into(), name: name.into(), default: plain(default), meaning: plain(meaning) }
        }));
    }
    // All keys of one table before those of the next.
    let mut order: Vec<String> = Vec::new();
    for key in &keys {
        if !order.contains(&key.table) {
            order.push(key.table.clone());
        }
    }
    keys.sort_by_key(|key| order.iter().position(|table| *table == key.table));
    keys
}

/// The tables of the configuration whose keys are described under a heading.
fn tables_under(heading: &str) -> Vec<String> {
    match heading {
        "Keys of a device" => vec!["cluster.device".to_owned()],
        "Keys of a level's links" => {
            ["package", "node", "cluster"].map(|level| format!("cluster.links.{level}")).into()
        }
        "Emulated links" => {
            ["package", "node", "cluster"].map(|level| format!("cluster.emulated.{level}")).into()
        }
        heading => heading
            .strip_prefix('[')
            .and_then(|heading| heading.strip_suffix(']'))
            .map(str::to_owned)
            .into_iter()
            .collect(),
    }
}

/// Markdown without its marks: `` `code` ``, `**bold**`, `[text](address)`.
fn plain(markdown: &str) -> String {
    let text = markdown.replace("**", "").replace('`', "");
    let mut parts = text.split("](");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // `out` ends with `[text`, and the part begins with `address)`.
        match (out.rfind('['), part.split_once(')')) {
            (Some(open), Some((_, rest))) => {
                out.remove(open);
                out.push_str(rest);
            }
            _ => out.push_str(part),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::config::deserialize::{Node, Problem};
    use crate::config::raw::RawConfig;

    /// The keys that the configuration accepts under a path, from the error for a key that does not exist.
    fn accepted(path: &[&str]) -> Vec<String> {
        let inner = Value::Table(Table::from_iter([("no such key".to_owned(), Value::Integer(0))]));
        let wrap = |inner, key: &&str| Value::Table(Table::from_iter([((*key).to_owned(), inner)]));
        match RawConfig::deserialize(Node(path.iter().rev().fold(inner, wrap))) {
            Err(Problem::UnknownKey { known }) => {
                known.iter().flat_map(|key| accepted(&[path, &[*key]].concat())).collect()
            }
            _ => vec![path.join(".")],
        }
    }

    #[test]
    fn every_key_that_is_accepted_is_described_and_no_other() {
        let mut described: Vec<String> = keys().iter().map(Key::path).collect();
        let mut accepted = accepted(&[]);
        described.sort();
        accepted.sort();
        assert_eq!(described, accepted);
    }

    #[test]
    fn a_row_is_read_as_plain_text() {
        let key = keys().into_iter().find(|key| key.path() == "parallel.schedule").unwrap();
        assert_eq!(key.default, "\"1f1b\"");
        assert_eq!(key.meaning, "\"gpipe\", \"1f1b\", \"interleaved\", \"zero-bubble\": see schedules");
        assert_eq!(key.default_value(), Some(Value::String("1f1b".into())));
        assert_eq!(plain("a [b](c.md) and `d` [e](f) **g**"), "a b and d e g");
    }

    #[test]
    fn every_default_that_is_a_value_is_accepted() {
        for key in keys() {
            if let Some(value) = key.default_value() {
                let source = crate::config::ConfigSource::text(format!("{} = {value}", key.path()));
                let given = source.init_folder();
                assert!(given.is_ok(), "{}: {given:?}", key.path());
            }
        }
    }
}
