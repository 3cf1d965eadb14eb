//! Where whole parameters are read from: a checkpoint, a folder of another program's weights, memory, or the
//! generator of initial weights. A rank reads the elements of its own part, whatever the layout.

use std::error::Error;

use kintsugi_plan::Compute;
use kintsugi_plan::parameters::{Parameter, Placed};
use kintsugi_spec::Cause;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::Whole;

/// What is kept of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// The most precise copy of the weights: the master weights where there are any.
    Weights,
    /// `AdamW`'s mean of gradients.
    FirstMoment,
    /// `AdamW`'s mean of squared gradients.
    SecondMoment,
}

impl Kept {
    /// All of it.
    pub const ALL: [Kept; 3] = [Kept::Weights, Kept::FirstMoment, Kept::SecondMoment];

    /// Its name: `first_moment`.
    pub fn name(self) -> &'static str {
        match self {
            Kept::Weights => "weights",
            Kept::FirstMoment => "first_moment",
            Kept::SecondMoment => "second_moment",
        }
    }
}

/// Why something could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct StoreError(#[from] Cause);

impl StoreError {
    /// A sentence, or the error of what is read from.
    pub fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        StoreError(Cause::new(cause))
    }
}

/// Elements of a whole parameter, row by row from `start` on: as many as whoever reads them has room for.
#[derive(Clone, Copy, Debug)]
pub struct Elements<'a> {
    /// The parameter.
    pub parameter: &'a Parameter,
    /// What of it.
    pub kept: Kept,
    /// The first element.
    pub start: usize,
}

impl<'a> Elements<'a> {
    /// From the parameter's first element on.
    pub fn of(parameter: &'a Parameter, kept: Kept) -> Self {
        Elements { parameter, kept, start: 0 }
    }
}

/// A source of whole parameters.
pub trait Store: Sync {
    /// Fills `out` with elements of a whole parameter; never asked for vocabulary padding.
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError>;
}

impl Store for Whole {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        let Elements { parameter, kept, start } = elements;
        let name = parameter.name();
        if kept != Kept::Weights {
            return Err(StoreError::new(format!("{name} has weights here and no states")));
        }
        let values = self.get(&name).ok_or_else(|| StoreError::new(format!("{name} is missing")))?;
        let wanted = values.get(start..start + out.len()).ok_or_else(|| {
            let (has, needs) = (values.len(), parameter.valid_elements());
            StoreError::new(format!("{name} has {has} elements and not {needs}"))
        })?;
        out.copy_from_slice(wanted);
        Ok(())
    }
}

/// A store that refuses numbers that are not finite in the type of computation: a model that has them computes nothing.
pub struct Finite<'a> {
    /// Where the numbers come from.
    pub store: &'a dyn Store,
    /// The type that they are computed with.
    pub compute: Compute,
}

impl Store for Finite<'_> {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        self.store.read(elements, out)?;
        match out.iter().find(|value| !self.compute.holds(**value)) {
            Some(value) => {
                let (kept, name) = (elements.kept.name(), elements.parameter.name());
                let compute = format!("{:?}", self.compute).to_lowercase();
                Err(StoreError::new(format!(
                    "the {kept} of {name} are not finite in {compute}: one is {value}"
                )))
            }
            None => Ok(()),
        }
    }
}

/// Elements that one thread reads at a time.
const CHUNK: usize = 1 << 14;

/// Reads elements of part `part` of `tp` of a parameter, from `first` on; the padding of the vocabulary is zero.
pub(crate) fn read_part(
    store: &dyn Store,
    placed: &Placed,
    (tp, part): (usize, usize),
    kept: Kept,
    first: usize,
    out: &mut [f32],
) -> Result<(), StoreError> {
    let parameter = &placed.parameter;
    out.par_chunks_mut(CHUNK).enumerate().try_for_each(|(i, out)| {
        let mut first = first + i * CHUNK;
        let mut rest = out;
        while !rest.is_empty() {
            let start = parameter.global_index(tp, part, first);
            let (run, after) = rest.split_at_mut(contiguous(placed, first).min(rest.len()));
            let valid = parameter.valid_elements().saturating_sub(start).min(run.len());
            let (real, padding) = run.split_at_mut(valid);
            padding.fill(0.0);
            if !real.is_empty() {
                store.read(Elements { parameter, kept, start }, real)?;
            }
            first += run.len();
            rest = after;
        }
        Ok(())
    })
}

/// How many elements of a part, from `local` on, are neighbours in the whole parameter too.
fn contiguous(placed: &Placed, local: usize) -> usize {
    let [rows, columns] = placed.local_shape;
    let whole_rows = columns == placed.parameter.shape[1];
    if whole_rows { rows * columns - local } else { columns - local % columns }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config;

    use super::*;

    /// Every element is its own index.
    struct Indices;

    impl Store for Indices {
        fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
            let Elements { parameter, start, .. } = elements;
            assert!(start + out.len() <= parameter.valid_elements(), "padding is not asked for");
            for (value, index) in out.iter_mut().zip(start..) {
                *value = index as f32;
            }
            Ok(())
        }
    }

    #[test]
    fn a_part_has_the_elements_that_its_split_says() {
        for tp in [1, 2, 4] {
            let settings = [format!("parallel.tp={tp}"), "model.vocab=200".into(), "model.hidden=64".into()];
            let plan = config::resolve(None, "demo", &settings).expect("a legal config");
            for placed in plan.units().into_iter().flat_map(|unit| plan.layout(unit).placed) {
                let (parameter, len) = (&placed.parameter, placed.range.len());
                for (part, first) in (0..tp).flat_map(|part| [(part, 0), (part, len / 3)]) {
                    let mut read = vec![f32::NAN; len - first];
                    read_part(&Indices, &placed, (tp, part), Kept::Weights, first, &mut read)
                        .expect("no file");
                    let index = |local| parameter.global_index(tp, part, local);
                    let valid =
                        |index: usize| if index < parameter.valid_elements() { index as f32 } else { 0.0 };
                    let expected: Vec<f32> = (first..len).map(|local| valid(index(local))).collect();
                    assert_eq!(read, expected, "{} of {tp}", parameter.name());
                }
            }
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let plan = config::resolve(None, "demo", &[]).expect("the demo");
        let parameter = plan.layout(plan.units()[0]).placed[0].parameter;
        let mut out = [0.0];
        let read = |whole: &Whole, kept, out: &mut [f32]| {
            whole.read(Elements::of(&parameter, kept), out).map_err(|e| e.to_string())
        };
        let missing = read(&Whole::new(), Kept::Weights, &mut out);
        assert_eq!(missing.unwrap_err(), "table.table is missing");
        let short = Whole::from([("table.table".to_owned(), vec![])]);
        assert!(read(&short, Kept::Weights, &mut out).unwrap_err().contains("has 0 elements and not "));
        assert!(read(&short, Kept::FirstMoment, &mut out).unwrap_err().contains("no states"));
    }
}
