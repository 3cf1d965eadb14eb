//! The tensors that are stored for each parameter: its weights, and the states of its optimizer.

use serde::{Deserialize, Serialize};

use crate::Plan;

/// A tensor with an element for every element of a parameter, as checkpoints name it.
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
}

impl StoredTensor {
    /// Its name: `first_moment`.
    pub fn name(self) -> &'static str {
        match self {
            StoredTensor::Weights => "weights",
            StoredTensor::FirstMoment => "first_moment",
            StoredTensor::SecondMoment => "second_moment",
            StoredTensor::Momentum => "momentum",
        }
    }
}

impl Plan {
    /// The tensors of every parameter that training changes: the weights, and the optimizer's states.
    pub fn stored_tensors(&self) -> Vec<StoredTensor> {
        let states = self.optimizer.kind.states().iter().copied();
        std::iter::once(StoredTensor::Weights).chain(states).collect()
    }
}
