//! `kintsugi doctor --self-test`: checks a device against the CPU, and writes a report that a person can attach.

mod operations;
mod rates;
mod report;
mod training;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use clap::Args;
use kintsugi_engine::platform;
use kintsugi_gpu::{GpuBackend, GpuError};
use kintsugi_plan::DeviceKind;
use kintsugi_plan::config::ConfigSource;
use kintsugi_tensor::Backend;
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use serde::Serialize;

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::files;
use crate::host;
use crate::output::Output;
use crate::progress::Progress;
use operations::Group;
use rates::Rates;
use training::Training;

/// The device and the configuration of a self-test.
#[derive(Args)]
pub struct SelfTestArguments {
    /// Tests the device of run.device: the first GPU, or the CPU if there is none
    ///
    /// Compiles every kernel; runs every operation on random shapes and compares it with the CPU; trains the
    /// configuration's model, or the demo's, for five steps on the device and on the CPU, in fp32 and in bf16; and measures
    /// copies, products and attention beside what the cluster's profile predicts. The exit code is 1 if results differ.
    #[arg(long)]
    pub self_test: bool,
    /// The report of the self-test
    #[arg(long, value_name = "FILE", default_value = "self-test.txt", requires = "self_test")]
    out: PathBuf,
    /// The random shapes of the self-test
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "self_test")]
    seed: u64,
    /// Only small shapes, for a device that is slow or emulated
    #[arg(long, requires = "self_test")]
    brief: bool,
    #[command(flatten)]
    config: ConfigArguments,
}

impl SelfTestArguments {
    /// Refuses a configuration without `--self-test`, which would have no effect.
    pub fn check(&self) -> Result<(), Failure> {
        if self.self_test || !(self.config.has_file() || self.config.has_sets()) {
            return Ok(());
        }
        Err(Failure::mistake("doctor reads a configuration only with --self-test"))
    }
}

/// Everything that was found out.
#[derive(Serialize)]
pub struct Results {
    device: String,
    seed: u64,
    /// Kernel files that were compiled, and the compiler's messages for others.
    compiled: usize,
    not_compiled: Vec<String>,
    operations: Vec<Group>,
    training: Vec<Training>,
    rates: Result<Rates, String>,
    passed: bool,
    seconds: f64,
}

/// Runs the test and writes the report, which begins with `findings`.
pub fn run(arguments: &SelfTestArguments, findings: &str, output: Output) -> Result<(), Failure> {
    files::check_writable(&arguments.out)?;
    let (begun, source) = (Instant::now(), source(&arguments.config)?);
    let plan = source.plan()?;
    let test = Test { kind: plan.run.device, seed: arguments.seed, brief: arguments.brief };
    let device = test.name()?;
    output.text(&format!("testing  {device}\n"))?;

    let (compiled, not_compiled, operations) = match test.kind {
        DeviceKind::Cpu => (0, Vec::new(), operations::run(&cpu(), &test)),
        DeviceKind::Cuda | DeviceKind::Hip => {
            let backend = test.gpu(test.operations_memory(), true)?;
            let (compiled, not_compiled) = compile(&backend);
            (compiled, not_compiled, operations::run(&backend, &test))
        }
    };
    let training = training::run(&source, &test)?;
    let rates = test.measure(&plan);

    let passed = not_compiled.is_empty()
        && operations.iter().all(|group| group.failed.is_empty())
        && training.iter().all(|training| training.failure.is_none())
        && rates.is_ok();
    let seconds = begun.elapsed().as_secs_f64();
    let results = Results {
        device,
        seed: test.seed,
        compiled,
        not_compiled,
        operations,
        training,
        rates,
        passed,
        seconds,
    };
    let text = report::text(&results);
    let version = env!("CARGO_PKG_VERSION");
    files::write_whole(&arguments.out, format!("kintsugi {version}\n{findings}\n{text}").as_bytes())?;
    output.text(&format!("{text}\nreport   {}\n", arguments.out.display()))?;
    output.result(&results)?;
    if passed { Ok(()) } else { Err(Failure::Shown) }
}

/// The configuration with the device that is tested.
fn source(config: &ConfigArguments) -> Result<ConfigSource, Failure> {
    let source = config.read()?;
    if !source.is_device_auto()? {
        return Ok(source);
    }
    let kind = match host::gpus() {
        (_, 0) => DeviceKind::Cpu,
        (kind, _) => kind,
    };
    Ok(source.set(format!("run.device={}", kind.name())))
}

/// What is tested.
struct Test {
    kind: DeviceKind,
    seed: u64,
    brief: bool,
}

impl Test {
    /// The kind of device and its name.
    fn name(&self) -> Result<String, Failure> {
        match platform(self.kind) {
            None => Ok("the CPU, one thread".to_owned()),
            Some(platform) => {
                let gpu = platform.gpu(0).map_err(Failure::run)?;
                Ok(format!("{}: {}", platform.name(), gpu.name().map_err(Failure::run)?))
            }
        }
    }

    /// Bytes of device memory that the operations need.
    fn operations_memory(&self) -> u64 {
        if self.brief { 96 << 20 } else { 1 << 30 }
    }

    fn gpu(&self, memory: u64, deterministic: bool) -> Result<GpuBackend, Failure> {
        let platform = platform(self.kind).expect("a GPU");
        platform.backend(0, memory, deterministic).map_err(Failure::run)
    }

    /// The rates, or the device's message.
    fn measure(&self, plan: &kintsugi_plan::Plan) -> Result<Rates, String> {
        match self.kind {
            DeviceKind::Cpu => Ok(rates::measure(&cpu(), None, plan, self)),
            DeviceKind::Cuda | DeviceKind::Hip => {
                let platform = platform(self.kind).expect("a GPU");
                let memory = rates::memory(self);
                let begin = || -> Result<_, GpuError> {
                    Ok((
                        platform.backend(0, memory, false)?.without_tuning_cache(),
                        platform.gpu(0)?.power_meter(),
                    ))
                };
                let (backend, meter) = begin().map_err(|error| error.to_string())?;
                let run = || rates::measure(&backend, meter.as_deref(), plan, self);
                catch_unwind(AssertUnwindSafe(run)).map_err(|_| "the device failed; see above".to_owned())
            }
        }
    }
}

fn cpu() -> CpuBackend {
    CpuBackend::new(Rc::new(Heap::default()), 1)
}

/// Compiles every kernel file. Returns how many compiled, and what the compiler said of the others.
fn compile(backend: &GpuBackend) -> (usize, Vec<String>) {
    let files = backend.kernel_files();
    let progress = Progress::new("kernels", files.len() as u64);
    let mut failed = Vec::new();
    for name in &files {
        if let Err(error) = backend.compile_kernel_file(name) {
            failed.push(error.to_string());
        }
        progress.add(1);
    }
    backend.synchronize();
    (files.len() - failed.len(), failed)
}
