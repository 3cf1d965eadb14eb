//! Configuration values that are words, or words and numbers.

use std::fmt;
use std::path::PathBuf;

use kintsugi_spec::Level;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{Codes, Integer};

/// A number of replicas, or `"auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replicas {
    Auto,
    Count(usize),
}

/// The source of tokens: a word or a path, or several paths with weights.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Sources {
    One(String),
    Blend(Vec<(String, f64)>),
}

/// The level a tensor is sharded over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ShardLevel {
    None,
    Package,
    Node,
    Pod,
    Cluster,
}

/// A known placement of weights, gradients and states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ShardPreset {
    /// Everything over the replicas of a node (arXiv 2205.00119).
    Mics,
    /// Everything over all replicas, and a secondary shard over those of a node (arXiv 2306.10209).
    #[serde(rename = "zero++")]
    ZeroPlusPlus,
    /// Weights over the package, gradients over the node, states over the cluster.
    ThreeLevel,
}

/// How a collective over several levels of links works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Collectives {
    /// The faster of the two.
    Auto,
    /// As one ring over all ranks.
    Ring,
    /// Level by level.
    Hierarchical,
}

/// The type of a quantised collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Quantize {
    None,
    Int8,
    Int4,
}

/// The optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerName {
    Adamw,
    Lion,
    Muon,
    Sgd,
}

/// The known devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeviceName {
    Auto,
    Cpu,
    Cuda,
    Hip,
}

impl Sources {
    /// The prefixes of the token files; `None` for the demo corpus.
    pub(crate) fn prefixes(&self) -> Option<Vec<PathBuf>> {
        match self {
            Sources::One(word) if word == "demo" => None,
            Sources::One(path) => Some(vec![path.into()]),
            Sources::Blend(parts) => Some(parts.iter().map(|(path, _)| path.into()).collect()),
        }
    }
}

impl ShardLevel {
    /// The level; `None` for the word `none`.
    pub(crate) fn level(self) -> Option<Level> {
        match self {
            ShardLevel::None => None,
            ShardLevel::Package => Some(Level::Package),
            ShardLevel::Node => Some(Level::Node),
            ShardLevel::Pod => Some(Level::Pod),
            ShardLevel::Cluster => Some(Level::Cluster),
        }
    }

    /// The word itself.
    pub(crate) fn name(self) -> &'static str {
        self.level().map_or("none", Level::name)
    }
}

impl From<Level> for ShardLevel {
    fn from(level: Level) -> Self {
        match level {
            Level::Package => ShardLevel::Package,
            Level::Node => ShardLevel::Node,
            Level::Pod => ShardLevel::Pod,
            Level::Cluster => ShardLevel::Cluster,
        }
    }
}

impl fmt::Display for ShardLevel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "\"{}\"", self.name())
    }
}

impl Quantize {
    /// The integers; `None` for the word `none`.
    pub(crate) fn integer(self) -> Option<Integer> {
        match self {
            Quantize::None => None,
            Quantize::Int8 => Some(Integer::Int8),
            Quantize::Int4 => Some(Integer::Int4),
        }
    }
}

impl From<Option<Codes>> for Quantize {
    fn from(codes: Option<Codes>) -> Self {
        match codes.map(|codes| codes.integer) {
            None => Quantize::None,
            Some(Integer::Int8) => Quantize::Int8,
            Some(Integer::Int4) => Quantize::Int4,
        }
    }
}

impl fmt::Display for Quantize {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "\"{}\"", self.integer().map_or("none", Integer::name))
    }
}

impl<'de> Deserialize<'de> for Replicas {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match toml::Value::deserialize(deserializer)? {
            toml::Value::String(word) if word == "auto" => Ok(Replicas::Auto),
            toml::Value::Integer(n) if n >= 0 => Ok(Replicas::Count(n as usize)),
            _ => Err(de::Error::custom("a whole number or \"auto\"")),
        }
    }
}

impl Serialize for Replicas {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Replicas::Auto => serializer.serialize_str("auto"),
            Replicas::Count(n) => serializer.serialize_u64(*n as u64),
        }
    }
}

impl<'de> Deserialize<'de> for Sources {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let part = |value: &toml::Value| match value {
            toml::Value::String(path) => Some((path.clone(), 1.0)),
            toml::Value::Table(table) if table.keys().all(|key| key == "path" || key == "weight") => {
                let weight = table.get("weight").map_or(Some(1.0), number)?;
                Some((table.get("path")?.as_str()?.to_owned(), weight))
            }
            _ => None,
        };
        let sources = match toml::Value::deserialize(deserializer)? {
            toml::Value::String(word) => Some(Sources::One(word)),
            toml::Value::Array(parts) => parts.iter().map(part).collect::<Option<_>>().map(Sources::Blend),
            _ => None,
        };
        let expected =
            "\"demo\", the prefix of token files, or a list of { path = \"prefix\", weight = 1.0 }";
        sources.ok_or_else(|| de::Error::custom(expected))
    }
}

impl Serialize for Sources {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Sources::One(word) => serializer.serialize_str(word),
            Sources::Blend(parts) => serializer.collect_seq(parts.iter().map(|(path, weight)| {
                toml::Table::from_iter([
                    ("path".to_owned(), path.as_str().into()),
                    ("weight".to_owned(), (*weight).into()),
                ])
            })),
        }
    }
}

fn number(value: &toml::Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}
