//! Every operation on random shapes, beside the CPU.

use kintsugi_conformance::{Case, Comparison, suite};
use kintsugi_tensor::Backend;
use serde::Serialize;

use super::Test;
use crate::progress::Progress;

/// Rounds of larger and larger shapes: up to 512 rows, or 16.
const ROUNDS: usize = 6;

/// The operations of one kind.
#[derive(Serialize)]
pub struct Group {
    pub name: &'static str,
    pub cases: usize,
    /// The largest error, as a share of what is allowed.
    pub worst: f64,
    /// What did not agree: the operation, its shape, and how far it is off.
    pub failed: Vec<String>,
}

/// Runs the suite on a device.
pub fn run(device: &dyn Backend, test: &Test) -> Vec<Group> {
    let cases = suite(test.seed, if test.brief { 1 } else { ROUNDS });
    let progress = Progress::new("operations", cases.len() as u64);
    let mut groups: Vec<Group> = Vec::new();
    for case in &cases {
        let at = groups.iter().position(|group| group.name == case.group).unwrap_or_else(|| {
            groups.push(Group { name: case.group, cases: 0, worst: 0.0, failed: Vec::new() });
            groups.len() - 1
        });
        groups[at].add(case, case.compare(device));
        progress.add(1);
    }
    groups
}

impl Group {
    fn add(&mut self, case: &Case, outcome: Result<Comparison, String>) {
        let Case { what, dtype, tolerance, .. } = case;
        self.cases += 1;
        let problem = match outcome {
            Ok(Comparison { error, repeats, .. }) => {
                if error > 0.0 {
                    self.worst = self.worst.max(error / tolerance);
                }
                let agrees = error <= *tolerance;
                (!agrees)
                    .then(|| format!("relative error {error:.1e}, allowed {tolerance:.0e}"))
                    .or_else(|| (!repeats).then(|| "other bits the second time".to_owned()))
            }
            Err(message) => Some(message),
        };
        self.failed.extend(problem.map(|problem| format!("{what} in {dtype:?}: {problem}")));
    }
}
