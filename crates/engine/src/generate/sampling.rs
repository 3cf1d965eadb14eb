//! Samples a token from its logits: greedily, or at random, optionally with top-k and top-p.
//!
//! A random draw depends only on the seed, the prompt and the position in its text. It does not depend on the layout or on
//! the other prompts.

use kintsugi_data::RandomStream;

/// How tokens are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 always takes the most probable token.
    pub temperature: f64,
    /// Samples from this many of the most probable tokens; 0 for all.
    pub top_k: usize,
    /// Samples from the smallest set of most probable tokens whose probabilities add up to this; 1 for all.
    pub top_p: f64,
    /// The seed of the random draws.
    pub seed: u64,
}

impl Sampling {
    /// Always takes the most probable token, and the first one if several are equal.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// The token after the first `place` of prompt number `prompt`.
    pub fn choose(&self, logits: &[f32], prompt: usize, place: usize) -> u32 {
        if self.temperature == 0.0 {
            return most_probable(logits);
        }
        let candidates = self.candidates(logits);
        let total: f64 = candidates.iter().map(|&(_, weight)| weight).sum();
        let mut left = RandomStream::new(&[self.seed, prompt as u64, place as u64]).unit() * total;
        for &(token, weight) in &candidates {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        // Because of rounding, `left` may still be positive after the last candidate.
        candidates.last().expect("there is a token to choose").0
    }

    /// The tokens to sample from, with weights in proportion to their probabilities.
    fn candidates(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let mut candidates: Vec<(u32, f64)> =
            (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect();
        let more_probable = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if (1..candidates.len()).contains(&self.top_k) {
            candidates.select_nth_unstable_by(self.top_k - 1, more_probable);
            candidates.truncate(self.top_k);
        }
        let highest = candidates.iter().map(|&(_, logit)| logit).fold(f64::NEG_INFINITY, f64::max);
        for (_, weight) in &mut candidates {
            *weight = ((*weight - highest) / self.temperature).exp();
        }
        // A random number selects a token by its place in this order, so the order must be defined: selection leaves it
        // unspecified.
        candidates.sort_unstable_by(more_probable);
        if self.top_p < 1.0 {
            let enough = self.top_p * candidates.iter().map(|&(_, weight)| weight).sum::<f64>();
            let mut sum = 0.0;
            let last = candidates.iter().position(|&(_, weight)| {
                sum += weight;
                sum >= enough
            });
            candidates.truncate(last.map_or(candidates.len(), |last| last + 1));
        }
        candidates
    }
}

fn most_probable(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 6] = [0.5, 2.0, -1.0, 2.0, 1.0, -30.0];

    fn sampling(temperature: f64, top_k: usize, top_p: f64) -> Sampling {
        Sampling { temperature, top_k, top_p, seed: 3 }
    }

    /// How often each token is drawn.
    fn draws(sampling: Sampling, times: usize) -> [usize; 6] {
        let mut counts = [0; 6];
        for place in 0..times {
            counts[sampling.choose(&LOGITS, 0, place) as usize] += 1;
        }
        counts
    }

    fn set(sampling: Sampling) -> Vec<u32> {
        sampling.candidates(&LOGITS).into_iter().map(|(token, _)| token).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_most_probable() {
        assert_eq!(Sampling::GREEDY.choose(&LOGITS, 0, 0), 1);
        assert_eq!(
            Sampling::GREEDY.choose(&[f32::NAN, 1.0], 0, 0),
            0,
            "what is not a number is above nothing"
        );
    }

    #[test]
    fn draws_follow_the_softmax() {
        for temperature in [0.7, 1.0, 2.0] {
            let counts = draws(sampling(temperature, 0, 1.0), 20_000);
            let weights = LOGITS.map(|logit| (f64::from(logit) / temperature).exp());
            let total: f64 = weights.iter().sum();
            for (count, weight) in counts.iter().zip(weights) {
                let expected = 20_000.0 * weight / total;
                // Five standard deviations.
                assert!((*count as f64 - expected).abs() <= 5.0 * expected.sqrt() + 1.0, "{counts:?}");
            }
        }
    }

    #[test]
    fn a_low_temperature_is_greedy() {
        assert_eq!(draws(sampling(1e-3, 0, 1.0), 200).iter().filter(|&&count| count > 0).count(), 2);
        let unequal = [0.5_f32, 2.0, -1.0, 1.99];
        assert!((0..200).all(|place| sampling(1e-4, 0, 1.0).choose(&unequal, 0, place) == 1));
    }

    #[test]
    fn top_k_keeps_the_k_most_probable() {
        assert_eq!(set(sampling(1.0, 1, 1.0)), [1]);
        assert_eq!(set(sampling(1.0, 3, 1.0)), [1, 3, 4]);
        assert_eq!(set(sampling(1.0, 60, 1.0)), [1, 3, 4, 0, 2, 5]);
        assert_eq!(set(sampling(1.0, 0, 1.0)), [1, 3, 4, 0, 2, 5]);
    }

    #[test]
    fn top_p_keeps_the_fewest_that_add_up() {
        // Of 2·e² + e¹ + e^0.5 + e⁻¹ = 19.51, each e² is 0.379 and e¹ 0.139.
        assert_eq!(set(sampling(1.0, 0, 0.3)), [1]);
        assert_eq!(set(sampling(1.0, 0, 0.75)), [1, 3]);
        assert_eq!(set(sampling(1.0, 0, 0.77)), [1, 3, 4]);
        assert_eq!(set(sampling(1.0, 0, 1e-9)), [1], "never none");
        // Of the two that top-k leaves, each has half.
        assert_eq!(set(sampling(1.0, 2, 0.5)), [1]);
        assert_eq!(set(sampling(1.0, 2, 0.51)), [1, 3]);
        // A high temperature makes all alike, and so takes more of them.
        assert_eq!(set(sampling(1e6, 0, 0.5)), [1, 3, 4]);
    }

    #[test]
    fn the_same_seed_prompt_and_place_give_the_same_token() {
        let one = |seed, prompt| {
            let sampling = Sampling { seed, ..sampling(1.0, 0, 1.0) };
            (0..50).map(|place| sampling.choose(&LOGITS, prompt, place)).collect::<Vec<_>>()
        };
        assert_eq!(one(1, 0), one(1, 0));
        assert_ne!(one(1, 0), one(2, 0));
        assert_ne!(one(1, 0), one(1, 1));
    }
}
