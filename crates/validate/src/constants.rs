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

/// Values of constants.
#[derive(Clone, Debug, Default)]
pub struct Constants {
    values: BTreeMap<Constant, f64>,
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

    /// The values for a run on a cluster under a framework, as `--set` takes them.
    pub fn settings(&self, cluster: &str, framework: &str) -> Vec<String> {
        let of = |table: &str, preset: &str| -> Vec<String> {
            let mine = self.values.iter().filter(|(c, _)| c.table == table && c.preset == preset);
            mine.map(|(c, value)| format!("{table}.{}={value:e}", c.key)).collect()
        };
        [of("cluster", cluster), of("framework", framework)].concat()
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
    fn a_run_has_the_constants_of_its_presets() {
        let mut constants = Constants::default();
        for key in ["framework.eager.host", "framework.nanotron.host", "cluster.h100.device.matmul"] {
            constants.set(&Constant::parse(key).unwrap(), 1e-5);
        }
        let settings = constants.settings("h100", "nanotron");
        assert_eq!(settings, ["cluster.device.matmul=1e-5", "framework.host=1e-5"]);
        assert!(constants.to_toml().contains("[framework.eager]\n\"host\" = 1.0000e-5\n"));
    }
}
