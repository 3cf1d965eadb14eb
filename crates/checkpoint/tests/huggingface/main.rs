//! Hugging Face folders: what is read from them, what is refused, and that what is written is read back.

mod broken;
mod configs;
mod roundtrip;
mod support;
