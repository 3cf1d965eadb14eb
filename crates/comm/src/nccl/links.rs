//! Which communicator carries a message.
//!
//! NCCL has no tags: a communicator runs the messages of a rank in the order in which they are enqueued, and one that waits for
//! its peer holds up those behind it. So every link between two neighbours of a pipeline has a communicator of its own for every
//! direction, from one sender to one receiver. On a link, both ends must start the same messages in the same order. Links do not
//! wait for each other.

use crate::Tag;

/// A kind of message. The lowest bit of a tag is its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the next member of the group: the last one's next is the first.
    Forward,
    /// To the previous member.
    Backward,
}

/// From one member of a group to a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MessageLink {
    /// Which messages it carries.
    pub direction: Direction,
    /// The member that sends.
    pub from: usize,
    /// The member that receives.
    pub to: usize,
}

impl MessageLink {
    /// The link of a message.
    pub fn of(tag: Tag, from: usize, to: usize) -> Self {
        let direction = if tag.is_multiple_of(2) { Direction::Forward } else { Direction::Backward };
        MessageLink { direction, from, to }
    }
}

/// All links of a group, in rounds: in every round a member has at most one link, so that one split makes all communicators of
/// a round. `wraps` says whether the first and the last member are neighbours, too.
pub fn rounds(members: usize, wraps: bool) -> Vec<Vec<MessageLink>> {
    let pairs = |of: &dyn Fn(usize) -> bool| -> Vec<(usize, usize)> {
        (0..members.saturating_sub(1)).filter(|&i| of(i)).map(|i| (i, i + 1)).collect()
    };
    let (even, mut odd) = (pairs(&|i| i.is_multiple_of(2)), pairs(&|i| !i.is_multiple_of(2)));
    let mut alone = Vec::new();
    if wraps && members > 1 {
        let wrap = (members - 1, 0);
        if members.is_multiple_of(2) { odd.push(wrap) } else { alone.push(wrap) }
    }
    let forward = |&(from, to): &(usize, usize)| MessageLink { direction: Direction::Forward, from, to };
    let backward = |&(to, from): &(usize, usize)| MessageLink { direction: Direction::Backward, from, to };
    let all = [even, odd, alone].into_iter().filter(|pairs| !pairs.is_empty());
    all.flat_map(|pairs| {
        [pairs.iter().map(forward).collect::<Vec<_>>(), pairs.iter().map(backward).collect()]
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_neighbour_has_a_link_each_way_in_one_round() {
        for (members, wraps) in (1..10).flat_map(|members| [(members, false), (members, true)]) {
            let rounds = rounds(members, wraps);
            for round in &rounds {
                let ends: HashSet<usize> = round.iter().flat_map(|link| [link.from, link.to]).collect();
                assert_eq!(ends.len(), 2 * round.len(), "a member has two links in one round: {round:?}");
            }
            let links: HashSet<MessageLink> = rounds.iter().flatten().copied().collect();
            assert_eq!(links.len(), rounds.iter().map(Vec::len).sum::<usize>(), "no link is there twice");
            let neighbours = if members == 1 { 0 } else { members - 1 + usize::from(wraps) };
            assert_eq!(links.len(), 2 * neighbours);
            for i in 0..neighbours {
                let next = (i + 1) % members;
                assert!(
                    links.contains(&MessageLink::of(0, i, next))
                        && links.contains(&MessageLink::of(1, next, i))
                );
            }
        }
    }
}
