//! The chain of waits. The rank that a stalled rank waits for usually waits for another one itself. The cause is the last rank of
//! the chain.

use std::fmt::Write;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Blame;

/// A process that has sent nothing for so long counts as silent.
const SILENT: Duration = Duration::from_secs(2);

/// Ranks of a chain that a message names before it skips to the end.
const NAMED: usize = 3;

/// What a rank waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wait {
    /// The rank that it waits for, if that is known.
    pub peer: Option<usize>,
    /// The transfer or call that it is in.
    pub activity: String,
}

/// What is known of a rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankState {
    /// Its host, if ranks may be on several.
    pub host: Option<String>,
    /// What it waits for, if it has waited for a while.
    pub wait: Option<Wait>,
    /// How long its process has sent nothing.
    pub silent: Duration,
}

/// The end of a chain of waits.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ChainEnd {
    /// The last rank, if any rank is known to be waited for.
    pub rank: Option<usize>,
    /// Whether it is the cause. Ranks that wait for each other are not, nor is one in a call of all ranks.
    pub blame: Blame,
    /// The chain in words: `rank 4, which waits for rank 3, which waits for no other rank`.
    pub words: String,
}

/// Follows the waits from the rank that `me` waits for. If that is not known, from the first of `ranks` ranks that does not wait itself.
/// `state` returns what is known of a rank.
pub(crate) fn follow(
    me: usize,
    first: Option<usize>,
    ranks: usize,
    state: impl Fn(usize) -> Option<RankState>,
) -> ChainEnd {
    let does_not_wait = |rank: &usize| {
        *rank != me && state(*rank).is_some_and(|state| state.wait.is_none() || state.silent >= SILENT)
    };
    let Some(first) = first.or_else(|| (0..ranks).find(does_not_wait)) else {
        return ChainEnd { rank: None, blame: Blame::Nobody, words: "other ranks".to_owned() };
    };
    let mut chain = vec![first];
    let mut blame = Blame::Peer;
    let end = loop {
        let rank = *chain.last().expect("it begins with one");
        let Some(RankState { wait, silent, .. }) = state(rank) else { break String::new() };
        if silent >= SILENT {
            break format!(", whose process has sent nothing for {} s", silent.as_secs());
        }
        match wait {
            None => break ", which waits for no other rank".to_owned(),
            Some(Wait { peer: None, activity }) => {
                blame = Blame::Nobody;
                break format!(", which is in {activity}");
            }
            Some(Wait { peer: Some(next), .. }) if chain.contains(&next) || next == me => {
                blame = Blame::Nobody;
                break format!(", which waits for rank {next}: they wait for each other");
            }
            Some(Wait { peer: Some(next), .. }) => chain.push(next),
        }
    };
    let name = |rank: usize| {
        let host = state(rank).and_then(|state| state.host);
        host.map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank} on {host}"))
    };
    let mut words = name(chain[0]);
    for (place, &rank) in chain.iter().enumerate().skip(1) {
        let is_last = place + 1 == chain.len();
        if place < NAMED {
            write!(words, ", which waits for {}", name(rank)).expect("a string takes any text");
        } else if is_last {
            write!(words, ", and so on to {}", name(rank)).expect("a string takes any text");
        }
    }
    ChainEnd { rank: chain.last().copied(), blame, words: words + &end }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks by whom they wait for: `None` if they do not wait.
    fn chain(first: Option<usize>, waits: &[Option<usize>]) -> ChainEnd {
        follow(0, first, waits.len(), |rank| {
            let wait = waits[rank].map(|peer| Wait { peer: Some(peer), activity: "all_gather".into() });
            Some(RankState { wait, ..RankState::default() })
        })
    }

    #[test]
    fn the_end_of_the_chain_is_named() {
        let end = chain(Some(1), &[Some(1), Some(2), None]);
        assert_eq!((end.rank, end.blame), (Some(2), Blame::Peer));
        assert_eq!(end.words, "rank 1, which waits for rank 2, which waits for no other rank");
        let ring: Vec<_> = (1..8).map(Some).chain([None]).collect();
        let end = chain(Some(1), &ring);
        assert_eq!(
            end.words,
            "rank 1, which waits for rank 2, which waits for rank 3, and so on to rank 7, which waits for no other rank"
        );
        let end = chain(Some(1), &[Some(1), Some(2), Some(0)]);
        assert_eq!(
            end.words,
            "rank 1, which waits for rank 2, which waits for rank 0: they wait for each other"
        );
        assert_eq!(end.blame, Blame::Nobody);
    }

    #[test]
    fn a_silent_or_unknown_rank_ends_the_chain() {
        let silent = |rank: usize| {
            let host = Some("b".to_owned());
            (rank == 1).then(|| RankState { host, silent: Duration::from_secs(7), ..RankState::default() })
        };
        let end = follow(0, Some(1), 3, silent);
        assert_eq!(
            end,
            ChainEnd {
                rank: Some(1),
                blame: Blame::Peer,
                words: "rank 1 on b, whose process has sent nothing for 7 s".into()
            }
        );
        let end = follow(0, Some(2), 3, silent);
        assert_eq!(end, ChainEnd { rank: Some(2), blame: Blame::Peer, words: "rank 2".into() });
    }

    #[test]
    fn in_a_call_of_all_ranks_the_one_that_is_missing_is_named() {
        let in_call = |rank: usize| {
            let wait = (rank != 2).then(|| Wait { peer: None, activity: "making group dp".into() });
            Some(RankState { wait, ..RankState::default() })
        };
        assert_eq!(follow(0, None, 4, in_call).words, "rank 2, which waits for no other rank");
        let nobody = ChainEnd { rank: None, blame: Blame::Nobody, words: "other ranks".into() };
        assert_eq!(follow(0, None, 2, in_call), nobody);
    }
}
