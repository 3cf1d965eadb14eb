//! `kintsugi eval`: the loss and the perplexity of a model on token files.

use clap::{Args, ValueEnum};
use kintsugi_checkpoint::WeightsFolder;
use kintsugi_comm::Connection;
use kintsugi_data::{Dataset, Split};
use kintsugi_engine::{
    EvaluateOptions, EvaluationResult, SourceLoss, check_tokenizers, device, evaluate, evaluation_dataset,
};
use kintsugi_plan::Plan;
use kintsugi_rank::Store;
use kintsugi_simulate::evaluation_memory;
use kintsugi_spec::units;

use crate::failure::Failure;
use crate::model::{self, ModelArguments};
use crate::output::{self, Output};
use crate::processes;
use crate::progress::Progress;

/// Measures the loss and the perplexity of a model on token files.
///
/// FOLDER is the folder of a run, a checkpoint or a Hugging Face folder. With --data, the whole files are read, in
/// consecutive samples of batch.sequence tokens. Without it, the validation split of the run's data is read. Every
/// token except the first of a sample is a target once, whatever the batch sizes. Only tokens at the end of a file that
/// do not fill a sample are left out.
///
/// Samples come in the order of the files. With several sources, each has its own loss, and the result is their
/// weighted mean.
///
/// The model runs on one rank, or on the layout that --set parallel.… gives.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Token files, as `kintsugi prepare` or Megatron-LM writes them: PREFIX.bin and PREFIX.idx
    #[arg(long, value_name = "PREFIX")]
    data: Option<String>,
    /// Part of the data, by data.split; by default all of --data, or else the validation split
    #[arg(long, value_name = "SPLIT")]
    split: Option<SplitName>,
    /// Samples to read, starting with the first, from several sources by weight; by default all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi eval out
      the newest checkpoint of the run in out, on its own validation split
  kintsugi eval gpt2 --data data/book --set batch.sequence=1024
      a Hugging Face folder on token files made with its tokenizer
  kintsugi eval out --data data/book --set parallel.tp=2 --json
      the same number with two ranks, as JSON";

/// The longest sample that is used by default.
const MAX_SEQUENCE: usize = 2048;

#[derive(Clone, Copy, ValueEnum)]
enum SplitName {
    Train,
    Validation,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    processes::refuse_several("eval")?;
    let output = Output { json: arguments.json };
    let weights = arguments.model.open()?;
    let plan = plan(arguments, &weights)?;
    for warning in check_tokenizers(&plan, weights.tokenizer().as_deref())? {
        output::stderr(&format!("warning: {warning}"));
    }
    let split = match (arguments.split, &arguments.data) {
        (Some(SplitName::Train), _) | (None, Some(_)) => Split::Train,
        (Some(SplitName::Validation), _) | (None, None) => Split::Validation,
    };
    let dataset = evaluation_dataset(&plan, split)?;
    let samples = samples(arguments, &plan, &*dataset)?;
    let there = dataset.validation().iter().filter_map(|part| part.samples).sum();
    let plan = filled(&plan, samples.unwrap_or(there));
    let memory = model::memory(&plan, &evaluation_memory(&plan, device(&plan, Connection::Threads)))?;
    let options = EvaluateOptions { samples, memory };
    let evaluated = arguments
        .model
        .with_store(&weights, &plan, |weights| with_progress(&plan, weights, &*dataset, &options))?;
    output.text(&sentence(&evaluated))?;
    output.result(&evaluated)
}

fn plan(arguments: &Arguments, weights: &WeightsFolder) -> Result<Plan, Failure> {
    let sequence = weights.model().positions.min(MAX_SEQUENCE);
    let under = match weights {
        WeightsFolder::HuggingFace(_) => vec![format!("batch.sequence={sequence}")],
        WeightsFolder::Checkpoint(_) => Vec::new(),
    };
    let mut over = Vec::new();
    if let Some(data) = &arguments.data {
        over.push(format!("data.source={}", serde_json::Value::from(data.as_str())));
        over.push("data.validation=[]".to_owned());
        // Files that are evaluated whole have no training split.
        over.extend(arguments.split.is_none().then(|| "data.split=0".to_owned()));
    } else if matches!(weights, WeightsFolder::HuggingFace(_)) {
        return Err(Failure::mistake("a Hugging Face folder has no data; add --data PREFIX"));
    }
    arguments.model.plan(weights, &under, &over)
}

/// The number of samples to read, if not all. The demo is endless, so it reads as many as an evaluation during
/// training.
fn samples(arguments: &Arguments, plan: &Plan, dataset: &dyn Dataset) -> Result<Option<u64>, Failure> {
    let there: Option<u64> = dataset.validation().iter().map(|part| part.samples).sum();
    match (there, arguments.samples) {
        (Some(there), Some(wanted)) if wanted > there => {
            Err(Failure::mistake(format!("--samples {wanted} is more than the {there} samples of the data")))
        }
        (None, None) => Ok(Some(plan.evaluation_samples())),
        (_, wanted) => Ok(wanted),
    }
}

/// The plan with global batches that fill its pipeline, if there are enough samples.
fn filled(plan: &Plan, samples: u64) -> Plan {
    let one = (plan.batch.micro * plan.mesh.dp()) as u64;
    plan.with_micro_batches(if samples >= one * plan.mesh.pp() as u64 { plan.mesh.pp() } else { 1 })
}

fn with_progress(
    plan: &Plan,
    weights: &dyn Store,
    dataset: &dyn Dataset,
    options: &EvaluateOptions,
) -> Result<EvaluationResult, Failure> {
    let batches = options.batches(plan, dataset);
    let progress = Progress::new("evaluating", batches);
    let mut done = 0;
    let evaluated = evaluate(plan, weights, dataset, options, |loss| {
        done += 1;
        progress.set(done, batches, &format!("loss {loss:.4}"));
    });
    drop(progress);
    evaluated.map_err(Failure::run)
}

fn sentence(evaluated: &EvaluationResult) -> String {
    let width = evaluated.sources.iter().map(|source| source.source.len()).max().unwrap_or(0);
    let source = |one: &SourceLoss| {
        let (name, tokens) = (&one.source, units::count(one.tokens as f64));
        format!("  {name:width$}  {:.4} in {tokens} tokens\n", one.loss)
    };
    format!(
        "loss        {:.4} nats per token\n{}perplexity  {:.4}\ntokens      {}, {} a second\n",
        evaluated.loss,
        evaluated.sources.iter().map(source).collect::<String>(),
        evaluated.perplexity,
        units::count(evaluated.tokens as f64),
        units::count(evaluated.tokens_per_s.round()),
    )
}
