//! Why one strategy is slower than another: where the difference of their times lies.

use kintsugi_plan::{Plan, Recompute};
use kintsugi_simulate::Timing;
use kintsugi_spec::Level;

/// Why `loser` takes longer than `winner`, in a few words: the parts of the step that grew, the largest first.
pub fn reason(winner: (&Plan, &Timing), loser: (&Plan, &Timing)) -> String {
    let step = winner.1.step_s;
    let slower = loser.1.step_s - step;
    let share = |seconds: f64| 100.0 * seconds / step;
    if share(slower).abs() < WORTH_TELLING {
        return "as fast".to_owned();
    }
    if slower < 0.0 {
        return format!("{:.1} % faster", -share(slower));
    }
    let mut grown = parts(winner, loser);
    grown.sort_by(|a, b| b.0.total_cmp(&a.0));
    let told = grown.iter().enumerate().filter(|&(i, &(seconds, _))| i == 0 || seconds > 0.2 * slower);
    let told: Vec<String> =
        told.take(2).map(|(_, &(seconds, what))| format!("{what} {:+.1} %", share(seconds))).collect();
    told.join(", ")
}

/// Differences below this percentage of a step are ignored.
const WORTH_TELLING: f64 = 0.05;

/// How much longer each part of the step takes, and what it is called.
fn parts(winner: (&Plan, &Timing), loser: (&Plan, &Timing)) -> Vec<(f64, &'static str)> {
    let (fast, slow) = (winner.1, loser.1);
    let exposed = |level: Level, name| (slow.exposed(level) - fast.exposed(level), name);
    vec![
        (slow.compute_s - fast.compute_s, computing(winner.0, loser.0)),
        (slow.tensor_s - fast.tensor_s, "tensor-parallel communication"),
        exposed(Level::Package, "waiting for weights and gradients in the package"),
        exposed(Level::Node, "waiting for weights and gradients in the node"),
        exposed(Level::Pod, "waiting for weights and gradients in the pod"),
        exposed(Level::Cluster, "waiting for weights and gradients across nodes"),
        (slow.idle_s - fast.idle_s, "larger bubble"),
    ]
}

/// Why kernels take longer: recomputation, smaller matrix products, or, if all products have the same size, a larger
/// optimizer step.
fn computing(winner: &Plan, loser: &Plan) -> &'static str {
    let products = |plan: &Plan| (plan.mesh.tp(), plan.batch.micro);
    let again = |plan: &Plan| match plan.memory.recompute {
        Recompute::None => 0,
        Recompute::Selective => 1,
        Recompute::Full => 2,
    };
    if again(loser) > again(winner) {
        "recomputation"
    } else if products(loser) == products(winner) {
        "larger optimizer step"
    } else {
        "less efficient kernels"
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    const FAST: Timing = Timing {
        step_s: 10.0,
        compute_s: 8.0,
        tensor_s: 1.0,
        exposed_s: [0.0; Level::ALL.len()],
        idle_s: 1.0,
        fixed_s: 0.0,
        bubble: 0.1,
    };

    fn plan(sets: &[&str]) -> Plan {
        ConfigSource::demo().sets(sets).plan().expect("the demo")
    }

    fn told(slow: Timing) -> String {
        reason((&plan(&["batch.micro=2"]), &FAST), (&plan(&["batch.micro=1"]), &slow))
    }

    #[test]
    fn the_largest_difference_comes_first() {
        let slow = Timing { step_s: 11.0, idle_s: 1.3, exposed_s: [0.0, 0.0, 0.0, 0.7], ..FAST };
        assert_eq!(told(slow), "waiting for weights and gradients across nodes +7.0 %, larger bubble +3.0 %");
        let slow = Timing { step_s: 10.5, compute_s: 8.6, idle_s: 0.9, ..FAST };
        assert_eq!(told(slow), "less efficient kernels +6.0 %");
        assert_eq!(told(FAST), "as fast");
        let alike = reason((&plan(&[]), &FAST), (&plan(&["sharding.zero=0"]), &slow));
        assert_eq!(alike, "larger optimizer step +6.0 %");
        assert_eq!(told(Timing { step_s: 9.5, ..FAST }), "5.0 % faster");
    }
}
