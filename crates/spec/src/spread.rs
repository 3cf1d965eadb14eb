//! How far measured steps were from predicted ones, by kind of run: `profiles/spread.toml`, which `scripts/spread` writes.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// The spread of measured over predicted time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The runs that were compared.
    pub runs: usize,
    /// Measured over predicted time of the tenth percentile.
    pub low: f64,
    /// The same of the ninetieth percentile.
    pub high: f64,
}

#[derive(Deserialize)]
struct Table {
    kind: Vec<Kind>,
    unseen: Spread,
}

#[derive(Deserialize)]
struct Kind {
    /// The framework's preset; `None` for this engine.
    framework: Option<String>,
    /// Whether the ranks are on several nodes.
    several_nodes: bool,
    #[serde(flatten)]
    spread: Spread,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    toml::from_str(include_str!("../../../profiles/spread.toml")).expect("the program's own table")
});

impl Spread {
    /// The spread of runs like this one: the same framework (`None` for this engine), in one node or on several.
    pub fn like(framework: Option<&str>, several_nodes: bool) -> Option<Spread> {
        let like =
            |kind: &&Kind| kind.framework.as_deref() == framework && kind.several_nodes == several_nodes;
        TABLE.kind.iter().find(like).map(|kind| kind.spread)
    }

    /// The spread of runs that were unknown when the constants were set.
    pub fn unseen() -> Spread {
        TABLE.unseen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn every_spread_is_a_range_of_a_known_framework() {
        let spreads = TABLE.kind.iter().map(|kind| kind.spread).chain([Spread::unseen()]);
        assert!(spreads.clone().count() > 5);
        for spread in spreads {
            assert!(0.0 < spread.low && spread.low <= spread.high && spread.runs > 1, "{spread:?}");
        }
        for framework in TABLE.kind.iter().filter_map(|kind| kind.framework.as_deref()) {
            presets::framework(framework).unwrap();
        }
    }

    #[test]
    fn runs_are_alike_by_framework_and_nodes() {
        assert_ne!(Spread::like(Some("nanotron"), true), Spread::like(Some("nanotron"), false));
        assert_eq!(Spread::like(None, true), None, "this engine was not measured on several nodes");
    }
}
