//! Every key of the configuration as text: its default, and what it takes.

use kintsugi_spec::presets::{self, Preset};
use kintsugi_spec::{DeclaredKey, Family};
use toml::{Table, Value};

use super::keys::RawConfig;

/// A key of the configuration as it is declared. Its texts are Markdown; [`Key::plain`] has none of it.
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

    /// The same with plain text instead of Markdown.
    #[must_use]
    pub fn plain(self) -> Key {
        Key { default: plain(&self.default), meaning: plain(&self.meaning), ..self }
    }

    /// The default as a value, if it is one.
    pub fn default_value(&self) -> Option<Value> {
        let mut table = toml::from_str::<Table>(&format!("default = {}", plain(&self.default))).ok()?;
        table.remove("default").filter(|value| !value.is_datetime())
    }
}

/// Every key, table by table.
pub fn keys() -> Vec<Key> {
    let mut keys = Vec::new();
    list("", RawConfig::KEYS, &mut keys);
    keys
}

/// Adds the keys of a table, and after them those of the tables in it.
fn list(table: &str, declared: &[DeclaredKey], keys: &mut Vec<Key>) {
    for key in declared {
        if let DeclaredKey::Value { name, default, meaning } = key {
            let lines: Vec<&str> = meaning.iter().map(|line| line.trim()).collect();
            keys.push(Key {
                table: table.to_owned(),
                name: (*name).to_owned(),
                default: default(),
                meaning: with_names(&lines.join(" ")),
            });
        }
    }
    for key in declared {
        if let DeclaredKey::Table { name, keys: inner } = key {
            let path = if table.is_empty() { (*name).to_owned() } else { format!("{table}.{name}") };
            list(&path, inner, keys);
        }
    }
}

/// A text with the names of all families and presets in it, where it says so.
fn with_names(text: &str) -> String {
    let quoted = |names: Vec<&str>| -> String {
        names.into_iter().map(|name| format!("`\"{name}\"`")).collect::<Vec<_>>().join(", ")
    };
    let names = |presets: &[Preset]| quoted(presets.iter().map(|preset| preset.name).collect());
    let families = || quoted(Family::ALL.iter().map(|family| family.name()).collect());
    text.replace("{families}", &families())
        .replace("{model presets}", &names(presets::MODELS))
        .replace("{cluster presets}", &names(presets::CLUSTERS))
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

    /// The words that a key takes, from the error for a word that it does not take.
    fn words(key: &Key) -> &'static [&'static str] {
        let wrap = |inner, name: &str| Value::Table(Table::from_iter([(name.to_owned(), inner)]));
        let config = key.path().split('.').rev().fold(Value::String("no such word".into()), wrap);
        match RawConfig::deserialize(Node(config)) {
            Err(Problem::UnknownWord { known }) => known,
            _ => &[],
        }
    }

    #[test]
    fn every_word_that_a_key_takes_is_in_its_text() {
        // A check refuses these.
        let refused = [
            ("precision.states", "fp16"),
            ("sharding.quantize_weights", "int4"),
            ("sharding.quantize_refresh", "int4"),
        ];
        let mut checked = 0;
        for key in keys().iter().filter(|key| !key.meaning.starts_with("the same for")) {
            for word in words(key).iter().filter(|word| !refused.contains(&(&key.path(), word))) {
                let quoted = format!("\"{word}\"");
                assert!(
                    key.meaning.contains(&quoted) || key.default.contains(&quoted),
                    "{}: {word}",
                    key.path()
                );
                checked += 1;
            }
        }
        assert!(checked > 50, "{checked} words");
    }

    #[test]
    fn texts_are_markdown_or_plain() {
        let key = keys().into_iter().find(|key| key.path() == "parallel.schedule").unwrap();
        assert_eq!(key.default, "`\"1f1b\"`");
        assert_eq!(key.default_value(), Some(Value::String("1f1b".into())));
        let key = key.plain();
        assert_eq!(key.default, "\"1f1b\"");
        assert_eq!(
            key.meaning,
            "\"gpipe\", \"1f1b\", \"interleaved\", \"zero-bubble\" (schedules). Interleaved needs pp of at least 2 and a multiple of pp micro-batches"
        );
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
