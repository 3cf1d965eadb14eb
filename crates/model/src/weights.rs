//! A unit's weights and gradients, by name.

use std::cell::Cell;

use kintsugi_plan::Unit;
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

    /// The unit.
    pub fn unit(&self) -> Unit {
        self.layout.unit
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

/// Which parameters of a unit's gradient have been written in this step.
#[derive(Debug)]
pub struct WrittenParameters(Box<[Cell<bool>]>);

impl WrittenParameters {
    /// None of the parameters of a layout.
    pub fn new(layout: &UnitLayout) -> Self {
        WrittenParameters(layout.placed.iter().map(|_| Cell::new(false)).collect())
    }

    /// No parameter is written from now on.
    pub fn clear(&self) {
        self.0.iter().for_each(|written| written.set(false));
    }

    /// Every parameter is written from now on.
    pub fn set_all(&self) {
        self.0.iter().for_each(|written| written.set(true));
    }

    /// The parameters that are not written, by their place in the layout.
    pub fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().filter(|(_, written)| !written.get()).map(|(i, _)| i)
    }
}

/// The whole gradient of a unit on this rank, unless the unit is frozen, and which of its parameters have been written in this
/// step.
///
/// The first write of a step overwrites and later ones accumulate, so gradients need not be zeroed.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    flat: Option<View<'a>>,
    layout: &'a UnitLayout,
    written: &'a WrittenParameters,
}

impl<'a> Gradients<'a> {
    /// The gradients in a flat buffer with this layout, if there are any. Records in `written` which parameters are written.
    pub fn new(flat: Option<View<'a>>, layout: &'a UnitLayout, written: &'a WrittenParameters) -> Self {
        Gradients { flat, layout, written }
    }

    /// Whether the unit is trained.
    pub fn are_trained(&self) -> bool {
        self.flat.is_some()
    }

    /// Where to write the gradient of one parameter. Panics if there is none.
    pub fn get(&self, kind: ParameterKind) -> Gradient<'a> {
        self.span(kind, kind)
    }

    /// Where to write the gradient of the parameter of this kind, or `None` if the model family lacks it or it is frozen.
    pub fn find(&self, kind: ParameterKind) -> Option<Gradient<'a>> {
        self.flat.and_then(|_| self.layout.find(kind)).map(|_| self.get(kind))
    }

    /// Where to write the gradient of adjacent parameters that are one matrix. Panics if there is none.
    pub fn span(&self, first: ParameterKind, last: ParameterKind) -> Gradient<'a> {
        let range = self.layout.span(first, last);
        let parameters = self.layout.placed.iter().zip(&self.written.0);
        let covered = parameters.filter(|(placed, _)| range.contains(&placed.range.start));
        let accumulate = covered.clone().any(|(_, written)| written.get());
        let alike = covered.clone().all(|(_, written)| written.get() == accumulate);
        debug_assert!(alike, "adjacent parameters are written together");
        covered.for_each(|(_, written)| written.set(true));
        let flat = self.flat.unwrap_or_else(|| panic!("{} is frozen", self.layout.unit));
        Gradient { view: flat.slice(range), accumulate }
    }

    /// Where to write the gradient of adjacent parameters that only some families have.
    pub fn find_span(&self, first: ParameterKind, last: ParameterKind) -> Option<Gradient<'a>> {
        self.flat.and_then(|_| self.layout.find(first)).map(|_| self.span(first, last))
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    #[test]
    fn a_unit_may_have_any_number_of_parameters() {
        let mut layout = ConfigSource::demo().plan().expect("the demo").layout(Unit::Head);
        layout.placed = vec![layout.placed[0].clone(); 40];
        let written = WrittenParameters::new(&layout);
        assert!(written.missing().eq(0..40));
        written.set_all();
        assert_eq!(written.missing().count(), 0);
        written.clear();
        assert_eq!(written.missing().count(), 40);
    }
}
