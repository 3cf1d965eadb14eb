//! The part of the Python package `kintsugi` that is Rust: plans, searches, and where the arrays of files are.
//!
//! Answers travel as JSON text, and arrays as files with offsets, which Python maps. What a person calls is in
//! `crates/python/python/kintsugi`.

mod files;

use std::path::PathBuf;

use kintsugi::Failure;
use kintsugi::answers::{self, Configuration, Source};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// A configuration: a file, or the text of one, or without both the demo.
fn configuration(file: Option<PathBuf>, text: Option<String>, sets: Vec<String>) -> Configuration {
    let source = match (file, text) {
        (Some(path), _) => Source::File(path),
        (None, Some(text)) => Source::Text(text),
        (None, None) => Source::Demo,
    };
    Configuration { source, sets }
}

/// A mistake of the user is a `ValueError`, everything else a `RuntimeError`: the exit codes 2 and 1 of the command.
fn raised(failure: &Failure) -> PyErr {
    let sentence = failure.to_string();
    match failure.code() {
        2 => PyValueError::new_err(sentence),
        _ => PyRuntimeError::new_err(sentence),
    }
}

#[pyfunction]
fn plan(py: Python<'_>, file: Option<PathBuf>, text: Option<String>, sets: Vec<String>) -> PyResult<String> {
    py.detach(|| answers::plan(configuration(file, text, sets))).map_err(|failure| raised(&failure))
}

#[pyfunction]
fn search(
    py: Python<'_>,
    file: Option<PathBuf>,
    text: Option<String>,
    sets: Vec<String>,
    asked: (Vec<String>, String, usize),
) -> PyResult<String> {
    let (only, by, top) = asked;
    py.detach(|| answers::search(configuration(file, text, sets), &only, &by, top))
        .map_err(|failure| raised(&failure))
}

#[pyfunction]
fn output_folder(
    py: Python<'_>,
    file: Option<PathBuf>,
    text: Option<String>,
    sets: Vec<String>,
) -> PyResult<PathBuf> {
    py.detach(|| answers::output_folder(configuration(file, text, sets))).map_err(|failure| raised(&failure))
}

#[pymodule]
fn _kintsugi(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("METRICS", kintsugi_run::files::METRICS)?;
    module.add("SUMMARY", kintsugi_run::files::SUMMARY)?;
    module.add("CONFIG", kintsugi_run::files::CONFIG)?;
    module.add_function(wrap_pyfunction!(plan, module)?)?;
    module.add_function(wrap_pyfunction!(search, module)?)?;
    module.add_function(wrap_pyfunction!(output_folder, module)?)?;
    module.add_class::<files::Follower>()?;
    module.add_function(wrap_pyfunction!(files::metrics, module)?)?;
    module.add_function(wrap_pyfunction!(files::checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(files::tokens, module)?)
}
