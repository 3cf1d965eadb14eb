//! `kintsugi verify`: compares every layout with one rank.

mod base;
mod tally;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kintsugi_engine::verify::{Fault, Recording, compare, layouts, record};
use kintsugi_plan::Plan;

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::output::Output;
use base::Base;
use tally::{Tally, Verdict};

/// Trains the same model with many layouts and checks that they agree with one rank.
///
/// It compares the loss and the gradient norm of every step, the whole gradient of every parameter at the first step
/// (Adam hides a constant factor of the gradient, so losses alone prove little), and every weight at the end; each by
/// the largest relative difference. Copies on several ranks must have the same bits. A key bias without rotary
/// positions is left out: softmax is invariant to it, so its gradient is only rounding.
///
/// With a CONFIG, its model is trained. Each layout replaces its tables parallel, sharding and memory, and layouts that
/// the model or the batch does not allow are skipped. Without a CONFIG, the demo is trained in all three model
/// families, with batch.micro = 1, batch.global = 8 and no evaluation, to be quick.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Training steps per layout
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Injects a fault into every layout in which it can occur, to check that it is detected (exit code 1)
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
      injects a fault: gradients are summed instead of averaged; this must fail";

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
    for (plan, name) in plans {
        let verdict = match plan {
            Ok(plan) => check(&plan, reference.of(&plan)?, arguments.inject),
            Err(error) => Verdict::Skipped(error.to_string()),
        };
        output.text(&tally.add(name, verdict))?;
    }
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

/// The one-rank run of the latest model. Layouts of a model follow each other, so one is enough.
#[derive(Default)]
struct Reference(Option<(Plan, Recording)>);

impl Reference {
    /// The one-rank run of a layout's model. An error there ends the whole check.
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
