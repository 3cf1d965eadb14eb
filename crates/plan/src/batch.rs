//! The batch: how many samples a step has, and how they are divided.

use serde::Serialize;

use crate::config::ConfigError;
use crate::config::error::{invalid, within};
use crate::config::keys::RawBatch;

/// Batch sizes, in samples and tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Batch {
    /// Tokens per sample.
    pub sequence: usize,
    /// Samples per micro-batch.
    pub micro: usize,
    /// Samples per step over all replicas.
    pub global: usize,
}

impl Batch {
    /// What the keys of `[batch]` say, for `dp` replicas.
    pub(crate) fn resolve(raw: &RawBatch, dp: usize) -> Result<Self, ConfigError> {
        let sequence = raw.sequence()?.ok_or_else(|| ConfigError::Missing {
            field: "batch.sequence",
            hint: "give the tokens of one sample, or a model.preset".to_owned(),
        })?;
        let micro = raw.micro()?;
        within("batch.micro · batch.sequence", micro * sequence, 1..=1 << 26)?;
        let per_pass = micro * dp;
        let global = within("batch.global", raw.global.unwrap_or(per_pass), 1..=1 << 32)?;
        if !global.is_multiple_of(per_pass) {
            let below = global - global % per_pass;
            let nearest =
                if below == 0 { per_pass.to_string() } else { format!("{below} or {}", below + per_pass) };
            let rule = format!("is not a multiple of batch.micro · dp = {micro} · {dp}; use {nearest}");
            return Err(invalid("batch.global", global, rule));
        }
        within("batch.global / (batch.micro · dp)", global / per_pass, 1..=1 << 20)?;
        Ok(Batch { sequence, micro, global })
    }
}
