//! Outliers among measured runs: something other than their layout made them slow.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::constants::Constants;
use super::description::Kind;
use super::run::Run;

/// The time of a slot of a run, and what decides with which runs it is compared.
#[derive(Clone, Debug)]
struct Slot {
    key: String,
    replicas: usize,
    slots: usize,
    /// Seconds of one slot.
    seconds: f64,
}

/// Slots of a step in which a reduction at its end is a small part.
const MANY_SLOTS: usize = 32;

/// Flags runs whose slot took over twice as long as the fastest of the same layout elsewhere.
///
/// More replicas have more to reduce, so a run is compared with runs that have at least as many. In a run of many slots the
/// reduction is a small part, so it is compared with all. Predictions are not used.
pub fn flag_outliers(runs: &mut [Run]) {
    let slots: Vec<Option<Slot>> = runs.par_iter().map(slot).collect();
    let mut layouts: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, slot) in slots.iter().enumerate() {
        if let Some(slot) = slot {
            layouts.entry(&slot.key).or_default().push(i);
        }
    }
    for layout in layouts.values() {
        let alike: Vec<&Slot> = layout.iter().filter_map(|&i| slots[i].as_ref()).collect();
        for (&i, is_outlier) in layout.iter().zip(outliers_of(&alike)) {
            runs[i].is_outlier = is_outlier;
        }
    }
}

fn slot(run: &Run) -> Option<Slot> {
    let plan = Some(run).filter(|run| run.kind == Kind::Step)?.plan(&Constants::default(), &[]).ok()?;
    let slots = plan.micro_batches() + plan.mesh.pp() - 1;
    let seconds = run.seconds(&plan)? / slots as f64;
    Some(Slot { key: run.slot_key(), replicas: plan.mesh.dp(), slots, seconds })
}

/// Whether each slot of a layout is an outlier.
fn outliers_of(layout: &[&Slot]) -> Vec<bool> {
    let is_outlier = |(i, slot): (usize, &&Slot)| {
        let others = layout.iter().enumerate().filter(|&(j, _)| j != i).map(|(_, other)| other);
        let alike = others.filter(|other| slot.slots >= MANY_SLOTS || other.replicas >= slot.replicas);
        slot.seconds > 2.0 * alike.map(|other| other.seconds).fold(f64::INFINITY, f64::min)
    };
    layout.iter().enumerate().map(is_outlier).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_an_outlier_if_the_same_layout_is_twice_as_fast_elsewhere() {
        let slot = |replicas: usize, slots: usize, seconds: f64| Slot {
            key: String::new(),
            replicas,
            slots,
            seconds,
        };
        assert_eq!(outliers_of(&[&slot(2, 8, 3.0), &slot(4, 8, 1.0)]), [true, false]);
        assert_eq!(
            outliers_of(&[&slot(2, 8, 1.0), &slot(4, 8, 3.0)]),
            [false, false],
            "it has more to reduce"
        );
        assert_eq!(
            outliers_of(&[&slot(2, 64, 1.0), &slot(4, 32, 3.0)]),
            [false, true],
            "but not in 32 slots"
        );
        assert_eq!(outliers_of(&[&slot(2, 8, 1.9), &slot(4, 8, 1.0)]), [false, false]);
    }
}
