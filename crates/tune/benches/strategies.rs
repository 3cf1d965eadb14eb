//! How many strategies are gone through in a second: the 175B model of arXiv 2312.12705 on 1024 ranks of Frontier. Then whole
//! searches: of that model, and of 1T on 3072 ranks.
//!
//! `cargo bench -p kintsugi-tune`. On a shared machine, compare the seconds of the processors and not those of the wall.

use std::time::Instant;

use kintsugi_plan::config::ConfigSource;
use kintsugi_tensor::Device;
use kintsugi_tune::{By, Limit, Settings, search, strategies, strategies_that_fit};

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

const TRILLION: &str = "
[model]
preset = \"gpt-1t\"
[batch]
global = 9600
[precision]
compute = \"fp16\"
[cluster]
preset = \"frontier\"
nodes = 384
";

const DEVICE: Device = Device::Cpu { threads: 1 };

fn main() {
    let (base, ranks) = ConfigSource::text(CONFIG).search_base().expect("a valid configuration");
    println!("{} on {ranks} ranks", base.model.name);

    let watch = Watch::start();
    let all = strategies(&base, ranks, &[], &[], usize::MAX);
    watch.report("enumerated", all.len());

    let limit = base.cluster.device.planned_memory().map(Limit::PerRank);
    let watch = Watch::start();
    let fitting = strategies_that_fit(&base, DEVICE, &all, limit);
    watch.report("checked for memory", all.len());
    println!("{} of them fit", fitting.len());

    let watch = Watch::start();
    strategies_that_fit(&base, DEVICE, &all, None);
    watch.report("the same without a limit", all.len());

    for text in [CONFIG, TRILLION] {
        let (base, ranks) = ConfigSource::text(text).search_base().expect("a valid configuration");
        let settings = Settings {
            base: &base,
            ranks,
            only: &[],
            supported: &[],
            by: By::Time,
            top: 10,
            every: false,
            limit: base.cluster.device.planned_memory().map(Limit::PerRank),
            device: DEVICE,
            fits: &|_, _| true,
        };
        let watch = Watch::start();
        let found = search(&settings, &|_, _, _| {}).expect("Frontier's speed is known");
        println!("{} on {ranks} ranks: {:?}", base.model.name, found.counts);
        watch.report("searched", found.counts.enumerated);
        if let Some(pick) = found.pick {
            println!("the pick takes {:.3} s: {:?}", pick.candidate.timing.step_s, pick.candidate.strategy);
        }
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
