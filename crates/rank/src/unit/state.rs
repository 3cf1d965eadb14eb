//! The states of the optimizer for the parameters that have them, and the runs of parameters that are updated together.

use std::ops::Range;

use kintsugi_plan::parameters::{PlacedParameter, UnitLayout};
use kintsugi_plan::{Optimizer, ParameterUpdate, StoredTensor};
use kintsugi_tensor::ops::Segment;
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

use super::within;

/// A state over what a rank owns of a unit.
///
/// If all parameters of the unit have it, it has an element for each that the rank owns. Otherwise it has those of the parameters
/// that do, one after the other, and as much room on every rank.
pub(super) struct State {
    pub stored: StoredTensor,
    buffer: Buffer,
    /// The ranges of the flat buffer that have the state, in order. Parameters that follow each other are one range.
    covered: Vec<Range<usize>>,
    /// Covered elements before those that the rank owns.
    first: usize,
}

impl State {
    /// The states of a unit on a rank that owns its elements `owned`. All begin at zero.
    pub fn all(
        backend: &dyn Backend,
        optimizer: &Optimizer,
        layout: &UnitLayout,
        owned: &Range<usize>,
        dtype: DType,
    ) -> Vec<State> {
        let new = |&stored: &StoredTensor| {
            let elements = optimizer.state_elements(layout, stored, owned.len());
            (elements > 0).then(|| {
                let covered = optimizer.covered(layout, stored);
                let buffer = backend.allocate(elements, dtype, Category::States);
                backend.fill(0.0, buffer.view());
                State { stored, buffer, first: before(&covered, owned.start), covered }
            })
        };
        optimizer.kind.states().iter().filter_map(new).collect()
    }

    /// All of it.
    pub fn whole(&self) -> View<'_> {
        self.buffer.view()
    }

    /// The part of the elements `range` of the flat buffer, which all have the state.
    pub fn view(&self, range: &Range<usize>) -> View<'_> {
        let start = before(&self.covered, range.start) - self.first;
        self.buffer.slice(start..start + range.len())
    }

    /// The ranges of `owned` that have the state, and their parts of it.
    pub fn runs(&self, owned: &Range<usize>) -> Vec<(Range<usize>, View<'_>)> {
        let inside = |range: &Range<usize>| range.start.max(owned.start)..range.end.min(owned.end);
        let owned = self.covered.iter().map(inside).filter(|range| !range.is_empty());
        owned.map(|range| (range.clone(), self.view(&range))).collect()
    }
}

/// Elements of the ranges before an element of the flat buffer.
fn before(ranges: &[Range<usize>], element: usize) -> usize {
    ranges.iter().map(|range| element.clamp(range.start, range.end) - range.start).sum()
}

/// A range of the flat buffer whose elements have the same states and are updated in the same way.
pub(super) struct Run {
    pub range: Range<usize>,
    /// Whether it is a part of a matrix that is updated whole.
    pub whole: bool,
    pub states: &'static [StoredTensor],
    /// The segments with the same learning rate and weight decay, relative to the start of the range.
    pub segments: Vec<Segment>,
}

impl Run {
    /// The runs of `owned`, in order: one, if all parameters of the unit are updated in the same way.
    pub fn all(optimizer: &Optimizer, layout: &UnitLayout, owned: &Range<usize>) -> Vec<Run> {
        let way = |placed: &PlacedParameter| {
            (optimizer.kind.needs_whole(&placed.parameter), optimizer.states_of(&placed.parameter))
        };
        let is_uniform = layout.placed.windows(2).all(|pair| way(&pair[0]) == way(&pair[1]));
        let mut runs: Vec<Run> = Vec::new();
        let mut previous = None;
        for placed in &layout.placed {
            let (whole, states) = way(placed);
            let is_neighbour = previous.replace((whole, states)) == Some((whole, states));
            let range = placed.range.start.max(owned.start)..placed.range.end.min(owned.end);
            if range.is_empty() {
                continue;
            }
            if runs.is_empty() || !is_neighbour {
                let first = if is_uniform { owned.clone() } else { range.clone() };
                runs.push(Run { range: first, whole, states, segments: Vec::new() });
            }
            let run = runs.last_mut().expect("one is there");
            run.range.end = run.range.end.max(range.end);
            run.add(&range, optimizer.update_of(&placed.parameter));
        }
        runs
    }

    fn add(&mut self, range: &Range<usize>, update: ParameterUpdate) {
        let ParameterUpdate { lr_factor, shape_factor, weight_decay } = update;
        let Range { start, end } = within(range, &self.range);
        let (rate_factor, decay) = (lr_factor * shape_factor, weight_decay / shape_factor);
        let next = Segment { start, len: end - start, rate_factor, decay };
        match self.segments.last_mut() {
            Some(last)
                if *last == (Segment { start: last.start, len: last.len, ..next })
                    && last.start + last.len == next.start =>
            {
                last.len += next.len;
            }
            _ => self.segments.push(next),
        }
    }
}
