//! Frozen weights: the units that training leaves as they are.
//!
//! A frozen unit has weights and nothing else: no gradient and no reduction of it, no states, no master weights, no average. A
//! block of frozen units passes the gradient of its output on to its input. Below the first block with a trained unit nobody
//! needs a gradient: there is no backward, and forwards save nothing for one.

use std::collections::BTreeSet;

use crate::config::ConfigError;
use crate::config::error::invalid;
use crate::parameters::{Parameter, parameters};
use crate::{Block, Optimizer, ParameterGroup, Plan, Unit};

/// The units of a model that are frozen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrozenUnits(BTreeSet<Unit>);

impl FrozenUnits {
    /// Whether nothing is frozen.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a unit is frozen.
    pub fn contains(&self, unit: Unit) -> bool {
        self.0.contains(&unit)
    }

    /// The same with these layers frozen and no others.
    #[must_use]
    pub fn with_layers(&self, layers: usize) -> Self {
        let others = self.0.iter().copied().filter(|unit| !matches!(unit, Unit::Layer(_)));
        FrozenUnits(others.chain((0..layers).map(Unit::Layer)).collect())
    }

    /// The same with the units of the embedding frozen, or trained.
    #[must_use]
    pub fn with_embedding(&self, frozen: bool) -> Self {
        let embedding = [Unit::Table, Unit::Positions];
        let others = self.0.iter().copied().filter(|unit| !embedding.contains(unit));
        FrozenUnits(others.chain(embedding.into_iter().filter(|_| frozen)).collect())
    }

    /// The units that the groups of an optimizer freeze.
    pub(crate) fn resolve(optimizer: &Optimizer, plan: &Plan) -> Result<Self, ConfigError> {
        let frozen = |parameter: &Parameter| optimizer.group_of(parameter).filter(|group| group.frozen);
        let mut units = BTreeSet::new();
        if !optimizer.groups.iter().any(|group| group.frozen) {
            return Ok(FrozenUnits(units));
        }
        let all = plan.units();
        for &unit in &all {
            let list = parameters(&plan.model, unit, 1);
            let Some((first, group)) = list.iter().find_map(|one| frozen(one).map(|group| (one, group)))
            else {
                continue;
            };
            if let Some(trained) = list.iter().find(|parameter| frozen(parameter).is_none()) {
                return Err(partly(group, first, trained));
            }
            units.insert(unit);
        }
        if units.len() == all.len() {
            return Err(invalid(
                "optimizer.groups.frozen",
                true,
                "freezes every parameter; leave some to train",
            ));
        }
        Ok(FrozenUnits(units))
    }
}

/// The error of a unit that is frozen in parts.
fn partly(group: &ParameterGroup, frozen: &Parameter, trained: &Parameter) -> ConfigError {
    let rule = format!(
        "freezes {} and not {}; freeze whole units, such as \"table.*\", \"layer.0.*\", \"layer.*\" or \"head.*\"",
        frozen.name(),
        trained.name()
    );
    invalid("optimizer.groups.parameters", format!("\"{}\"", group.parameters), rule)
}

impl Plan {
    /// Whether training leaves the weights of a unit as they are.
    #[inline]
    pub fn is_frozen(&self, unit: Unit) -> bool {
        self.frozen.contains(unit)
    }

    /// Whether a block has only frozen units.
    pub(crate) fn is_frozen_block(&self, block: Block) -> bool {
        self.units_of(block).all(|unit| self.is_frozen(unit))
    }

    /// The first block with a trained unit. This block and those after it have a backward.
    pub fn first_backward(&self) -> Block {
        let layers = (0..self.model.layers).map(Block::Layer);
        let mut blocks = std::iter::once(Block::Embedding).chain(layers);
        blocks.find(|&block| !self.is_frozen_block(block)).unwrap_or(Block::Head)
    }

    /// The trained units of a stage, in model order.
    pub fn trained_units(&self, stage: usize) -> Vec<Unit> {
        let mut units = self.stage_units(stage);
        units.retain(|&unit| !self.is_frozen(unit));
        units
    }

    /// Number of trained layers of a stage.
    pub fn trained_layers(&self, stage: usize) -> usize {
        self.trained_units(stage).iter().filter(|unit| matches!(unit, Unit::Layer(_))).count()
    }

    /// The trained units whose weights a block uses.
    pub(crate) fn trained_units_of(&self, block: Block) -> impl Iterator<Item = Unit> + '_ {
        self.units_of(block).filter(|&unit| !self.is_frozen(unit))
    }

    /// Number of parameters of the model that are trained, without vocabulary padding.
    pub fn trained_parameter_count(&self) -> u64 {
        let trained = self.units().into_iter().filter(|&unit| !self.is_frozen(unit));
        trained.map(|unit| self.elements(unit)).sum()
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{ConfigError, ConfigSource};
    use crate::{BackwardPart, Block, Computation, Op, Plan, Transfer, Unit};

    fn plan(groups: &str, sets: &[&str]) -> Result<Plan, ConfigError> {
        let groups = format!("optimizer.groups=[{groups}]");
        ConfigSource::demo()
            .without(&["parallel", "sharding"])
            .sets(["model.layers=4", &groups])
            .sets(sets)
            .plan()
    }

    fn frozen(patterns: &[&str]) -> String {
        let group = |pattern: &&str| format!("{{ parameters = \"{pattern}\", frozen = true }}");
        patterns.iter().map(group).collect::<Vec<_>>().join(", ")
    }

    fn computations(plan: &Plan, stage: usize, block: Block) -> Vec<Computation> {
        let of_block =
            |op: &Op| op.computation().filter(|_| op.block() == Some(block) && op.micro() == Some(0));
        plan.program(stage).ops.iter().filter_map(of_block).collect()
    }

    #[test]
    fn a_backward_ends_at_the_first_block_with_a_trained_unit() {
        let below = frozen(&["table.*", "positions.*", "layer.0.*", "layer.2.*"]);
        let plan = plan(&below, &["memory.recompute=full"]).expect("a legal config");
        let of = |block| computations(&plan, 0, block);
        let [both, passed] = [BackwardPart::Both, BackwardPart::Frozen].map(Computation::Backward);
        assert_eq!(of(Block::Embedding), [Computation::Evaluate]);
        assert_eq!(of(Block::Layer(0)), [Computation::Evaluate]);
        assert_eq!(of(Block::Layer(1)), [Computation::Forward, Computation::Recompute, both]);
        assert_eq!(of(Block::Layer(2)), [Computation::Forward, Computation::Recompute, passed]);
        assert_eq!(of(Block::Head), [Computation::Forward, both]);
    }

    #[test]
    fn frozen_stages_neither_get_gradients_nor_send_any() {
        let below = frozen(&["table.*", "positions.*", "layer.0.*", "layer.1.*"]);
        for schedule in ["1f1b", "gpipe", "zero-bubble"] {
            let schedule = format!("parallel.schedule={schedule}");
            let sets = ["parallel.pp=2", "parallel.dp=2", "parallel.tp=1", "sharding.zero=3", &schedule];
            let plan = plan(&below, &sets).expect("a legal config");
            let messages = |stage| -> Vec<Transfer> {
                let transfers = plan.program(stage).ops.into_iter().filter_map(Op::transfer);
                transfers.filter(|transfer| transfer.message().is_some()).collect()
            };
            assert!(messages(0).iter().all(|transfer| matches!(transfer, Transfer::Send(_))), "{schedule}");
            assert!(
                messages(1).iter().all(|transfer| matches!(transfer, Transfer::Receive(_))),
                "{schedule}"
            );
            let changes =
                |op: &Op| matches!(op.transfer(), Some(Transfer::Reduce { .. } | Transfer::Refresh { .. }));
            assert!(!plan.program(0).ops.iter().any(changes), "{schedule}");
            assert!(plan.program(1).ops.iter().any(changes), "{schedule}");
        }
    }

    #[test]
    fn trained_parameters_are_counted() {
        let plan = plan(&frozen(&["layer.*"]), &[]).expect("a legal config");
        let layers: u64 = (0..4).map(|layer| plan.elements(Unit::Layer(layer))).sum();
        assert_eq!(plan.trained_parameter_count(), plan.parameter_count() - layers);
    }

    #[test]
    fn units_are_frozen_as_a_whole_and_never_all() {
        let error = |groups: &str| plan(groups, &[]).expect_err("a wrong config").to_string();
        assert_eq!(
            error(&frozen(&["layer.*_weight"])),
            "optimizer.groups.parameters = \"layer.*_weight\" freezes layer.0.attention_norm_weight and not \
             layer.0.attention_norm_bias; freeze whole units, such as \"table.*\", \"layer.0.*\", \"layer.*\" or \"head.*\""
        );
        assert_eq!(
            error(&frozen(&["*"])),
            "optimizer.groups.frozen = true freezes every parameter; leave some to train"
        );
        assert_eq!(
            error("{ parameters = \"table.*\", frozen = true, lr_factor = 0.5 }"),
            "optimizer.groups.lr_factor = 0.5 has no meaning with frozen = true; leave it out"
        );
    }
}
