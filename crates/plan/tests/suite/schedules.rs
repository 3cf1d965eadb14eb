//! Properties of the schedules: how many micro-batches each stage has in flight.

use std::collections::BTreeSet;

use kintsugi_plan::schedule::{Pass, forward_only, gpipe, interleaved, one_f_one_b, zero_bubble};
use proptest::prelude::*;

/// The largest number of micro-batch chunks between an opening and a closing pass.
fn most_in_flight(passes: &[Pass], opens: fn(&Pass) -> bool, closes: fn(&Pass) -> bool) -> usize {
    let (mut now, mut most) = (0, 0);
    for pass in passes {
        now += usize::from(opens(pass));
        most = most.max(now);
        now -= usize::from(closes(pass));
    }
    assert_eq!(now, 0, "what is opened is closed: {passes:?}");
    most
}

fn forward(pass: &Pass) -> bool {
    matches!(pass, Pass::Forward { .. })
}

fn backward(pass: &Pass) -> bool {
    matches!(pass, Pass::Backward { .. } | Pass::BackwardInput { .. })
}

fn weight(pass: &Pass) -> bool {
    matches!(pass, Pass::BackwardWeight { .. })
}

/// Every chunk of the stage has every micro-batch once in each kind of pass.
fn each_once(passes: &[Pass], kinds: usize, chunks: usize, micro_batches: usize) {
    let distinct: BTreeSet<String> = passes.iter().map(|pass| format!("{pass:?}")).collect();
    assert_eq!(distinct.len(), passes.len());
    assert_eq!(passes.len(), kinds * chunks * micro_batches);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn gpipe_keeps_every_micro_batch(stage in 0..6_usize, micro_batches in 1..20_usize) {
        let passes = gpipe(stage, micro_batches);
        each_once(&passes, 2, 1, micro_batches);
        prop_assert_eq!(most_in_flight(&passes, forward, backward), micro_batches);
    }

    #[test]
    fn one_f_one_b_keeps_one_for_each_stage_to_come(
        (pp, stage) in (1..8_usize).prop_flat_map(|pp| (Just(pp), 0..pp)),
        micro_batches in 1..20_usize,
    ) {
        let passes = one_f_one_b(pp, stage, micro_batches);
        each_once(&passes, 2, 1, micro_batches);
        prop_assert_eq!(most_in_flight(&passes, forward, backward), micro_batches.min(pp - stage));
    }

    #[test]
    fn interleaved_keeps_what_megatron_keeps(
        (pp, stage) in (2..8_usize).prop_flat_map(|pp| (Just(pp), 0..pp)),
        groups in 1..4_usize,
        virtual_stages in 1..4_usize,
    ) {
        let micro_batches = groups * pp;
        let passes = interleaved(pp, stage, micro_batches, virtual_stages);
        each_once(&passes, 2, virtual_stages, micro_batches);
        let bound = (pp - stage - 1) * 2 + (virtual_stages - 1) * pp + 1;
        let expected = bound.min(micro_batches * virtual_stages);
        prop_assert_eq!(most_in_flight(&passes, forward, backward), expected);
    }

    #[test]
    fn zero_bubble_keeps_no_more_than_one_f_one_b_on_its_first_stage(
        (pp, stage) in (1..8_usize).prop_flat_map(|pp| (Just(pp), 0..pp)),
        micro_batches in 1..20_usize,
    ) {
        let passes = zero_bubble(pp, stage, micro_batches);
        each_once(&passes, 3, 1, micro_batches);
        prop_assert_eq!(most_in_flight(&passes, forward, backward), micro_batches.min(pp - stage));
        prop_assert_eq!(most_in_flight(&passes, forward, weight), micro_batches.min(pp));
    }

    #[test]
    fn evaluation_meets_every_chunk_once(
        (pp, stage) in (1..8_usize).prop_flat_map(|pp| (Just(pp), 0..pp)),
        micro_batches in 1..20_usize,
        virtual_stages in 1..4_usize,
    ) {
        each_once(&forward_only(pp, stage, micro_batches, virtual_stages), 1, virtual_stages, micro_batches);
    }
}
