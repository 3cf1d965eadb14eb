//! The same short training on the device and on the CPU.

use kintsugi_comm::Connection;
use kintsugi_engine::MemoryChoice;
use kintsugi_engine::verify::{Bounds, Difference, compare, record, record_reference};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use serde::Serialize;

use super::Test;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::verify::{memory, on_one_rank};

/// What the configuration need not say.
const DEFAULTS: [&str; 3] = ["batch.micro=1", "batch.global=4", "run.eval_every=0"];

const STEPS: &str = "run.steps=5";

/// A training in one precision.
#[derive(Serialize)]
pub struct Training {
    pub precision: &'static str,
    /// The differences to the CPU.
    pub difference: Option<Difference>,
    /// What was not as on the CPU, or why there is nothing to compare.
    pub failure: Option<String>,
}

/// Trains in fp32 and in bf16.
pub fn run(source: &ConfigSource, test: &Test) -> Result<Vec<Training>, Failure> {
    let progress = Progress::new("training", 2);
    ["fp32", "bf16"]
        .into_iter()
        .map(|precision| {
            let plan = |device: &str| -> Result<Plan, Failure> {
                let settings = [format!("precision.compute={precision}"), format!("run.device={device}")];
                let source = source.clone().sets_below(&DEFAULTS).set(STEPS).sets(settings);
                Ok(on_one_rank(&source.plan()?))
            };
            let training = train(precision, &plan("cpu")?, &plan(test.kind.name())?);
            progress.add(1);
            Ok(training)
        })
        .collect()
}

fn train(precision: &'static str, on_cpu: &Plan, on_device: &Plan) -> Training {
    let connection = Connection::Threads;
    let recordings = record_reference(on_cpu, MemoryChoice::Heap).and_then(|reference| {
        Ok((reference, record(on_device, memory(on_device, connection), connection, None)?))
    });
    match recordings {
        Ok((reference, recorded)) => {
            let difference = compare(&reference, &recorded.expect("rank 0 is here"));
            let broken = Bounds::of(on_device).broken_by(&difference);
            let failure = (!broken.is_empty()).then(|| format!("beyond the bounds: {}", broken.join(", ")));
            Training { precision, difference: Some(difference), failure }
        }
        Err(error) => Training { precision, difference: None, failure: Some(error.to_string()) },
    }
}
