//! `kintsugi completions` and `kintsugi man`: shell completions and manual pages.

use clap::builder::PossibleValuesParser;
use clap::{Args, Command, ValueEnum};
use clap_complete::{Shell, generate};
use clap_mangen::Man;
use kintsugi_plan::config::keys;

use crate::failure::Failure;
use crate::output;

/// Prints a completion script for a shell.
#[derive(Args)]
#[command(after_long_help = COMPLETIONS)]
pub struct CompletionArguments {
    /// The shell
    #[arg(value_enum)]
    shell: ShellName,
}

/// Prints a manual page.
#[derive(Args)]
#[command(after_long_help = PAGES)]
pub struct ManArguments {
    /// The command of the page; by default kintsugi itself
    command: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ShellName {
    Bash,
    Zsh,
    Fish,
}

const COMPLETIONS: &str = "\
Examples:
  kintsugi completions bash > ~/.local/share/bash-completion/completions/kintsugi
  kintsugi completions zsh > ~/.zfunc/_kintsugi
      for a folder ~/.zfunc in fpath
  kintsugi completions fish > ~/.config/fish/completions/kintsugi.fish";

const PAGES: &str = "\
Examples:
  kintsugi man > ~/.local/share/man/man1/kintsugi.1
  kintsugi man train > ~/.local/share/man/man1/kintsugi-train.1";

/// Prints the completions of `program`.
pub fn completions(arguments: &CompletionArguments, mut program: Command) -> Result<(), Failure> {
    let shell = match arguments.shell {
        ShellName::Bash => Shell::Bash,
        ShellName::Zsh => Shell::Zsh,
        ShellName::Fish => Shell::Fish,
    };
    // The program runs once, so that these names may stay.
    let keys: Vec<&'static str> = keys().iter().map(|key| &*format!("{}=", key.path()).leak()).collect();
    program = with_keys(program, &keys);
    let mut script = Vec::new();
    generate(shell, &mut program, "kintsugi", &mut script);
    let mut script = String::from_utf8_lossy(&script).into_owned();
    if let ShellName::Bash = arguments.shell {
        script += KEYS_IN_BASH;
    }
    output::stdout(&script)
}

/// The value of a key follows its `=` without a space.
const KEYS_IN_BASH: &str = r#"
_kintsugi_keys() {
    _kintsugi "$@"
    if [[ "${COMPREPLY[0]-}" == *= ]]; then
        compopt -o nospace 2> /dev/null
    fi
    return 0
}

complete -F _kintsugi_keys -o nosort -o bashdefault -o default kintsugi
"#;

/// The program with the keys of the configuration as the values of `--set` and `--sweep`. Only for completions: every value is
/// allowed after the `=`.
fn with_keys(program: Command, keys: &[&'static str]) -> Command {
    let program = program.mut_subcommands(|command| with_keys(command, keys));
    program.mut_args(|argument| match argument.get_long() {
        Some("set" | "sweep") => argument.value_parser(PossibleValuesParser::new(keys)),
        _ => argument,
    })
}

/// Prints the page of `program`, or of one of its commands.
pub fn man(arguments: &ManArguments, mut program: Command) -> Result<(), Failure> {
    program.build();
    let command = match &arguments.command {
        None => program,
        Some(name) => {
            program.find_subcommand(name).cloned().ok_or_else(|| unknown_command(name, &program))?
        }
    };
    let mut page = Vec::new();
    Man::new(command)
        .source(format!("kintsugi {}", crate::VERSION))
        .render(&mut page)
        .expect("a page in memory");
    output::stdout(&String::from_utf8_lossy(&page))
}

fn unknown_command(name: &str, program: &Command) -> Failure {
    let names: Vec<&str> = program.get_subcommands().map(Command::get_name).collect();
    Failure::mistake(format!("there is no command {name}; the commands are {}", names.join(", ")))
}
