//! `kintsugi convert`: converts weights to another kind of folder or another layout.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, ValueEnum};
use kintsugi_checkpoint::WeightsFolder;
use kintsugi_checkpoint::convert::{ConversionOptions, ConversionTarget, convert, elements, plan_for};
use kintsugi_plan::Compute;
use kintsugi_spec::units;
use serde::Serialize;

use crate::describe::word;
use crate::failure::Failure;
use crate::model;
use crate::output::Output;
use crate::progress::Progress;

/// Converts weights between Hugging Face folders and checkpoints of any layout.
///
/// FROM is a Hugging Face folder with safetensors of a supported family (model.family), a checkpoint, or the folder of a run,
/// whose newest checkpoint is used.
///
/// A Hugging Face folder becomes a checkpoint. A checkpoint becomes a Hugging Face folder that transformers can load,
/// with the tokenizer of its training data or of the folder from which training started. With --set, a checkpoint is
/// converted to another layout, optimizer states included. Training never needs that, because --resume reads
/// checkpoints of any layout.
///
/// Weights are read and written piece by piece, so the model need not fit into memory. TO must not exist. It is written
/// completely or not at all.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// A Hugging Face folder, a checkpoint, or the folder of a run (its best checkpoint with /best)
    from: PathBuf,
    /// The folder to write
    to: PathBuf,
    /// What to write; by default the other kind, or a checkpoint if --set is given
    #[arg(long = "to", value_name = "KIND")]
    kind: Option<Kind>,
    /// Type of the weights in a Hugging Face folder; fp32 by default
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,
    /// Writes the moving average of the weights (optimizer.ema) instead of the weights, to a Hugging Face folder
    #[arg(long)]
    average: bool,
    /// Sets a value of the checkpoint's configuration, as in --set parallel.tp=4
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    sets: Vec<String>,
    /// Allows numbers that are not finite, also in the type of --dtype; by default they are an error
    #[arg(long)]
    allow_non_finite: bool,
    /// Prints the result as JSON, and nothing else to stdout
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi convert gpt2 start
      a Hugging Face folder into a checkpoint for one rank
  kintsugi convert llama start --set parallel.tp=2 --set parallel.pp=4
      the same, cut for eight ranks
  kintsugi convert out model --dtype bf16
      the newest checkpoint of the run in out into a Hugging Face folder
  kintsugi convert out model --average
      the moving average of its weights instead
  kintsugi convert out again --set parallel.tp=8
      the newest checkpoint of the run in out, for other ranks";

/// A kind of folder.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// A Hugging Face folder
    Hf,
    /// A checkpoint
    Checkpoint,
}

/// A type of weights.
#[derive(Clone, Copy, ValueEnum)]
enum DType {
    Fp32,
    Bf16,
    Fp16,
}

/// The result.
#[derive(Serialize)]
struct Conversion {
    /// Paths as text, since JSON cannot represent paths that are not UTF-8.
    from: String,
    to: String,
    kind: &'static str,
    family: String,
    parameters: u64,
    ranks: Option<usize>,
    files: usize,
    bytes: u64,
    seconds: f64,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let begun = Instant::now();
    // Without a trailing slash, which would put the unfinished folder inside it.
    let to: PathBuf = arguments.to.components().collect();
    check_free(&to)?;
    let from = WeightsFolder::open(&arguments.from)?;
    let target = target(arguments, &from)?;
    if arguments.average {
        model::check_average(&from, &arguments.from)?;
    }
    let progress = Progress::new("converting", elements(&from, &target));
    let options = ConversionOptions { average: arguments.average, non_finite: arguments.allow_non_finite };
    let converted = convert(&from, &to, &target, options, &|moved| progress.add(moved));
    drop(progress);
    converted.map_err(Failure::run)?;
    let (files, bytes) = measure(&to).map_err(|error| Failure::file("read", &to, error))?;
    let converted = Conversion {
        from: arguments.from.display().to_string(),
        to: to.display().to_string(),
        kind: if matches!(target, ConversionTarget::HuggingFace(_)) { "hf" } else { "checkpoint" },
        family: word(&from.model().family),
        parameters: elements(&from, &ConversionTarget::HuggingFace(Compute::Fp32)),
        ranks: match &target {
            ConversionTarget::HuggingFace(_) => None,
            ConversionTarget::Checkpoint(plan) => Some(plan.mesh.ranks()),
        },
        files,
        bytes,
        seconds: begun.elapsed().as_secs_f64(),
    };
    output.text(&sentence(&converted))?;
    if from.tokenizer().is_none() {
        output.text("no tokenizer is written, because none is known for these weights\n")?;
    }
    output.result(&converted)
}

fn check_free(to: &Path) -> Result<(), Failure> {
    let free = !to.exists() || fs::read_dir(to).is_ok_and(|mut entries| entries.next().is_none());
    if free {
        Ok(())
    } else {
        Err(Failure::mistake(format!("{} already exists; choose another folder", to.display())))
    }
}

fn target(arguments: &Arguments, from: &WeightsFolder) -> Result<ConversionTarget, Failure> {
    let other = match from {
        WeightsFolder::Checkpoint(_) if arguments.sets.is_empty() => Kind::Hf,
        _ => Kind::Checkpoint,
    };
    match (arguments.kind.unwrap_or(other), arguments.dtype) {
        (Kind::Hf, _) if !arguments.sets.is_empty() => Err(Failure::mistake(
            "--set needs a checkpoint as the target; a Hugging Face folder has no layout",
        )),
        (Kind::Hf, dtype) => Ok(ConversionTarget::HuggingFace(match dtype {
            None | Some(DType::Fp32) => Compute::Fp32,
            Some(DType::Bf16) => Compute::Bf16,
            Some(DType::Fp16) => Compute::Fp16,
        })),
        (Kind::Checkpoint, Some(_)) => {
            Err(Failure::mistake("--dtype needs a Hugging Face folder as the target; checkpoints are fp32"))
        }
        (Kind::Checkpoint, None) if arguments.average => Err(Failure::mistake(
            "--average needs a Hugging Face folder as the target; a checkpoint has both",
        )),
        (Kind::Checkpoint, None) => {
            let plan = plan_for(from, &arguments.sets)?;
            from.check_model(&plan)?;
            Ok(ConversionTarget::Checkpoint(Box::new(plan)))
        }
    }
}

/// The files of a folder and their bytes.
fn measure(folder: &Path) -> std::io::Result<(usize, u64)> {
    fs::read_dir(folder)?
        .try_fold((0, 0), |(files, bytes), entry| Ok((files + 1, bytes + entry?.metadata()?.len())))
}

fn sentence(converted: &Conversion) -> String {
    let kind = match converted.ranks {
        None => "a Hugging Face folder".to_owned(),
        Some(1) => "a checkpoint for one rank".to_owned(),
        Some(ranks) => format!("a checkpoint for {ranks} ranks"),
    };
    format!(
        "{} is {kind}: {}, {} parameters, {} in {} files, {:.1} s\n",
        converted.to,
        converted.family,
        units::count(converted.parameters as f64),
        units::bytes(converted.bytes),
        converted.files,
        converted.seconds,
    )
}
