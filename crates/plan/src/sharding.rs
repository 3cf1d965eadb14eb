//! Where weights, gradients and states are, over the levels of the data-parallel axis.
//!
//! The axis is divided into parts, innermost first: the replicas inside a package, those across the packages of a node, those
//! across nodes. A unit's flat buffer is divided by the first part, each piece by the second, and so on. Weights are
//! sharded over the first parts, gradients over these and perhaps more, states over these and perhaps more. So a rank's states are
//! inside its gradient shard, and that is inside its weight shard, and every collective over one part works on one
//! contiguous piece. ZeRO (arXiv 1910.02054), MiCS (arXiv 2205.00119), ZeRO++ (arXiv 2306.10209) and three levels are points
//! of this space.

use std::ops::Range;

use kintsugi_spec::{Axis, Group, Level, Span};
use serde::{Deserialize, Serialize};

use crate::{Codes, Integer, Phase, PhaseKind, Quantized};

/// How often weights are gathered or gradients reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum When {
    /// For every micro-batch: less memory, more traffic.
    #[serde(rename = "micro-batch")]
    MicroBatch,
    /// Once a step.
    #[serde(rename = "step")]
    Step,
}

/// Which gathers start from the secondary shard of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SecondaryUse {
    /// All but the first of a unit in a step.
    #[default]
    All,
    /// Those for a backward. Gathers for a forward or a recomputation fill it anew, as in DeepSpeed before 0.13.2.
    Backward,
}

/// A part of the data-parallel axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// Its span of levels.
    pub span: Span,
    /// Its number of ranks.
    pub ranks: usize,
}

/// There is at most one part for each level of links.
pub const MAX_PARTS: usize = Level::ALL.len();

/// Over how many data-parallel ranks weights, gradients and states are sharded, and over which parts of the axis. 1 is not
/// sharded. Each number divides the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Sharding {
    /// Ranks over which weights are sharded.
    pub weights: usize,
    /// Ranks over which gradients are sharded.
    pub gradients: usize,
    /// Ranks over which optimizer states are sharded.
    pub states: usize,
    /// Ranks over which a secondary shard of the weights is kept during a step (hpZ, arXiv 2306.10209); 1 if there is none.
    pub secondary: usize,
    /// Which gathers start from that shard.
    pub secondary_use: SecondaryUse,
    /// When sharded weights are gathered.
    pub gather: When,
    /// When gradients are reduced.
    pub reduce: When,
    /// The transfers that carry codes.
    pub quantized: Quantized,
    /// A shard's length is a multiple of this: of whole blocks, if something is quantised.
    pub multiple: usize,
    /// The parts of the axis, innermost first. Each has at least two ranks, and all together have all ranks of the axis.
    pub parts: [Option<Part>; MAX_PARTS],
}

impl Sharding {
    /// The multiple that aligns shards in every type.
    pub const ALIGNMENT: usize = 64;

    /// Nothing is sharded over a single replica.
    pub const ONE_REPLICA: Sharding = Sharding {
        weights: 1,
        gradients: 1,
        states: 1,
        secondary: 1,
        secondary_use: SecondaryUse::All,
        gather: When::MicroBatch,
        reduce: When::Step,
        quantized: Quantized::NONE,
        multiple: Sharding::ALIGNMENT,
        parts: [None; MAX_PARTS],
    };

    /// The same parts with nothing sharded over them.
    #[must_use]
    pub fn unsharded(self) -> Sharding {
        let quantized = Quantized::NONE;
        let secondary_use = SecondaryUse::All;
        Sharding { weights: 1, gradients: 1, states: 1, secondary: 1, secondary_use, quantized, ..self }
    }

    /// Whether gradients are reduced to their shards after every micro-batch.
    pub fn reduces_every_micro_batch(&self) -> bool {
        self.gradients > 1 && self.reduce == When::MicroBatch
    }

    /// The parts of the data-parallel axis, innermost first.
    pub fn parts(&self) -> impl DoubleEndedIterator<Item = Part> + '_ {
        self.parts.iter().flatten().copied()
    }

    /// The number of parts that together have `ranks` ranks.
    pub fn depth(&self, ranks: usize) -> usize {
        let mut together = 1;
        let inside = |part: &Part| {
            let wanted = together < ranks;
            together *= part.ranks;
            wanted
        };
        self.parts().take_while(inside).count()
    }

    /// The number of parts inside the part of a group, which must be one of this sharding's.
    pub fn depth_of(&self, group: Group) -> usize {
        let place = self.parts().position(|part| group_of(part) == group);
        place.unwrap_or_else(|| panic!("{group} is no part of {self:?}"))
    }

    /// Whether a group is one of the parts.
    pub fn has(&self, group: Group) -> bool {
        self.parts().any(|part| group_of(part) == group)
    }

    /// The groups of the parts, innermost first.
    pub fn groups(&self) -> impl Iterator<Item = Group> + '_ {
        self.parts().map(group_of)
    }

    /// The piece of `len` elements that belongs to replica `dp` after the first `depth` divisions.
    pub fn piece(&self, len: usize, dp: usize, depth: usize) -> Range<usize> {
        let (mut start, mut len, mut rest) = (0, len, dp);
        for part in self.parts().take(depth) {
            len /= part.ranks;
            start += rest % part.ranks * len;
            rest /= part.ranks;
        }
        start..start + len
    }

    /// The multiple for shards of whole blocks of these codes.
    pub fn multiple_for(quantized: Quantized) -> usize {
        quantized.block().max(Sharding::ALIGNMENT)
    }

    /// The gathers that make a unit's weights whole, outermost part first. If there is a secondary shard, the outer ones fill
    /// it, and only these carry codes.
    pub fn gathers(&self) -> Vec<Phase> {
        let secondary = self.depth(self.secondary);
        let mut phases = self.gathers_between(secondary, self.depth(self.weights), self.quantized.weights);
        phases.extend(self.gathers_between(0, secondary, None));
        phases
    }

    /// The gathers that make a unit's weights whole from the secondary shard, if there is one.
    pub fn later_gathers(&self) -> Vec<Phase> {
        match self.secondary {
            1 => self.gathers(),
            secondary => self.gathers_between(0, self.depth(secondary), None),
        }
    }

    /// The gathers that bring updated weights from the owners of their states.
    pub fn refreshes(&self) -> Vec<Phase> {
        self.gathers_between(self.depth(self.weights), self.depth(self.states), self.quantized.refresh)
    }

    /// The reductions of a gradient that end with its shard: innermost part first.
    pub fn inner_reductions(&self) -> Vec<Phase> {
        self.scatters_between(0, self.depth(self.gradients)).collect()
    }

    /// The reductions after those: to the owners of the states, and then the sum over the replicas that own the same states.
    pub fn outer_reductions(&self) -> Vec<Phase> {
        let states = self.depth(self.states);
        let groups: Vec<Group> = self.groups().collect();
        let plain = |kind| move |&over: &Group| Phase::plain(over, kind);
        let mut phases: Vec<Phase> = self.scatters_between(self.depth(self.gradients), states).collect();
        // A sum level by level: scattered inwards, summed over the outermost part, and gathered outwards.
        if let Some((outermost, inner)) = groups[states..].split_last() {
            phases.extend(inner.iter().map(plain(PhaseKind::Scatter)));
            phases.push(Phase::plain(*outermost, PhaseKind::Sum));
            phases.extend(inner.iter().rev().map(plain(PhaseKind::Gather)));
        }
        phases
    }

    /// The placement by its common name, or by the replicas that share weights, gradients and states; and what is quantised.
    pub fn name(&self) -> String {
        let Quantized { weights, refresh, gradients } = self.quantized;
        let codes = [("weights", weights), ("refresh", refresh), ("gradients", gradients)];
        let codes = codes.into_iter().filter_map(|(what, codes)| Some((what, codes?.integer)));
        let named = |name: String, (what, integer): (&str, Integer)| format!("{name}, {integer} {what}");
        codes.fold(self.placement(), named)
    }

    fn placement(&self) -> String {
        let [weights, gradients, states] = [self.weights, self.gradients, self.states];
        let dp: usize = self.parts().map(|part| part.ranks).product();
        if ![weights, gradients, states].iter().all(|&shards| shards == 1 || shards == dp) {
            return format!(
                "weights over {weights}, gradients over {gradients}, states over {states} replicas"
            );
        }
        let zero = [states, gradients, weights].iter().rposition(|&shards| shards > 1);
        let Some(zero) = zero else { return "nothing sharded over dp".to_owned() };
        let secondary = match (self.secondary, self.secondary_use) {
            (1, _) => String::new(),
            (ranks, SecondaryUse::All) => format!(" with a secondary shard over {ranks}"),
            (ranks, SecondaryUse::Backward) => {
                format!(" with a secondary shard over {ranks} for the backward")
            }
        };
        format!("ZeRO-{}{secondary}", zero + 1)
    }

    /// Whether a phase is the last one of the inner reductions, which leaves only the gradient's shard.
    pub fn leaves_shard(&self, phase: Phase) -> bool {
        let scattered = phase.kind == PhaseKind::Scatter && self.has(phase.over);
        self.gradients > 1 && scattered && self.depth_of(phase.over) + 1 == self.depth(self.gradients)
    }

    /// Whether a phase is the first one that reduces a gradient over dp.
    pub fn begins_reduction(&self, phase: Phase) -> bool {
        phase.kind != PhaseKind::Gather && self.groups().next() == Some(phase.over)
    }

    fn gathers_between(&self, from: usize, to: usize, codes: Option<Codes>) -> Vec<Phase> {
        let groups: Vec<Group> = self.groups().collect();
        let gather = |&over: &Group| Phase { over, kind: PhaseKind::Gather, codes };
        groups[from..to].iter().rev().map(gather).collect()
    }

    fn scatters_between(&self, from: usize, to: usize) -> impl Iterator<Item = Phase> + '_ {
        let codes = self.quantized.gradients;
        let scatter = move |over| Phase { over, kind: PhaseKind::Scatter, codes };
        self.groups().skip(from).take(to - from).map(scatter)
    }
}

fn group_of(part: Part) -> Group {
    Group::Along(Axis::Data, part.span)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twelve replicas: two in a package, two packages in a node, three nodes.
    fn sharding([weights, gradients, states]: [usize; 3]) -> Sharding {
        let part = |span, ranks| Some(Part { span, ranks });
        Sharding {
            weights,
            gradients,
            states,
            secondary: 1,
            secondary_use: SecondaryUse::All,
            gather: When::MicroBatch,
            reduce: When::MicroBatch,
            quantized: Quantized::NONE,
            multiple: Sharding::ALIGNMENT,
            parts: [
                part(Span::Inside(Level::Package), 2),
                part(Span::Between(Level::Package, Level::Node), 2),
                part(Span::Across(Level::Node), 3),
                None,
            ],
        }
    }

    #[test]
    fn shards_are_nested_and_cover_everything() {
        let sharding = sharding([2, 4, 12]);
        for (depth, shards) in [(0, 1), (1, 2), (2, 4), (3, 12)] {
            assert_eq!(sharding.depth(shards), depth);
            let mut pieces: Vec<Range<usize>> = (0..12).map(|dp| sharding.piece(24, dp, depth)).collect();
            for (dp, piece) in pieces.iter().enumerate() {
                let outer = sharding.piece(24, dp, depth.saturating_sub(1));
                assert!(outer.start <= piece.start && piece.end <= outer.end);
            }
            pieces.sort_by_key(|piece| piece.start);
            pieces.dedup();
            assert_eq!(pieces.len(), shards);
            assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
        // Replica 7 is on the second node, in its second package, and the second of that.
        assert_eq!(sharding.piece(24, 7, 3), 12 + 6 + 2..12 + 6 + 4);
    }

    #[test]
    fn every_part_is_reduced_once_and_gathered_back() {
        let text = |phases: Vec<Phase>| phases.iter().map(Phase::to_string).collect::<Vec<_>>().join(", ");
        let all = |shards| {
            let sharding = sharding(shards);
            [
                sharding.gathers(),
                sharding.inner_reductions(),
                sharding.outer_reductions(),
                sharding.refreshes(),
            ]
            .map(text)
        };
        let (package, between, node) =
            ("dp inside a package", "dp across packages inside a node", "dp across nodes");
        assert_eq!(
            all([2, 4, 12]),
            [
                format!("gather over {package}"),
                format!("scatter over {package}, scatter over {between}"),
                format!("scatter over {node}"),
                format!("gather over {node}, gather over {between}"),
            ]
        );
        assert_eq!(
            all([1, 1, 1]),
            [
                String::new(),
                String::new(),
                format!(
                    "scatter over {package}, scatter over {between}, sum over {node}, gather over {between}, \
                     gather over {package}"
                ),
                String::new(),
            ]
        );
        // Codes: in everything but sums and gathers from a secondary shard.
        let codes = |integer| Some(Codes { integer, block: 256 });
        let coded = |shards, secondary| {
            let quantized = Quantized {
                weights: codes(Integer::Int8),
                refresh: codes(Integer::Int8),
                gradients: codes(Integer::Int4),
            };
            let sharding = Sharding { secondary, quantized, ..sharding(shards) };
            [
                sharding.gathers(),
                sharding.later_gathers(),
                sharding.inner_reductions(),
                sharding.outer_reductions(),
                sharding.refreshes(),
            ]
            .map(text)
        };
        assert_eq!(
            coded([12, 12, 12], 4),
            [
                format!("gather over {node} in int8, gather over {between}, gather over {package}"),
                format!("gather over {between}, gather over {package}"),
                format!(
                    "scatter over {package} in int4, scatter over {between} in int4, scatter over {node} in int4"
                ),
                String::new(),
                String::new(),
            ]
        );
        assert_eq!(
            coded([2, 2, 4], 1),
            [
                format!("gather over {package} in int8"),
                format!("gather over {package} in int8"),
                format!("scatter over {package} in int4"),
                format!("scatter over {between} in int4, sum over {node}"),
                format!("gather over {between} in int8"),
            ]
        );
        assert_eq!(
            all([4, 4, 4]),
            [
                format!("gather over {between}, gather over {package}"),
                format!("scatter over {package}, scatter over {between}"),
                format!("sum over {node}"),
                String::new(),
            ]
        );
    }
}
