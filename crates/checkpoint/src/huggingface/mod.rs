//! Hugging Face's folders: `config.json`, and the weights as safetensors, in one file or several with an index.
//!
//! Three architectures are known: `gpt2`, `gpt_neox` and `llama`. A folder is read tensor by tensor and piece by piece, so
//! a model never has to fit into memory, and a value that would make it compute something else is refused.

mod config;
mod describe;
mod export;
mod fields;
mod folder;
mod names;
mod tensors;

pub use export::{ExportOptions, export};
pub use folder::HuggingFaceFolder;
pub use names::parameter_count;
