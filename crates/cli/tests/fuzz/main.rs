//! Fuzzing of every reader of foreign bytes: valid files are changed a little, and reading them must end in a value or in
//! an error, never in a panic, a long wait or gigabytes of memory.
//!
//! Every test takes `KINTSUGI_FUZZ_SECONDS` (2 unless given) and draws from `KINTSUGI_FUZZ_SEED`; `scripts/fuzz` runs them
//! for longer.

mod harness;
mod mutate;
mod runs;
mod settings;
mod tokens;
mod weights;

use harness::fuzz;

#[test]
fn token_files() {
    fuzz("token_files", tokens::token_files);
}

#[test]
fn documents() {
    fuzz("documents", tokens::documents);
}

#[test]
fn tokenizers() {
    fuzz("tokenizers", tokens::tokenizers);
}

#[test]
fn hugging_face_weights() {
    fuzz("hugging_face_weights", weights::hugging_face);
}

#[test]
fn hugging_face_descriptions() {
    fuzz("hugging_face_descriptions", weights::hugging_face_descriptions);
}

#[test]
fn checkpoints() {
    fuzz("checkpoints", weights::checkpoints);
}

#[test]
fn resealed_checkpoints() {
    fuzz("resealed_checkpoints", weights::resealed_checkpoints);
}

#[test]
fn configurations() {
    fuzz("configurations", settings::configurations);
}

#[test]
fn profiles() {
    fuzz("profiles", settings::profiles);
}

#[test]
fn validation_tables() {
    fuzz("validation_tables", settings::validation_tables);
}

#[test]
fn run_folders() {
    fuzz("run_folders", runs::folders);
}
