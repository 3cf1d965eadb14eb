//! The optimizers: what each is called, which states it has, and its own keys.

use serde::Serialize;

use crate::StoredTensor;
use crate::config::ConfigError;
use crate::config::error::{between, invalid, short};
use crate::config::keys::RawOptimizer;
use crate::config::words::OptimizerName;

/// A beta or a momentum that rounds to 1 in `f32` would never forget old gradients.
const MAX_BETA: f64 = 0.999_999_9;

/// An optimizer, with the numbers of its rule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay (arXiv 1711.05101).
    AdamW {
        /// β₁, β₂.
        betas: (f64, f64),
        /// ε.
        eps: f64,
    },
    /// The sign of a mean of gradients, with decoupled weight decay (arXiv 2302.06675).
    Lion {
        /// β₁ of the mean whose sign is taken, β₂ of the mean that is kept.
        betas: (f64, f64),
    },
    /// Stochastic gradient descent, with weight decay as a part of the gradient, as in PyTorch.
    Sgd {
        /// μ, 0 for none.
        momentum: f64,
        /// Whether the momentum is Nesterov's.
        nesterov: bool,
    },
}

impl OptimizerKind {
    /// Its value of `optimizer.name`.
    pub fn name(self) -> &'static str {
        match self {
            OptimizerKind::AdamW { .. } => "adamw",
            OptimizerKind::Lion { .. } => "lion",
            OptimizerKind::Sgd { .. } => "sgd",
        }
    }

    /// The states of every parameter. Each has as many elements as the parameter and the type `precision.states`, begins at
    /// zero, and is updated element by element, so that every rank updates its own shard. Buffers of ranks, checkpoints,
    /// memory and the bytes of an update follow from this list.
    pub fn states(self) -> &'static [StoredTensor] {
        match self {
            OptimizerKind::AdamW { .. } => &[StoredTensor::FirstMoment, StoredTensor::SecondMoment],
            OptimizerKind::Lion { .. } => &[StoredTensor::FirstMoment],
            OptimizerKind::Sgd { momentum, .. } if momentum > 0.0 => &[StoredTensor::Momentum],
            OptimizerKind::Sgd { .. } => &[],
        }
    }

    /// β₁ and β₂ of the corrections of moments that begin at zero; 0 for an optimizer that corrects none.
    pub fn corrected_betas(self) -> (f64, f64) {
        match self {
            OptimizerKind::AdamW { betas, .. } => betas,
            OptimizerKind::Lion { .. } | OptimizerKind::Sgd { .. } => (0.0, 0.0),
        }
    }

    /// What `optimizer.name` and the keys of that optimizer say. A key of another optimizer is refused.
    pub(super) fn resolve(raw: &RawOptimizer) -> Result<Self, ConfigError> {
        let name = raw.name();
        let RawOptimizer { betas, eps, momentum, nesterov, .. } = raw;
        let (adamw, sgd) = (name == OptimizerName::Adamw, name == OptimizerName::Sgd);
        let others = [
            ("betas", betas.as_ref().map(|betas| format!("{betas:?}")).filter(|_| sgd)),
            ("eps", eps.map(short).filter(|_| !adamw)),
            ("momentum", momentum.map(short).filter(|_| !sgd)),
            ("nesterov", nesterov.map(|nesterov| nesterov.to_string()).filter(|_| !sgd)),
        ];
        for (key, value) in others {
            let Some(value) = value else { continue };
            let name = toml::Value::try_from(name).expect("a word");
            let rule = format!("has no meaning for optimizer.name = {name}; leave it out");
            return Err(invalid(&format!("optimizer.{key}"), value, rule));
        }
        Ok(match name {
            OptimizerName::Adamw => OptimizerKind::AdamW {
                betas: two_betas(betas.as_deref(), (0.9, 0.95))?,
                eps: raw.eps()?.unwrap_or(1e-8),
            },
            OptimizerName::Lion => OptimizerKind::Lion { betas: two_betas(betas.as_deref(), (0.9, 0.99))? },
            OptimizerName::Sgd => {
                let (momentum, nesterov) = (momentum.unwrap_or(0.9), nesterov.unwrap_or(false));
                between("optimizer.momentum", momentum, 0.0..=MAX_BETA)?;
                if nesterov && momentum == 0.0 {
                    return Err(invalid("optimizer.nesterov", true, "needs optimizer.momentum above 0"));
                }
                OptimizerKind::Sgd { momentum, nesterov }
            }
        })
    }
}

fn two_betas(given: Option<&[f64]>, default: (f64, f64)) -> Result<(f64, f64), ConfigError> {
    match given {
        None => Ok(default),
        Some(&[first, second]) if [first, second].iter().all(|beta| (0.0..=MAX_BETA).contains(beta)) => {
            Ok((first, second))
        }
        Some(betas) => {
            let rule = format!("must be two numbers from 0 to {MAX_BETA}");
            Err(invalid("optimizer.betas", format!("{betas:?}"), rule))
        }
    }
}
