//! The `kintsugi` command: parse, call, print.
//!
//! Exit codes: 0 all well, 1 the run or the check failed, 2 the user's mistake.
#![forbid(unsafe_code)]
// These panic where the output is full or closed: `output` has what does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod calibrate;
mod config;
mod convert;
mod describe;
mod doctor;
mod eval;
mod failure;
mod files;
mod fit;
mod generate;
mod host;
mod keys;
mod model;
mod output;
mod plan;
mod prepare;
mod progress;
mod report;
mod shell;
mod signals;
mod table;
mod train;
mod verify;
mod watch;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use kintsugi_engine::start_shared_threads;
use kintsugi_tensor::cpu::counting::CountingAllocator;

use failure::Failure;

/// Measures the memory of every rank: what `predicted / measured` compares.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Trains large language models across many ranks, and tells beforehand what will happen.
///
/// A model is broken into pieces (tensor, pipeline and sharded data parallelism) and joined by communication.
/// For every way of breaking it, memory and traffic are predicted to the byte.
#[derive(Parser)]
#[command(name = "kintsugi", version = VERSION, after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{DETAILS}"))]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Train(train::Arguments),
    Plan(plan::Arguments),
    Verify(verify::Arguments),
    Report(report::Arguments),
    Watch(watch::Arguments),
    Calibrate(calibrate::Arguments),
    Prepare(prepare::Arguments),
    Convert(convert::Arguments),
    Generate(generate::Arguments),
    Eval(eval::Arguments),
    Config(keys::Arguments),
    Doctor(doctor::Arguments),
    Completions(shell::CompletionArguments),
    Man(shell::ManArguments),
}

/// The version, and the git commit that the build script found.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("KINTSUGI_COMMIT"), ")");

const EXAMPLES: &str = "\
Start with:
  kintsugi train              train the built-in demo on 8 ranks of this machine
  kintsugi plan --draw        see what it will take, and its pipeline schedule
  kintsugi verify             prove that every layout trains the same model";

const DETAILS: &str = "\
Configuration:
  Every command reads kintsugi COMMAND [CONFIG.toml] [--set table.key=value]...
  Values are laid over each other: defaults, the presets named by model.preset and cluster.preset,
  the file, --set. Without a file the built-in demo is the file. A wrong value is answered with
  the field, the value and what is allowed.

Exit codes:
  0 all well, 1 the run or the check failed, 2 a mistake in the configuration or the arguments";

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(command: Option<Command>) -> Result<(), Failure> {
    signals::fail_writes_beyond_the_limit()?;
    start_shared_threads()?;
    match command {
        Some(Command::Train(arguments)) => train::run(&arguments),
        Some(Command::Plan(arguments)) => plan::run(&arguments),
        Some(Command::Verify(arguments)) => verify::run(&arguments),
        Some(Command::Report(arguments)) => report::run(&arguments),
        Some(Command::Watch(arguments)) => watch::run(&arguments),
        Some(Command::Calibrate(arguments)) => calibrate::run(&arguments),
        Some(Command::Prepare(arguments)) => prepare::run(&arguments),
        Some(Command::Convert(arguments)) => convert::run(&arguments),
        Some(Command::Generate(arguments)) => generate::run(&arguments),
        Some(Command::Eval(arguments)) => eval::run(&arguments),
        Some(Command::Config(arguments)) => keys::run(&arguments),
        Some(Command::Doctor(arguments)) => doctor::run(&arguments),
        Some(Command::Completions(arguments)) => shell::completions(&arguments, Cli::command()),
        Some(Command::Man(arguments)) => shell::man(&arguments, Cli::command()),
        None => output::stdout(&Cli::command().render_help().to_string()),
    }
}
