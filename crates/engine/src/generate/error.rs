//! Why nothing is generated, as a sentence.

use kintsugi_plan::Plan;
use kintsugi_spec::Family;
use thiserror::Error;

use super::GenerateOptions;
use crate::JobError;

/// Why generation was refused or failed.
#[derive(Clone, Debug, Error)]
pub enum GenerateError {
    /// A prompt without tokens.
    #[error("prompt {number} is empty; give at least one token to go on from")]
    Empty {
        /// Its number, from 1.
        number: usize,
    },
    /// A token that the model does not have.
    #[error("prompt {number} has token {token}, but the model's vocabulary ends before {vocab}")]
    Vocabulary {
        /// The number of the prompt, from 1.
        number: usize,
        /// The token.
        token: u32,
        /// The model's tokens.
        vocab: usize,
    },
    /// A text that would outgrow the learned positions.
    #[error(
        "prompt {number} has {prompt} tokens and is to grow by {tokens}, but the model has learned {positions} \
         positions; shorten it or ask for fewer tokens"
    )]
    Positions {
        /// The number of the prompt, from 1.
        number: usize,
        /// Its tokens.
        prompt: usize,
        /// Tokens to generate.
        tokens: usize,
        /// Positions of the model.
        positions: usize,
    },
    /// A value of the sampling that makes no sense.
    #[error("{field} = {value} {rule}")]
    Sampling {
        /// Which.
        field: &'static str,
        /// What it is.
        value: f64,
        /// What it may be.
        rule: &'static str,
    },
    /// A rank failed.
    #[error(transparent)]
    Job(#[from] JobError),
}

/// Refuses what cannot be generated, before anything is loaded.
pub fn check_prompts(
    plan: &Plan,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Result<(), GenerateError> {
    let sampling = options.sampling;
    if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
        let (value, rule) = (sampling.temperature, "must be 0, for the most probable token, or above");
        return Err(GenerateError::Sampling { field: "temperature", value, rule });
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        let (value, rule) = (sampling.top_p, "must be above 0 and at most 1");
        return Err(GenerateError::Sampling { field: "top-p", value, rule });
    }
    let (vocab, positions, tokens) = (plan.model.vocab, plan.model.positions, options.tokens);
    let learned = plan.model.family == Family::Gpt;
    for (number, prompt) in (1..).zip(prompts) {
        if prompt.is_empty() {
            return Err(GenerateError::Empty { number });
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(GenerateError::Vocabulary { number, token, vocab });
        }
        // The last token of a text is never fed.
        if learned && prompt.len() + tokens > positions + 1 {
            return Err(GenerateError::Positions { number, prompt: prompt.len(), tokens, positions });
        }
    }
    Ok(())
}
