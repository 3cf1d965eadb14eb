//! What a framework can run: restrictions of a search that its profile states, with reasons.

use kintsugi_plan::Plan;
use kintsugi_plan::config::{LayerSplit, ShardingChoice, Strategy};
use kintsugi_spec::{Level, Support};

use crate::{Only, OnlyError};

/// The values of a key that a plan's framework can run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupportedValues {
    only: Only,
    support: Support,
}

impl SupportedValues {
    /// What the framework of a plan can run.
    pub fn by_framework(plan: &Plan) -> Result<Vec<SupportedValues>, OnlyError> {
        let read = |support: &Support| {
            let only = Only::new(&support.key, support.values.clone());
            only.map(|only| SupportedValues { only, support: support.clone() })
        };
        plan.framework.supports.iter().map(read).collect()
    }

    /// Whether the framework can run a strategy. Without replicas there is nothing to shard.
    pub fn allows(&self, strategy: &Strategy) -> bool {
        let meaningless = strategy.mesh.replicas() == 1 && self.support.key.starts_with("sharding.");
        meaningless || self.only.allows(strategy)
    }

    /// Why the framework cannot run a plan, if so.
    pub fn refusal(&self, plan: &Plan) -> Option<String> {
        let strategy = strategy_of(plan);
        let Support { key, reason, .. } = &self.support;
        (!self.allows(&strategy)).then(|| format!("{key} = {}: {reason}", self.only.value(&strategy)))
    }

    /// The restriction in words.
    pub fn describe(&self) -> String {
        let Support { key, values, reason } = &self.support;
        format!("{key} {} ({reason})", values.join(", "))
    }
}

/// The strategy of a plan. Restrictions compare only whether something is sharded and whether layers are divided evenly, so levels
/// and layers are not exact.
fn strategy_of(plan: &Plan) -> Strategy {
    let level = |shards: usize| (shards > 1).then_some(Level::Cluster);
    let (layers, sharding) = (&plan.pipeline.layers, plan.sharding);
    Strategy {
        mesh: plan.mesh,
        micro: plan.batch.micro,
        schedule: plan.pipeline.schedule,
        virtual_stages: plan.pipeline.virtual_stages,
        split: if layers.windows(2).all(|two| two[0] == two[1]) {
            LayerSplit::Even
        } else {
            LayerSplit::LighterEnds
        },
        sequence_parallel: plan.sequence_parallel,
        sharding: ShardingChoice {
            weights: level(sharding.weights),
            gradients: level(sharding.gradients),
            states: level(sharding.states),
            secondary: None,
            gather: sharding.gather,
            reduce: sharding.reduce,
            quantized: sharding.quantized,
        },
        recompute: plan.memory.recompute,
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;
    use kintsugi_spec::presets::FRAMEWORKS;

    use super::*;

    fn plan(sets: &[&str]) -> Plan {
        ConfigSource::text("")
            .sets(["model.preset=gpt-1.4b"])
            .sets(sets)
            .plan()
            .expect("a right configuration")
    }

    #[test]
    fn every_framework_runs_its_own_defaults() {
        for framework in FRAMEWORKS {
            let plan = plan(&[&format!("framework.preset={}", framework.name), "parallel.dp=8"]);
            let supported = SupportedValues::by_framework(&plan).expect(framework.name);
            let refused: Vec<String> = supported.iter().filter_map(|one| one.refusal(&plan)).collect();
            assert!(refused.is_empty(), "{}: {refused:?}", framework.name);
        }
    }

    #[test]
    fn a_framework_says_what_it_cannot_run() {
        let refusals = |sets: &[&str]| {
            let plan = plan(sets);
            let supported = SupportedValues::by_framework(&plan).expect("a right profile");
            supported.iter().filter_map(|one| one.refusal(&plan)).collect::<Vec<_>>()
        };
        let zero = ["framework.preset=nanotron", "sharding.zero=3"];
        assert_eq!(
            refusals(&[&zero[..], &["parallel.dp=2"]].concat()),
            ["sharding.zero = 3: it has no ZeRO-2 and ZeRO-3"]
        );
        assert_eq!(refusals(&[&zero[..], &["parallel.dp=1"]].concat()), [""; 0]);
        assert!(
            SupportedValues::by_framework(&plan(&[
                "framework.supports=[{ key = \"model.layers\", values = [\"1\"], reason = \"none\" }]"
            ]))
            .is_err()
        );
    }
}
