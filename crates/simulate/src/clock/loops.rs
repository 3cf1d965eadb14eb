//! Codes with what repeats in them written once.
//!
//! After the first micro-batches have filled the pipeline, every stage does the same for each period until the last
//! ones drain it. So a step of any number of micro-batches is a short one whose repeated part is played more often.

use std::collections::HashMap;
use std::ops::Range;

use kintsugi_plan::Plan;

use super::code::{Code, Extent, Flat, Name, Names, flat};

/// The codes of every stage of a plan.
#[derive(Debug)]
pub(super) struct Codes {
    pub stages: Vec<Vec<Code>>,
    /// What repeats, in order.
    pub loops: Vec<Loop>,
    /// The kinds of ops that are run in a row.
    pub rows_of_runs: Vec<Vec<u8>>,
    /// Micro-batches of one repetition.
    pub period: u32,
    /// The most transfers of its own that a stage may have under way.
    pub transfers: usize,
    /// Kinds of messages: those of activations, then those of gradients.
    pub rows: usize,
    /// The most repetitions after which stages that do not do the same each time may do the same again.
    pub cycle: usize,
    /// Micro-batches of which messages can be told apart: a power of two.
    pub ring: usize,
}

/// A part of every stage's codes that is played over and over.
#[derive(Debug)]
pub(super) struct Loop {
    /// Of each stage.
    pub spans: Vec<Range<usize>>,
    /// The messages in it: of activations, 0, of gradients, 1, or of both.
    pub kinds: Range<usize>,
    /// Whether stages start transfers of their own in it.
    pub transfers: bool,
    /// After how many repetitions the last has been waited for of what is begun in one.
    pub age: usize,
}

impl Codes {
    /// The whole programs of a plan, in which nothing repeats.
    pub(super) fn whole(plan: &Plan, extent: Extent) -> Self {
        let names = Names::of(plan);
        let mut flats: Vec<Flat> = (0..plan.mesh.pp).map(|stage| flat(plan, stage, extent, &names)).collect();
        Codes {
            rows_of_runs: join_runs(&mut flats),
            stages: flats.into_iter().map(|flat| flat.codes).collect(),
            loops: Vec::new(),
            period: plan.period() as u32,
            transfers: names.transfers(),
            rows: names.rows(),
            cycle: 0,
            ring: plan.micro_batches().next_power_of_two(),
        }
    }

    /// The programs of a short plan and what repeats in them; `None` if nothing does.
    pub(super) fn looped(plan: &Plan, extent: Extent) -> Option<Self> {
        let names = Names::of(plan);
        let mut flats: Vec<Flat> = (0..plan.mesh.pp).map(|stage| flat(plan, stage, extent, &names)).collect();
        let rows_of_runs = join_runs(&mut flats);
        let loops = if flats[0].backwards.is_empty() {
            vec![repeated(plan, &flats, 0..2, |flat| &flat.forwards)?]
        } else {
            let forwards = repeated(plan, &flats, 0..1, |flat| &flat.forwards)?;
            vec![forwards, repeated(plan, &flats, 1..2, |flat| &flat.backwards)?]
        };
        // A delay that goes around all stages comes back after as many micro-batches.
        let cycle = (plan.mesh.pp / plan.period()).max(2);
        Some(Codes {
            stages: flats.into_iter().map(|flat| flat.codes).collect(),
            loops,
            rows_of_runs,
            period: plan.period() as u32,
            transfers: names.transfers(),
            rows: names.rows(),
            cycle,
            ring: ((cycle + UNDER_WAY) * plan.period()).next_power_of_two(),
        })
    }
}

/// Periods of which messages may be under way at once.
const UNDER_WAY: usize = 4;

/// Makes one code of ops that are run in a row, but none across the beginning of a period.
fn join_runs(flats: &mut [Flat]) -> Vec<Vec<u8>> {
    let mut numbers: HashMap<Vec<u8>, u16> = HashMap::new();
    let mut row = Vec::new();
    for flat in flats {
        let mut joined = Vec::with_capacity(flat.codes.len());
        let mut finish = |row: &mut Vec<u8>, joined: &mut Vec<Code>| {
            match row.as_slice() {
                [] => return,
                [kind] => joined.push(Code::Run(*kind)),
                _ => {
                    let next = numbers.len() as u16;
                    let number = numbers.get(row).copied().unwrap_or_else(|| {
                        numbers.insert(row.clone(), next);
                        next
                    });
                    joined.push(Code::RunAll(number));
                }
            }
            row.clear();
        };
        let (mut forwards, mut backwards) =
            (flat.forwards.iter_mut().peekable(), flat.backwards.iter_mut().peekable());
        for (i, &code) in flat.codes.iter().enumerate() {
            for begins in [&mut forwards, &mut backwards] {
                if let Some(begin) = begins.next_if(|begin| **begin == i) {
                    finish(&mut row, &mut joined);
                    *begin = joined.len();
                }
            }
            if let Code::Run(kind) = code {
                row.push(kind);
            } else {
                finish(&mut row, &mut joined);
                joined.push(code);
            }
        }
        finish(&mut row, &mut joined);
        flat.codes = joined;
    }
    let mut rows: Vec<(Vec<u8>, u16)> = numbers.into_iter().collect();
    rows.sort_by_key(|&(_, number)| number);
    rows.into_iter().map(|(row, _)| row).collect()
}

/// The last period that every stage does twice in a row. Periods are alike while the pipeline fills, too, but these are
/// not the ones of which there are more in a longer step.
fn repeated(
    plan: &Plan,
    flats: &[Flat],
    kinds: Range<usize>,
    begins: impl Fn(&Flat) -> &Vec<usize>,
) -> Option<Loop> {
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
    let spans: Vec<Range<usize>> =
        flats.iter().map(|flat| begins(flat)[found]..begins(flat)[found + 1]).collect();
    let parts = || flats.iter().zip(&spans).map(|(flat, span)| &flat.codes[span.clone()]);
    let transfers = parts().any(|codes| codes.iter().any(|code| code.transfers()));
    let age = age_of_messages(parts(), 2 * plan.chunks(), period as u32);
    Some(Loop { kinds, transfers, age: age.max(1), spans })
}

/// After how many repetitions a message has been waited for that is sent or expected in one.
fn age_of_messages<'a>(stages: impl Iterator<Item = &'a [Code]> + Clone, rows: usize, period: u32) -> usize {
    let place = |Name { row, micro }: Name| usize::from(row) * period as usize + (micro % period) as usize;
    let mut begun = vec![0; rows * period as usize];
    for code in stages.clone().flatten() {
        if let Code::SendActivation(name) | Code::SendGradient(name) | Code::Expect(name) = *code {
            begun[place(name)] = name.micro.max(begun[place(name)]);
        }
    }
    let waits =
        stages.flatten().filter_map(|code| if let Code::Arrive(name) = *code { Some(name) } else { None });
    let age = |name: Name| begun[place(name)].saturating_sub(name.micro) / period;
    waits.map(age).max().unwrap_or(0) as usize
}

/// Micro-batches that fill the pipeline.
fn filling(plan: &Plan) -> usize {
    if plan.period() > 1 { 2 * plan.mesh.pp } else { plan.mesh.pp }
}

/// Micro-batches that fill the pipeline, do something twice and drain it, but never more than there are.
pub(super) fn enough(plan: &Plan, micro_batches: usize) -> usize {
    let period = plan.period();
    // A gather may be started so many blocks, and so at most so many micro-batches, ahead.
    let ahead = if plan.sharding.weights > 1 { plan.pipeline.prefetch } else { 0 };
    let twice = if period > 1 { 3 * period } else { 4 };
    micro_batches.min((filling(plan) + twice + ahead).next_multiple_of(period))
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::resolve;
    use proptest::prelude::{prop_assert_eq, proptest};
    use proptest::sample::select;

    use super::*;

    /// What a stage does when what repeats is done so many times more.
    fn unrolled(codes: &Codes, stage: usize, more: u32) -> Vec<Code> {
        let all = &codes.stages[stage];
        let (mut unrolled, mut done, mut later) = (Vec::new(), 0, [0; 2]);
        let renamed = |code: &Code, later: [u32; 2]| match code {
            Code::SendActivation(Name { row, .. })
            | Code::SendGradient(Name { row, .. })
            | Code::Expect(Name { row, .. })
            | Code::Arrive(Name { row, .. }) => code.later(later[usize::from(*row) / (codes.rows / 2)]),
            other => *other,
        };
        for part in &codes.loops {
            let span = part.spans[stage].clone();
            unrolled.extend(all[done..span.start].iter().map(|code| renamed(code, later)));
            for time in 0..=more {
                let after = part.kinds.clone().fold(later, |mut later, kind| {
                    later[kind] += time * codes.period;
                    later
                });
                unrolled.extend(all[span.clone()].iter().map(|code| renamed(code, after)));
            }
            part.kinds.clone().for_each(|kind| later[kind] += more * codes.period);
            done = span.end;
        }
        unrolled.extend(all[done..].iter().map(|code| renamed(code, later)));
        unrolled
    }

    /// Every op that is run by itself again.
    fn apart(codes: &Codes, stage: Vec<Code>) -> Vec<Code> {
        let apart = |code| match code {
            Code::RunAll(row) => {
                codes.rows_of_runs[usize::from(row)].iter().map(|&kind| Code::Run(kind)).collect()
            }
            other => vec![other],
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
            more in 0..=5_usize,
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
            let plan = resolve(Some(&text), "random", &[]).unwrap_or_else(|error| panic!("{error}\n{text}"));
            let short = enough(&plan, plan.micro_batches());
            let codes = Codes::looped(&plan.with_micro_batches(short), Extent::Step).expect("something repeats");
            let whole = Codes::whole(&plan.with_micro_batches(short + more * plan.period()), Extent::Step);
            for stage in 0..pp {
                prop_assert_eq!(
                    apart(&codes, unrolled(&codes, stage, more as u32)),
                    apart(&whole, whole.stages[stage].clone())
                );
            }
        }
    }
}
