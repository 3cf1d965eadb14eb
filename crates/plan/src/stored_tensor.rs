//! The tensors that are stored for each parameter: its weights, and the states of its optimizer.

use serde::{Deserialize, Serialize};

use crate::Plan;
use crate::parameters::Parameter;

/// A tensor with an element for every element of a parameter, as checkpoints name it. Every parameter has its weights, and those
/// states that its optimizer has for it ([`Plan::stores`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredTensor {
    /// The weights in their highest precision: the master weights if there are any.
    Weights,
    /// A weighted mean of gradients.
    FirstMoment,
    /// A weighted mean of squared gradients.
    SecondMoment,
    /// A weighted sum of gradients.
    Momentum,
    /// The moving average of the weights.
    Average,
}

impl StoredTensor {
    /// Its name: `first_moment`.
    pub fn name(self) -> &'static str {
        match self {
            StoredTensor::Weights => "weights",
            StoredTensor::FirstMoment => "first_moment",
            StoredTensor::SecondMoment => "second_moment",
            StoredTensor::Momentum => "momentum",
            StoredTensor::Average => "average",
        }
    }
}

impl Plan {
    /// Whether a moving average of the weights is kept.
    pub fn averages_weights(&self) -> bool {
        self.optimizer.ema > 0.0
    }

    /// The tensors that training changes: the weights, the states that some parameter has, and the average of the weights.
    pub fn stored_tensors(&self) -> Vec<StoredTensor> {
        let states = self.optimizer.kind.states().iter().copied();
        let average = self.averages_weights().then_some(StoredTensor::Average);
        std::iter::once(StoredTensor::Weights).chain(states).chain(average).collect()
    }

    /// Whether a parameter has one of these tensors.
    pub fn stores(&self, parameter: &Parameter, stored: StoredTensor) -> bool {
        let trained = !self.is_frozen(parameter.unit);
        match stored {
            StoredTensor::Weights => true,
            StoredTensor::Average => trained && self.averages_weights(),
            StoredTensor::FirstMoment | StoredTensor::SecondMoment | StoredTensor::Momentum => {
                trained && self.optimizer.states_of(parameter).contains(&stored)
            }
        }
    }
}
