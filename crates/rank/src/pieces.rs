//! Parts of parameters on the host, and whole parameters assembled from the parts of all ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kintsugi_plan::{Plan, Unit};
use kintsugi_tensor::View;
use serde::{Deserialize, Serialize};

use crate::rank::Rank;
use crate::unit::UnitState;

/// A contiguous range of a unit's flat buffer on one tensor-parallel rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UnitValues {
    /// The unit.
    pub unit: Unit,
    /// Index of the tensor-parallel rank.
    pub part: usize,
    /// The range in the flat buffer.
    pub range: Range<usize>,
    /// Its values.
    pub values: Vec<f32>,
}

/// Whole parameters by name, without vocabulary padding.
pub type WholeParameters = BTreeMap<String, Vec<f32>>;

impl Rank {
    pub(crate) fn pieces<'a>(
        &'a self,
        units: impl Iterator<Item = &'a UnitState>,
        view: impl Fn(&UnitState) -> (View<'_>, Range<usize>),
    ) -> Vec<UnitValues> {
        units
            .map(|state| {
                let (view, range) = view(state);
                let values = self.backend.read(view);
                UnitValues { unit: state.layout.unit, part: self.at.tp(), range, values }
            })
            .collect()
    }
}

/// Whole parameters, and which of them have copies that are not bit-identical.
pub struct AssembledParameters {
    /// The parameters. If there are several copies, the last rank's.
    pub whole: WholeParameters,
    /// The names of the parameters whose copies differ.
    pub diverged: BTreeSet<String>,
}

/// Assembles the whole parameters of the units that have pieces. Panics if an element of them is missing.
pub fn assemble(plan: &Plan, pieces: &[UnitValues]) -> AssembledParameters {
    let (mut whole, mut diverged) = (WholeParameters::new(), BTreeSet::new());
    let has_pieces = |unit: &Unit| pieces.iter().any(|piece| piece.unit == *unit);
    for unit in plan.units().into_iter().filter(has_pieces) {
        let layout = plan.layout(unit);
        for placed in &layout.placed {
            let parameter = &placed.parameter;
            let mut values: Vec<Option<f32>> = vec![None; parameter.valid_elements()];
            let mut alike = true;
            for piece in pieces.iter().filter(|piece| piece.unit == unit) {
                let start = placed.range.start.max(piece.range.start);
                let end = placed.range.end.min(piece.range.end);
                for flat in start..end {
                    let index = parameter.global_index(plan.mesh.tp(), piece.part, flat - placed.range.start);
                    if index < values.len() {
                        let value = piece.values[flat - piece.range.start];
                        let before = values[index].replace(value);
                        alike &= before.is_none_or(|before| before.to_bits() == value.to_bits());
                    }
                }
            }
            let name = parameter.name();
            let values =
                values.into_iter().map(|v| v.unwrap_or_else(|| panic!("{name} has a hole"))).collect();
            if !alike {
                diverged.insert(name.clone());
            }
            whole.insert(name, values);
        }
    }
    AssembledParameters { whole, diverged }
}
