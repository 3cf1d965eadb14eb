//! When what repeats can be told from the repetitions before.
//!
//! A play only adds durations to moments and takes the later of two. So if all moments that matter after a repetition
//! are those after an earlier one, all later by the same, then everything that follows is the same too, later by as
//! much: as many cycles as are left can be skipped, to the picosecond.

use super::lanes::{Lanes, Mask};

/// The moments that mattered after the last repetitions, of several plans side by side.
pub(super) struct History<const V: usize> {
    /// After each repetition: what plans had spent, and then the moments.
    kept: Vec<Vec<Lanes<V>>>,
    /// Repetitions so far.
    count: usize,
}

/// A cycle that goes on for ever.
pub(super) struct Cycle {
    /// Repetitions of it.
    pub length: usize,
    /// By how much later everything is after each.
    pub later: i64,
    /// What is spent in it more than before.
    pub spent: [i64; SPENT],
}

/// Things that time is spent on, of those that do not follow from the steps alone.
pub(super) const SPENT: usize = 4;

impl<const V: usize> History<V> {
    /// Begins anew, and remembers enough for cycles of up to so many repetitions.
    pub(super) fn new(cycle: usize) -> Self {
        History { kept: vec![Vec::new(); cycle], count: 0 }
    }

    /// Remembers how things are before the next repetition.
    pub(super) fn note(&mut self, spent: &[Lanes<V>; SPENT], moments: impl Iterator<Item = Lanes<V>>) {
        let last = self.count % self.kept.len();
        self.kept[last].clear();
        self.kept[last].extend(spent);
        self.kept[last].extend(moments);
        self.count += 1;
    }

    /// The cycles that plans are in, of those that have played so many repetitions while they were remembered.
    pub(super) fn cycles(
        &self,
        played: &[usize],
        spent: &[Lanes<V>; SPENT],
        moments: &(impl Iterator<Item = Lanes<V>> + Clone),
    ) -> Vec<Option<Cycle>> {
        let mut found: Vec<Option<Cycle>> = played.iter().map(|_| None).collect();
        let most = self.kept.len().min(played.iter().copied().max().unwrap_or(0));
        for length in 1..=most {
            let before = &self.kept[(self.count - length) % self.kept.len()];
            let asked = Mask::of(|lane| played[lane] >= length && found[lane].is_none());
            let (later, even) = later_than(&before[SPENT..], moments.clone(), asked);
            for lane in (0..played.len()).filter(|&lane| even.has(lane)) {
                let spent = std::array::from_fn(|i| spent[i][lane] - before[i][lane]);
                found[lane] = Some(Cycle { length, later: later[lane], spent });
            }
        }
        found
    }
}

/// By how much later the first moment is than before, and of the plans that are asked for those of which all are.
fn later_than<const V: usize>(
    before: &[Lanes<V>],
    now: impl Iterator<Item = Lanes<V>>,
    asked: Mask<V>,
) -> (Lanes<V>, Mask<V>) {
    let mut both = now.zip(before);
    let later = both.next().map_or(Lanes::ZERO, |(now, before)| now - *before);
    let mut even = asked;
    for (now, before) in both {
        if !even.any() {
            break;
        }
        even = even.and((now - *before - later).zero());
    }
    (later, even)
}
