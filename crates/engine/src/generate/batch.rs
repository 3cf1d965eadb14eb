//! The texts of one round while they grow: what each step feeds, and what becomes of the tokens it chose.

use kintsugi_plan::Round;
use kintsugi_rank::{NewTokens, Source, Tokens};

use super::Sampling;

/// When a text ends.
#[derive(Clone, Debug)]
pub(super) struct End {
    /// After so many new tokens.
    pub tokens: usize,
    /// At any of these.
    pub at: Vec<u32>,
}

/// The texts of one round on a rank.
pub(super) struct Batch<'a> {
    round: &'a Round,
    texts: Vec<Text>,
    sampling: Sampling,
    /// Tokens that may be chosen are below it.
    vocab: usize,
    end: &'a End,
    /// New tokens of every sample in the running step.
    width: usize,
    /// What the running step feeds, for a micro-batch.
    tokens: Vec<u32>,
    positions: Vec<u32>,
    last: Vec<u32>,
}

struct Text {
    prompt: usize,
    tokens: Vec<u32>,
    /// Tokens that are in the caches.
    fed: usize,
    done: bool,
    generated: usize,
}

impl<'a> Batch<'a> {
    pub fn new(
        round: &'a Round,
        prompts: &[Vec<u32>],
        sampling: Sampling,
        vocab: usize,
        end: &'a End,
    ) -> Self {
        let text = |&prompt: &usize| Text {
            prompt,
            tokens: prompts[prompt].clone(),
            fed: 0,
            done: end.tokens == 0,
            generated: 0,
        };
        Batch {
            texts: round.prompts.iter().map(text).collect(),
            round,
            sampling,
            vocab,
            end,
            width: round.prompt,
            tokens: Vec::new(),
            positions: Vec::new(),
            last: Vec::new(),
        }
    }

    /// New tokens of every sample in the next step; `None` when all texts have ended.
    pub fn next_step(&self) -> Option<usize> {
        self.texts.iter().any(|text| !text.done).then_some(self.width)
    }

    /// Takes the tokens that a step chose; `tell` hears of each that belongs to a text.
    pub fn take(&mut self, chosen: &[u32], mut tell: impl FnMut(usize, u32)) {
        self.width = 1;
        for (text, &token) in self.texts.iter_mut().zip(chosen) {
            text.fed = text.tokens.len();
            if text.done {
                continue;
            }
            text.tokens.push(token);
            text.generated += 1;
            text.done = text.generated == self.end.tokens || self.end.at.contains(&token);
            tell(text.prompt, token);
        }
    }
}

impl Source for Batch<'_> {
    fn batch(&mut self, _micro: usize) -> Option<Tokens<'_>> {
        unreachable!("generation has no targets")
    }

    fn new_tokens(&mut self, micro: usize) -> Option<NewTokens<'_>> {
        let Batch { texts, tokens, positions, last, width, .. } = self;
        tokens.clear();
        positions.clear();
        last.clear();
        for sample in 0..self.round.samples {
            let text = texts.get(micro * self.round.samples + sample);
            // Where there is no text, or a finished one, something is fed whose successor nobody reads.
            let (new, first) = match text {
                Some(text) if !text.done => (&text.tokens[text.fed..], text.fed),
                _ => (&[][..], 0),
            };
            tokens.extend((0..*width).map(|i| new.get(i).copied().unwrap_or(0)));
            positions.extend((0..*width).map(|i| (first + i) as u32));
            last.push((sample * *width + new.len().max(1) - 1) as u32);
        }
        Some(NewTokens { tokens, positions, last })
    }

    fn choose(&mut self, micro: usize, logits: &[f32]) -> Option<Vec<u32>> {
        let samples = self.round.samples;
        let vocabulary = logits.len() / samples;
        let choose = |(sample, logits): (usize, &[f32])| match self.texts.get(micro * samples + sample) {
            Some(text) if !text.done => {
                self.sampling.choose(&logits[..self.vocab.min(vocabulary)], text.prompt, text.tokens.len())
            }
            _ => 0,
        };
        Some(logits.chunks_exact(vocabulary).enumerate().map(choose).collect())
    }
}
