//! Every layout trains the same model, and `verify` detects a layout that does not.

use std::collections::HashMap;

use kintsugi_comm::Connection;
use kintsugi_engine::MemoryChoice;
use kintsugi_engine::verify::{Bounds, Fault, Reference, compare, layouts, record, record_reference};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;

/// A model small enough that fifty layouts take seconds.
const SMALL: &str = r#"
    [model]
    preset = "demo"
    hidden = 32
    ffn = 64
    heads = 4
    [batch]
    sequence = 16
    micro = 1
    global = 8
    [optimizer]
    lr = 1e-3
    warmup = 5
    [run]
    steps = 20
    eval_every = 0
"#;

fn plan(settings: &[&[String]]) -> Plan {
    ConfigSource::text(SMALL).sets(settings.concat()).plan().expect("a layout of verify is a legal config")
}

fn reference(settings: &[&[String]]) -> Reference {
    record_reference(&plan(settings), MemoryChoice::Heap).expect("one rank")
}

#[test]
fn all_layouts_agree_with_one_rank() {
    let mut references: HashMap<Vec<String>, Reference> = HashMap::new();
    let mut failed = Vec::new();
    for layout in layouts(true) {
        let reference = references.entry(layout.model.clone()).or_insert_with(|| reference(&[&layout.model]));
        let plan = plan(&[&layout.model, &layout.settings]);
        let difference = compare(
            reference,
            &record(&plan, MemoryChoice::Heap, Connection::Threads, None)
                .expect("no rank fails")
                .expect("rank 0 is here"),
        );
        println!("{layout}: {difference:?}");
        if !Bounds::of(&plan).hold(&difference) {
            failed.push(format!("{layout}: {difference:?}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn every_fault_is_noticed() {
    for (name, fault) in Fault::ALL {
        let sizes = if fault.is_of_context() { ["tp=2", "cp=2", "dp=1"] } else { ["tp=2", "pp=2", "dp=2"] };
        let settings = [&sizes[..], &["sequence_parallel=true"]].concat();
        let settings: Vec<String> = settings.iter().map(|s| format!("parallel.{s}")).collect();
        let plan = plan(&[&settings]);
        let reference = reference(&[]);
        let bounds = Bounds::of(&plan);
        assert!(
            bounds.hold(&compare(
                &reference,
                &record(&plan, MemoryChoice::Heap, Connection::Threads, None)
                    .expect("no fault")
                    .expect("rank 0 is here")
            ))
        );
        let difference = compare(
            &reference,
            &record(&plan, MemoryChoice::Heap, Connection::Threads, Some(fault))
                .expect("a fault is not a failure")
                .expect("rank 0 is here"),
        );
        assert!(!bounds.hold(&difference), "{name} went unnoticed: {difference:?}");
    }
}
