//! A restriction of a search: one key of the configuration, and the values it may have.

use std::collections::BTreeMap;

use kintsugi_plan::config::{LayerSplit, Strategy};
use kintsugi_plan::{Codes, Integer};
use kintsugi_spec::Level;
use serde::Serialize;

/// A key and the values that it may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Only {
    key: &'static str,
    values: Vec<String>,
}

type Value = fn(&Strategy) -> String;

/// The values that a key accepts.
enum AllowedValues {
    /// A number from 1.
    Count,
    Words(&'static [&'static str]),
}

const LEVELS: [&str; 5] = ["none", "package", "node", "pod", "cluster"];
const TIMES: [&str; 2] = ["micro-batch", "step"];

/// The size of the context-parallel axis. Strategies have cp = 1 unless it is restricted.
const CONTEXT: &str = "parallel.cp";

/// The keys that a strategy decides.
const KEYS: [(&str, AllowedValues, Value); 19] = [
    ("parallel.tp", AllowedValues::Count, |strategy| strategy.mesh.tp().to_string()),
    (CONTEXT, AllowedValues::Count, |strategy| strategy.mesh.cp().to_string()),
    ("parallel.pp", AllowedValues::Count, |strategy| strategy.mesh.pp().to_string()),
    ("parallel.dp", AllowedValues::Count, |strategy| strategy.mesh.dp().to_string()),
    (
        "parallel.schedule",
        AllowedValues::Words(&["gpipe", "1f1b", "interleaved", "zero-bubble"]),
        |strategy| word(strategy.schedule),
    ),
    ("parallel.virtual_stages", AllowedValues::Count, |strategy| strategy.virtual_stages.to_string()),
    (
        "parallel.layers_per_stage",
        AllowedValues::Words(&["even", "lighter-ends", "lighter-last"]),
        |strategy| {
            match strategy.split {
                LayerSplit::Even => "even",
                LayerSplit::LighterEnds => "lighter-ends",
                LayerSplit::Last(_) => "lighter-last",
            }
            .to_owned()
        },
    ),
    ("parallel.sequence_parallel", AllowedValues::Words(&["false", "true"]), |strategy| {
        strategy.sequence_parallel.to_string()
    }),
    ("batch.micro", AllowedValues::Count, |strategy| strategy.micro.to_string()),
    ("sharding.zero", AllowedValues::Words(&["0", "1", "2", "3"]), |strategy| zero(strategy).to_string()),
    ("sharding.weights", AllowedValues::Words(&LEVELS), |strategy| level_word(strategy.sharding.weights)),
    ("sharding.gradients", AllowedValues::Words(&LEVELS), |strategy| level_word(strategy.sharding.gradients)),
    ("sharding.states", AllowedValues::Words(&LEVELS), |strategy| level_word(strategy.sharding.states)),
    ("sharding.secondary", AllowedValues::Words(&LEVELS), |strategy| level_word(strategy.sharding.secondary)),
    ("sharding.gather", AllowedValues::Words(&TIMES), |strategy| word(strategy.sharding.gather)),
    ("sharding.reduce", AllowedValues::Words(&TIMES), |strategy| word(strategy.sharding.reduce)),
    ("sharding.quantize_weights", AllowedValues::Words(&["none", "int8"]), |strategy| {
        code_word(strategy.sharding.quantized.weights)
    }),
    ("sharding.quantize_gradients", AllowedValues::Words(&["none", "int4", "int8"]), |strategy| {
        code_word(strategy.sharding.quantized.gradients)
    }),
    ("memory.recompute", AllowedValues::Words(&["none", "selective", "full"]), |strategy| {
        word(strategy.recompute)
    }),
];

/// Why a restriction of a search is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OnlyError {
    /// It is not a key and its values.
    #[error("\"{0}\" must be table.key=value,value")]
    Form(String),
    /// Strategies do not differ in this key.
    #[error("{0} is not searched over; the keys are {keys}", keys = KEYS.map(|(name, ..)| name).join(", "))]
    Key(String),
    /// A number must be positive.
    #[error("{key} = {value} must be a number from 1")]
    Count {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
    },
    /// The key has no such value.
    #[error("{key} = {value} must be one of {}", allowed.join(", "))]
    Word {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// Its values.
        allowed: &'static [&'static str],
    },
}

impl Only {
    /// Whether it restricts cp, and so asks for strategies that divide sequences.
    pub(crate) fn asks_for_context(&self) -> bool {
        self.key == CONTEXT
    }

    /// Parses `table.key=value,value`.
    pub fn parse(text: &str) -> Result<Only, OnlyError> {
        let (key, values) = text.split_once('=').ok_or_else(|| OnlyError::Form(text.to_owned()))?;
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if values.iter().any(String::is_empty) {
            return Err(OnlyError::Form(text.to_owned()));
        }
        Only::new(key.trim(), values)
    }

    /// Restricts a key to these values.
    pub fn new(key: &str, values: Vec<String>) -> Result<Only, OnlyError> {
        let Some((key, allowed, _)) = KEYS.iter().find(|(name, ..)| *name == key) else {
            return Err(OnlyError::Key(key.to_owned()));
        };
        values.iter().try_for_each(|value| allowed.check(key, value))?;
        Ok(Only { key, values })
    }

    /// Whether a strategy decides the key.
    pub fn is_decided(key: &str) -> bool {
        KEYS.iter().any(|(name, ..)| *name == key)
    }

    /// Whether it allows transfers that carry codes, which no strategy is picked for unless this is asked for.
    pub(crate) fn asks_for_codes(&self) -> bool {
        self.key.starts_with("sharding.quantize_") && self.values.iter().any(|value| value != "none")
    }

    /// The codes that it allows for a key.
    pub(crate) fn integers(&self, key: &str) -> Vec<Integer> {
        let integer = |value: &String| Integer::ALL.into_iter().find(|integer| integer.name() == value);
        if self.key == key { self.values.iter().filter_map(integer).collect() } else { Vec::new() }
    }

    /// Whether a strategy has one of the values.
    pub fn allows(&self, strategy: &Strategy) -> bool {
        self.values.contains(&self.value(strategy))
    }

    /// The value of the key in a strategy.
    pub fn value(&self, strategy: &Strategy) -> String {
        let (.., value) = KEYS.iter().find(|(name, ..)| *name == self.key).expect("a key that was parsed");
        value(strategy)
    }
}

/// The value of every key that a strategy decides.
pub fn values(strategy: &Strategy) -> BTreeMap<String, String> {
    KEYS.iter().map(|(key, _, value)| ((*key).to_owned(), value(strategy))).collect()
}

impl AllowedValues {
    fn check(&self, key: &'static str, value: &str) -> Result<(), OnlyError> {
        match self {
            AllowedValues::Count if value.parse::<usize>().is_ok_and(|n| n > 0 && n.to_string() == value) => {
                Ok(())
            }
            AllowedValues::Words(words) if words.contains(&value) => Ok(()),
            AllowedValues::Count => Err(OnlyError::Count { key, value: value.to_owned() }),
            AllowedValues::Words(allowed) => Err(OnlyError::Word { key, value: value.to_owned(), allowed }),
        }
    }
}

/// The ZeRO stage with the same sharding.
pub(crate) fn zero(strategy: &Strategy) -> usize {
    let sharding = &strategy.sharding;
    let sharded = [sharding.states, sharding.gradients, sharding.weights];
    sharded.iter().rposition(Option::is_some).map_or(0, |last| last + 1)
}

/// The value of a key that is a level.
fn level_word(level: Option<Level>) -> String {
    level.map_or("none", Level::name).to_owned()
}

/// The value of a key that quantises.
fn code_word(codes: Option<Codes>) -> String {
    codes.map_or("none", |codes| codes.integer.name()).to_owned()
}

/// A value as it stands in a configuration.
fn word(value: impl Serialize) -> String {
    match toml::Value::try_from(value) {
        Ok(toml::Value::String(word)) => word,
        other => unreachable!("a choice is a word, not {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restriction_is_a_key_and_values() {
        let only = Only::parse("parallel.tp = 1, 8").expect("right");
        assert_eq!((only.key, only.values), ("parallel.tp", vec!["1".to_owned(), "8".to_owned()]));
        assert!(Only::parse("parallel.tp").is_err());
        assert!(Only::parse("parallel.tp=").is_err());
        assert!(Only::parse("model.layers=3").unwrap_err().to_string().contains("parallel.tp"));
        let said = |text| Only::parse(text).unwrap_err().to_string();
        assert_eq!(
            said("memory.recompute=ful"),
            "memory.recompute = ful must be one of none, selective, full"
        );
        assert_eq!(said("parallel.tp=2,0"), "parallel.tp = 0 must be a number from 1");
        assert!(Only::parse("sharding.zero=7").is_err() && Only::parse("sharding.zero=3").is_ok());
        for level in Level::ALL {
            assert!(Only::parse(&format!("sharding.states={}", level.name())).is_ok(), "{level:?}");
        }
    }
}
