//! A map from units to values, with fast lookups, because every computation of a program uses it.

use std::ops::{Index, IndexMut};

use crate::{Plan, Unit};

/// A value for each unit.
pub(super) struct ByUnit<T>(Vec<T>);

impl<T: Clone> ByUnit<T> {
    /// The same value for all.
    pub(super) fn all(plan: &Plan, value: T) -> Self {
        ByUnit(vec![value; BESIDE_LAYERS + plan.model.layers])
    }
}

const BESIDE_LAYERS: usize = 3;

fn place(unit: Unit) -> usize {
    match unit {
        Unit::Table => 0,
        Unit::Positions => 1,
        Unit::Head => 2,
        Unit::Layer(i) => BESIDE_LAYERS + i,
    }
}

impl<T> Index<Unit> for ByUnit<T> {
    type Output = T;

    fn index(&self, unit: Unit) -> &T {
        &self.0[place(unit)]
    }
}

impl<T> IndexMut<Unit> for ByUnit<T> {
    fn index_mut(&mut self, unit: Unit) -> &mut T {
        &mut self.0[place(unit)]
    }
}
