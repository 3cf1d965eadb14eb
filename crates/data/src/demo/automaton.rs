//! A probabilistic automaton whose state is determined by the tokens seen, so every probability is known exactly.
//!
//! The entropy of its texts is computed without sampling: the distribution over states is propagated token by token, and by
//! the chain rule the entropy of a text is the sum of the entropies of its next-token distributions.

use std::collections::HashMap;
use std::hash::Hash;

use crate::random::RandomStream;

/// A transition out of a state: a token, its relative weight, and the next state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transition<S> {
    pub(super) token: u32,
    pub(super) weight: u64,
    pub(super) next: S,
}

/// The automaton as a table. Every text starts in state 0.
#[derive(Clone, Debug)]
pub(super) struct Automaton {
    states: Vec<StateTransitions>,
}

/// The transitions out of one state. No two have the same token.
#[derive(Clone, Debug)]
struct StateTransitions {
    transitions: Vec<Transition<usize>>,
    /// The sum of the transitions' weights.
    total: u64,
}

impl Automaton {
    /// Tabulates every state that can be reached from `start`, where `expand` gives the transitions out of a state.
    pub(super) fn new<S: Copy + Eq + Hash>(start: S, expand: impl Fn(S) -> Vec<Transition<S>>) -> Automaton {
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
            let transitions = expand(state).into_iter();
            let transitions = transitions.map(|transition| Transition {
                token: transition.token,
                weight: transition.weight,
                next: number(transition.next),
            });
            states.push(StateTransitions::new(transitions.collect()));
        }
        Automaton { states }
    }

    /// The probability of `token` in `state`, and the next state. `None` if the token is not possible.
    pub(super) fn follow(&self, state: usize, token: u32) -> Option<(f64, usize)> {
        let state = &self.states[state];
        let transition = state.transitions.iter().find(|transition| transition.token == token)?;
        Some((state.probability(transition), transition.next))
    }

    /// Fills `out` with a text drawn from `random`.
    pub(super) fn generate(&self, random: &mut RandomStream, out: &mut [u32]) {
        let mut state = 0;
        for token in out {
            let transition = self.states[state].draw(random);
            *token = transition.token;
            state = transition.next;
        }
    }

    /// The entropies, in nats, of the first, second, third … token given all the tokens before it.
    pub(super) fn entropies(&self) -> impl Iterator<Item = f64> {
        let entropies: Vec<f64> = self.states.iter().map(StateTransitions::entropy).collect();
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
            for transition in &state.transitions {
                pushed[transition.next] += p * state.probability(transition);
            }
        }
        pushed
    }
}

impl StateTransitions {
    fn new(transitions: Vec<Transition<usize>>) -> StateTransitions {
        let total = transitions.iter().map(|transition| transition.weight).sum();
        StateTransitions { transitions, total }
    }

    fn probability(&self, transition: &Transition<usize>) -> f64 {
        transition.weight as f64 / self.total as f64
    }

    fn entropy(&self) -> f64 {
        self.transitions.iter().map(|transition| self.probability(transition)).map(|p| -p * p.ln()).sum()
    }

    fn draw(&self, random: &mut RandomStream) -> &Transition<usize> {
        let mut left = random.below(self.total);
        let drawn = self.transitions.iter().find(|transition| {
            let here = left < transition.weight;
            left = left.saturating_sub(transition.weight);
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
            0 => {
                vec![Transition { token: 0, weight: 3, next: 0 }, Transition { token: 1, weight: 1, next: 1 }]
            }
            _ => vec![Transition { token: 2, weight: 5, next: 1 }],
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
            automaton.generate(&mut RandomStream::new(&[index]), &mut first);
            first == [1]
        });
        // Five standard deviations of a binomial of 10,000 draws at 1/4.
        assert!(left.count().abs_diff(2500) < 217);
    }

    #[test]
    fn every_state_of_the_grammar_is_unambiguous_and_its_probabilities_sum_to_one() {
        for state in &grammar::automaton().states {
            let tokens: HashSet<u32> = state.transitions.iter().map(|transition| transition.token).collect();
            assert_eq!(tokens.len(), state.transitions.len(), "{state:?}");
            let sum: f64 = state.transitions.iter().map(|transition| state.probability(transition)).sum();
            assert!((sum - 1.0).abs() < 1e-12, "{state:?}");
            assert!(state.transitions.iter().all(|transition| transition.weight > 0), "{state:?}");
        }
    }

    #[test]
    fn the_grammar_reaches_every_word() {
        let automaton = grammar::automaton();
        let transitions = automaton.states.iter().flat_map(|state| &state.transitions);
        let reached: HashSet<u32> = transitions.map(|transition| transition.token).collect();
        let missing = words::vocabulary().into_iter().enumerate();
        let missing: Vec<&str> =
            missing.filter(|(token, _)| !reached.contains(&(*token as u32))).map(|(_, word)| word).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
