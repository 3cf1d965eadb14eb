//! Sources of whole parameters: a checkpoint, a Hugging Face folder, memory, or the generator of initial weights. A rank
//! reads the elements of its own part, with any layout.

use std::error::Error;

use kintsugi_plan::parameters::{Parameter, PlacedParameter};
use kintsugi_plan::{Compute, StoredTensor};
use kintsugi_spec::Cause;
use rayon::prelude::*;

use crate::WholeParameters;

/// Why elements could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct StoreError(#[from] Cause);

impl StoreError {
    /// An error with this message or cause.
    pub fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        StoreError(Cause::new(cause))
    }
}

/// Elements of a whole parameter in row-major order, from `start` on. The reader's buffer decides how many.
#[derive(Clone, Copy, Debug)]
pub struct Elements<'a> {
    /// The parameter.
    pub parameter: &'a Parameter,
    /// Which tensor of the parameter.
    pub stored: StoredTensor,
    /// The first element.
    pub start: usize,
}

impl<'a> Elements<'a> {
    /// Elements that start at the parameter's first element.
    pub fn of(parameter: &'a Parameter, stored: StoredTensor) -> Self {
        Elements { parameter, stored, start: 0 }
    }
}

/// A source of whole parameters.
pub trait Store: Sync {
    /// Fills `out` with elements of a whole parameter. Callers never ask for vocabulary padding.
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError>;
}

impl Store for WholeParameters {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        let Elements { parameter, stored, start } = elements;
        let name = parameter.name();
        if stored != StoredTensor::Weights {
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

/// A store whose weights are the moving averages of those of another store.
pub struct AverageStore<'a> {
    /// The underlying store.
    pub store: &'a dyn Store,
}

impl Store for AverageStore<'_> {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        let stored = match elements.stored {
            StoredTensor::Weights => StoredTensor::Average,
            other => other,
        };
        self.store.read(Elements { stored, ..elements }, out)
    }
}

/// A store of zeros.
pub(crate) struct Zeros;

impl Store for Zeros {
    fn read(&self, _: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        out.fill(0.0);
        Ok(())
    }
}

/// A store that fails if a number is not finite in the compute type, since such a model is useless.
pub struct FiniteStore<'a> {
    /// The underlying store.
    pub store: &'a dyn Store,
    /// The compute type.
    pub compute: Compute,
}

impl Store for FiniteStore<'_> {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        self.store.read(elements, out)?;
        match out.iter().find(|value| !self.compute.holds(**value)) {
            Some(value) => {
                let (stored, name) = (elements.stored.name(), elements.parameter.name());
                let compute = format!("{:?}", self.compute).to_lowercase();
                Err(StoreError::new(format!(
                    "the {stored} of {name} are not finite in {compute}: one is {value}"
                )))
            }
            None => Ok(()),
        }
    }
}

/// Elements that one thread reads at a time.
const CHUNK: usize = 1 << 14;

/// Reads elements of part `part` of `tp` of a parameter, from `first` on. Vocabulary padding is zero.
pub(crate) fn read_part(
    store: &dyn Store,
    placed: &PlacedParameter,
    (tp, part): (usize, usize),
    stored: StoredTensor,
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
                store.read(Elements { parameter, stored, start }, real)?;
            }
            first += run.len();
            rest = after;
        }
        Ok(())
    })
}

/// How many elements of a part, from `local` on, are also contiguous in the whole parameter.
fn contiguous(placed: &PlacedParameter, local: usize) -> usize {
    let [rows, columns] = placed.local_shape;
    let whole_rows = columns == placed.parameter.shape[1];
    if whole_rows { rows * columns - local } else { columns - local % columns }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

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
            let plan = ConfigSource::demo().sets(settings).plan().expect("a legal config");
            for placed in plan.units().into_iter().flat_map(|unit| plan.layout(unit).placed) {
                let (parameter, len) = (&placed.parameter, placed.range.len());
                for (part, first) in (0..tp).flat_map(|part| [(part, 0), (part, len / 3)]) {
                    let mut read = vec![f32::NAN; len - first];
                    read_part(&Indices, &placed, (tp, part), StoredTensor::Weights, first, &mut read)
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
        let plan = ConfigSource::demo().plan().expect("the demo");
        let parameter = plan.layout(plan.units()[0]).placed[0].parameter;
        let mut out = [0.0];
        let read = |whole: &WholeParameters, stored, out: &mut [f32]| {
            whole.read(Elements::of(&parameter, stored), out).map_err(|e| e.to_string())
        };
        let missing = read(&WholeParameters::new(), StoredTensor::Weights, &mut out);
        assert_eq!(missing.unwrap_err(), "table.table is missing");
        let short = WholeParameters::from([("table.table".to_owned(), vec![])]);
        assert!(
            read(&short, StoredTensor::Weights, &mut out).unwrap_err().contains("has 0 elements and not ")
        );
        assert!(read(&short, StoredTensor::FirstMoment, &mut out).unwrap_err().contains("no states"));
    }
}
