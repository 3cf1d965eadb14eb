//! `kintsugi calibrate`: measures this machine's device and writes a profile.

mod fitting;

use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use clap::Args;
use kintsugi_calibrate::{Patience, Rows, Shapes, calibrate, thread_links, under_background_load};
use kintsugi_engine::ThreadError;
use kintsugi_engine::platform;
use kintsugi_model::compute_type;
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{DeviceKind, GradientType, Plan};
use kintsugi_spec::{Cause, DeviceSpec, Hardware, LinkSpec, ModelSpec, units};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::{Backend, DType};
use serde::Serialize;

use crate::config::ConfigArguments;
use crate::failure::{ErrorContext, Failure};
use crate::files;
use crate::host;
use crate::output::Output;
use crate::progress::Progress;
use crate::table::Table;
use fitting::Fitting;

/// Measures this machine and writes a profile for `plan --profile`.
///
/// Matrix products in the shapes of the model presets, attention, copies and launches are timed twice: in bursts, and
/// back to back after the device has warmed up. A GPU at its power cap runs slower in training than in a short test. If
/// the GPU reports its power, idle and loaded power are measured too. Data-sheet peaks are taken from cluster.preset,
/// if it is given.
///
/// run.device selects the device. "cpu" measures one thread, as a rank has it while the other cores are busy, and the
/// copies between ranks that are threads. "cuda" or "hip" measures the first GPU. On a CPU the shapes are those of the
/// configuration's model and micro-batch, in fp32 and in precision.compute.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// The file to write
    #[arg(long, value_name = "FILE.toml", default_value = "profile.toml")]
    out: PathBuf,
    /// Seconds of warm-up before sustained rates are measured
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    warm_up: f64,
    /// Seconds of work for each sustained rate
    #[arg(long, value_name = "SECONDS", default_value_t = 0.4, value_parser = seconds)]
    sustained: f64,
    #[command(flatten)]
    fitting: Fitting,
    /// Prints the profile as JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi calibrate --set run.device=cuda --set cluster.preset=h200 --out h200.toml
      the first GPU, a few minutes
  kintsugi plan run.toml --profile h200.toml
      predicts with what was measured
  kintsugi calibrate --warm-up 1 --sustained 0.1
      one CPU thread, briefly
  kintsugi calibrate --fit tables --leave-out vtrain
      fits the constants of clusters and frameworks to measured runs, without those of one source";

fn seconds(text: &str) -> Result<f64, Cause> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(Cause::new("must be a number from 0 to 3600")),
    }
}

/// The contents of a profile.
#[derive(Serialize)]
struct Profile<'a> {
    cluster: Cluster<'a>,
}

#[derive(Serialize)]
struct Cluster<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    cores: Option<usize>,
    device: &'a DeviceSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    links: Option<Links>,
}

/// What is measured in addition to the device, if ranks are threads.
#[derive(Serialize)]
struct Links {
    node: LinkTable,
}

#[derive(Serialize)]
struct LinkTable {
    bandwidth: Option<f64>,
    efficiency: Option<f64>,
    latency: Option<f64>,
    start: Option<f64>,
}

impl From<LinkSpec> for LinkTable {
    fn from(link: LinkSpec) -> Self {
        let LinkSpec { bandwidth, efficiency, latency, start, .. } = link;
        LinkTable { bandwidth, efficiency, latency, start }
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    if let Some(folder) = &arguments.fitting.fit {
        return arguments.fitting.run(folder, output);
    }
    let plan = arguments.config.plan()?;
    files::check_writable(&arguments.out)?;
    let patience = Patience {
        warm_up: Duration::from_secs_f64(arguments.warm_up),
        sustained: Duration::from_secs_f64(arguments.sustained),
        rest: Duration::from_millis(50),
        shared: plan.run.device == DeviceKind::Cpu,
    };
    let cores = host::cores();
    let (device, cores, link) = match plan.run.device {
        DeviceKind::Cpu => {
            let no_thread = |error| ThreadError::new("a thread to measure with", error);
            let device = cpu(&plan, patience, cores).map_err(no_thread)?;
            (device, Some(cores), Some(thread_links(cores).map_err(no_thread)?))
        }
        DeviceKind::Cuda | DeviceKind::Hip => (gpu(&plan, patience)?, None, None),
    };
    let shared = link.as_ref().map_or_else(String::new, |link| sharing(cores, link));
    let links = link.map(|link| Links { node: link.into() });
    let profile = toml::to_string(&Profile { cluster: Cluster { cores, device: &device, links } })
        .map_err(|error| Failure::run(ErrorContext::new("the profile cannot be written as TOML", error)))?;
    files::write_whole(&arguments.out, profile.as_bytes())?;
    output.text(&(shared + &report(&device)))?;
    output.text(&format!("\nprofile  {}\n", arguments.out.display()))?;
    output.result(&device)
}

/// Models that fit on one GPU.
const GPU_MODELS: [&str; 5] = ["gpt2-124m", "gpt2-1558m", "gpt-1.3b", "gpt-1.4b", "llama2-7b"];

fn gpu(plan: &Plan, patience: Patience) -> Result<DeviceSpec, Failure> {
    /// More memory than the largest product and the largest copy take.
    const MEMORY: u64 = 12 << 30;
    let failure = |error: kintsugi_gpu::GpuError| Failure::run(error);
    let platform = platform(plan.run.device).expect("the device of a GPU's plan");
    let gpu = platform.gpu(0).map_err(failure)?;
    let backend = platform.backend(0, MEMORY, false).map_err(failure)?;
    let models = GPU_MODELS.map(model);
    let shapes = Shapes::of(&models, &[1], &[8192, 32768], &[1024, 2048], &[DType::BF16]);
    let known = DeviceSpec {
        name: gpu.name().map_err(failure)?,
        kind: Some(Hardware::Gpu),
        memory: Some(gpu.memory().map_err(failure)?.1),
        units: Some(gpu.multiprocessors()),
        ..plan.cluster.device.clone()
    };
    let meter = gpu.power_meter();
    let bar = Progress::new("measuring", 0);
    Ok(calibrate(&backend, meter.as_deref(), &shapes, patience, known, |progress| {
        bar.set(progress.done as u64, progress.all as u64, "");
    }))
}

/// Measures one thread while the other cores are busy, with models of a size that is used to try layouts.
fn cpu(plan: &Plan, patience: Patience, cores: usize) -> io::Result<DeviceSpec> {
    let backend: Box<dyn Backend> = Box::new(CpuBackend::new(Rc::new(Heap::default()), 1));
    let sequence = plan.batch.sequence;
    let rows = sequence * plan.batch.micro;
    let models = [plan.model.clone(), model("gpt2-124m")];
    let mut dtypes = vec![DType::F32, compute_type(plan.precision.compute)];
    dtypes.dedup();
    let shapes = Shapes {
        kernels: Some(Rows { rows, width: plan.model.hidden }),
        narrow_gradients: plan.precision.gradients == GradientType::Compute,
        ..Shapes::of(&models, &[1, 2, 4], &[rows], &[sequence, 256], &dtypes)
    };
    let known = DeviceSpec { kind: Some(Hardware::Cpu), units: Some(1), ..plan.cluster.device.clone() };
    let bar = Progress::new("measuring", 0);
    under_background_load(cores - 1, || {
        calibrate(&*backend, None, &shapes, patience, known, |progress| {
            bar.set(progress.done as u64, progress.all as u64, "");
        })
    })
}

/// A preset's model.
fn model(preset: &str) -> ModelSpec {
    let source = ConfigSource::text(format!("model.preset = \"{preset}\""));
    source.plan().expect("a preset is a legal model").model
}

/// The links between ranks that are threads.
fn sharing(cores: Option<usize>, link: &LinkSpec) -> String {
    let micro = |seconds: Option<f64>| seconds.unwrap_or(0.0) * 1e6;
    format!(
        "cores    {}, shared by ranks that are threads\nlinks    {}/s between them, {:.1} µs to begin, {:.1} µs a hop\n",
        cores.unwrap_or(1),
        units::bytes(link.bandwidth.unwrap_or(0.0) as u64),
        micro(link.start),
        micro(link.latency),
    )
}

/// The most important results as text.
fn report(device: &DeviceSpec) -> String {
    let fastest = device.products.iter().map(|point| point.flops).fold(0.0, f64::max);
    let (unit, factor) = if fastest < 1e12 { ("GFLOP/s", 1e9) } else { ("TFLOP/s", 1e12) };
    let rate = |rate: f64| format!("{:.1}", rate / factor);
    let mut lines = vec![format!("device   {}", device.name)];
    if let (Some(bandwidth), Some(share)) = (device.memory_bandwidth, device.streaming) {
        lines.push(format!("copies   {}/s read and written", units::bytes((bandwidth * share) as u64)));
    }
    if let Some(launch) = device.launch {
        lines.push(format!("launch   {:.2} µs from one small operation to the next", launch * 1e6));
    }
    if let (Some(idle), Some(most)) = (device.power_idle, device.power_max) {
        lines.push(format!("power    {idle:.0} W at rest, {most:.0} W at work"));
    }
    let mut products = Table::new(["m", "n", "k", &format!("{unit} sustained"), "in bursts"]);
    for point in &device.products {
        let burst = point.burst.map_or_else(String::new, rate);
        products.row(vec![
            point.m.to_string(),
            point.n.to_string(),
            point.k.to_string(),
            rate(point.flops),
            burst,
        ]);
    }
    let mut attention = Table::new(["head", "sequence", &format!("{unit} forward"), "backward"]);
    for point in &device.attention {
        let (forward, backward) = (rate(point.forward), rate(point.backward));
        attention.row(vec![point.head_dim.to_string(), point.sequence.to_string(), forward, backward]);
    }
    format!("{}\n\n{products}\n{attention}", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_are_models_that_there_are() {
        for name in GPU_MODELS {
            assert_eq!(model(name).name, name);
        }
    }
}
