//! Hugging Face folders: what is read from them, what is refused, and that exports are read back.

mod broken;
mod configs;
mod roundtrip;
mod support;
