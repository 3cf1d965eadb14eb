//! Hugging Face folders: `config.json`, and the weights as safetensors, in one file or several with an index.
//!
//! Each family has a file in `families`. A folder is read in pieces, so the model need not fit
//! into memory. A configuration value that would change the computation in an unsupported way is an error.

mod config;
mod describe;
mod export;
mod families;
mod fields;
mod folder;
mod names;
mod tensors;

pub use export::{ExportOptions, export};
pub use folder::HuggingFaceFolder;
pub use names::parameter_count;
