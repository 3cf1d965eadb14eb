//! One training step on this CPU beside a peer, alternating in one run.
//!
//! The model is a GPT of 4 layers, hidden 256, 8 heads, sequence 256, batch 4, vocabulary 8192, in fp32. Every
//! variant runs in a process of its own, so that its peak memory is its own. `KINTSUGI_PEER` names the peer: a
//! command that prints a line of JSON with `tok_s` and `peak_mib`.

use std::process::Command;

use kintsugi_comm::Connection;
use kintsugi_engine::{Event, MemoryChoice, TrainOptions, dataset, device, train};
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Coverage, predict};
use serde_json::{Value, json};

const ROUNDS: usize = 5;
const STEPS: usize = 14;
const WARM_UP: usize = 4;
const MODEL: &str = "
    model.layers=4 model.hidden=256 model.heads=8 model.ffn=1024 model.vocab=8192
    batch.sequence=256 batch.global=4 run.steps=14 run.eval_every=0 sharding.zero=0";
const ONE_RANK: &str = "batch.micro=4 parallel.tp=1 parallel.pp=1 parallel.dp=1";
const EIGHT_RANKS: &str = "batch.micro=1 parallel.tp=2 parallel.pp=2 parallel.dp=2 sharding.zero=1";

fn main() {
    if let Some(layout) = std::env::args().skip_while(|arg| arg != "--layout").nth(1) {
        println!("{}", run(&layout));
        return;
    }
    let peer = std::env::var("KINTSUGI_PEER").ok();
    let this = std::env::current_exe().expect("a path to this program").display().to_string();
    let quoted = |layout: &str| format!("{this} --layout '{layout}'");
    let mut variants = vec![("one rank", quoted(ONE_RANK)), ("eight ranks", quoted(EIGHT_RANKS))];
    variants.extend(peer.map(|command| ("peer", command)));
    let mut results: Vec<Vec<Value>> = vec![Vec::new(); variants.len()];
    for round in 1..=ROUNDS {
        for ((name, command), results) in variants.iter().zip(&mut results) {
            let result = measure(command);
            println!("round {round}: {name:<12} {result}");
            results.push(result);
        }
    }
    println!();
    let rates: Vec<f64> =
        results.iter().map(|r| median(r.iter().map(|v| number(v, "tok_s")).collect())).collect();
    for (((name, _), results), rate) in variants.iter().zip(&results).zip(&rates) {
        let memory = median(results.iter().map(|v| number(v, "peak_mib")).collect());
        println!("{name:<12} {rate:>8.0} tokens/s, peak {memory:.0} MiB");
    }
    println!("eight ranks / one rank: {:.3}", rates[1] / rates[0]);
    if let Some(peer) = rates.get(2) {
        println!("one rank / peer: {:.3}", rates[0] / peer);
    }
}

fn measure(command: &str) -> Value {
    let output = Command::new("sh").args(["-c", command]).output().expect("a shell");
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line)
        .unwrap_or_else(|_| panic!("{command} said {text}{}", String::from_utf8_lossy(&output.stderr)))
}

fn run(layout: &str) -> Value {
    let settings = MODEL.split_whitespace().chain(layout.split_whitespace());
    let plan = ConfigSource::demo().sets(settings).plan().expect("a legal layout");
    let reserved = predict(&plan, device(&plan, Connection::Threads), Coverage::WholeStep)
        .stages
        .iter()
        .map(|stage| stage.reserved)
        .collect();
    let mut seconds = Vec::with_capacity(STEPS);
    train(
        &plan,
        &*dataset(&plan).expect("its data"),
        &TrainOptions::new(MemoryChoice::Slab(reserved)),
        |event| {
            if let Event::Step(report) = event {
                seconds.push(report.step_s);
            }
        },
    )
    .expect("it trains");
    let step = median(seconds.split_off(WARM_UP));
    json!({ "tok_s": (plan.tokens_per_step() as f64 / step).round(), "step_s": step, "peak_mib": peak_mib() })
}

/// The process's highest resident memory, from the kernel.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or(f64::NAN)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
