//! `kintsugi verify`: every layout against one rank.

mod base;
mod tally;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kintsugi_engine::verify::{Fault, Recording, compare, layouts, record};
use kintsugi_plan::Plan;

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::output::Output;
use crate::progress::Progress;
use base::Base;
use tally::{Tally, Verdict};

/// Trains the same model under many layouts and shows that they agree with one rank.
///
/// Compared are the loss and the gradient norm of every step, every parameter's whole gradient at the first step
/// (Adam hides a constant factor in the gradient, so losses alone prove little) and every weight at the end; each
/// as the largest relative difference. Copies that several ranks hold must be the same bits. The key bias is left out
/// where it is not rotated: softmax does not see it, so its true gradient is zero and what is computed is rounding alone.
///
/// With a CONFIG its model is trained: each layout stands in place of its tables parallel, sharding and memory, and
/// those that the model or the batch cannot have are skipped. Without one the demo is used, with batch.micro = 1,
/// batch.global = 8 and no evaluation to be quick, in all three families of models.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Steps that every layout is trained
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Makes a deliberate mistake in every layout where it can occur, to see that it is noticed (exit 1)
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

fn fault_parser() -> impl TypedValueParser<Value = Fault> {
    PossibleValuesParser::new(Fault::ALL.map(|(name, _)| name)).map(|chosen| {
        let named = Fault::ALL.iter().find(|(name, _)| *name == chosen);
        named.expect("the parser lets only these names through").1
    })
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let base = Base::new(&arguments.config, arguments.steps)?;
    let layouts = layouts(!arguments.config.has_file());
    let plans: Vec<_> = layouts.into_iter().map(|layout| (base.plan(&layout), layout.name)).collect();
    base::check_fit(plans.iter().filter_map(|(plan, name)| Some((name.as_str(), plan.as_ref().ok()?))))?;
    let mut reference = Reference::default();
    let mut tally = Tally::default();
    output.text(&tally::header())?;
    let progress = Progress::new("layouts", plans.len() as u64);
    for (plan, name) in plans {
        let verdict = match plan {
            Ok(plan) => check(&plan, reference.of(&plan)?, arguments.inject),
            Err(error) => Verdict::Skipped(error.to_string()),
        };
        let row = tally.add(name, verdict);
        progress.suspend(|| output.text(&row))?;
        progress.add(1);
    }
    drop(progress);
    output.text(&tally.conclusion(arguments.inject.is_some()))?;
    output.result(&tally.answer())?;
    if tally.any_failed() { Err(Failure::Shown) } else { Ok(()) }
}

/// Runs a layout and compares it with one rank.
fn check(plan: &Plan, reference: &Recording, fault: Option<Fault>) -> Verdict {
    match record(plan, base::memory(plan), fault) {
        Ok(recording) => Verdict::compared(plan, compare(reference, &recording)),
        Err(error) => Verdict::Broken(error.to_string()),
    }
}

/// One rank's run of the latest model. Layouts of a model follow each other, so one is enough.
#[derive(Default)]
struct Reference(Option<(Plan, Recording)>);

impl Reference {
    /// What one rank does with the model of a layout. What goes wrong there ends the whole check.
    fn of(&mut self, layout: &Plan) -> Result<&Recording, Failure> {
        let plan = base::on_one_rank(layout);
        let (_, recording) = match self.0.take() {
            Some(known) if known.0 == plan => self.0.insert(known),
            _ => {
                let recording = record(&plan, base::memory(&plan), None)?;
                self.0.insert((plan, recording))
            }
        };
        Ok(recording)
    }
}
