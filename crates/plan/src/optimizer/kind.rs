//! The optimizers: what each is called, which states it has for which parameters, and its own keys.

use serde::{Deserialize, Serialize};

use crate::StoredTensor;
use crate::config::ConfigError;
use crate::config::error::{between, invalid, short};
use crate::config::keys::RawOptimizer;
use crate::config::words::OptimizerName;
use crate::parameters::Parameter;

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
    /// The matrices of layers move by the orthogonal matrix that is nearest to their momentum
    /// (<https://kellerjordan.github.io/posts/muon/>), and all other parameters by AdamW.
    Muon {
        /// μ.
        momentum: f64,
        /// Whether the momentum is Nesterov's.
        nesterov: bool,
        /// How the learning rate of a matrix follows from its shape.
        adjust_lr: RateAdjustment,
        /// β₁, β₂ of AdamW.
        betas: (f64, f64),
        /// ε of AdamW.
        eps: f64,
    },
}

/// How Muon's learning rate follows from the shape of a matrix, as PyTorch's `adjust_lr_fn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RateAdjustment {
    /// √max(1, rows / columns).
    Original,
    /// 0.2 · √max(rows, columns): an update is as large as AdamW's usually are (arXiv 2502.16982).
    MatchRmsAdamw,
}

impl RateAdjustment {
    /// The factor of the learning rate of a matrix.
    fn factor(self, [rows, columns]: [usize; 2]) -> f64 {
        match self {
            RateAdjustment::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
            RateAdjustment::MatchRmsAdamw => 0.2 * (rows.max(columns) as f64).sqrt(),
        }
    }
}

impl OptimizerKind {
    /// Its value of `optimizer.name`.
    pub fn name(self) -> &'static str {
        match self {
            OptimizerKind::AdamW { .. } => "adamw",
            OptimizerKind::Lion { .. } => "lion",
            OptimizerKind::Sgd { .. } => "sgd",
            OptimizerKind::Muon { .. } => "muon",
        }
    }

    /// The states that some parameter has; see [`OptimizerKind::states_of`].
    pub fn states(self) -> &'static [StoredTensor] {
        match self {
            OptimizerKind::AdamW { .. } => &[StoredTensor::FirstMoment, StoredTensor::SecondMoment],
            OptimizerKind::Lion { .. } => &[StoredTensor::FirstMoment],
            OptimizerKind::Sgd { momentum, .. } if momentum > 0.0 => &[StoredTensor::Momentum],
            OptimizerKind::Sgd { .. } => &[],
            OptimizerKind::Muon { .. } => {
                &[StoredTensor::FirstMoment, StoredTensor::SecondMoment, StoredTensor::Momentum]
            }
        }
    }

    /// The states of a parameter. Each has as many elements as the parameter and the type `precision.states`, begins at zero,
    /// and is updated element by element, so that every rank updates its own shard. Buffers of ranks, checkpoints, memory and
    /// the bytes of an update follow from this list.
    pub fn states_of(self, parameter: &Parameter) -> &'static [StoredTensor] {
        match self {
            OptimizerKind::Muon { .. } if self.needs_whole(parameter) => &[StoredTensor::Momentum],
            OptimizerKind::Muon { .. } => &[StoredTensor::FirstMoment, StoredTensor::SecondMoment],
            OptimizerKind::AdamW { .. } | OptimizerKind::Lion { .. } | OptimizerKind::Sgd { .. } => {
                self.states()
            }
        }
    }

    /// Whether a parameter is updated as a whole matrix and not element by element, so that one rank needs all of it.
    pub fn needs_whole(self, parameter: &Parameter) -> bool {
        matches!(self, OptimizerKind::Muon { .. }) && parameter.kind.is_layer_matrix()
    }

    /// The factor of the learning rate of a parameter that follows from its shape. Weight decay does not have it.
    pub(super) fn shape_factor(self, parameter: &Parameter) -> f64 {
        match self {
            OptimizerKind::Muon { adjust_lr, .. } if self.needs_whole(parameter) => {
                adjust_lr.factor(parameter.shape)
            }
            OptimizerKind::Muon { .. }
            | OptimizerKind::AdamW { .. }
            | OptimizerKind::Lion { .. }
            | OptimizerKind::Sgd { .. } => 1.0,
        }
    }

    /// β₁ and β₂ of the corrections of moments that begin at zero; 0 for an optimizer that corrects none.
    pub fn corrected_betas(self) -> (f64, f64) {
        match self {
            OptimizerKind::AdamW { betas, .. } | OptimizerKind::Muon { betas, .. } => betas,
            OptimizerKind::Lion { .. } | OptimizerKind::Sgd { .. } => (0.0, 0.0),
        }
    }

    /// What `optimizer.name` and the keys of that optimizer say. A key of another optimizer is refused.
    pub(super) fn resolve(raw: &RawOptimizer) -> Result<Self, ConfigError> {
        let name = raw.name();
        let RawOptimizer { betas, eps, momentum, nesterov, adjust_lr, .. } = raw;
        let (muon, sgd) = (name == OptimizerName::Muon, name == OptimizerName::Sgd);
        let (adamw, momentary) = (muon || name == OptimizerName::Adamw, muon || sgd);
        let others = [
            ("betas", betas.as_ref().map(|betas| format!("{betas:?}")).filter(|_| sgd)),
            ("eps", eps.map(short).filter(|_| !adamw)),
            ("momentum", momentum.map(short).filter(|_| !momentary)),
            ("nesterov", nesterov.map(|nesterov| nesterov.to_string()).filter(|_| !momentary)),
            ("adjust_lr", adjust_lr.map(word).filter(|_| !muon)),
        ];
        for (key, value) in others {
            let Some(value) = value else { continue };
            let rule = format!("has no meaning for optimizer.name = {}; leave it out", word(name));
            return Err(invalid(&format!("optimizer.{key}"), value, rule));
        }
        Ok(match name {
            OptimizerName::Adamw => OptimizerKind::AdamW {
                betas: two_betas(betas.as_deref(), (0.9, 0.95))?,
                eps: raw.eps()?.unwrap_or(1e-8),
            },
            OptimizerName::Lion => OptimizerKind::Lion { betas: two_betas(betas.as_deref(), (0.9, 0.99))? },
            OptimizerName::Sgd => {
                let (momentum, nesterov) = (checked(momentum.unwrap_or(0.9))?, nesterov.unwrap_or(false));
                if nesterov && momentum == 0.0 {
                    return Err(invalid("optimizer.nesterov", true, "needs optimizer.momentum above 0"));
                }
                OptimizerKind::Sgd { momentum, nesterov }
            }
            OptimizerName::Muon => OptimizerKind::Muon {
                momentum: checked(momentum.unwrap_or(0.95))?,
                nesterov: nesterov.unwrap_or(true),
                adjust_lr: adjust_lr.unwrap_or(RateAdjustment::MatchRmsAdamw),
                betas: two_betas(betas.as_deref(), (0.9, 0.95))?,
                eps: raw.eps()?.unwrap_or(1e-8),
            },
        })
    }
}

/// A word of a configuration, as it is written there.
fn word(value: impl Serialize) -> String {
    toml::Value::try_from(value).expect("a word").to_string()
}

fn checked(momentum: f64) -> Result<f64, ConfigError> {
    between("optimizer.momentum", momentum, 0.0..=MAX_BETA)?;
    Ok(momentum)
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
