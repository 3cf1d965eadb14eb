//! Codes with what repeats in them written once.
//!
//! After the first micro-batches have filled the pipeline, every stage does the same for each period until the last
//! ones drain it. So a step of any number of micro-batches is a short one whose repeated part is played more often.

use std::ops::Range;

use kintsugi_plan::{Plan, ScheduleKind};

use super::code::{Code, Extent, Flat, Names, Rows, flat};

/// The codes of every stage of a plan.
#[derive(Debug)]
pub(super) struct Codes {
    pub stages: Vec<Vec<Code>>,
    /// What repeats, in order: a span of each stage's codes.
    pub loops: Vec<Vec<Range<usize>>>,
    /// The kinds of ops that are run in a row.
    pub rows: Vec<Vec<u8>>,
    pub micro_batches: usize,
    /// Micro-batches of one repetition.
    pub period: u32,
    /// The most transfers of its own that a stage may have under way.
    pub transfers: usize,
    pub chunks: usize,
    /// The most repetitions after which stages that do not do the same each time may do the same again.
    pub cycle: usize,
}

impl Codes {
    /// The whole programs of a plan, in which nothing repeats.
    pub(super) fn whole(plan: &Plan, extent: Extent) -> Self {
        Codes::new(plan, extent, |_| Vec::new())
    }

    /// The programs of a short plan and what repeats in them, if anything does.
    pub(super) fn looped(plan: &Plan, extent: Extent) -> Self {
        Codes::new(plan, extent, |flats| {
            let forwards = || repeated(plan, flats, |flat| &flat.forwards);
            let backwards = || repeated(plan, flats, |flat| &flat.backwards);
            let all = match plan.pipeline.schedule {
                ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubble => vec![forwards()],
                ScheduleKind::Interleaved => vec![backwards()],
                ScheduleKind::GPipe => vec![forwards(), backwards()],
            };
            all.into_iter().collect::<Option<_>>().unwrap_or_default()
        })
    }

    fn new(plan: &Plan, extent: Extent, loops: impl FnOnce(&[Flat]) -> Vec<Vec<Range<usize>>>) -> Self {
        let (names, mut rows) = (Names::of(plan), Rows::default());
        let stages = 0..plan.mesh.pp;
        let flats: Vec<Flat> = stages.map(|stage| flat(plan, stage, extent, &names, &mut rows)).collect();
        Codes {
            loops: loops(&flats),
            stages: flats.into_iter().map(|flat| flat.codes).collect(),
            rows: rows.all,
            micro_batches: plan.micro_batches(),
            period: plan.period() as u32,
            transfers: names.transfers(),
            chunks: plan.chunks(),
            // A delay that goes around all stages comes back after as many micro-batches.
            cycle: (plan.mesh.pp / plan.period()).max(2),
        }
    }
}

/// The last period that every stage does twice in a row. Periods are alike while the pipeline fills, too, but these are
/// not the ones of which there are more in a longer step.
fn repeated(plan: &Plan, flats: &[Flat], begins: impl Fn(&Flat) -> &Vec<usize>) -> Option<Vec<Range<usize>>> {
    let period = plan.period();
    let twice = |flat: &Flat, i: usize| {
        let at = begins(flat);
        let (one, other) = (&flat.codes[at[i]..at[i + 1]], &flat.codes[at[i + 1]..at[i + 2]]);
        let same = |(a, b): (&Code, &Code)| a.later(period as u32) == *b && !a.joins();
        one.len() == other.len() && one.iter().zip(other).all(same)
    };
    let filled = filling(plan) / period;
    let candidates = filled..begins(&flats[0]).len().saturating_sub(2);
    let found = candidates.rev().find(|&i| flats.iter().all(|flat| twice(flat, i)))?;
    Some(flats.iter().map(|flat| begins(flat)[found]..begins(flat)[found + 1]).collect())
}

/// Micro-batches that fill the pipeline before what repeats can begin.
fn filling(plan: &Plan) -> usize {
    if plan.pipeline.schedule == ScheduleKind::Interleaved { 0 } else { plan.mesh.pp }
}

/// Micro-batches of the short plan that stands for one with so many: those that fill the pipeline, do something twice and
/// drain it. A plan may do what repeats once, or not at all; if it has fewer micro-batches yet, it stands for itself.
pub(super) fn enough(plan: &Plan, micro_batches: usize) -> usize {
    let period = plan.period();
    // A gather may be started so many blocks ahead, and a micro-batch has at least two of each chunk; but where all
    // forwards come first, one.
    let ahead = if plan.sharding.weights > 1 { plan.pipeline.prefetch } else { 0 };
    let ahead = if period > 1 { ahead / (2 * plan.pipeline.virtual_stages) } else { ahead };
    let short = filling(plan) + 4 * period + ahead / period * period;
    if micro_batches + period < short { micro_batches } else { short }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;
    use proptest::prelude::{prop_assert_eq, proptest};
    use proptest::sample::select;

    use super::*;

    /// What a stage does when what repeats is done so many times.
    fn unrolled(codes: &Codes, stage: usize, times: u32) -> Vec<Code> {
        let all = &codes.stages[stage];
        let (mut unrolled, mut done, mut later) = (Vec::new(), 0, [0_u32; 2]);
        let renamed = |code: &Code, later: [u32; 2]| match code.message() {
            Some(name) => code.renamed(name.micro.wrapping_add(later[usize::from(name.row) / codes.chunks])),
            None => *code,
        };
        for (number, spans) in codes.loops.iter().enumerate() {
            // One loop has messages of both kinds in it, two have one each.
            let kinds = if codes.loops.len() == 1 { 0..2 } else { number..number + 1 };
            let span = spans[stage].clone();
            unrolled.extend(all[done..span.start].iter().map(|code| renamed(code, later)));
            for _ in 0..times {
                unrolled.extend(all[span.clone()].iter().map(|code| renamed(code, later)));
                later[kinds.clone()].iter_mut().for_each(|later| *later = later.wrapping_add(codes.period));
            }
            later[kinds].iter_mut().for_each(|later| *later = later.wrapping_sub(codes.period));
            done = span.end;
        }
        unrolled.extend(all[done..].iter().map(|code| renamed(code, later)));
        unrolled
    }

    /// The kind of every op that is run, and all other codes.
    fn apart(codes: &Codes, stage: Vec<Code>) -> Vec<Result<u8, Code>> {
        let apart = |code| match code {
            Code::Run(row) => codes.rows[usize::from(row)].iter().map(|&kind| Ok(kind)).collect(),
            other => vec![Err(other)],
        };
        stage.into_iter().flat_map(apart).collect()
    }

    proptest! {
        #[test]
        fn a_longer_step_repeats_what_a_short_one_does_twice(
            (pp, chunks) in (1..=4_usize, 1..=2_usize),
            schedule in select(vec!["1f1b", "gpipe", "zero-bubble", "interleaved"]),
            (zero, prefetch, overlap) in (0..=3_usize, 0..=3_usize, select(vec!["true", "false"])),
            (gather, reduce) in (select(vec!["step", "micro-batch"]), select(vec!["step", "micro-batch"])),
            recompute in select(vec!["none", "full"]),
            times in 0..=6_usize,
        ) {
            let interleaved = schedule == "interleaved" && pp > 1;
            let chunks = if interleaved { 1 + chunks } else { 1 };
            let schedule = if schedule == "interleaved" && !interleaved { "1f1b" } else { schedule };
            let text = format!(
                "model = {{ preset = \"demo\", layers = {} }}\nbatch.global = 480\n\
                 parallel = {{ dp = 2, pp = {pp}, schedule = \"{schedule}\", virtual_stages = {chunks}, \
                 prefetch = {prefetch}, overlap = {overlap} }}\n\
                 sharding = {{ zero = {zero}, gather = \"{gather}\", reduce = \"{}\" }}\nmemory.recompute = \"{recompute}\"\n",
                pp * chunks * 2,
                if zero >= 2 { reduce } else { "step" },
            );
            let plan = ConfigSource::text(&text).plan().unwrap_or_else(|error| panic!("{error}\n{text}"));
            let short = enough(&plan, plan.micro_batches());
            let codes = Codes::looped(&plan.with_micro_batches(short), Extent::Step);
            prop_assert_eq!(codes.loops.is_empty(), false);
            let whole = Codes::whole(&plan.with_micro_batches(short + times * plan.period() - plan.period()), Extent::Step);
            for stage in 0..pp {
                prop_assert_eq!(
                    apart(&codes, unrolled(&codes, stage, times as u32)),
                    apart(&whole, whole.stages[stage].clone())
                );
            }
        }
    }
}
