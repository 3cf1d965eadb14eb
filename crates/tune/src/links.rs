//! The best strategies over the range of links between nodes.

use kintsugi_plan::Plan;
use kintsugi_plan::config::Strategy;
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_simulate::{LinkTimes, link_scenarios, uses_links_between_nodes};

use crate::search::timings;
use crate::{Candidate, Settings};

/// Times candidates over the range of links, and stores the times in them, if they run on several nodes.
pub(crate) fn time_over_links(settings: &Settings, model: &DeviceModel, candidates: &mut [Candidate]) {
    let plan = |base: &Plan, candidate: &Candidate| {
        base.with_strategy(&candidate.strategy).expect("strategies are allowed")
    };
    if !candidates.first().is_some_and(|first| uses_links_between_nodes(&plan(settings.base, first))) {
        return;
    }
    let strategies: Vec<Strategy> = candidates.iter().map(|candidate| candidate.strategy).collect();
    let scenarios = link_scenarios(settings.base).map(|base| timings(&base, model, &strategies, &|_| {}));
    for (i, candidate) in candidates.iter_mut().enumerate() {
        candidate.links = Some(LinkTimes::new(scenarios.each_ref().map(|all| all[i].step_s)));
    }
}
