//! The `kintsugi` command: parse, call, print.
//!
//! It is a library, so that the Python package gives the same answers as the command: [`answers`]. The binary calls [`main`].
//!
//! Exit codes: 0 success, 1 the run or the check failed, 2 an error in the configuration or the arguments.
#![forbid(unsafe_code)]
// These panic where the output is full or closed: `output` has what does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod agent;
pub mod answers;
mod bench;
mod calibrate;
mod config;
mod convert;
mod describe;
mod doctor;
#[cfg(test)]
mod documentation;
mod eval;
mod failure;
mod files;
mod fit;
mod generate;
mod host;
mod keys;
mod launch;
mod model;
mod output;
mod plan;
mod prepare;
mod processes;
mod progress;
mod report;
mod shell;
mod signals;
mod status;
mod table;
mod train;
mod tune;
mod verdict;
mod verify;
mod watch;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use kintsugi_comm::rendezvous::Rendezvous;
use kintsugi_comm::{agents, print_notices_by, report_failures_by};
use kintsugi_engine::start_shared_threads;

pub use failure::Failure;

/// Trains large language models on many ranks, and predicts memory, traffic and time before the run.
///
/// A model is split into pieces (tensor, pipeline and sharded data parallelism), which exchange data. For every layout,
/// memory and traffic are predicted to the byte.
#[derive(Parser)]
#[command(name = "kintsugi", version = VERSION, max_term_width = HELP_WIDTH, after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{DETAILS}"))]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Train(train::Arguments),
    Plan(plan::Arguments),
    Tune(Box<tune::Arguments>),
    Verify(verify::Arguments),
    Launch(launch::Arguments),
    Report(report::Arguments),
    Watch(watch::Arguments),
    Status(status::Arguments),
    Calibrate(calibrate::Arguments),
    Bench(bench::Arguments),
    Prepare(prepare::Arguments),
    Convert(convert::Arguments),
    Generate(generate::Arguments),
    Eval(eval::Arguments),
    Config(keys::Arguments),
    Doctor(doctor::Arguments),
    Completions(shell::CompletionArguments),
    Man(shell::ManArguments),
    #[command(hide = true)]
    Agent(agent::Arguments),
}

/// The width of help texts on a wide terminal. Elsewhere it is the width of the terminal, or 100.
const HELP_WIDTH: usize = 100;

/// The version, and the git commit that the build script found.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("KINTSUGI_COMMIT"), ")");

const EXAMPLES: &str = "\
Start with:
  kintsugi train              train the built-in demo on 8 ranks of this machine
  kintsugi plan --draw        predict the demo's memory and traffic, and draw its pipeline schedule
  kintsugi verify             check that every layout trains the same model";

const DETAILS: &str = "\
Configuration:
  Most commands take a configuration: kintsugi COMMAND [CONFIG.toml] [--set table.key=value]...
  Later values override earlier ones: defaults, the presets in model.preset and cluster.preset,
  the file, --set. Without a file the built-in demo is used, unless --set names another model
  (model.preset, model.init) or another cluster (cluster.preset): then nothing of the demo remains.
  The message about an invalid value names the key, the value and what is allowed.

Exit codes:
  0 success, 1 the run or the check failed, 2 an error in the configuration or the arguments";

/// Runs the command with the arguments of this process.
pub fn main() -> ExitCode {
    let command = Cli::parse().command;
    if matches!(command, Some(Command::Train(_))) {
        agents::register();
    }
    let result = run(command);
    let code = result.as_ref().err().map_or(0, Failure::code);
    if let Err(failure) = &result
        && !Rendezvous::is_reported()
    {
        failure.report();
        verdict::add_for(failure);
    }
    // A failed process may not come to the end of what follows.
    if code > 0 {
        let names_cause = result.as_ref().err().is_some_and(verdict::names_cause);
        agents::report_end(code, names_cause);
    }
    processes::finish(code, result.is_err_and(|failure| failure.ends_others()));
    if code == 0 {
        agents::report_end(code, true);
    }
    ExitCode::from(code)
}

fn run(command: Option<Command>) -> Result<(), Failure> {
    print_notices_by(output::stderr);
    report_failures_by(verdict::report);
    signals::fail_writes_beyond_the_limit()?;
    start_shared_threads()?;
    match command {
        Some(Command::Train(arguments)) => train::run(&arguments),
        Some(Command::Plan(arguments)) => plan::run(&arguments),
        Some(Command::Tune(arguments)) => tune::run(&arguments),
        Some(Command::Verify(arguments)) => verify::run(&arguments),
        Some(Command::Launch(arguments)) => launch::run(&arguments),
        Some(Command::Report(arguments)) => report::run(&arguments),
        Some(Command::Watch(arguments)) => watch::run(&arguments),
        Some(Command::Status(arguments)) => status::run(&arguments),
        Some(Command::Calibrate(arguments)) => calibrate::run(&arguments),
        Some(Command::Bench(arguments)) => bench::run(&arguments),
        Some(Command::Prepare(arguments)) => prepare::run(&arguments),
        Some(Command::Convert(arguments)) => convert::run(&arguments),
        Some(Command::Generate(arguments)) => generate::run(&arguments),
        Some(Command::Eval(arguments)) => eval::run(&arguments),
        Some(Command::Config(arguments)) => keys::run(&arguments),
        Some(Command::Doctor(arguments)) => doctor::run(&arguments),
        Some(Command::Completions(arguments)) => shell::completions(&arguments, Cli::command()),
        Some(Command::Man(arguments)) => shell::man(&arguments, Cli::command()),
        Some(Command::Agent(arguments)) => agent::run(&arguments),
        None => output::stdout(&Cli::command().render_help().to_string()),
    }
}
