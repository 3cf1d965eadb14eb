//! A search finds what trying every configuration finds.
#![allow(clippy::float_cmp, reason = "a shortcut gives the same bits")]

use std::collections::BTreeMap;

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Plan, ScheduleKind, When};
use kintsugi_simulate::{Coverage, Prediction, pessimistic, predict, time};
use kintsugi_tensor::Device;
use kintsugi_tune::{
    By, Candidate, Counts, FREE_SHARE, Limit, Only, SearchResult, Settings, SupportedValues, complexity,
    search, strategies, strategies_that_fit,
};

const DEVICE: Device = Device::Cpu { threads: 1 };
const CONFIG: &str = "
[model]
layers = 4
hidden = 32
heads = 4
vocab = 200
[batch]
sequence = 16
micro = 1
global = 4
[parallel]
dp = 4
[cluster]
preset = \"frontier\"
";

fn reserved(prediction: &Prediction) -> u64 {
    prediction.stages.iter().map(|stage| stage.reserved).max().unwrap_or(0)
}

/// A search where each rank has so many bytes.
fn found_in(memory: u64, by: By, only: &[Only]) -> SearchResult {
    let (base, ranks) = ConfigSource::text(CONFIG).search_base().expect("a valid configuration");
    assert_eq!(ranks, 4);
    let limit = Some(Limit::PerRank(memory));
    let fits = |_: &Plan, prediction: &Prediction| reserved(prediction) <= memory;
    let settings = Settings {
        base: &base,
        ranks,
        only,
        supported: &[],
        by,
        top: usize::MAX,
        every: false,
        limit,
        device: DEVICE,
        fits: &fits,
    };
    search(&settings, &|_, _, _| {}).expect("Frontier's speed is known")
}

fn found(by: By, only: &[Only]) -> SearchResult {
    found_in(u64::MAX, by, only)
}

/// Whether a search proposes a plan: not a schedule for one stage, nor GPipe for one micro-batch.
fn is_proposed(plan: &Plan) -> bool {
    match plan.pipeline.schedule {
        ScheduleKind::OneForwardOneBackward => true,
        ScheduleKind::GPipe => plan.mesh.pp() > 1 && plan.micro_batches() > 1,
        ScheduleKind::Interleaved | ScheduleKind::ZeroBubble => plan.mesh.pp() > 1,
    }
}

/// What tells strategies apart: things that make no difference to a plan are left out.
fn name(plan: &Plan) -> String {
    let mut sharding = plan.sharding;
    if sharding.weights == 1 {
        sharding.gather = When::MicroBatch;
    }
    let micro = plan.batch.micro;
    format!(
        "{:?} {micro} {:?} {} {sharding:?} {:?}",
        plan.mesh, plan.pipeline, plan.sequence_parallel, plan.memory.recompute
    )
}

/// Every configuration that is accepted, by name.
fn every_plan() -> BTreeMap<String, Plan> {
    let mut plans = BTreeMap::new();
    let mut try_one = |sets: Vec<String>| {
        if let Ok(plan) = ConfigSource::text(CONFIG).sets(sets).plan() {
            plans.insert(name(&plan), plan);
        }
    };
    for mesh in [[4, 1, 1], [1, 4, 1], [1, 1, 4], [2, 2, 1], [2, 1, 2], [1, 2, 2], [3, 1, 1]] {
        for micro in 1..=4 {
            for pipeline in ["gpipe 1", "1f1b 1", "zero-bubble 1", "interleaved 2", "interleaved 4", "1f1b 2"]
            {
                for sharding in 0..27_usize {
                    for recompute in ["none", "selective", "full"] {
                        for sequence_parallel in [false, true] {
                            let (schedule, chunks) = pipeline.split_once(' ').expect("two words");
                            // The last are three levels, for every micro-batch and once a step, and ZeRO++: without codes,
                            // with all, with those of weights and with those of gradients.
                            let last = [sharding, 16, 19, 20, 23, 24, 28, 31, 32, 35, 36, 40];
                            let sharding = last[sharding.saturating_sub(15)];
                            let when = |bit: usize| if sharding & bit == 0 { "micro-batch" } else { "step" };
                            let zero = sharding / 4;
                            let mut sets = vec![
                                format!("parallel.tp={}", mesh[0]),
                                format!("parallel.pp={}", mesh[1]),
                                format!("parallel.dp={}", mesh[2]),
                                format!("batch.micro={micro}"),
                                format!("parallel.schedule={schedule}"),
                                format!("parallel.virtual_stages={chunks}"),
                                format!("parallel.sequence_parallel={sequence_parallel}"),
                                match zero {
                                    4 | 5 | 7 | 8 => "sharding.preset=three-level".to_owned(),
                                    6 | 9 | 10 => "sharding.preset=zero++".to_owned(),
                                    zero => format!("sharding.zero={zero}"),
                                },
                                format!("sharding.gather={}", when(1)),
                                format!("memory.recompute={recompute}"),
                            ];
                            sets.extend((zero >= 2).then(|| format!("sharding.reduce={}", when(2))));
                            let plain: &[&str] = match zero {
                                4 => &["weights", "gradients"],
                                7 | 9 => &["gradients"],
                                8 | 10 => &["weights"],
                                _ => &[],
                            };
                            sets.extend(plain.iter().map(|what| format!("sharding.quantize_{what}=none")));
                            try_one(sets);
                        }
                    }
                }
            }
        }
    }
    plans.retain(|_, plan| plan.mesh.ranks() == 4 && is_proposed(plan));
    plans
}

#[test]
fn a_search_equals_trying_every_configuration() {
    let (base, _) = ConfigSource::text(CONFIG).search_base().expect("a valid configuration");
    let all = every_plan();
    let needs = |plan: &Plan| reserved(&predict(plan, DEVICE, Coverage::WholeStep));
    let needed: BTreeMap<&str, u64> = all.iter().map(|(name, plan)| (name.as_str(), needs(plan))).collect();
    let mut sorted: Vec<u64> = needed.values().copied().collect();
    sorted.sort_unstable();
    let memory = sorted[sorted.len() / 2];
    let fitting: BTreeMap<&str, f64> = all
        .iter()
        .filter(|(name, _)| needed[name.as_str()] <= memory)
        .map(|(name, plan)| (name.as_str(), time(plan).expect("a known speed").step_s))
        .collect();
    let found = found_in(memory, By::Time, &with_codes());
    assert_eq!(found.counts.enumerated, all.len());
    assert!(found.counts.dropped > 0 && fitting.len() > 20, "{:?}", found.counts);
    assert_eq!(found.best.len(), fitting.len());
    for candidate in &found.best {
        let plan = base.with_strategy(&candidate.strategy).expect("a legal strategy");
        assert_eq!(fitting[name(&plan).as_str()], candidate.timing.step_s, "{}", name(&plan));
    }
    assert!(
        found.best[1..].is_sorted_by_key(|candidate| candidate.timing.step_s.to_bits()),
        "after the pick"
    );
    let fastest = fitting.values().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(found.fastest.as_ref().map(|candidate| candidate.timing.step_s), Some(fastest));
    for memory in [memory, 2 * sorted[sorted.len() - 1]] {
        let found = found_in(memory, By::Time, &with_codes());
        let pick = found.pick.as_ref().expect("something fits");
        assert_eq!(pick.candidate.strategy, found.best[0].strategy);
        assert!(pick.candidate.timing.step_s <= 1.02 * found.timed[0].timing.step_s);
        // Four ranks are in one node, so the pick is the simplest of those that are about as fast as the fastest and have room.
        let has_room = |candidate: &&Candidate| {
            let plan = base.with_strategy(&candidate.strategy).expect("a legal strategy");
            needed[name(&plan).as_str()] as f64 <= (1.0 - FREE_SHARE) * memory as f64
        };
        let near = found.best.iter().filter(|one| one.timing.step_s <= 1.02 * found.timed[0].timing.step_s);
        let simplest = near.clone().filter(has_room).map(|candidate| complexity(&candidate.strategy)).min();
        assert_eq!(pick.has_room, simplest.is_some());
        match simplest {
            Some(simplest) => assert_eq!(complexity(&pick.candidate.strategy), simplest),
            None => assert_eq!(Some(pick.candidate.peak), near.map(|candidate| candidate.peak).min()),
        }
        assert_eq!(pick.has_room, has_room(&&pick.candidate));
    }
}

/// A restriction that allows everything and asks for codes.
fn with_codes() -> [Only; 2] {
    ["sharding.quantize_weights=none,int8", "sharding.quantize_gradients=none,int4"]
        .map(|text| Only::parse(text).expect("right"))
}

/// What a search finds with bounds, and what it finds when everything is timed.
fn found_both_ways(config: &str, by: By, share: f64) -> [SearchResult; 2] {
    let (base, ranks) = ConfigSource::text(config).search_base().expect("a valid configuration");
    let all = strategies(&base, ranks, &[], &[], usize::MAX);
    let mut peaks: Vec<u64> =
        strategies_that_fit(&base, DEVICE, &all, None).into_iter().map(|(_, peak)| peak).collect();
    peaks.sort_unstable();
    let memory = peaks[(share * (peaks.len() - 1) as f64) as usize];
    let fits = |_: &Plan, prediction: &Prediction| reserved(prediction) <= memory;
    [false, true].map(|every| {
        let settings = Settings {
            base: &base,
            ranks,
            only: &[],
            supported: &[],
            by,
            top: 5,
            every,
            limit: Some(Limit::PerRank(memory)),
            device: DEVICE,
            fits: &fits,
        };
        search(&settings, &|_, _, _| {}).expect("Frontier's speed is known")
    })
}

#[test]
fn bounds_cut_neither_the_best_nor_the_pick() {
    let larger = CONFIG.replace("hidden = 32", "hidden = 512").replace("global = 4", "global = 8");
    let two_nodes = larger.replace("dp = 4", "dp = 1").replace("layers = 4", "layers = 6");
    let two_nodes = format!("{two_nodes}nodes = 2\n").replace("global = 8", "global = 16");
    let mut cut = 0;
    for (config, share) in [(CONFIG, 0.5), (&larger, 0.9), (&two_nodes, 0.7)] {
        for by in [By::Time, By::Energy, By::Pareto] {
            let [some, all] = found_both_ways(config, by, share);
            let of = |found: &SearchResult| {
                let best: Vec<_> =
                    found.best.iter().map(|one| (one.strategy, one.timing, one.reserved)).collect();
                let pick = found.pick.as_ref().map(|pick| (pick.candidate.strategy, pick.gains.clone()));
                (best, pick, found.fastest.as_ref().map(|one| one.strategy))
            };
            assert_eq!(of(&some), of(&all), "{config} {by:?}");
            assert!(!some.best.is_empty() && (some.pick.is_some() || by == By::Pareto));
            let Counts { enumerated, bounded, dropped, timed, .. } = some.counts;
            assert_eq!(enumerated, bounded + dropped + timed);
            assert_eq!((all.counts.bounded, all.counts.enumerated), (0, enumerated));
            cut += bounded;
        }
    }
    assert!(cut > 1000, "bounds that cut nothing show nothing: {cut}");
}

#[test]
fn the_front_is_what_nothing_beats_in_both() {
    let all = found(By::Time, &[]).best;
    let front = found(By::Pareto, &[]).best;
    let of = |candidate: &Candidate| {
        (candidate.timing.step_s, candidate.consumption.expect("Frontier's power is known").joules)
    };
    assert!(!front.is_empty());
    for (seconds, joules) in front.iter().map(of) {
        let beaten =
            all.iter().map(of).any(|(s, j)| s <= seconds && j <= joules && (s, j) != (seconds, joules));
        assert!(!beaten, "{seconds} s, {joules} J");
    }
    let least = found(By::Energy, &[]).best;
    assert_eq!(of(&least[0]).1, front.iter().map(|candidate| of(candidate).1).fold(f64::INFINITY, f64::min));
}

#[test]
fn what_the_full_play_refuses_hides_nothing_from_the_front() {
    let (base, ranks) = ConfigSource::text(CONFIG).search_base().expect("a valid configuration");
    let first = found(By::Pareto, &[]).best.remove(0);
    // All that is at the front is refused, and so is what has its mesh.
    let fits = |plan: &Plan, _: &Prediction| plan.mesh != first.strategy.mesh;
    let (by, top, limit) = (By::Pareto, usize::MAX, None);
    let settings = Settings {
        base: &base,
        ranks,
        only: &[],
        supported: &[],
        by,
        top,
        every: false,
        limit,
        device: DEVICE,
        fits: &fits,
    };
    let front = search(&settings, &|_, _, _| {}).expect("Frontier's speed is known");
    assert!(front.counts.refused > 0 && !front.best.is_empty(), "{:?}", front.counts);
    assert!(front.best.iter().all(|candidate| candidate.strategy.mesh != first.strategy.mesh));
}

#[test]
fn a_heavy_head_leaves_the_last_stage_fewer_layers() {
    let larger = [
        ("hidden = 32", "hidden = 1024"),
        ("vocab = 200", "vocab = 32000"),
        ("sequence = 16", "sequence = 512"),
    ];
    let config = larger.iter().fold(CONFIG.to_owned(), |config, (small, large)| config.replace(small, large));
    let (base, ranks) = ConfigSource::text(config).search_base().expect("a valid configuration");
    let only =
        [Only::parse("parallel.pp=2").expect("right"), Only::parse("parallel.schedule=1f1b").expect("right")];
    let (by, top, limit, fits) = (By::Time, usize::MAX, None, |_: &Plan, _: &Prediction| true);
    let settings = Settings {
        base: &base,
        ranks,
        only: &only,
        supported: &[],
        by,
        top,
        every: false,
        limit,
        device: DEVICE,
        fits: &fits,
    };
    let found = search(&settings, &|_, _, _| {}).expect("Frontier's speed is known");
    let plans: Vec<Plan> =
        found.best.iter().map(|one| base.with_strategy(&one.strategy).expect("a legal strategy")).collect();
    let fastest = found.fastest.as_ref().expect("a strategy");
    let fastest = base.with_strategy(&fastest.strategy).expect("a legal strategy");
    assert_eq!(fastest.pipeline.layers, [3, 1]);
    assert!(plans.iter().any(|plan| plan.pipeline.layers == [2, 2]));
    for (plan, candidate) in plans.iter().zip(&found.best) {
        assert_eq!(time(plan).expect("a known speed").step_s, candidate.timing.step_s, "{}", name(plan));
        let prediction = predict(plan, DEVICE, Coverage::WholeStep);
        let peak = prediction.stages.iter().map(|stage| stage.total).max();
        assert_eq!(peak, Some(candidate.peak), "{}", name(plan));
    }
}

#[test]
fn a_restriction_leaves_only_what_it_names() {
    let only =
        [Only::parse("parallel.pp=2").expect("right"), Only::parse("sharding.zero=0,1").expect("right")];
    let restricted = found(By::Time, &only);
    assert!(restricted.counts.enumerated > 0);
    assert!(restricted.best.iter().all(|candidate| candidate.strategy.mesh.pp() == 2));
    assert!(restricted.best.iter().all(|candidate| candidate.strategy.sharding.gradients.is_none()));
}

/// A model on two nodes of Frontier, where sharding over all ranks is fastest only if its transfers overlap.
const TWO_NODES: &str = "
[model]
preset = \"gpt-1.4b\"
[batch]
sequence = 2048
global = 32
[precision]
compute = \"fp16\"
[cluster]
preset = \"frontier\"
nodes = 2
";

#[test]
fn a_pick_loses_little_over_the_range_of_links() {
    let (base, ranks) = ConfigSource::text(TWO_NODES).search_base().expect("a valid configuration");
    let only = [
        Only::parse("parallel.tp=1,2").expect("right"),
        Only::parse("parallel.schedule=1f1b").expect("right"),
        Only::parse("memory.recompute=none").expect("right"),
    ];
    let (by, top, limit, fits) = (By::Time, 10, None, |_: &Plan, _: &Prediction| true);
    let settings = Settings {
        base: &base,
        ranks,
        only: &only,
        supported: &[],
        by,
        top,
        every: false,
        limit,
        device: DEVICE,
        fits: &fits,
    };
    let found = search(&settings, &|_, _, _| {}).expect("Frontier's speed is known");
    assert_eq!(found.best.len(), 10);
    assert_eq!(found.best.iter().filter(|one| !is_lossless(one)).count(), 0, "codes were not asked for");
    let pick = found.pick.as_ref().expect("something fits");
    let (own, fastest) = (&found.best[0], found.fastest.as_ref().expect("a strategy"));
    let judged = |candidate: &Candidate| {
        let links = candidate.links.expect("two nodes");
        assert!(links.full_s <= candidate.timing.step_s && candidate.timing.step_s <= links.slow_s);
        pessimistic(candidate.timing.step_s, links.slow_s.max(links.no_overlap_s))
    };
    assert_eq!((own.strategy, own.pessimistic), (pick.candidate.strategy, Some(judged(own))));
    assert!(
        judged(own) <= 1.02 * judged(fastest) && complexity(&own.strategy) <= complexity(&fastest.strategy)
    );
    assert!(pick.gains.iter().any(|gain| gain.used && gain.gain.is_some_and(|gain| gain > 0.0)), "{pick:?}");
    // Codes would be faster with slow links, but they change the numbers: what they gain is told.
    let codes = pick.gains.iter().find(|gain| gain.mechanism == "codes").expect("codes gain something");
    assert!(!codes.used && codes.gain.is_some_and(|gain| gain > 0.0), "{codes:?}");
    let asked = [&only[..], &with_codes()].concat();
    let all = search(&Settings { only: &asked, ..settings }, &|_, _, _| {}).expect("the same machine");
    assert!(!is_lossless(all.fastest.as_ref().expect("a strategy")), "{all:?}");
}

fn is_lossless(candidate: &Candidate) -> bool {
    candidate.strategy.sharding.quantized.iter().next().is_none()
}

#[test]
fn a_search_for_a_framework_proposes_what_it_can_run() {
    let config = format!("{TWO_NODES}[framework]\npreset = \"nanotron\"\n");
    let (base, ranks) = ConfigSource::text(config).search_base().expect("a valid configuration");
    let supported = SupportedValues::by_framework(&base).expect("a right profile");
    let all = strategies(&base, ranks, &[], &supported, usize::MAX);
    let every = strategies(&base, ranks, &[], &[], usize::MAX);
    assert!(!all.is_empty() && all.len() < every.len());
    assert!(all.iter().all(|strategy| strategy.virtual_stages == 1 && strategy.sharding.gradients.is_none()));
}
