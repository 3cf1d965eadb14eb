//! A probabilistic automaton whose state is determined by the tokens seen, so every probability is known exactly.
//!
//! The entropy of its texts needs no sampling: the distribution over states is pushed forward token by token, and by
//! the chain rule the entropy of a text is the sum of the entropies of its next-token distributions.

use std::collections::HashMap;
use std::hash::Hash;

use crate::random::Stream;

/// One way to go on from a state: a token, how likely it is relative to the others, and the state it leads to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arc<S> {
    pub(super) token: u32,
    pub(super) weight: u64,
    pub(super) next: S,
}

/// The automaton as a table. State 0 is where every text starts.
#[derive(Clone, Debug)]
pub(super) struct Automaton {
    states: Vec<State>,
}

/// The arcs out of one state. No two have the same token.
#[derive(Clone, Debug)]
struct State {
    arcs: Vec<Arc<usize>>,
    /// The sum of the arcs' weights.
    total: u64,
}

impl Automaton {
    /// Tabulates every state that can be reached from `start`, where `expand` gives the arcs out of a state.
    pub(super) fn new<S: Copy + Eq + Hash>(start: S, expand: impl Fn(S) -> Vec<Arc<S>>) -> Automaton {
        let mut found = vec![start];
        let mut numbers = HashMap::from([(start, 0)]);
        let mut states = Vec::new();
        while let Some(&state) = found.get(states.len()) {
            let mut number = |next: S| {
                *numbers.entry(next).or_insert_with(|| {
                    found.push(next);
                    found.len() - 1
                })
            };
            let arcs = expand(state).into_iter();
            let arcs = arcs.map(|arc| Arc { token: arc.token, weight: arc.weight, next: number(arc.next) });
            states.push(State::new(arcs.collect()));
        }
        Automaton { states }
    }

    /// The probability of `token` after `state`, and the state it leads to; `None` if it cannot come.
    pub(super) fn follow(&self, state: usize, token: u32) -> Option<(f64, usize)> {
        let state = &self.states[state];
        let arc = state.arcs.iter().find(|arc| arc.token == token)?;
        Some((state.probability(arc), arc.next))
    }

    /// Fills `out` with a text drawn from `random`.
    pub(super) fn generate(&self, random: &mut Stream, out: &mut [u32]) {
        let mut state = 0;
        for token in out {
            let arc = self.states[state].draw(random);
            *token = arc.token;
            state = arc.next;
        }
    }

    /// The entropies, in nats, of the first, second, third … token given all the tokens before it.
    pub(super) fn entropies(&self) -> impl Iterator<Item = f64> {
        let entropies: Vec<f64> = self.states.iter().map(State::entropy).collect();
        let mut reached = vec![0.0; self.states.len()];
        reached[0] = 1.0;
        std::iter::repeat_with(move || {
            let entropy = reached.iter().zip(&entropies).map(|(p, entropy)| p * entropy).sum();
            reached = self.push(&reached);
            entropy
        })
    }

    /// The distribution over states one token later.
    fn push(&self, reached: &[f64]) -> Vec<f64> {
        let mut pushed = vec![0.0; reached.len()];
        for (state, &p) in self.states.iter().zip(reached) {
            for arc in &state.arcs {
                pushed[arc.next] += p * state.probability(arc);
            }
        }
        pushed
    }
}

impl State {
    fn new(arcs: Vec<Arc<usize>>) -> State {
        let total = arcs.iter().map(|arc| arc.weight).sum();
        State { arcs, total }
    }

    fn probability(&self, arc: &Arc<usize>) -> f64 {
        arc.weight as f64 / self.total as f64
    }

    fn entropy(&self) -> f64 {
        self.arcs.iter().map(|arc| self.probability(arc)).map(|p| -p * p.ln()).sum()
    }

    fn draw(&self, random: &mut Stream) -> &Arc<usize> {
        let mut left = random.below(self.total);
        let drawn = self.arcs.iter().find(|arc| {
            let here = left < arc.weight;
            left = left.saturating_sub(arc.weight);
            here
        });
        drawn.expect("the draw is below the sum of the weights")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{grammar, words};
    use super::*;

    /// From state 0, token 0 stays with probability 3/4 and token 1 leaves for state 1, which only has token 2.
    fn coin() -> Automaton {
        Automaton::new(0, |state| match state {
            0 => vec![Arc { token: 0, weight: 3, next: 0 }, Arc { token: 1, weight: 1, next: 1 }],
            _ => vec![Arc { token: 2, weight: 5, next: 1 }],
        })
    }

    #[test]
    fn entropies_follow_the_states() {
        let once = -(0.75 * 0.75_f64.ln() + 0.25 * 0.25_f64.ln());
        for (t, entropy) in coin().entropies().take(10).enumerate() {
            assert!((entropy - once * 0.75_f64.powi(t as i32)).abs() < 1e-15, "token {t}: {entropy}");
        }
    }

    #[test]
    fn draws_have_their_probabilities() {
        let automaton = coin();
        let mut first = [0];
        let left = (0..10_000).filter(|&index| {
            automaton.generate(&mut Stream::new(&[index]), &mut first);
            first == [1]
        });
        // Five standard deviations of a binomial of 10,000 draws at 1/4.
        assert!(left.count().abs_diff(2500) < 217);
    }

    #[test]
    fn every_state_of_the_grammar_is_unambiguous_and_its_probabilities_sum_to_one() {
        for state in &grammar::automaton().states {
            let tokens: HashSet<u32> = state.arcs.iter().map(|arc| arc.token).collect();
            assert_eq!(tokens.len(), state.arcs.len(), "{state:?}");
            let sum: f64 = state.arcs.iter().map(|arc| state.probability(arc)).sum();
            assert!((sum - 1.0).abs() < 1e-12, "{state:?}");
            assert!(state.arcs.iter().all(|arc| arc.weight > 0), "{state:?}");
        }
    }

    #[test]
    fn the_grammar_reaches_every_word() {
        let automaton = grammar::automaton();
        let arcs = automaton.states.iter().flat_map(|state| &state.arcs);
        let reached: HashSet<u32> = arcs.map(|arc| arc.token).collect();
        let missing = words::vocabulary().into_iter().enumerate();
        let missing: Vec<&str> =
            missing.filter(|(token, _)| !reached.contains(&(*token as u32))).map(|(_, word)| word).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
