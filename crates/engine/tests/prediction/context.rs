//! The bytes of context parallelism for each way of attention, derived here and compared with a measured step.

use kintsugi_comm::{Connection, Operation, Traffic};
use kintsugi_engine::{MemoryChoice, device};
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Coverage, predict};
use kintsugi_spec::Level;

use crate::{MODEL, check, measure};

/// Layers of [`MODEL`], its width, and the width of its two key heads.
const LAYERS: u64 = 4;
const HIDDEN: u64 = 32;
const KEYS: u64 = 16;
const MICRO_BATCHES: u64 = 2;

/// Numbers that a rank of `cp` and `tp` sends in a layer for a micro-batch of `tokens`: all-gathered, reduce-scattered, sent in
/// messages, and sent in all-to-alls; in a forward and in a backward.
fn numbers(way: &str, tokens: u64, [cp, tp]: [u64; 2]) -> [[u64; 4]; 2] {
    let [q, k] = [HIDDEN, KEYS].map(|width| width / tp);
    let u = tokens / cp * (cp - 1);
    match way {
        // The backward gathers keys and values again.
        "gather" => [[2 * u * k, 0, 0, 0], [2 * u * k, 2 * u * k, 0, 0]],
        "ring" => [[0, 0, 2 * u * k, 0], [0, 0, 4 * u * k, 0]],
        "all-to-all" => {
            // Key heads are repeated if there are fewer than ranks.
            let repeated = k * (cp * tp / 2).max(1);
            let each = (2 * q + 2 * repeated) * u / cp;
            [[0, 0, 0, each], [0, 0, 0, each]]
        }
        other => unreachable!("{other}"),
    }
}

/// In fp32, where keys and their gradients have 4 bytes each.
#[test]
fn traffic_of_context_parallelism_is_what_each_way_should_move() {
    for (cp, tp) in [(2, 1), (4, 1), (2, 2)] {
        for way in ["gather", "ring", "all-to-all"] {
            for recompute in ["none", "full"] {
                let text = format!(
                    "{MODEL}family = \"llama\"\nkv_heads = 2\n[parallel]\ntp = {tp}\ncp = {cp}\n\
                     cp_attention = \"{way}\"\n[batch]\nsequence = 16\nmicro = 2\nglobal = {}\n\
                     [memory]\nrecompute = \"{recompute}\"\n[run]\neval_every = 0\n[data]\nsource = \"corpus\"\n",
                    2 * MICRO_BATCHES
                );
                let plan = ConfigSource::text(&text).plan().unwrap_or_else(|error| panic!("{error}\n{text}"));
                let prediction = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep);
                let measured = measure(&plan, MemoryChoice::Heap, |_| {});
                check(&prediction, &measured).unwrap_or_else(|error| panic!("{error}\n{text}"));
                let mut traffic = Traffic::default();
                for rank in &measured {
                    traffic.merge(&rank.traffic);
                }
                let operations =
                    [Operation::AllGather, Operation::ReduceScatter, Operation::Send, Operation::AllToAll];
                let seen = operations.map(|operation| {
                    Level::ALL.map(|level| traffic.get(level, operation)).iter().sum::<u64>()
                });
                let [forward, backward] = numbers(way, 32, [cp, tp]);
                let forwards = if recompute == "full" { 2 } else { 1 };
                let expected: [u64; 4] = std::array::from_fn(|i| {
                    4 * cp * tp * LAYERS * MICRO_BATCHES * (forwards * forward[i] + backward[i])
                });
                // tp gathers three numbers of every token for the loss.
                let of_loss = if tp > 1 { MICRO_BATCHES * cp * 4 * 3 * (32 / cp) * tp * (tp - 1) } else { 0 };
                let expected = [expected[0] + of_loss, expected[1], expected[2], expected[3]];
                assert_eq!(seen, expected, "{way}, cp {cp}, tp {tp}, recompute {recompute}");
            }
        }
    }
}
