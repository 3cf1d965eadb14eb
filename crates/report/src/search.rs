//! A search as charts: every strategy by time and memory, and by time and energy, with the Pareto front of each.

use kintsugi_draw::chart::{Axis, Chart, Series, Style, Unit};
use kintsugi_plan::config::LayerSplit;
use kintsugi_plan::{Plan, When};
use kintsugi_spec::Level;
use kintsugi_tune::Candidate;

use crate::thin::rounded;
use crate::{Item, Report, TableData};

/// What is known of a search.
pub struct SearchFigures<'a> {
    /// The model, the batch and the machine.
    pub base: &'a Plan,
    /// Every strategy that was timed.
    pub timed: &'a [Candidate],
    /// What was searched, line by line: a name and a text.
    pub facts: Vec<(String, String)>,
    /// The one that the search picks, if any fits.
    pub pick: Option<&'a Candidate>,
    /// The best ones, with the reason why each is not first.
    pub best: TableData,
}

/// Which figures of a strategy are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Against {
    /// Memory of the fullest rank.
    Memory,
    /// Energy of a step.
    Energy,
}

/// Strategies on one chart: about two megabytes with their descriptions.
const MAX_POINTS: usize = 30_000;

/// The page of a search.
pub fn report(figures: &SearchFigures) -> Report {
    let base = figures.base;
    let mut report = Report {
        title: format!("Strategies for {} on {}", base.model.name, base.cluster.name),
        ..Report::default()
    };
    let facts = TableData {
        title: "The search".to_owned(),
        question: "What was compared?".to_owned(),
        header: vec![String::new(), String::new()],
        rows: figures.facts.iter().map(|(name, text)| vec![name.clone(), text.clone()]).collect(),
        ..TableData::default()
    };
    report.section("Search", vec![facts.into()]);
    let charts =
        [Against::Memory, Against::Energy].map(|against| chart(figures.timed, figures.pick, against, true));
    report.section("Every strategy that fits", charts.into_iter().flatten().map(Item::from).collect());
    report.section("The best", vec![figures.best.clone().into()]);
    report
}

/// Every strategy by time and another figure, with a series for each tp and a ring around the pick; nothing if that figure is
/// not known. On a page (`labels`), hovering shows the strategy.
pub fn chart(timed: &[Candidate], pick: Option<&Candidate>, against: Against, labels: bool) -> Option<Chart> {
    let value = |candidate: &Candidate| match against {
        Against::Memory => Some(candidate.reserved.unwrap_or(candidate.peak) as f64),
        Against::Energy => candidate.consumption.map(|used| used.joules),
    };
    let mut shown: Vec<(&Candidate, f64)> =
        timed.iter().filter_map(|candidate| Some((candidate, value(candidate)?))).collect();
    shown.sort_by(|(a, _), (b, _)| a.timing.step_s.total_cmp(&b.timing.step_s));
    if shown.is_empty() {
        return None;
    }
    let front = front(&shown);
    let left_out = shown.len().saturating_sub(MAX_POINTS);
    shown.truncate(MAX_POINTS);
    let mut degrees: Vec<usize> = shown.iter().map(|(candidate, _)| candidate.strategy.mesh.tp()).collect();
    degrees.sort_unstable();
    degrees.dedup();
    let series = degrees.iter().enumerate().map(|(colour, &tp)| {
        let own = || shown.iter().filter(move |(candidate, _)| candidate.strategy.mesh.tp() == tp);
        let mut series = Series::new(format!("tp {tp}"), Style::Points, colour).points(
            own().map(|(candidate, value)| (rounded(candidate.timing.step_s), Some(rounded(*value)))),
        );
        if labels {
            series.labels = own().map(|(candidate, _)| describe(candidate)).collect();
        }
        series
    });
    let mut series: Vec<Series> = series.collect();
    series.push(
        Series::new("no other is better in both", Style::Guide, 7)
            .points(front.iter().map(|&(step_s, value)| (step_s, Some(value)))),
    );
    if let Some(pick) = pick {
        // The same strategy among the points, so that the ring is around one of them.
        let point = shown.iter().map(|(candidate, _)| *candidate);
        let pick = point.into_iter().find(|candidate| candidate.strategy == pick.strategy).unwrap_or(pick);
        let place = value(pick).map(|value| (rounded(pick.timing.step_s), Some(rounded(value))));
        let mut ring = Series::new("the pick", Style::Ring, 7).points(place);
        if labels {
            ring.labels = vec![format!("tp {}, {}", pick.strategy.mesh.tp(), describe(pick))];
        }
        series.push(ring);
    }
    let (title, label, unit, question) = match against {
        Against::Memory => (
            "Time and memory",
            "memory of the fullest rank",
            Unit::Bytes,
            "What does less memory cost in time?",
        ),
        Against::Energy => {
            ("Time and energy", "energy of a step", Unit::Joules, "Is the fastest also the most frugal?")
        }
    };
    let x = Axis { scale: kintsugi_draw::chart::Scale::Log, ..Axis::of("time of a step", Unit::Seconds) };
    Some(Chart {
        title: title.to_owned(),
        question: question.to_owned(),
        caption: match left_out {
            0 => format!("{} strategies", timed.len()),
            left_out => format!("the fastest {MAX_POINTS} strategies; {left_out} slower ones are left out"),
        },
        x,
        y: Axis::of(label, unit),
        series,
        ..Chart::default()
    })
}

/// Time and value of the strategies for which no faster strategy has a lower value.
fn front(by_time: &[(&Candidate, f64)]) -> Vec<(f64, f64)> {
    let mut front: Vec<(f64, f64)> = Vec::new();
    for &(candidate, value) in by_time {
        if front.last().is_none_or(|&(_, least)| value < least) {
            front.push((candidate.timing.step_s, value));
        }
    }
    front
}

/// A strategy in a line.
fn describe(candidate: &Candidate) -> String {
    let strategy = &candidate.strategy;
    let word = |value: serde_json::Result<serde_json::Value>| {
        value.ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
    };
    let (mesh, sharding) = (strategy.mesh, strategy.sharding);
    let zero = [sharding.states, sharding.gradients, sharding.weights].iter().flatten().count();
    let each = |when: When| if when == When::MicroBatch { " each micro-batch" } else { " once a step" };
    let mut parts = vec![format!("pp {} dp {} micro {}", mesh.pp(), mesh.dp(), strategy.micro)];
    if mesh.cp() > 1 {
        parts.push(format!("cp {}", mesh.cp()));
    }
    if mesh.pp() > 1 {
        parts.push(word(serde_json::to_value(strategy.schedule)));
    }
    if strategy.virtual_stages > 1 {
        parts.push(format!("{} chunks", strategy.virtual_stages));
    }
    match strategy.split {
        LayerSplit::Even => {}
        LayerSplit::LighterEnds => parts.push("lighter ends".to_owned()),
        LayerSplit::Last(layers) => parts.push(format!("{layers} layers in the last")),
    }
    let over = |level: Option<Level>| level.map_or("none", Level::name);
    let levels = [sharding.weights, sharding.gradients, sharding.states];
    if levels.iter().flatten().all(|&level| level == Level::Cluster) {
        parts.push(format!("ZeRO-{zero}"));
    } else {
        let [weights, gradients, states] = levels.map(over);
        parts.push(format!("weights {weights}, gradients {gradients}, states {states}"));
    }
    let codes = [("weights", sharding.quantized.weights), ("gradients", sharding.quantized.gradients)];
    parts.extend(codes.into_iter().filter_map(|(what, codes)| Some(format!("{} {what}", codes?.integer))));
    parts.extend(sharding.secondary.map(|level| format!("secondary shard over the {}", level.name())));
    if zero == 3 {
        parts.push(format!("gather{}", each(sharding.gather)));
    }
    if zero >= 2 {
        parts.push(format!("reduce{}", each(sharding.reduce)));
    }
    parts.push(format!("recompute {}", word(serde_json::to_value(strategy.recompute))));
    if strategy.sequence_parallel {
        parts.push("sequence parallel".to_owned());
    }
    parts.join(", ")
}
