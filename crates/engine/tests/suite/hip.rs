//! Training on AMD's machine code without an AMD GPU: the HIP backend runs on the interpreter of gfx90a code, and every layout
//! is compared with the CPU.
//!
//! Each test runs in a process of its own, in which the interpreter is loaded under the names of AMD's libraries.

use std::path::Path;
use std::thread;

use kintsugi_comm::Connection;
use kintsugi_engine::verify::{Bounds, compare, record, record_reference};
use kintsugi_engine::{MemoryChoice, device};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Coverage, predict};
use kintsugi_testing::{Need, skip};

/// The demo's model in small, for five steps.
fn plan(device: &str, settings: &[&str]) -> Plan {
    let small = [
        "model.layers=2",
        "model.hidden=64",
        "model.heads=2",
        "model.ffn=128",
        "batch.sequence=32",
        "batch.micro=1",
        "batch.global=2",
        "run.steps=5",
        "run.eval_every=0",
        "optimizer.warmup=2",
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.dp=1",
    ];
    let device = format!("run.device={device}");
    ConfigSource::demo().sets(small).set(&device).sets(settings).plan().expect("a legal config")
}

/// Whether this process has the interpreter. If not, the calling test runs again in a process that has it.
fn is_interpreted() -> bool {
    if amdhip64::is_here() {
        return true;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if let Err(missing) = amdhip64::check_tools(folder) {
        skip(Need::AmdTools, missing);
        return false;
    }
    let test = thread::current().name().expect("a test's thread has its name").to_owned();
    let mut program = amdhip64::this_program(folder).expect("the interpreter's library");
    let status = program.args([&test, "--exact", "--nocapture"]).status().expect("it starts");
    assert!(status.success(), "{test} on the interpreter: {status}");
    false
}

/// Trains a layout on the interpreter and the same model on one CPU rank.
fn agrees_with_the_cpu(model: &[&str], layouts: &[&[&str]]) {
    if !is_interpreted() {
        return;
    }
    let reference = record_reference(&plan("cpu", model), MemoryChoice::Heap).expect("the CPU does not fail");
    for layout in layouts {
        let plan = plan("hip", &[model, layout].concat());
        let stages = predict(&plan, device(&plan, Connection::Threads), Coverage::ShortStep).stages;
        let memory = MemoryChoice::Slab(stages.iter().map(|memory| memory.reserved).collect());
        let recorded = record(&plan, memory, Connection::Threads, None).expect("no rank fails");
        let difference = compare(&reference, &recorded.expect("rank 0 is here"));
        println!("{layout:?}: {difference:?}");
        assert!(Bounds::of(&plan).hold(&difference), "{layout:?}: {difference:?}");
    }
}

#[test]
fn layouts_on_amd_code_train_the_model_of_the_cpu() {
    agrees_with_the_cpu(&[], &[&[], &["parallel.tp=2"], &["parallel.dp=2"], &["parallel.cp=2"]]);
}

#[test]
fn a_llama_in_16_bits_on_amd_code_trains_the_model_of_the_cpu() {
    let llama = ["model.family=llama", "model.kv_heads=1", "model.tied=false", "precision.compute=bf16"];
    agrees_with_the_cpu(&llama, &[&["sharding.zero=1", "parallel.dp=2"]]);
}

/// Heads of 64 in bf16, whose attention runs on matrix cores, of whole sequences and of slices.
#[test]
fn attention_on_matrix_cores_trains_the_model_of_the_cpu() {
    let gathered = ["parallel.cp=2", "parallel.cp_attention=gather"];
    let ring = ["parallel.cp=2", "parallel.cp_attention=ring"];
    let layouts: [&[&str]; 4] = [&[], &["parallel.dp=2"], &gathered, &ring];
    agrees_with_the_cpu(&["model.heads=1", "precision.compute=bf16"], &layouts);
}
