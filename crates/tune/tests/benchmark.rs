//! Trials until 95 % of the best on published tables: a part of what `scripts/bench-tune` measures.
//!
//! The tables are outside the repository, in `shared/validation`. Without them the test says so and passes.

use std::path::PathBuf;

use kintsugi_testing::{Need, skip};
use kintsugi_tune::trials::Proposal;
use kintsugi_tune::trials::benchmark::{MeasuredJob, Method};
use kintsugi_validate::{Layout, LayoutGroup, Run, Tables, fit, layout_groups};

/// The source of the groups, which the constants are not fitted on.
const SOURCE: &str = "nanotron";
/// Groups with little, medium and much to try, and one where almost everything fails.
const GROUPS: [&str; 4] = ["llama-1B 1", "llama-8B 2", "llama-8B 4", "llama-80B 4"];
const SEEDS: u64 = 5;

fn job(group: &LayoutGroup) -> MeasuredJob {
    let proposal = |layout: &Layout| Proposal {
        values: layout.values.clone(),
        predicted: layout.predicted_s,
        memory: layout.memory_share,
    };
    let pair = |layout: &Layout| (proposal(layout), layout.measured_s.clone());
    MeasuredJob::new(group.layouts.iter().map(pair).collect())
}

fn median(job: &MeasuredJob, method: Method) -> usize {
    let mut trials: Vec<usize> =
        (0..SEEDS).map(|seed| job.trials_until_good(method, seed).expect("something worked")).collect();
    trials.sort_unstable();
    trials[trials.len() / 2]
}

#[test]
fn few_trials_find_a_good_layout_of_a_published_table() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/validation");
    if !folder.exists() {
        skip(Need::Tables, "there are no published runs beside the repository, in shared/validation");
        return;
    }
    let tables = Tables::read(&folder).expect("the tables can be read");
    let constants = fit(&tables.runs, Some(SOURCE), &mut |_| {}).constants;
    let chosen = |run: &Run| run.source == SOURCE && GROUPS.contains(&run.group.as_str());
    let runs: Vec<Run> = tables.runs.into_iter().filter(chosen).collect();
    let groups = layout_groups(&runs, &constants, 256);
    assert_eq!(groups.len(), GROUPS.len());
    let mut random = Vec::new();
    for group in &groups {
        let job = job(group);
        let [ours, order] = [Method::Tuner, Method::PlannerOrder].map(|method| median(&job, method));
        assert!(
            ours <= 10 && ours <= order + 2,
            "{}: {ours} trials, by the planner's order {order}",
            group.name
        );
        // Without a planner, and with a wrong one, it is still a search.
        let wrong = [Method::WithoutPlanner, Method::ShuffledPlanner].map(|method| median(&job, method));
        random.push((median(&job, Method::Random), wrong));
    }
    let sum = |of: fn(&(usize, [usize; 2])) -> usize| random.iter().map(of).sum::<usize>();
    assert!(sum(|group| group.1[0]) < sum(|group| group.0), "{random:?}");
    assert!(sum(|group| group.1[1]) < sum(|group| group.0), "{random:?}");
}
