//! Parts of parameters as the host sees them, and whole parameters put together from all ranks' parts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kintsugi_plan::{Plan, Unit};
use kintsugi_tensor::View;

use crate::rank::Rank;
use crate::unit::UnitState;

/// A run of a unit's flat buffer on one tensor-parallel part.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The unit.
    pub unit: Unit,
    /// Tensor-parallel part.
    pub part: usize,
    /// Where it lies in the flat buffer.
    pub range: Range<usize>,
    /// Its values.
    pub values: Vec<f32>,
}

/// Whole parameters by name, vocabulary padding left out.
pub type Whole = BTreeMap<String, Vec<f32>>;

impl Rank {
    pub(crate) fn pieces(&self, view: impl Fn(&UnitState) -> (View<'_>, Range<usize>)) -> Vec<Piece> {
        self.units
            .iter()
            .map(|state| {
                let (view, range) = view(state);
                let values = self.backend.read(view);
                Piece { unit: state.layout.unit, part: self.at.tp, range, values }
            })
            .collect()
    }
}

/// Whole parameters that were put together, and those of which two ranks hold copies that differ in any bit.
pub struct Assembled {
    /// The parameters; of copies, the last rank's.
    pub whole: Whole,
    /// The names of those whose copies differ.
    pub torn: BTreeSet<String>,
}

/// Puts whole parameters together; panics if an element is missing.
pub fn assemble(plan: &Plan, pieces: &[Piece]) -> Assembled {
    let (mut whole, mut torn) = (Whole::new(), BTreeSet::new());
    for unit in plan.units() {
        let layout = plan.layout(unit);
        for placed in &layout.placed {
            let parameter = &placed.parameter;
            let mut values: Vec<Option<f32>> = vec![None; parameter.valid_elements()];
            let mut alike = true;
            for piece in pieces.iter().filter(|piece| piece.unit == unit) {
                let start = placed.range.start.max(piece.range.start);
                let end = placed.range.end.min(piece.range.end);
                for flat in start..end {
                    let index = parameter.global_index(plan.mesh.tp, piece.part, flat - placed.range.start);
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
                torn.insert(name.clone());
            }
            whole.insert(name, values);
        }
    }
    Assembled { whole, torn }
}
