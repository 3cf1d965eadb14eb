//! The built-in corpus: endless stories in a small language of our own, whose entropy is known exactly.
//!
//! Nothing is stored: a sample is generated from the seed, the split and its index. A model's loss can be held
//! against [`Dataset::floor`], which no model can beat.

mod automaton;
mod grammar;
mod words;

use self::automaton::Automaton;
use crate::random::Stream;
use crate::{Dataset, Split};

/// The demo language with a seed.
#[derive(Clone, Debug)]
pub struct Demo {
    seed: u64,
    words: Vec<&'static str>,
    automaton: Automaton,
}

impl Demo {
    /// The corpus of a seed. All seeds speak the same language.
    pub fn new(seed: u64) -> Demo {
        Demo { seed, words: words::vocabulary(), automaton: grammar::automaton() }
    }

    /// Every word, by token.
    pub fn words(&self) -> &[&'static str] {
        &self.words
    }

    /// Tokens as text, with a space between any two words.
    pub fn text(&self, tokens: &[u32]) -> String {
        let words: Vec<&str> = tokens.iter().map(|&token| self.words[token as usize]).collect();
        words.join(" ")
    }

    /// The loss of a perfect model on each of `tokens` given all those before it, in nats; the first is always 0.
    ///
    /// It stops at the first token that the language does not allow there.
    pub fn surprisals(&self, tokens: &[u32]) -> impl Iterator<Item = f64> {
        tokens.iter().scan(0, |state, &token| {
            let (probability, next) = self.automaton.follow(*state, token)?;
            *state = next;
            Some(-probability.ln())
        })
    }
}

impl Dataset for Demo {
    fn vocab(&self) -> usize {
        self.words.len()
    }

    fn floor(&self, sequence: usize) -> Option<f64> {
        // The first token is the first input, never a target.
        let total: f64 = self.automaton.entropies().skip(1).take(sequence).sum();
        Some(total / sequence as f64)
    }

    fn sample(&self, split: Split, index: u64, out: &mut [u32]) {
        let mut random = Stream::new(&[self.seed, split as u64, index]);
        self.automaton.generate(&mut random, out);
    }
}
