//! The failure of a rank in jobs of up to 10,000 ranks: what the agents send to the launcher, and when it knows the cause.
//!
//! `cargo run -p kintsugi-comm --example agents_at_scale`

use std::time::{Duration, Instant};

use kintsugi_comm::agents::simulation::{SimulatedJob, simulate};

fn main() {
    println!(
        "nodes  ranks  cause known, ms  messages/s before  most in 0.1 s  messages in all  simulated in, s"
    );
    let jobs = [(125, 8), (1_250, 8), (2_500, 4), (10_000, 1)];
    for (nodes, ranks_per_node) in jobs {
        let (victim, ends_within) = (nodes * ranks_per_node / 3, Duration::from_secs(3));
        let begun = Instant::now();
        let outcome = simulate(&SimulatedJob { nodes, ranks_per_node, victim, ends_within, seed: 1 });
        assert_eq!(outcome.culprit, Some(victim), "the rank that has died");
        println!(
            "{nodes:5} {:6} {:16.2} {:18.0} {:14} {:16} {:16.2}",
            nodes * ranks_per_node,
            outcome.known_after.as_secs_f64() * 1e3,
            outcome.usual_messages,
            outcome.most_messages,
            outcome.messages,
            begun.elapsed().as_secs_f64()
        );
    }
}
