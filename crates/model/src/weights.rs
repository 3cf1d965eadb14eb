//! A unit's weights and gradients, by name.

use std::cell::Cell;

use kintsugi_plan::parameters::{Slot, UnitLayout};
use kintsugi_tensor::View;
use kintsugi_tensor::ops::Gradient;

/// The whole weights of a unit on this rank.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    flat: View<'a>,
    layout: &'a UnitLayout,
}

impl<'a> Weights<'a> {
    /// Names the parts of a flat buffer.
    pub fn new(flat: View<'a>, layout: &'a UnitLayout) -> Self {
        Weights { flat, layout }
    }

    /// One parameter.
    pub fn get(&self, slot: Slot) -> View<'a> {
        self.flat.slice(self.layout.range(slot))
    }

    /// One parameter that only some families have.
    pub fn find(&self, slot: Slot) -> Option<View<'a>> {
        self.layout.find(slot).map(|placed| self.flat.slice(placed.range.clone()))
    }

    /// Neighbours that are used as one matrix.
    pub fn span(&self, first: Slot, last: Slot) -> View<'a> {
        self.flat.slice(self.layout.span(first, last))
    }

    /// Neighbours that only some families have.
    pub fn find_span(&self, first: Slot, last: Slot) -> Option<View<'a>> {
        self.layout.find(first).map(|_| self.span(first, last))
    }
}

/// The whole gradient of a unit on this rank, and which of its parameters this step has written already.
///
/// The first write of a step overwrites and later ones add, so gradients need no clearing.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    flat: View<'a>,
    layout: &'a UnitLayout,
    written: &'a Cell<u32>,
}

impl<'a> Gradients<'a> {
    /// Names the parts of a flat buffer; bit `i` of `written` stands for the unit's parameter `i`.
    pub fn new(flat: View<'a>, layout: &'a UnitLayout, written: &'a Cell<u32>) -> Self {
        Gradients { flat, layout, written }
    }

    /// Where to write the gradient of one parameter.
    pub fn get(&self, slot: Slot) -> Gradient<'a> {
        self.span(slot, slot)
    }

    /// Where to write the gradient of one parameter that only some families have.
    pub fn find(&self, slot: Slot) -> Option<Gradient<'a>> {
        self.layout.find(slot).map(|_| self.get(slot))
    }

    /// Where to write the gradient of neighbours that are used as one matrix.
    pub fn span(&self, first: Slot, last: Slot) -> Gradient<'a> {
        let range = self.layout.span(first, last);
        let covered = self.layout.placed.iter().enumerate().filter(|(_, p)| range.contains(&p.range.start));
        let bits = covered.fold(0, |bits, (i, _)| bits | 1 << i);
        let accumulate = self.written.get() & bits != 0;
        debug_assert!(!accumulate || self.written.get() & bits == bits, "neighbours are written together");
        self.written.set(self.written.get() | bits);
        Gradient { view: self.flat.slice(range), accumulate }
    }

    /// Where to write the gradient of neighbours that only some families have.
    pub fn find_span(&self, first: Slot, last: Slot) -> Option<Gradient<'a>> {
        self.layout.find(first).map(|_| self.span(first, last))
    }
}
