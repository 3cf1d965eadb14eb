//! `kintsugi doctor --self-test`, on the CPU and on the interpreter of AMD's machine code.

use std::path::Path;
use std::process::Output;

use kintsugi_testing::{Need, skip};
use serde_json::Value;

use crate::support::{folder, kintsugi};

/// Brief tests of a tiny model, and JSON.
const ARGUMENTS: [&str; 6] = ["doctor", "--self-test", "--brief", "--json", "--out", "report.txt"];

const MODEL: [&str; 11] = [
    "model.layers=1",
    "model.hidden=32",
    "model.heads=1",
    "model.ffn=64",
    "batch.sequence=16",
    "batch.micro=1",
    "batch.global=2",
    "parallel.dp=1",
    "parallel.pp=1",
    "parallel.tp=1",
    "optimizer.warmup=1",
];

/// The arguments for a device.
fn arguments(device: &'static str) -> Vec<&'static str> {
    let settings = MODEL.into_iter().chain([device]).flat_map(|setting| ["--set", setting]);
    ARGUMENTS.into_iter().chain(settings).collect()
}

/// What a passed test says, and what its report has.
fn passed(output: &Output, folder: &Path) -> Value {
    let [said, problems] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{said}{problems}");
    let results: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(results["passed"], true, "{results}");
    let groups = results["operations"].as_array().expect("a list");
    assert_eq!(groups.len(), 10, "{results}");
    let report = std::fs::read_to_string(folder.join("report.txt")).expect("the report");
    for part in ["attention", "✓ training in fp32", "✓ training in bf16", "copies", "all agrees"] {
        assert!(report.contains(part), "{report}");
    }
    results
}

#[test]
fn the_cpu_agrees_with_itself() {
    let folder = folder("self-test-cpu");
    let results = passed(&kintsugi(&folder, &arguments("run.device=cpu")), &folder);
    assert_eq!(results["compiled"], 0);
}

#[test]
fn amd_code_agrees_with_the_cpu() {
    let (folder, cache) = (folder("self-test-hip"), Path::new(env!("CARGO_TARGET_TMPDIR")));
    if let Err(missing) = amdhip64::check_tools(cache) {
        skip(Need::AmdTools, missing);
        return;
    }
    let mut program = amdhip64::program(Path::new(env!("CARGO_BIN_EXE_kintsugi")), cache)
        .expect("the interpreter's library");
    program.current_dir(&folder).args(arguments("run.device=hip"));
    let results = passed(&program.output().expect("it starts"), &folder);
    assert!(results["compiled"].as_u64().is_some_and(|files| files >= 16), "{results}");
    assert_eq!(results["device"], "HIP: gfx90a interpreter");
}

#[test]
fn a_configuration_without_a_self_test_is_a_mistake() {
    let output = kintsugi(&folder("self-test-mistake"), &["doctor", "--set", "run.steps=5"]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("doctor reads a configuration only with --self-test"), "{said}");
}
