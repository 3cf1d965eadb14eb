//! The texts of one round of generation: which tokens each step feeds, and how the sampled tokens extend the texts.

use kintsugi_plan::Round;
use kintsugi_rank::{NewTokens, TokenSource, Tokens};

use super::Sampling;

/// When the generation of a text stops.
#[derive(Clone, Debug)]
pub(super) struct StopCondition {
    /// After this many new tokens.
    pub tokens: usize,
    /// After any of these tokens.
    pub at: Vec<u32>,
}

/// The texts of one round on a rank.
pub(super) struct TextBatch<'a> {
    round: &'a Round,
    texts: Vec<GrowingText>,
    sampling: Sampling,
    /// Only tokens below this are sampled.
    vocab: usize,
    end: &'a StopCondition,
    /// New tokens per sample in the current step.
    width: usize,
    /// The tokens, positions and last rows that the current step feeds for a micro-batch.
    tokens: Vec<u32>,
    positions: Vec<u32>,
    last: Vec<u32>,
}

struct GrowingText {
    prompt: usize,
    tokens: Vec<u32>,
    /// Number of tokens in the KV caches.
    fed: usize,
    done: bool,
    generated: usize,
}

impl<'a> TextBatch<'a> {
    pub fn new(
        round: &'a Round,
        prompts: &[Vec<u32>],
        sampling: Sampling,
        vocab: usize,
        end: &'a StopCondition,
    ) -> Self {
        let text = |&prompt: &usize| GrowingText {
            prompt,
            tokens: prompts[prompt].clone(),
            fed: 0,
            done: end.tokens == 0,
            generated: 0,
        };
        TextBatch {
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

    /// New tokens per sample in the next step. `None` when all texts have ended.
    pub fn next_step(&self) -> Option<usize> {
        self.texts.iter().any(|text| !text.done).then_some(self.width)
    }

    /// Appends the tokens that a step sampled. Calls `on_token` for each one that belongs to a text.
    pub fn take(&mut self, chosen: &[u32], mut on_token: impl FnMut(usize, u32)) {
        self.width = 1;
        for (text, &token) in self.texts.iter_mut().zip(chosen) {
            text.fed = text.tokens.len();
            if text.done {
                continue;
            }
            text.tokens.push(token);
            text.generated += 1;
            text.done = text.generated == self.end.tokens || self.end.at.contains(&token);
            on_token(text.prompt, token);
        }
    }
}

impl TokenSource for TextBatch<'_> {
    fn batch(&mut self, _micro: usize) -> Option<Tokens<'_>> {
        unreachable!("generation has no targets")
    }

    fn new_tokens(&mut self, micro: usize) -> Option<NewTokens<'_>> {
        let TextBatch { texts, tokens, positions, last, width, .. } = self;
        tokens.clear();
        positions.clear();
        last.clear();
        for sample in 0..self.round.samples {
            let text = texts.get(micro * self.round.samples + sample);
            // Without a text, or after its end, the step feeds a placeholder. Nobody reads the token sampled after it.
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
