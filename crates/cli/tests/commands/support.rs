//! Runs the binary in a separate folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A model that trains in a moment.
pub const TINY: [&str; 10] = [
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "batch.sequence=16",
    "batch.micro=1",
    "batch.global=4",
    "run.steps=4",
    "run.eval_every=2",
    "run.eval_tokens=256",
    "optimizer.warmup=2",
];

/// An empty folder for one test.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The binary in a folder, not yet started.
pub fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kintsugi"));
    command.args(arguments).current_dir(folder).env_remove("COLUMNS");
    command
}

/// Runs the binary to its end.
pub fn kintsugi(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().unwrap()
}

/// Runs the binary to its end in two GiB of address space.
pub fn limited(folder: &Path, arguments: &[&str]) -> Output {
    under(folder, "-v 2097152", arguments)
}

/// Runs the binary to its end under a limit of the shell's `ulimit`.
pub fn under(folder: &Path, limit: &str, arguments: &[&str]) -> Output {
    let binary = command(folder, arguments);
    let script = format!("ulimit {limit} && exec \"$@\"");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, "sh"]).arg(binary.get_program()).args(binary.get_args());
    shell.current_dir(folder).output().unwrap()
}

/// Runs the binary on the tiny model, with more settings.
pub fn tiny(folder: &Path, arguments: &[&str], settings: &[&str]) -> Output {
    let settings = TINY.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    kintsugi(folder, &arguments.iter().copied().chain(settings).collect::<Vec<_>>())
}

/// Its output, if it succeeded.
pub fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A JSON file, or one per line.
pub fn json_lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The keys of an object, in order.
pub fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}
