//! A plan as charts: memory of every stage, traffic by level, where the time goes, and the schedule.

use std::collections::BTreeMap;

use kintsugi_draw::Trace;
use kintsugi_draw::chart::{Axis, Chart, Series, Style, Unit};
use kintsugi_plan::Plan;
use kintsugi_rank::RankMemory;
use kintsugi_simulate::{Prediction, Timeline, Timing};
use kintsugi_spec::{Level, units};

use crate::{Item, Report, TableData, TextData, TimelineData};

/// What is known of a plan.
pub struct PlanFigures<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Its memory and traffic.
    pub prediction: &'a Prediction,
    /// Its time, if the speed of its device is known.
    pub timing: Option<&'a Timing>,
    /// What it is, line by line: a name and a text.
    pub facts: Vec<(String, String)>,
    /// What a reader should know.
    pub notes: Vec<String>,
}

/// The page of a plan.
pub fn report(figures: &PlanFigures) -> Report {
    let PlanFigures { plan, prediction, timing, .. } = *figures;
    let mut report = Report {
        title: format!("{} on {}", plan.model.name, plan.cluster.name),
        subtitle: layout(plan),
        notes: figures.notes.clone(),
        ..Report::default()
    };
    let facts = figures.facts.iter().map(|(name, text)| vec![name.clone(), text.clone()]).collect();
    let facts = TableData {
        title: "The plan".to_owned(),
        question: "What is run, how fast, and does it fit?".to_owned(),
        header: vec![String::new(), "predicted".to_owned()],
        rows: facts,
        ..TableData::default()
    };
    report.section("Plan", vec![facts.into()]);
    let mut charts: Vec<Item> = vec![memory_chart(plan, &prediction.stages).into()];
    let traffic: BTreeMap<String, BTreeMap<String, u64>> = owned(&prediction.figures().comm_bytes);
    charts.extend(traffic_chart(&[("predicted", &traffic)]).map(Item::from));
    charts.extend(timing.map(|timing| time_chart(timing).into()));
    report.section("Memory, traffic and time", charts);
    report.section("Schedule", timeline(plan).into_iter().map(Item::from).collect());
    let config = TextData { title: "config.toml, with every key".to_owned(), text: plan.to_toml() };
    report.section("Configuration", vec![Item::Text(config)]);
    report
}

/// A layout in a line.
pub fn layout(plan: &Plan) -> String {
    let mesh = plan.mesh;
    let word = |value: serde_json::Result<serde_json::Value>| {
        value.ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
    };
    let mut parts = vec![
        mesh.to_string(),
        format!("micro-batch {}", plan.batch.micro),
        format!("batch {}", plan.batch.global),
    ];
    if mesh.pp() > 1 {
        parts.push(word(serde_json::to_value(plan.pipeline.schedule)));
    }
    if plan.pipeline.virtual_stages > 1 {
        parts.push(format!("{} chunks", plan.pipeline.virtual_stages));
    }
    parts.push(if plan.sharding.states == 1 { "ZeRO-0".to_owned() } else { plan.sharding.name() });
    parts.push(format!("recompute {}", word(serde_json::to_value(plan.memory.recompute))));
    if plan.sequence_parallel {
        parts.push("sequence parallel".to_owned());
    }
    if plan.overlap_tp && plan.mesh.tp() > 1 {
        parts.push("tp overlap".to_owned());
    }
    parts.join(" · ")
}

/// The predicted schedule, if a step is short enough to be laid out.
pub fn timeline(plan: &Plan) -> Option<TimelineData> {
    if Timeline::too_long(plan).is_some() {
        return None;
    }
    let timeline = Timeline::of(plan);
    let known = plan.cluster.device.peak_fp32.is_some() && plan.cluster.device.memory_bandwidth.is_some();
    let trace = Trace::predicted(plan, &timeline);
    let mut data = TimelineData::new("Predicted schedule", &trace, if known { "seconds" } else { "units" });
    "What does each stage do, and where does it wait?".clone_into(&mut data.question);
    let bubble = format!("bubble {:.1} %", 100.0 * timeline.bubble);
    data.caption = if data.caption.is_empty() { bubble } else { format!("{bubble}; {}", data.caption) };
    Some(data)
}

/// Memory of every stage by category, and the limit that decides whether the plan fits.
pub fn memory_chart(plan: &Plan, stages: &[RankMemory]) -> Chart {
    let names = (0..stages.len()).map(|stage| stage.to_string()).collect();
    let bars: Vec<BTreeMap<String, u64>> = stages.iter().map(by_category).collect();
    let mut chart = memory_bars(names, &bars);
    "stage".clone_into(&mut chart.x.label);
    "Memory of a rank of each stage".clone_into(&mut chart.title);
    chart.caption = layout(plan);
    let device = &plan.cluster.device;
    if let Some((memory, limit)) = device.memory.zip(device.planned_memory()) {
        let less = match memory - limit {
            0 => String::new(),
            headroom => format!(": {} less a headroom of {}", units::bytes(memory), units::bytes(headroom)),
        };
        chart.question = format!("What fills the memory? A rank may take {}{less}.", units::bytes(limit));
        // Of a device that is nearly empty the bars would not be seen.
        let fullest = stages.iter().map(|stage| stage.reserved + stage.transport).max().unwrap_or(0);
        if limit < 8 * fullest {
            let ends = [-0.5, stages.len() as f64 - 0.5];
            let name = format!("limit, {}", units::bytes(limit));
            chart.series.push(Series::guide(name, 7, ends, limit as f64));
        }
    }
    chart
}

/// Bars of memory, stacked by category: together what is reserved on the device, which decides whether a plan fits.
pub(crate) fn memory_bars(names: Vec<String>, bars: &[BTreeMap<String, u64>]) -> Chart {
    let bytes = |bar: &BTreeMap<String, u64>, name: &str| bar.get(name).copied().unwrap_or(0);
    let series = |name: &str, colour: usize, bytes: &dyn Fn(&BTreeMap<String, u64>) -> u64| {
        let points = bars.iter().enumerate().map(|(place, bar)| (place as f64, Some(bytes(bar) as f64)));
        let any = bars.iter().any(|bar| bytes(bar) > 0);
        any.then(|| Series::new(name, Style::Stack, colour).points(points))
    };
    let categories = RankMemory::default().categories();
    let mut all: Vec<Option<Series>> = categories
        .iter()
        .enumerate()
        .map(|(i, &(category, _))| series(category, i, &|bar| bytes(bar, category)))
        .collect();
    let unused = |bar: &BTreeMap<String, u64>| bytes(bar, "reserved").saturating_sub(bytes(bar, "total"));
    all.push(series("reserved, unused at the peak", 7, &unused));
    all.push(series("transport", 6, &|bar| bytes(bar, "transport")));
    Chart {
        question: "What fills the memory, and on which stage?".to_owned(),
        x: Axis::of_categories("", names),
        y: Axis::from_zero("reserved memory, by its use at the peak", Unit::Bytes),
        series: all.into_iter().flatten().collect(),
        ..Chart::default()
    }
}

/// A rank's memory by the names of its categories.
pub(crate) fn by_category(memory: &RankMemory) -> BTreeMap<String, u64> {
    let sums = [("total", memory.total), ("reserved", memory.reserved), ("transport", memory.transport)];
    memory.categories().into_iter().chain(sums).map(|(name, bytes)| (name.to_owned(), bytes)).collect()
}

type Traffic = BTreeMap<String, BTreeMap<String, u64>>;

pub(crate) fn owned(traffic: &BTreeMap<&'static str, BTreeMap<&'static str, u64>>) -> Traffic {
    let operations = |operations: &BTreeMap<&str, u64>| -> BTreeMap<String, u64> {
        operations.iter().map(|(&name, &bytes)| (name.to_owned(), bytes)).collect()
    };
    traffic.iter().map(|(&level, of_level)| (level.to_owned(), operations(of_level))).collect()
}

/// Traffic by level and operation, one bar for each that is compared; nothing if there is none.
pub fn traffic_chart(compared: &[(&str, &Traffic)]) -> Option<Chart> {
    let mut places: Vec<(Level, String)> = Vec::new();
    for level in Level::ALL {
        let of_level = compared.iter().filter_map(|(_, traffic)| traffic.get(level.name()));
        let mut operations: Vec<&String> = of_level.flat_map(BTreeMap::keys).collect();
        operations.sort_unstable();
        operations.dedup();
        places.extend(operations.into_iter().map(|operation| (level, operation.clone())));
    }
    if places.is_empty() {
        return None;
    }
    let bytes = |traffic: &Traffic, (level, operation): &(Level, String)| {
        traffic.get(level.name()).and_then(|operations| operations.get(operation)).copied().unwrap_or(0)
            as f64
    };
    let series = compared.iter().enumerate().map(|(i, (name, traffic))| {
        let points = places.iter().enumerate().map(|(x, place)| (x as f64, Some(bytes(traffic, place))));
        Series::new(*name, Style::Bars, i).points(points)
    });
    let names =
        places.iter().map(|(level, operation)| format!("{} {}", level.name(), operation.replace('_', "-")));
    Some(Chart {
        title: "Traffic of a step, over all ranks".to_owned(),
        question: "Which links carry how much?".to_owned(),
        x: Axis::of_categories("level and operation", names.collect()),
        y: Axis::from_zero("bytes sent", Unit::Bytes),
        series: series.collect(),
        ..Chart::default()
    })
}

/// Where the time of a step goes.
pub fn time_chart(timing: &Timing) -> Chart {
    let mut parts = vec![
        ("kernels".to_owned(), timing.compute_s),
        ("tensor-parallel links".to_owned(), timing.tensor_s),
        ("other stages".to_owned(), timing.idle_s),
        ("framework".to_owned(), timing.fixed_s),
    ];
    parts.extend(Level::ALL.map(|level| (format!("{} links", level.name()), timing.exposed(level))));
    parts.retain(|(_, seconds)| seconds / timing.step_s >= 0.0005);
    let points = parts.iter().enumerate().map(|(i, &(_, seconds))| (i as f64, Some(seconds)));
    Chart {
        title: "Where the time of a step goes".to_owned(),
        question: "What would make it faster?".to_owned(),
        x: Axis::of_categories(
            "computing, or waiting for",
            parts.iter().map(|(name, _)| name.clone()).collect(),
        ),
        y: Axis::from_zero("mean over the stages", Unit::Seconds),
        series: vec![Series::new("predicted", Style::Bars, 0).points(points)],
        ..Chart::default()
    }
}
