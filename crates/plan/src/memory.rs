//! What is saved for the backward pass, and what is computed again.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::config::ConfigError;
use crate::config::error::check;
use crate::config::keys::RawMemory;
use crate::{Compute, Plan};

/// What is saved for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryOptions {
    /// Recomputation.
    pub recompute: Recompute,
    /// Attention.
    pub attention: AttentionKind,
    /// The rows whose logits are in memory at a time.
    pub head_rows: HeadRows,
}

/// Activation recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Save everything.
    None,
    /// Save the results of matrix products and attention; recompute norms and activation functions.
    Selective,
    /// Save only each layer's input.
    Full,
}

/// Attention algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKind {
    /// Tiled; saves only the log-sum-exp (arXiv 2205.14135).
    Flash,
    /// Saves the probabilities.
    Plain,
}

/// The rows of a micro-batch whose logits are in memory at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadRows {
    /// All of them. Their gradient is computed in the forward and kept.
    All,
    /// As many as 512 MiB have room for.
    Auto,
    /// At most this many.
    AtMost(usize),
}

/// The logits that a rank computes at a time with `memory.head_rows = "auto"`: a product of 2048 rows with a vocabulary of
/// 128k in 16 bits.
const AUTO_LOGITS_BYTES: usize = 512 << 20;

/// `"auto"` takes a multiple of these rows, which products on GPUs need for their full speed.
const AUTO_ROWS_MULTIPLE: usize = 128;

impl MemoryOptions {
    /// What the keys of `[memory]` say.
    pub(crate) fn resolve(raw: &RawMemory) -> Result<Self, ConfigError> {
        let head_rows = raw.head_rows();
        if let HeadRows::AtMost(rows) = head_rows {
            check("memory.head_rows", rows, 1..=1 << 24)?;
        }
        Ok(MemoryOptions { recompute: raw.recompute(), attention: raw.attention(), head_rows })
    }
}

impl Plan {
    /// The rows whose logits a rank computes at a time. With fewer than all, the backward computes the logits again.
    pub fn head_rows(&self) -> usize {
        let rows = self.rows();
        match self.memory.head_rows {
            HeadRows::All => rows,
            HeadRows::AtMost(count) => count.min(rows),
            HeadRows::Auto => {
                let width = self.model.padded_vocab(self.mesh.tp()) / self.mesh.tp();
                let bytes = match self.precision.compute {
                    Compute::Fp32 => 4,
                    Compute::Bf16 | Compute::Fp16 => 2,
                };
                let parts = (rows * width * bytes).div_ceil(AUTO_LOGITS_BYTES);
                rows.div_ceil(parts).next_multiple_of(AUTO_ROWS_MULTIPLE).min(rows)
            }
        }
    }

    /// Whether logits are computed some rows at a time, and again in the backward.
    pub fn divides_head(&self) -> bool {
        self.head_rows() < self.rows()
    }
}

impl<'de> Deserialize<'de> for HeadRows {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match toml::Value::deserialize(deserializer)? {
            toml::Value::String(word) if word == "all" => Ok(HeadRows::All),
            toml::Value::String(word) if word == "auto" => Ok(HeadRows::Auto),
            toml::Value::Integer(n) if n >= 0 => Ok(HeadRows::AtMost(n as usize)),
            _ => Err(de::Error::custom("\"all\", \"auto\" or a whole number")),
        }
    }
}

impl Serialize for HeadRows {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            HeadRows::All => serializer.serialize_str("all"),
            HeadRows::Auto => serializer.serialize_str("auto"),
            HeadRows::AtMost(count) => serializer.serialize_u64(*count as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::ConfigSource;

    #[test]
    fn auto_takes_the_rows_that_its_bytes_have_room_for() {
        let rows = |sets: &[&str]| {
            let source = ConfigSource::text("").sets(["model.preset=llama3-8b", "precision.compute=bf16"]);
            let plan = source.sets(sets).plan().expect("a legal config");
            (plan.rows(), plan.head_rows())
        };
        // 128,256 tokens of 2 bytes: 2093 rows in 512 MiB.
        assert_eq!(rows(&["batch.sequence=2048", "memory.head_rows=auto"]), (2048, 2048));
        assert_eq!(rows(&["batch.sequence=8192", "memory.head_rows=auto"]), (8192, 2048));
        assert_eq!(rows(&["batch.sequence=8192", "memory.head_rows=auto", "parallel.tp=4"]), (8192, 8192));
        assert_eq!(rows(&["batch.sequence=8192"]), (8192, 8192));
        assert_eq!(rows(&["batch.sequence=8192", "memory.head_rows=100"]), (8192, 100));
        assert_eq!(rows(&["batch.sequence=64", "memory.head_rows=100"]), (64, 64));
    }
}
