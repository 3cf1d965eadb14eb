//! What makes a strategy complicated to run: its mechanisms.

use kintsugi_plan::config::{LayerSplit, Strategy};
use kintsugi_plan::{Recompute, ScheduleKind};
use kintsugi_spec::Level;

use crate::only::zero;

/// One thing that a strategy may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mechanism {
    /// Tensor parallelism.
    Tensor,
    /// Pipeline parallelism.
    Pipeline,
    /// Sharding of states, then also of gradients, then also of weights.
    Zero,
    /// Sharding over a part of the replicas.
    Levels,
    /// A secondary shard of the weights (hpZ).
    Secondary,
    /// Recomputation.
    Recompute,
    /// Several chunks per stage.
    Chunks,
    /// A backward in two parts.
    ZeroBubble,
    /// Chunks with different numbers of layers.
    Uneven,
    /// Transfers that carry codes.
    Codes,
}

impl Mechanism {
    /// All of them.
    pub const ALL: [Mechanism; 10] = [
        Mechanism::Tensor,
        Mechanism::Pipeline,
        Mechanism::Zero,
        Mechanism::Levels,
        Mechanism::Secondary,
        Mechanism::Recompute,
        Mechanism::Chunks,
        Mechanism::ZeroBubble,
        Mechanism::Uneven,
        Mechanism::Codes,
    ];

    /// How much a strategy has of it. A ZeRO stage counts its number, and chunks count their doublings; all others count one, and
    /// codes one for each kind of transfer.
    pub fn count(self, strategy: &Strategy) -> usize {
        let sharding = &strategy.sharding;
        let levels = [sharding.weights, sharding.gradients, sharding.states];
        match self {
            Mechanism::Tensor => usize::from(strategy.mesh.tp() > 1),
            Mechanism::Pipeline => usize::from(strategy.mesh.pp() > 1),
            Mechanism::Zero => zero(strategy),
            Mechanism::Levels => {
                usize::from(levels.into_iter().flatten().any(|level| level != Level::Cluster))
            }
            Mechanism::Secondary => usize::from(sharding.secondary.is_some()),
            Mechanism::Recompute => usize::from(strategy.recompute != Recompute::None),
            Mechanism::Chunks => strategy.virtual_stages.next_power_of_two().ilog2() as usize,
            Mechanism::ZeroBubble => usize::from(strategy.schedule == ScheduleKind::ZeroBubble),
            Mechanism::Uneven => usize::from(strategy.split != LayerSplit::Even),
            Mechanism::Codes => sharding.quantized.iter().count(),
        }
    }

    /// What a strategy that has it is called.
    pub fn describe(self, strategy: &Strategy) -> String {
        match self {
            Mechanism::Tensor => format!("tp {}", strategy.mesh.tp()),
            Mechanism::Pipeline => format!("pp {}", strategy.mesh.pp()),
            Mechanism::Zero => format!("ZeRO-{}", zero(strategy)),
            Mechanism::Levels => "sharding by level".to_owned(),
            Mechanism::Secondary => "a secondary shard".to_owned(),
            Mechanism::Recompute => match strategy.recompute {
                Recompute::None => "no recomputation".to_owned(),
                Recompute::Selective => "selective recomputation".to_owned(),
                Recompute::Full => "full recomputation".to_owned(),
            },
            Mechanism::Chunks => format!("{} chunks", strategy.virtual_stages),
            Mechanism::ZeroBubble => "zero-bubble".to_owned(),
            Mechanism::Uneven => "uneven chunks".to_owned(),
            Mechanism::Codes => "codes".to_owned(),
        }
    }
}

/// The number of mechanisms that a strategy uses.
pub fn complexity(strategy: &Strategy) -> usize {
    Mechanism::ALL.iter().map(|mechanism| mechanism.count(strategy)).sum()
}

/// Whether a strategy changes no number of a training beside rounding.
pub(crate) fn is_lossless(strategy: &Strategy) -> bool {
    Mechanism::Codes.count(strategy) == 0
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ShardingChoice;
    use kintsugi_plan::{Axis, Mesh};

    use super::*;

    #[test]
    fn mechanisms_are_counted() {
        let plain = Strategy {
            mesh: Mesh::ONE.with(Axis::Data, 8),
            micro: 4,
            schedule: ScheduleKind::OneForwardOneBackward,
            virtual_stages: 1,
            split: LayerSplit::Even,
            sequence_parallel: false,
            sharding: ShardingChoice::NONE,
            recompute: Recompute::None,
        };
        assert_eq!(complexity(&plain), 0, "replicas alone");
        let cluster = Some(Level::Cluster);
        let zero1 = ShardingChoice { states: cluster, ..ShardingChoice::NONE };
        let zero3 = ShardingChoice { weights: cluster, gradients: cluster, ..zero1 };
        assert_eq!(complexity(&Strategy { sharding: zero3, ..plain }), 3);
        let mics = ShardingChoice { weights: Some(Level::Node), ..zero3 };
        assert_eq!(complexity(&Strategy { sharding: mics, ..plain }), 4);
        // Llama 3 405B: tp, pp, ZeRO-1, four chunks and uneven ends.
        let llama = Strategy {
            mesh: plain.mesh.with(Axis::Tensor, 8).with(Axis::Pipeline, 16),
            schedule: ScheduleKind::Interleaved,
            virtual_stages: 4,
            split: LayerSplit::LighterEnds,
            sequence_parallel: true,
            sharding: zero1,
            ..plain
        };
        assert_eq!(complexity(&llama), 6);
        assert_eq!(complexity(&Strategy { virtual_stages: 12, ..llama }), 8);
        assert_eq!(complexity(&Strategy { recompute: Recompute::Full, ..llama }), 7);
    }
}
