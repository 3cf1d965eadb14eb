//! A unit's weights and gradients, by name.

use std::cell::Cell;

use kintsugi_plan::parameters::{ParameterKind, UnitLayout};
use kintsugi_tensor::View;
use kintsugi_tensor::ops::Gradient;

/// The whole weights of a unit on this rank.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    flat: View<'a>,
    layout: &'a UnitLayout,
}

impl<'a> Weights<'a> {
    /// The weights in a flat buffer with this layout.
    pub fn new(flat: View<'a>, layout: &'a UnitLayout) -> Self {
        Weights { flat, layout }
    }

    /// One parameter.
    pub fn get(&self, kind: ParameterKind) -> View<'a> {
        self.flat.slice(self.layout.range(kind))
    }

    /// The parameter of this kind, or `None` if the model family lacks it.
    pub fn find(&self, kind: ParameterKind) -> Option<View<'a>> {
        self.layout.find(kind).map(|placed| self.flat.slice(placed.range.clone()))
    }

    /// Adjacent parameters as one matrix.
    pub fn span(&self, first: ParameterKind, last: ParameterKind) -> View<'a> {
        self.flat.slice(self.layout.span(first, last))
    }

    /// Adjacent parameters that only some families have.
    pub fn find_span(&self, first: ParameterKind, last: ParameterKind) -> Option<View<'a>> {
        self.layout.find(first).map(|_| self.span(first, last))
    }
}

/// The whole gradient of a unit on this rank, and which of its parameters have been written in this step.
///
/// The first write of a step overwrites and later ones accumulate, so gradients need not be zeroed.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    flat: View<'a>,
    layout: &'a UnitLayout,
    written: &'a Cell<u32>,
}

impl<'a> Gradients<'a> {
    /// The gradients in a flat buffer with this layout. Bit `i` of `written` is set when parameter `i` is written.
    pub fn new(flat: View<'a>, layout: &'a UnitLayout, written: &'a Cell<u32>) -> Self {
        Gradients { flat, layout, written }
    }

    /// Where to write the gradient of one parameter.
    pub fn get(&self, kind: ParameterKind) -> Gradient<'a> {
        self.span(kind, kind)
    }

    /// Where to write the gradient of the parameter of this kind, or `None` if the model family lacks it.
    pub fn find(&self, kind: ParameterKind) -> Option<Gradient<'a>> {
        self.layout.find(kind).map(|_| self.get(kind))
    }

    /// Where to write the gradient of adjacent parameters that are one matrix.
    pub fn span(&self, first: ParameterKind, last: ParameterKind) -> Gradient<'a> {
        let range = self.layout.span(first, last);
        let covered = self.layout.placed.iter().enumerate().filter(|(_, p)| range.contains(&p.range.start));
        let bits = covered.fold(0, |bits, (i, _)| bits | 1 << i);
        let accumulate = self.written.get() & bits != 0;
        debug_assert!(!accumulate || self.written.get() & bits == bits, "neighbours are written together");
        self.written.set(self.written.get() | bits);
        Gradient { view: self.flat.slice(range), accumulate }
    }

    /// Where to write the gradient of adjacent parameters that only some families have.
    pub fn find_span(&self, first: ParameterKind, last: ParameterKind) -> Option<Gradient<'a>> {
        self.layout.find(first).map(|_| self.span(first, last))
    }
}
