//! The values that a configuration resolves to, and which layer each comes from.

use toml::{Table, Value};

use super::error::ConfigError;
use super::layers;
use super::source::ConfigSource;

/// A value of a resolved configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedValue {
    /// The key with its tables.
    pub key: String,
    /// The value that is used.
    pub value: Value,
    /// Where it comes from: `default`, `preset NAME`, `profile FILE`, `file NAME` or `--set`.
    pub origin: String,
}

impl ConfigSource {
    /// Every value of the resolved plan, and other keys that were set, table by table.
    pub fn resolved(&self) -> Result<Vec<ResolvedValue>, ConfigError> {
        let plan: Table = toml::from_str(&self.plan()?.to_toml()).expect("a plan writes TOML");
        let given = layers::by_origin(self)?;
        let mut values: Vec<ResolvedValue> = Vec::new();
        for (key, value) in leaves(&plan) {
            let origin = origin(&given, &key).unwrap_or_else(|| derived(&given, &key));
            values.push(ResolvedValue { key, value, origin });
        }
        // Keys that only affect how others are resolved: sharding.zero, cluster.profile.
        for (origin, table) in given.iter().rev() {
            for (key, value) in leaves(table) {
                if values.iter().any(|other| other.key == key) {
                    continue;
                }
                let of_table = |other: &ResolvedValue| other.key.split('.').next() == key.split('.').next();
                let at = values.iter().rposition(of_table).map_or(values.len(), |last| last + 1);
                values.insert(at, ResolvedValue { key, value, origin: origin.clone() });
            }
        }
        Ok(values)
    }
}

/// The topmost layer that has a key.
fn origin(given: &[(String, Table)], key: &str) -> Option<String> {
    let has = |table: &Table| {
        let mut keys = key.split('.');
        let first = table.get(keys.next()?)?;
        keys.try_fold(first, |value, key| value.get(key)).map(|_| ())
    };
    given.iter().rev().find(|(_, table)| has(table).is_some()).map(|(origin, _)| origin.clone())
}

/// The origin of a value that no layer has: the key that it is derived from, or the default.
fn derived(given: &[(String, Table)], key: &str) -> String {
    let from = match key {
        "sharding.weights" | "sharding.gradients" | "sharding.states" | "sharding.secondary" => {
            let preset = origin(given, "sharding.preset").is_some();
            if preset { "sharding.preset" } else { "sharding.zero" }
        }
        _ => return DEFAULT.to_owned(),
    };
    origin(given, from).map_or(DEFAULT.to_owned(), |origin| format!("{origin}, by {from}"))
}

const DEFAULT: &str = "default";

/// The values of a table and its inner tables, with their keys.
fn leaves(table: &Table) -> Vec<(String, Value)> {
    let leaf = |(key, value): (&String, &Value)| match value {
        Value::Table(inner) => {
            leaves(inner).into_iter().map(|(rest, value)| (format!("{key}.{rest}"), value)).collect()
        }
        value => vec![(key.clone(), value.clone())],
    };
    table.iter().flat_map(leaf).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin_of(values: &[ResolvedValue], key: &str) -> (String, String) {
        let found = values.iter().find(|value| value.key == key).unwrap_or_else(|| panic!("{key}"));
        (found.value.to_string(), found.origin.clone())
    }

    #[test]
    fn every_value_names_its_layer() {
        let values = ConfigSource::text(
            "model.preset = \"gpt2-124m\"\nparallel.dp = \"auto\"\nsharding.zero = 1\ncluster.preset = \"h200\"\n\
             cluster.nodes = 1\n[batch]\nglobal = 64\n",
        )
        .named("run.toml")
        .profile("mine.toml", "cluster.price = 2.5")
        .set("batch.micro=2")
        .resolved()
        .unwrap();
        let of = |key| origin_of(&values, key);
        let pair = |value: &str, origin: &str| (value.to_owned(), origin.to_owned());
        assert_eq!(of("model.layers"), pair("12", "preset gpt2-124m"));
        assert_eq!(of("cluster.per_node"), pair("8", "preset h200"));
        assert_eq!(of("cluster.price"), pair("2.5", "profile mine.toml"));
        assert_eq!(of("batch.global"), pair("64", "file run.toml"));
        assert_eq!(of("parallel.dp"), pair("8", "file run.toml"));
        assert_eq!(of("sharding.zero"), pair("1", "file run.toml"));
        assert_eq!(of("sharding.states"), pair("\"cluster\"", "file run.toml, by sharding.zero"));
        assert_eq!(of("batch.micro"), pair("2", "--set"));
        assert_eq!(of("optimizer.weight_decay"), pair("0.1", "default"));
    }
}
