//! The order of candidates: by time, by energy, or the Pareto front of both.

use crate::Candidate;

/// The criterion of the ranking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The shortest step.
    Time,
    /// The fewest joules.
    Energy,
    /// The Pareto front of time and energy, the fastest first.
    Pareto,
}

/// Sorts candidates: best first, or the fastest first of a Pareto front. Memory breaks ties.
pub fn order(mut candidates: Vec<Candidate>, by: By) -> Vec<Candidate> {
    let joules = Candidate::joules;
    let seconds = |candidate: &Candidate| candidate.timing.step_s;
    let keys = |candidate: &Candidate| match by {
        By::Time | By::Pareto => [seconds(candidate), joules(candidate)],
        By::Energy => [joules(candidate), seconds(candidate)],
    };
    candidates.sort_by(|a, b| {
        let ([a1, a2], [b1, b2]) = (keys(a), keys(b));
        a1.total_cmp(&b1).then(a2.total_cmp(&b2)).then(a.peak.cmp(&b.peak))
    });
    candidates
}
