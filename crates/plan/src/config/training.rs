//! The rest of a configuration: precision, memory, optimizer and run.

use std::path::PathBuf;

use kintsugi_spec::Hardware;

use super::error::{ConfigError, between, invalid, short, within};
use super::raw::{RawMemory, RawOptimizer, RawPrecision, RawRun};
use super::words::{DeviceName, Transport as TransportName};
use crate::{
    AttentionKind, Compute, DeviceKind, GradientType, LogFormat, LossScale, MemoryOptions, Optimizer,
    Precision, RateSchedule, Recompute, Resume, Run, Transport,
};

/// Step counters are `f32` on the device and stop counting beyond this.
const MAX_STEPS: u64 = 1 << 24;
/// A year.
const MAX_SECONDS: u64 = 365 * 24 * 3600;

/// The default number of checkpoints that are kept.
const DEFAULT_KEEP: u64 = 2;

/// The default number of tokens of an evaluation: enough for a mean to two digits, and few compared with a training
/// run.
const USUAL_EVALUATION: u64 = 1 << 16;

/// A beta that rounds to 1 in `f32` would never forget old gradients.
const MAX_BETA: f64 = 0.999_999_9;

pub(super) fn precision(raw: &RawPrecision) -> Result<Precision, ConfigError> {
    let states = raw.states.unwrap_or(Compute::Fp32);
    if states == Compute::Fp16 {
        let rule = "cannot hold squared gradients; use \"fp32\" or \"bf16\"";
        return Err(invalid("precision.states", "\"fp16\"", rule));
    }
    let loss_scale = raw.loss_scale.unwrap_or(LossScale::Dynamic);
    if let LossScale::Fixed(scale) = loss_scale {
        between("precision.loss_scale", scale, 1e-30..=1e30)?;
    }
    Ok(Precision {
        compute: raw.compute.unwrap_or(Compute::Fp32),
        gradients: raw.gradients.unwrap_or(GradientType::Fp32),
        states,
        loss_scale,
    })
}

pub(super) fn memory(raw: &RawMemory) -> MemoryOptions {
    MemoryOptions {
        recompute: raw.recompute.unwrap_or(Recompute::None),
        attention: raw.attention.unwrap_or(AttentionKind::Flash),
    }
}

pub(super) fn optimizer(raw: &RawOptimizer) -> Result<Optimizer, ConfigError> {
    let lr = between("optimizer.lr", raw.lr.unwrap_or(3e-4), 1e-30..=1e6)?;
    let min_lr = between("optimizer.min_lr", raw.min_lr.unwrap_or(lr / 10.0), 0.0..=1e6)?;
    if min_lr > lr {
        return Err(invalid("optimizer.min_lr", min_lr, format!("is above optimizer.lr = {lr}")));
    }
    let schedule = raw.schedule.unwrap_or(RateSchedule::Cosine);
    Ok(Optimizer {
        lr,
        min_lr,
        warmup: within("optimizer.warmup", raw.warmup.unwrap_or(0), 0..=MAX_STEPS)?,
        schedule,
        decay_steps: raw.decay_steps.map(|steps| decay_steps(steps, schedule)).transpose()?,
        betas: betas(raw)?,
        eps: between("optimizer.eps", raw.eps.unwrap_or(1e-8), 1e-30..=1.0)?,
        weight_decay: between("optimizer.weight_decay", raw.weight_decay.unwrap_or(0.1), 0.0..=1e6)?,
        clip: clip(raw.clip.unwrap_or(1.0))?,
    })
}

/// The steps of a decay, for schedules with a decay that ends.
fn decay_steps(steps: u64, schedule: RateSchedule) -> Result<u64, ConfigError> {
    let rule = |name| format!("has no meaning for optimizer.schedule = \"{name}\"; leave it out");
    match schedule {
        RateSchedule::Constant => Err(invalid("optimizer.decay_steps", steps, rule("constant"))),
        RateSchedule::InverseSqrt => Err(invalid("optimizer.decay_steps", steps, rule("inverse-sqrt"))),
        RateSchedule::Cosine | RateSchedule::Linear | RateSchedule::Wsd => {
            within("optimizer.decay_steps", steps, 1..=MAX_STEPS)
        }
    }
}

/// A note about what the optimizer does not reach in such a short run.
pub(super) fn note(optimizer: &Optimizer, run: &Run) -> Option<String> {
    let (warmup, steps, lr) = (optimizer.warmup, run.steps, optimizer.lr);
    (0 < steps && steps < warmup).then(|| {
        let last = short(lr * steps as f64 / warmup as f64);
        format!(
            "optimizer.warmup = {warmup} is longer than run.steps = {steps}: the learning rate ends at {last} and does \
             not reach optimizer.lr = {}",
            short(lr)
        )
    })
}

/// Why no checkpoint has a validation loss although the best are to be kept, as a sentence.
pub(super) fn keep_best_note(run: &Run) -> Option<String> {
    let missing = match (run.keep, run.eval_every) {
        (0, _) => "run.keep = 0 saves no checkpoints",
        (_, 0) => "run.eval_every = 0 evaluates nothing",
        _ => return None,
    };
    (run.keep_best > 0).then(|| format!("run.keep_best = {} has no effect: {missing}", run.keep_best))
}

fn betas(raw: &RawOptimizer) -> Result<(f64, f64), ConfigError> {
    let Some(betas) = &raw.betas else { return Ok((0.9, 0.95)) };
    match betas[..] {
        [first, second] if [first, second].iter().all(|beta| (0.0..=MAX_BETA).contains(beta)) => {
            Ok((first, second))
        }
        _ => {
            let rule = format!("must be two numbers from 0 to {MAX_BETA}");
            Err(invalid("optimizer.betas", format!("{betas:?}"), rule))
        }
    }
}

/// 0 disables clipping, so no other value may become 0 on the device.
fn clip(norm: f64) -> Result<f64, ConfigError> {
    if norm == 0.0 || (1e-30..=1e30).contains(&norm) {
        return Ok(norm);
    }
    Err(invalid("optimizer.clip", short(norm), "must be 0, for no clipping, or from 1e-30 to 1e30"))
}

/// The device of a run if the configuration says it: by its key, or by a transport that only GPUs have.
pub(super) fn given_device(raw: &RawRun) -> Option<DeviceKind> {
    match (raw.device.unwrap_or(DeviceName::Auto), raw.transport) {
        (DeviceName::Cpu, _) => Some(DeviceKind::Cpu),
        (DeviceName::Cuda, _) | (DeviceName::Auto, Some(TransportName::Nccl)) => Some(DeviceKind::Cuda),
        (DeviceName::Auto, _) => None,
    }
}

/// The run. If the configuration does not say its device, that is the one of the cluster, whose devices are of this `kind`.
pub(super) fn run(raw: &RawRun, kind: Option<Hardware>) -> Result<Run, ConfigError> {
    let device = given_device(raw).unwrap_or(match kind {
        Some(Hardware::Gpu) => DeviceKind::Cuda,
        Some(Hardware::Cpu) | None => DeviceKind::Cpu,
    });
    Ok(Run {
        steps: within("run.steps", raw.steps.unwrap_or(100), 0..=MAX_STEPS)?,
        seed: raw.seed.unwrap_or(1),
        out: folder(raw.out.as_deref())?,
        resume: raw.resume.clone().unwrap_or(Resume::No),
        checkpoint_every: raw.checkpoint_every.unwrap_or(0),
        keep: raw.keep.unwrap_or(DEFAULT_KEEP),
        keep_best: raw.keep_best.unwrap_or(0),
        log_every: raw.log_every.map(|steps| within("run.log_every", steps, 1..=MAX_STEPS)).transpose()?,
        log: log(raw.log.as_deref().unwrap_or_default()),
        eval_every: raw.eval_every.unwrap_or(0),
        eval_tokens: within("run.eval_tokens", raw.eval_tokens.unwrap_or(USUAL_EVALUATION), 1..=1 << 50)?,
        max_skipped: within("run.max_skipped", raw.max_skipped.unwrap_or(20), 1..=MAX_STEPS)?,
        communication_timeout: within(
            "run.communication_timeout",
            raw.communication_timeout.unwrap_or(600),
            1..=MAX_SECONDS,
        )?,
        // Determinism is free on a CPU, but not on a GPU.
        deterministic: raw.deterministic.unwrap_or(device == DeviceKind::Cpu),
        graph: raw.graph.unwrap_or(true),
        device,
        transport: transport(raw, device)?,
        nccl_channels: raw
            .nccl_channels
            .map(|channels| within("run.nccl_channels", channels, 1..=MAX_CHANNELS))
            .transpose()?,
        nccl_buffer: raw
            .nccl_buffer
            .map(|bytes| within("run.nccl_buffer", bytes, SMALLEST_BUFFER..=LARGEST_BUFFER))
            .transpose()?,
    })
}

/// NCCL's own limit.
const MAX_CHANNELS: u64 = 64;

/// The buffer of a channel has eight parts, and a part at least 8 KiB.
const SMALLEST_BUFFER: u64 = 64 << 10;
const LARGEST_BUFFER: u64 = 1 << 30;

fn transport(raw: &RawRun, device: DeviceKind) -> Result<Transport, ConfigError> {
    match raw.transport {
        Some(TransportName::Nccl) if device == DeviceKind::Cpu => Err(invalid(
            "run.transport",
            "\"nccl\"",
            "needs GPUs: set run.device = \"cuda\", or use \"mpi\" or \"threads\"",
        )),
        Some(TransportName::Nccl) => Ok(Transport::Nccl),
        Some(TransportName::Mpi) => Ok(Transport::Mpi),
        Some(TransportName::Threads) => Ok(Transport::Threads),
        Some(TransportName::Auto) | None => Ok(Transport::Auto),
    }
}

/// Every format once.
fn log(given: &[LogFormat]) -> Vec<LogFormat> {
    let mut formats = Vec::new();
    for &format in given {
        if !formats.contains(&format) {
            formats.push(format);
        }
    }
    formats
}

/// The output folder of a run.
fn folder(given: Option<&str>) -> Result<PathBuf, ConfigError> {
    match given {
        Some("") => Err(invalid("run.out", "\"\"", "names no folder; \".\" is the one you are in")),
        given => Ok(given.unwrap_or("out").into()),
    }
}
