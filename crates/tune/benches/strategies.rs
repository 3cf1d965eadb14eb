//! How many strategies are gone through in a second: the 175B model of arXiv 2312.12705 on 1024 ranks of Frontier.
//!
//! `cargo bench -p kintsugi-tune`. A number as argument is how many of those that fit are timed, spread evenly; all
//! without one. Where the machine is shared, the seconds of its processors say more than those of the wall.

use std::time::Instant;

use kintsugi_plan::config::{ConfigSource, Strategy};
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_tensor::Device;
use kintsugi_tune::{Limit, strategies, strategies_that_fit, timings};

const CONFIG: &str = "
[model]
preset = \"gpt-175b\"
[batch]
global = 10240
[precision]
compute = \"fp16\"
[cluster]
preset = \"frontier\"
nodes = 128
";

const DEVICE: Device = Device::Cpu { threads: 1 };

fn main() {
    let most: usize = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(usize::MAX);
    let (base, ranks) = ConfigSource::text(CONFIG).search_base().expect("a valid configuration");
    println!("{} on {ranks} ranks", base.model.name);

    let watch = Watch::start();
    let all = strategies(&base, ranks, &[], &[], usize::MAX);
    watch.report("enumerated", all.len());

    let limit = base.cluster.device.planned_memory().map(Limit::PerRank);
    let watch = Watch::start();
    let fitting = strategies_that_fit(&base, DEVICE, &all, limit, &|_| {});
    watch.report("checked for memory", all.len());
    println!("{} of them fit", fitting.len());

    let watch = Watch::start();
    strategies_that_fit(&base, DEVICE, &all, None, &|_| {});
    watch.report("the same without a limit", all.len());

    let model = DeviceModel::new(&base.cluster.device, &base.framework).expect("Frontier's speed is known");
    let apart = fitting.len().div_ceil(most).max(1);
    let sample: Vec<Strategy> = fitting.iter().step_by(apart).map(|&(strategy, _)| strategy).collect();
    let watch = Watch::start();
    let timed = timings(&base, &model, &sample, &|_| {});
    watch.report("timed", sample.len());
    if let Some((timing, strategy)) =
        timed.iter().zip(&sample).min_by(|a, b| a.0.step_s.total_cmp(&b.0.step_s))
    {
        println!("the fastest takes {:.3} s: {strategy:?}", timing.step_s);
    }
}

struct Watch {
    wall: Instant,
    processor: f64,
}

impl Watch {
    fn start() -> Self {
        Watch { wall: Instant::now(), processor: processor_seconds() }
    }

    fn report(&self, what: &str, count: usize) {
        let (wall, processor) = (self.wall.elapsed().as_secs_f64(), processor_seconds() - self.processor);
        let rate = |seconds: f64| count as f64 / seconds.max(1e-9);
        println!(
            "{what:<24}{count:>8} in {wall:7.2} s: {:>8.0} per second; {processor:7.2} s of processors: {:>8.0}",
            rate(wall),
            rate(processor)
        );
    }
}

/// Seconds that this process has kept processors busy, where the system tells.
fn processor_seconds() -> f64 {
    let Ok(stat) = std::fs::read_to_string("/proc/self/stat") else { return f64::NAN };
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|field| field.parse::<f64>().ok()).unwrap_or(f64::NAN);
    (ticks(11) + ticks(12)) / 100.0
}
