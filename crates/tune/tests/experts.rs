//! Layouts that experts chose: they are searched, and on small clusters a search finds nothing worse.
//!
//! `scripts/expert-layouts` searches for all of them.

use std::fs;
use std::path::{Path, PathBuf};

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{TimeRange, time};
use kintsugi_tensor::Device;
use kintsugi_tune::{By, Limit, Only, Settings, search, strategies};

fn experts() -> Vec<(PathBuf, ConfigSource)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../validate/experts");
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .expect("the folder of layouts")
        .map(|entry| entry.expect("a file").path())
        .collect();
    paths.sort();
    let source = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("a file of text");
        (path, ConfigSource::text(text))
    };
    paths.into_iter().map(source).collect()
}

/// Restricts a search to the stages, the micro-batch and the recomputation of a layout.
fn like(plan: &Plan) -> Vec<Only> {
    let texts = [
        format!("parallel.tp={}", plan.mesh.tp()),
        format!("parallel.pp={}", plan.mesh.pp()),
        format!("batch.micro={}", plan.batch.micro),
        format!("parallel.virtual_stages={}", plan.pipeline.virtual_stages),
    ];
    texts.iter().map(|text| Only::parse(text).expect("a right restriction")).collect()
}

#[test]
fn expert_layouts_are_searched() {
    let experts = experts();
    assert_eq!(experts.len(), 10);
    for (path, source) in experts {
        let expert = source.plan().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (base, ranks) = source.search_base().expect("the same configuration");
        let all = strategies(&base, ranks, &like(&expert), &[], usize::MAX);
        let mut plans =
            all.iter().map(|strategy| base.with_strategy(strategy).expect("strategies are allowed"));
        assert!(plans.any(|plan| plan == expert), "{} is not searched", path.display());
    }
}

#[test]
fn a_search_finds_nothing_worse_than_an_expert() {
    let (_, source) = experts()
        .into_iter()
        .find(|(path, _)| path.ends_with("llama3-70b-64.toml"))
        .expect("Llama 70B is one of them");
    let expert = source.plan().expect("a right configuration");
    let (base, ranks) = source.search_base().expect("the same configuration");
    let settings = Settings {
        base: &base,
        ranks,
        only: &[],
        supported: &[],
        by: By::Time,
        top: 3,
        every: false,
        limit: base.cluster.device.planned_memory().map(Limit::PerRank),
        device: Device::Cpu { threads: 1 },
        fits: &|_, _| true,
    };
    let found = search(&settings, &|_, _, _| {}).expect("the H100's speed is known");
    let timing = time(&expert).expect("the H100's speed is known");
    let judged = TimeRange::of(&expert, &timing).pessimistic_s;
    assert!(found.fastest.expect("something fits").timing.step_s <= timing.step_s);
    let pick = found.pick.expect("something fits");
    assert!(pick.candidate.pessimistic.expect("of a pick") <= 1.02 * judged, "{pick:?}");
}
