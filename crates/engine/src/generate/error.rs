//! The errors of generation.

use kintsugi_plan::Plan;
use thiserror::Error;

use super::GenerateOptions;
use crate::JobError;

/// Why generation was rejected or failed.
#[derive(Clone, Debug, Error)]
pub enum GenerateError {
    /// A prompt has no tokens.
    #[error("prompt {number} is empty; it needs at least one token")]
    Empty {
        /// Its number, from 1.
        number: usize,
    },
    /// A prompt has a token that is not in the model's vocabulary.
    #[error("prompt {number} has token {token}, but the model's vocabulary has {vocab} tokens")]
    Vocabulary {
        /// The number of the prompt, from 1.
        number: usize,
        /// The token.
        token: u32,
        /// The model's tokens.
        vocab: usize,
    },
    /// A text would become longer than the learned positions.
    #[error(
        "prompt {number} has {prompt} tokens, and with {tokens} generated tokens it exceeds the model's \
         {limit} learned positions; shorten it or generate fewer tokens"
    )]
    Positions {
        /// The number of the prompt, from 1.
        number: usize,
        /// Its tokens.
        prompt: usize,
        /// Tokens to generate.
        tokens: usize,
        /// The number of positions.
        limit: usize,
    },
    /// The layout divides sequences.
    #[error(
        "parallel.cp = {cp} divides sequences over ranks, which generation does not; use parallel.cp = 1"
    )]
    Context {
        /// Ranks of cp.
        cp: usize,
    },
    /// A sampling option is out of range.
    #[error("{field} = {value} {rule}")]
    Sampling {
        /// The option.
        field: &'static str,
        /// Its value.
        value: f64,
        /// The allowed values.
        rule: &'static str,
    },
    /// A rank failed.
    #[error(transparent)]
    Job(#[from] JobError),
}

/// Rejects prompts and options that cannot be generated from, before anything is loaded.
pub fn check_prompts(
    plan: &Plan,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Result<(), GenerateError> {
    if plan.mesh.cp() > 1 {
        return Err(GenerateError::Context { cp: plan.mesh.cp() });
    }
    let sampling = options.sampling;
    if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
        let (value, rule) =
            (sampling.temperature, "must be at least 0; 0 always chooses the most probable token");
        return Err(GenerateError::Sampling { field: "temperature", value, rule });
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        let (value, rule) = (sampling.top_p, "must be above 0 and at most 1");
        return Err(GenerateError::Sampling { field: "top-p", value, rule });
    }
    let (vocab, tokens) = (plan.model.vocab, options.tokens);
    for (number, prompt) in (1..).zip(prompts) {
        if prompt.is_empty() {
            return Err(GenerateError::Empty { number });
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(GenerateError::Vocabulary { number, token, vocab });
        }
        // The last token of a text is never fed to the model.
        if let Some(limit) = plan.model.max_tokens().filter(|most| prompt.len() + tokens > most + 1) {
            return Err(GenerateError::Positions { number, prompt: prompt.len(), tokens, limit });
        }
    }
    Ok(())
}
