//! `kintsugi verify`: every layout against one rank.

mod tally;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kintsugi_engine::device;
use kintsugi_engine::verify::{Fault, Layout, Recording, compare, layouts, record};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigError;
use kintsugi_simulate::{Play, predict};

use crate::config::{Config, ConfigArguments};
use crate::failure::Failure;
use crate::fit;
use crate::output::Output;
use tally::{Tally, Verdict};

/// Trains the same model under many layouts and shows that they agree with one rank.
///
/// Compared are the loss and the gradient norm of every step, every parameter's whole gradient at the first step
/// (Adam hides a constant factor in the gradient, so losses alone prove little) and every weight at the end; each
/// as the largest relative difference. The key bias is left out: softmax does not see it, so its true gradient is
/// zero and what is computed is rounding alone.
///
/// With a CONFIG the layouts are laid over it and those that it cannot have are skipped. Without one the demo is
/// used, with batch.micro = 1, batch.global = 8 and no evaluation to be quick, in all three families of models.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Steps that every layout is trained
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Makes a deliberate mistake in every layout, to see that it is noticed (exit 1)
    #[arg(long, value_name = "FAULT", value_parser = fault_parser())]
    inject: Option<Fault>,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi verify
      the demo under every layout, in all families and precisions
  kintsugi verify run.toml --steps 5
      your own model, briefly
  kintsugi verify --inject missing-average
      a gradient summed where its mean was meant: this must fail";

/// Laid under `--set` where there is no CONFIG.
const QUICK: [&str; 3] = ["batch.micro=1", "batch.global=8", "run.eval_every=0"];

/// One rank, nothing split, nothing recomputed: what a layout's settings are laid over.
const PLAIN: [&str; 9] = [
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.dp=1",
    "parallel.schedule=1f1b",
    "parallel.virtual_stages=1",
    "parallel.sequence_parallel=false",
    "sharding.zero=0",
    "memory.recompute=none",
    "memory.attention=flash",
];

fn fault_parser() -> impl TypedValueParser<Value = Fault> {
    PossibleValuesParser::new(Fault::ALL.map(|(name, _)| name)).map(|chosen| {
        let named = Fault::ALL.iter().find(|(name, _)| *name == chosen);
        named.expect("the parser lets only these names through").1
    })
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let mut base = Base::new(arguments)?;
    let layouts = layouts(!arguments.config.has_file());
    let mut tally = Tally::default();
    output.text(&tally::header())?;
    for layout in layouts {
        let verdict = base.check(&layout, arguments.inject)?;
        output.text(&tally.add(layout.name, verdict))?;
    }
    output.text(&tally.conclusion(arguments.inject.is_some()))?;
    output.result(&tally.answer())?;
    if tally.any_failed() { Err(Failure::Shown) } else { Ok(()) }
}

/// What the layouts are laid over, and what they are compared with.
struct Base {
    config: Config,
    under: &'static [&'static str],
    steps: u64,
    /// One rank's run of every model so far.
    references: Vec<(Vec<String>, Recording)>,
}

impl Base {
    fn new(arguments: &Arguments) -> Result<Self, Failure> {
        let config = arguments.config.read()?;
        let under: &[&str] = if arguments.config.has_file() { &[] } else { &QUICK };
        let base = Base { config, under, steps: arguments.steps, references: Vec::new() };
        // What is wrong with the configuration itself is not a reason to skip a layout.
        base.plan(&[], &[])?;
        Ok(base)
    }

    fn plan(&self, model: &[String], settings: &[String]) -> Result<Plan, ConfigError> {
        let mut over: Vec<String> = PLAIN.map(str::to_owned).to_vec();
        over.push(format!("run.steps={}", self.steps));
        over.extend(model.iter().chain(settings).cloned());
        self.config.resolve(self.under, &over)
    }

    /// Runs a layout and compares it with one rank. What goes wrong on one rank ends the whole check.
    fn check(&mut self, layout: &Layout, fault: Option<Fault>) -> Result<Verdict, Failure> {
        let plans = self.plan(&layout.model, &layout.settings);
        let plans = plans.and_then(|plan| Ok((plan, self.plan(&layout.model, &[])?)));
        let (plan, plain) = match plans {
            Ok(plans) => plans,
            Err(error) => return Ok(Verdict::Skipped(error.to_string())),
        };
        let reference = self.reference(&layout.model, &plain)?;
        Ok(match record(&plan, fault) {
            Ok(recording) => Verdict::compared(&plan, compare(reference, &recording)),
            Err(error) => Verdict::Broken(error.to_string()),
        })
    }

    /// One rank's run of a model, recorded when it is first needed.
    fn reference(&mut self, model: &[String], plain: &Plan) -> Result<&Recording, Failure> {
        let known = self.references.iter().position(|(known, _)| known == model);
        if known.is_none() {
            let prediction = predict(plain, device(plain), Play::Short);
            fit::here(plain, &prediction).map_err(|misfit| Failure::Mistake(misfit.to_string()))?;
            self.references.push((model.to_vec(), record(plain, None)?));
        }
        let index = known.unwrap_or(self.references.len() - 1);
        Ok(&self.references[index].1)
    }
}
