//! Configurations side by side: the keys that differ.

use std::collections::BTreeMap;

use toml::{Table, Value};

/// Every value of a configuration under its whole key.
pub fn values(text: &str) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    if let Ok(table) = text.parse::<Table>() {
        flatten("", &Value::Table(table), &mut values);
    }
    values
}

fn flatten(key: &str, value: &Value, into: &mut BTreeMap<String, String>) {
    match value {
        Value::Table(table) => {
            for (name, value) in table {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                flatten(&key, value, into);
            }
        }
        Value::String(text) => drop(into.insert(key.to_owned(), text.clone())),
        other => drop(into.insert(key.to_owned(), other.to_string())),
    }
}

/// The keys that do not have the same value everywhere, each with its values; `–` where it has none.
pub fn differences(configs: &[BTreeMap<String, String>]) -> Vec<(String, Vec<String>)> {
    let mut keys: Vec<&String> = configs.iter().flat_map(BTreeMap::keys).collect();
    keys.sort_unstable();
    keys.dedup();
    let row = |key: &String| {
        let values: Vec<Option<&String>> = configs.iter().map(|config| config.get(key)).collect();
        let differ = values.windows(2).any(|pair| pair[0] != pair[1]);
        let shown = values.into_iter().map(|value| value.map_or_else(|| "–".to_owned(), Clone::clone));
        differ.then(|| (key.clone(), shown.collect()))
    };
    keys.into_iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_shown() {
        let [a, b] = ["run.steps = 3\nparallel = { tp = 2, pp = 1 }\n", "run.steps = 3\nparallel.tp = 4\n"]
            .map(values);
        let expected = [("parallel.pp", ["1", "–"]), ("parallel.tp", ["2", "4"])];
        let expected = expected.map(|(key, values)| (key.to_owned(), values.map(str::to_owned).to_vec()));
        assert_eq!(differences(&[a, b]), expected);
    }
}
