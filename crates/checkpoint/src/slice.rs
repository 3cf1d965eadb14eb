//! A slice: the elements of a whole parameter in one file, in the order of the file.
//!
//! Tensor parallelism divides a parameter into blocks of rows or strips of columns, and ZeRO divides those at any element. So
//! a slice is a contiguous range of a strip: the strip has the columns `columns` of the whole parameter in row-major order,
//! and the slice begins at its element `start`.

use std::ops::Range;

use kintsugi_plan::parameters::{Parameter, PlacedParameter, TensorSplit};
use kintsugi_rank::StoredTensor;
use serde::{Deserialize, Serialize};

/// The location of elements of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// Name of the parameter.
    pub parameter: String,
    /// Which tensor of the parameter.
    #[serde(rename = "kept")]
    pub stored: StoredTensor,
    /// Index of the file in the manifest's list.
    pub file: usize,
    /// First column of the strip, and the column after the last.
    pub columns: [usize; 2],
    /// First element of the slice in the strip.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl Slice {
    /// The slice of elements `local` of part `part` of `tp` of a parameter. `None` if they are all padding.
    pub fn of_part(
        placed: &PlacedParameter,
        (tp, part): (usize, usize),
        local: Range<usize>,
        stored: StoredTensor,
        file: usize,
    ) -> Option<Slice> {
        let parameter = &placed.parameter;
        let [local_rows, local_columns] = placed.local_shape;
        debug_assert_eq!(parameter.local_shape(tp), placed.local_shape);
        let (first, columns) = match parameter.split {
            TensorSplit::Whole => (0, 0..parameter.shape[1]),
            TensorSplit::Rows => (part * local_rows * local_columns, 0..parameter.shape[1]),
            TensorSplit::Columns => (0, part * local_columns..(part + 1) * local_columns),
        };
        let end = (first + local.end).min(parameter.valid_rows * columns.len());
        let start = first + local.start;
        (start < end).then(|| Slice {
            parameter: parameter.name(),
            stored,
            file,
            columns: [columns.start, columns.end],
            start,
            len: end - start,
        })
    }

    /// Columns of the strip.
    pub fn width(&self) -> usize {
        self.columns[1] - self.columns[0]
    }

    /// The tensor's name in its file. Weights have the parameter's name.
    pub fn tensor(&self) -> String {
        match self.stored {
            StoredTensor::Weights => self.parameter.clone(),
            stored => format!("{}.{}", self.parameter, stored.name()),
        }
    }

    /// The tensor's shape in its file: a matrix if the slice has whole rows of several columns, else a vector.
    pub fn shape(&self) -> Vec<usize> {
        let width = self.width();
        let matrix = width > 1 && self.start.is_multiple_of(width) && self.len.is_multiple_of(width);
        if matrix { vec![self.len / width, width] } else { vec![self.len] }
    }

    /// Divides elements `wanted` of this slice into runs that are contiguous in a whole parameter of `columns` columns. Returns
    /// the start of each run in the parameter, and its range in the slice.
    pub fn runs(&self, columns: usize, wanted: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (width, first, start) = (self.width(), self.columns[0], self.start);
        let mut at = wanted.start;
        std::iter::from_fn(move || {
            if at >= wanted.end {
                return None;
            }
            let (row, column) = ((start + at) / width, (start + at) % width);
            let len = if width == columns { wanted.end - at } else { (width - column).min(wanted.end - at) };
            let run = (row * columns + first + column, at..at + len);
            at += len;
            Some(run)
        })
    }

    /// The range of this slice that is among elements `wanted` of a whole parameter of `columns` columns.
    pub fn overlap(&self, columns: usize, wanted: &Range<usize>) -> Range<usize> {
        let width = self.width();
        // Number of the strip's elements before an element of the whole parameter.
        let before = |index: usize| {
            let (row, column) = (index / columns, index % columns);
            row * width + column.clamp(self.columns[0], self.columns[1]) - self.columns[0]
        };
        let (start, end) = (self.start, self.start + self.len);
        before(wanted.start).clamp(start, end) - start..before(wanted.end).clamp(start, end) - start
    }
}

/// Why slices are not a whole parameter.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CoverError {
    #[error("a slice of {name} is outside of its {shape:?} elements")]
    Outside { name: String, shape: [usize; 2] },
    #[error("only {found} of the {expected} elements of {name} are present")]
    Incomplete { name: String, found: usize, expected: usize },
    #[error("slices of {0} overlap")]
    Overlap(String),
}

/// Checks that the slices of a parameter have each of its elements exactly once. Sorts them.
pub(crate) fn check_cover(parameter: &Parameter, slices: &mut [&Slice]) -> Result<(), CoverError> {
    let columns = parameter.shape[1];
    let name = parameter.name();
    let mut total = 0_usize;
    for slice in slices.iter() {
        let inside = slice.columns[0] < slice.columns[1] && slice.columns[1] <= columns;
        let end = slice.start.checked_add(slice.len);
        if !inside || end.is_none_or(|end| end > parameter.valid_rows * slice.width()) {
            return Err(CoverError::Outside { name, shape: parameter.shape });
        }
        total = total.saturating_add(slice.len);
    }
    slices.sort_by_key(|slice| (slice.columns, slice.start));
    let apart = slices.windows(2).all(|pair| {
        let (a, b) = (pair[0], pair[1]);
        if a.columns == b.columns { a.start + a.len <= b.start } else { a.columns[1] <= b.columns[0] }
    });
    let expected = parameter.valid_elements();
    match (apart, total == expected) {
        (true, true) => Ok(()),
        (true, false) => Err(CoverError::Incomplete { name, found: total, expected }),
        (false, _) => Err(CoverError::Overlap(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(columns: [usize; 2], start: usize, len: usize) -> Slice {
        Slice { parameter: "p".into(), stored: StoredTensor::Weights, file: 0, columns, start, len }
    }

    /// The whole's index of every element of a slice, by definition.
    fn indices(slice: &Slice, columns: usize) -> Vec<usize> {
        let index = |i: usize| i / slice.width() * columns + slice.columns[0] + i % slice.width();
        (slice.start..slice.start + slice.len).map(index).collect()
    }

    #[test]
    fn runs_and_overlaps_are_what_the_definition_says() {
        let columns = 7;
        for (strip, start, len) in [
            ([0, 7], 0, 35),
            ([0, 7], 9, 13),
            ([2, 5], 0, 15),
            ([2, 5], 4, 8),
            ([6, 7], 1, 3),
            ([0, 1], 0, 5),
        ] {
            let slice = slice(strip, start, len);
            let expected = indices(&slice, columns);
            let runs = slice.runs(columns, 1..len);
            let listed: Vec<usize> = runs.flat_map(|(at, range)| at..at + range.len()).collect();
            assert_eq!(listed, expected[1..]);
            for (from, to) in (0..35).flat_map(|from| (from..=35).map(move |to| (from, to))) {
                let inside: Vec<usize> = (0..len).filter(|&i| (from..to).contains(&expected[i])).collect();
                assert_eq!(
                    slice.overlap(columns, &(from..to)).collect::<Vec<_>>(),
                    inside,
                    "{slice:?} {from}..{to}"
                );
            }
        }
    }
}
