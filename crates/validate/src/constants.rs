//! Values of constants that replace those of the presets.

use std::collections::BTreeMap;
use std::fmt::Write;

/// A constant of a preset: `cluster` or `framework`, the preset's name, and the key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Constant {
    /// `cluster` or `framework`.
    pub table: String,
    /// The preset.
    pub preset: String,
    /// The key inside the table, as `device.matmul`.
    pub key: String,
}

/// Values of constants, and presets whose constants are those of another.
#[derive(Clone, Debug, Default)]
pub struct Constants {
    values: BTreeMap<Constant, f64>,
    /// The preset that stands for another, and values of keys that only the other has.
    instead: BTreeMap<String, (String, Vec<(String, f64)>)>,
}

impl Constant {
    /// The constant of a key such as `cluster.a100.device.matmul`.
    pub fn parse(key: &str) -> Option<Self> {
        let (table, rest) = key.split_once('.')?;
        let (preset, key) = rest.split_once('.')?;
        Some(Constant { table: table.to_owned(), preset: preset.to_owned(), key: key.to_owned() })
    }
}

impl Constants {
    /// Sets the value of a constant.
    pub fn set(&mut self, constant: &Constant, value: f64) {
        self.values.insert(constant.clone(), value);
    }

    /// The value of a constant, if it was set.
    pub fn get(&self, constant: &Constant) -> Option<f64> {
        self.values.get(constant).copied()
    }

    /// Gives a framework the constants of another. `neutral` are values of keys that the other may not have.
    pub fn fall_back(&mut self, framework: &str, to: &str, neutral: Vec<(String, f64)>) {
        self.instead.insert(framework.to_owned(), (to.to_owned(), neutral));
    }

    /// The frameworks that have the constants of another.
    pub fn fell_back(&self) -> Vec<String> {
        self.instead.keys().cloned().collect()
    }

    /// The values for a run on a cluster under a framework, as `--set` takes them.
    pub fn settings(&self, cluster: &str, framework: &str) -> Vec<String> {
        let instead = self.instead.get(framework);
        let neutral = instead.map_or(&[][..], |(_, neutral)| neutral);
        let neutral = neutral.iter().map(|(key, value)| format!("framework.{key}={value:e}")).collect();
        let framework = instead.map_or(framework, |(other, _)| other);
        let of = |table: &str, preset: &str| -> Vec<String> {
            let mine = self.values.iter().filter(|(c, _)| c.table == table && c.preset == preset);
            mine.map(|(c, value)| format!("{table}.{}={value:e}", c.key)).collect()
        };
        [of("cluster", cluster), neutral, of("framework", framework)].concat()
    }

    /// The values as a configuration: one table for each preset.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let mut last = None;
        for (Constant { table, preset, key }, value) in &self.values {
            if last != Some((table, preset)) {
                writeln!(text, "[{table}.{preset}]").expect("a string takes all text");
                last = Some((table, preset));
            }
            writeln!(text, "{key:?} = {value:.4e}").expect("a string takes all text");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_framework_may_have_the_constants_of_another() {
        let constant = |preset: &str| Constant {
            table: "framework".to_owned(),
            preset: preset.to_owned(),
            key: "host".to_owned(),
        };
        let mut constants = Constants::default();
        constants.set(&constant("eager"), 1e-5);
        constants.set(&constant("nanotron"), 2e-5);
        assert_eq!(constants.settings("h100", "nanotron"), ["framework.host=2e-5"]);
        constants.fall_back("nanotron", "eager", vec![("attention".to_owned(), 1.0)]);
        assert_eq!(
            constants.settings("h100", "nanotron"),
            ["framework.attention=1e0", "framework.host=1e-5"]
        );
        assert!(constants.to_toml().contains("[framework.eager]\n\"host\" = 1.0000e-5\n"));
    }
}
