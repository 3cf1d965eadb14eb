//! Runs, checkpoints and token files: checked here, and described so that Python can map them.
#![allow(clippy::needless_pass_by_value, reason = "arguments of Python are owned")]

use std::error::Error;
use std::path::PathBuf;

use kintsugi_checkpoint::{SlicePlace, TensorPlace, find};
use kintsugi_data::{TokenFile, TokenType};
use kintsugi_run::{MetricsFollower, RunFolder};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A slice: its file, offset, type, first and last column, and its first element and number of elements in that strip.
type Slice = (PathBuf, u64, String, [usize; 2], usize, usize);

/// A tensor: its parameter, which tensor of the parameter, its shape, and its slices.
type Tensor = (String, &'static str, [usize; 2], Vec<Slice>);

/// A checkpoint: its folder, its step, its configuration, its tensors, and why newer ones were left out.
type Contents = (PathBuf, u64, String, Vec<Tensor>, Vec<String>);

/// A figure of steps: its name, and its values as the bytes of 64-bit floats.
type Column<'py> = (&'static str, Bound<'py, PyBytes>);

/// Token files: the path of the tokens, the type of a token, the number of tokens, the first token of every document as the
/// bytes of 64-bit integers, and the vocabulary and the tokenizer if they are known.
type Tokens<'py> = (PathBuf, &'static str, u64, Bound<'py, PyBytes>, Option<usize>, Option<String>);

fn wrong(error: impl Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The figures of a run's steps, and the number of lines that cannot be read.
#[pyfunction]
pub fn metrics(py: Python<'_>, run: PathBuf) -> PyResult<(Vec<Column<'_>>, usize)> {
    let folder = py.detach(|| RunFolder::open(&run, String::new()));
    let folder =
        folder.map_err(|error| PyValueError::new_err(format!("{} is not a run: {error}", run.display())))?;
    let steps = folder.steps;
    let empty = (Vec::new(), Vec::new());
    let (evaluated, validation) = steps.validation.get("").unwrap_or(&empty);
    let (saved, paused): (Vec<f64>, Vec<f64>) = steps.checkpoints.iter().copied().unzip();
    let columns = [
        ("step", &steps.step),
        ("time", &steps.time),
        ("loss", &steps.loss),
        ("grad_norm", &steps.grad_norm),
        ("lr", &steps.lr),
        ("tokens", &steps.tokens),
        ("tokens_per_s", &steps.tokens_per_s),
        ("step_s", &steps.step_s),
        ("mfu", &steps.mfu),
        ("loss_scale", &steps.loss_scale),
        ("energy_j", &steps.energy_j),
        ("validation_step", evaluated),
        ("validation_loss", validation),
        ("checkpoint_step", &saved),
        ("checkpoint_s", &paused),
        ("skipped_step", &steps.skipped),
    ];
    let bytes = |column: &[f64]| column.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
    let columns = columns.into_iter().map(|(name, column)| (name, PyBytes::new(py, &bytes(column))));
    Ok((columns.collect(), steps.damaged))
}

/// The lines of a run's metrics as they are written.
#[pyclass(module = "kintsugi._kintsugi")]
pub struct Follower(MetricsFollower);

#[pymethods]
impl Follower {
    #[new]
    fn new(run: PathBuf) -> Self {
        Follower(MetricsFollower::new(&run))
    }

    /// The lines that were added since the last call.
    fn lines(&mut self, py: Python<'_>) -> PyResult<Vec<String>> {
        py.detach(|| self.0.lines()).map_err(wrong)
    }
}

/// A checkpoint, or the newest one of a run. Every file is compared with its checksum.
#[pyfunction]
pub fn checkpoint(py: Python<'_>, path: PathBuf) -> PyResult<Contents> {
    let mut broken = Vec::new();
    let found = py.detach(|| find(&path, |error| broken.push(error.to_string()))).map_err(wrong)?;
    let tensors = found.places().into_iter().map(tensor).collect();
    Ok((found.path().to_owned(), found.progress().step, found.config().to_owned(), tensors, broken))
}

fn tensor(TensorPlace { parameter, stored, shape, slices }: TensorPlace) -> Tensor {
    let slice = |SlicePlace { file, offset, dtype, slice }: SlicePlace| {
        (file, offset, dtype.to_string(), slice.columns, slice.start, slice.len)
    };
    (parameter, stored.name(), shape, slices.into_iter().map(slice).collect())
}

/// Opens token files and checks their index.
#[pyfunction]
pub fn tokens(py: Python<'_>, prefix: PathBuf) -> PyResult<Tokens<'_>> {
    let opened = py.detach(|| TokenFile::open(&prefix).and_then(|file| Ok((file.document_starts()?, file))));
    let (starts, file) = opened.map_err(wrong)?;
    let starts: Vec<u8> = starts.into_iter().flat_map(u64::to_ne_bytes).collect();
    let kind = match file.token_type() {
        TokenType::U8 => "uint8",
        TokenType::I8 => "int8",
        TokenType::I16 => "<i2",
        TokenType::U16 => "<u2",
        TokenType::I32 => "<i4",
        TokenType::I64 => "<i8",
    };
    let vocab = file.about().map(|about| about.vocab);
    Ok((file.path().to_owned(), kind, file.tokens(), PyBytes::new(py, &starts), vocab, file.tokenizer()))
}
