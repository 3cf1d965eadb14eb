//! The rest of a configuration: precision, memory, optimizer and run.

use std::path::PathBuf;

use super::error::{ConfigError, between, invalid, short, unavailable, within};
use super::raw::{RawMemory, RawOptimizer, RawPrecision, RawRun};
use super::words::Transport as TransportName;
use crate::{
    AttentionKind, Compute, DeviceKind, GradientType, LogFormat, LossScale, MemoryOptions, Optimizer,
    Precision, RateSchedule, Recompute, Resume, Run, Transport,
};

/// Counters of steps are `f32` on the device: beyond this they stand still.
const MOST_STEPS: u64 = 1 << 24;
/// A year.
const MOST_SECONDS: u64 = 365 * 24 * 3600;

/// Checkpoints that are kept where nothing is said.
const DEFAULT_KEEP: u64 = 2;

/// Tokens of an evaluation where nothing is said: enough for a mean to two digits, and few beside a training run's.
const USUAL_EVALUATION: u64 = 1 << 16;

/// What rounds to 1 in `f32` would never forget.
const MOST_BETA: f64 = 0.999_999_9;

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
        warmup: within("optimizer.warmup", raw.warmup.unwrap_or(0), 0..=MOST_STEPS)?,
        schedule,
        decay_steps: raw.decay_steps.map(|steps| decay_steps(steps, schedule)).transpose()?,
        betas: betas(raw)?,
        eps: between("optimizer.eps", raw.eps.unwrap_or(1e-8), 1e-30..=1.0)?,
        weight_decay: between("optimizer.weight_decay", raw.weight_decay.unwrap_or(0.1), 0.0..=1e6)?,
        clip: clip(raw.clip.unwrap_or(1.0))?,
    })
}

/// The steps of a decay, if the schedule has one that ends.
fn decay_steps(steps: u64, schedule: RateSchedule) -> Result<u64, ConfigError> {
    let rule = |name| format!("has no meaning for optimizer.schedule = \"{name}\"; leave it out");
    match schedule {
        RateSchedule::Constant => Err(invalid("optimizer.decay_steps", steps, rule("constant"))),
        RateSchedule::InverseSqrt => Err(invalid("optimizer.decay_steps", steps, rule("inverse-sqrt"))),
        RateSchedule::Cosine | RateSchedule::Linear | RateSchedule::Wsd => {
            within("optimizer.decay_steps", steps, 1..=MOST_STEPS)
        }
    }
}

/// What the optimizer will not do in a run this short, as a sentence.
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

fn betas(raw: &RawOptimizer) -> Result<(f64, f64), ConfigError> {
    let Some(betas) = &raw.betas else { return Ok((0.9, 0.95)) };
    match betas[..] {
        [first, second] if [first, second].iter().all(|beta| (0.0..=MOST_BETA).contains(beta)) => {
            Ok((first, second))
        }
        _ => {
            let rule = format!("must be two numbers from 0 to {MOST_BETA}");
            Err(invalid("optimizer.betas", format!("{betas:?}"), rule))
        }
    }
}

/// 0 is no clipping, so nothing else may become 0 on the device.
fn clip(norm: f64) -> Result<f64, ConfigError> {
    if norm == 0.0 || (1e-30..=1e30).contains(&norm) {
        return Ok(norm);
    }
    Err(invalid("optimizer.clip", short(norm), "must be 0, for no clipping, or from 1e-30 to 1e30"))
}

pub(super) fn run(raw: &RawRun) -> Result<Run, ConfigError> {
    check_available(raw)?;
    let device = raw.device.unwrap_or(DeviceKind::Cpu);
    Ok(Run {
        steps: within("run.steps", raw.steps.unwrap_or(100), 0..=MOST_STEPS)?,
        seed: raw.seed.unwrap_or(1),
        out: folder(raw.out.as_deref())?,
        resume: raw.resume.clone().unwrap_or(Resume::No),
        checkpoint_every: raw.checkpoint_every.unwrap_or(0),
        keep: raw.keep.unwrap_or(DEFAULT_KEEP),
        log_every: raw.log_every.map(|steps| within("run.log_every", steps, 1..=MOST_STEPS)).transpose()?,
        log: log(raw.log.as_deref().unwrap_or_default()),
        eval_every: raw.eval_every.unwrap_or(0),
        eval_tokens: within("run.eval_tokens", raw.eval_tokens.unwrap_or(USUAL_EVALUATION), 1..=1 << 50)?,
        max_skipped: within("run.max_skipped", raw.max_skipped.unwrap_or(20), 1..=MOST_STEPS)?,
        communication_timeout: within(
            "run.communication_timeout",
            raw.communication_timeout.unwrap_or(600),
            1..=MOST_SECONDS,
        )?,
        // It costs nothing on a CPU; on a GPU it does.
        deterministic: raw.deterministic.unwrap_or(device == DeviceKind::Cpu),
        graph: raw.graph.unwrap_or(true),
        device,
        transport: Transport::Threads,
    })
}

fn check_available(raw: &RawRun) -> Result<(), ConfigError> {
    match raw.transport {
        Some(TransportName::Mpi) => return Err(unavailable("run.transport", "\"mpi\"", "\"threads\"")),
        Some(TransportName::Nccl) => return Err(unavailable("run.transport", "\"nccl\"", "\"threads\"")),
        Some(TransportName::Threads) | None => {}
    }
    Ok(())
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

/// Where a run writes.
fn folder(given: Option<&str>) -> Result<PathBuf, ConfigError> {
    match given {
        Some("") => Err(invalid("run.out", "\"\"", "names no folder; \".\" is the one you are in")),
        given => Ok(given.unwrap_or("out").into()),
    }
}
