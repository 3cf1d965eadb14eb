//! The `kintsugi` command lines of the pages, held to clap's own parser. Nothing is run.

use std::ffi::OsString;
use std::fs;

use clap::error::ErrorKind;
use clap::{Command, CommandFactory};

use super::markdown::{Block, Page};
use super::{Finding, root};
use crate::Cli;

/// What starts processes, whose arguments are before the command.
const LAUNCHERS: [&str; 4] = ["srun", "mpirun", "mpiexec", "echo"];

/// The help texts of all commands, as pages: their examples are checked too.
pub fn help_texts() -> Vec<Page> {
    let mut program = Cli::command();
    program.build();
    let mut pages = Vec::new();
    add_help(&mut program, &mut pages);
    assert!(pages.len() > 10, "{} help texts", pages.len());
    pages
}

fn add_help(command: &mut Command, pages: &mut Vec<Page>) {
    let name = format!("{} --help", command.get_bin_name().unwrap_or_else(|| command.get_name()));
    let after = command.get_after_long_help().or(command.get_after_help());
    let text = after.map(ToString::to_string).unwrap_or_default();
    // Examples are indented by two spaces, and what they do by more.
    let lines = text.lines().map(|line| line.strip_prefix("  ").unwrap_or(line));
    let text = lines.fold("```\n".to_owned(), |text, line| text + line + "\n");
    pages.push(Page { name, text });
    for inner in
        command.get_subcommands_mut().filter(|inner| inner.get_name() != "help" && !inner.is_hide_set())
    {
        add_help(inner, pages);
    }
}

/// The comments of the examples, as pages. Commands in them are indented.
pub fn examples() -> Vec<Page> {
    let mut pages = Vec::new();
    for entry in fs::read_dir(root().join("examples")).expect("the folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            let text = fs::read_to_string(&path).expect("UTF-8");
            let commands = text.lines().skip(1).map(|line| line.strip_prefix("#   ").unwrap_or_default());
            let name = format!("examples/{}", path.file_name().expect("a name").to_string_lossy());
            // The first line describes the example, and here opens the block.
            let text = commands.fold("```\n".to_owned(), |text, line| text + line + "\n");
            pages.push(Page { name, text });
        }
    }
    assert!(pages.iter().all(|page| !command_lines(page).is_empty()), "an example without a command");
    pages
}

/// The command lines that do not parse.
pub fn findings(pages: &[Page]) -> Vec<Finding> {
    let mut program = Cli::command();
    let mut findings = Vec::new();
    for page in pages {
        for line in command_lines(page) {
            if let Some(problem) = problem(&mut program, &line.words, line.is_complete) {
                findings.push(Finding::new(
                    page,
                    line.line,
                    format!("`{}`: {problem}", line.words.join(" ")),
                ));
            }
        }
    }
    findings
}

/// A command line, from the word `kintsugi` on.
pub struct CommandLine {
    pub line: usize,
    pub words: Vec<String>,
    /// Whether it is one to type, from a block. Code in the text may leave arguments out.
    is_complete: bool,
}

/// The command lines of a page.
pub fn command_lines(page: &Page) -> Vec<CommandLine> {
    let mut lines = Vec::new();
    for block in page.blocks().iter().filter(|block| block.language.is_empty() || block.language == "sh") {
        for (line, text) in typed(block) {
            lines.extend(commands(&text).map(|words| CommandLine { line, words, is_complete: true }));
        }
    }
    for code in page.codes() {
        let words = words(&code.text);
        let is_short = words.len() > 1 && words[1].starts_with("--") && is_command(&words[0]);
        let words = if is_short { [vec!["kintsugi".to_owned()], words].concat() } else { words };
        if words.len() > 1 && words[0] == "kintsugi" {
            lines.push(CommandLine { line: code.line, words: until_redirect(&words), is_complete: false });
        }
    }
    lines
}

/// Whether a word is a command that a page may name without `kintsugi`, as in `plan --search`.
fn is_command(word: &str) -> bool {
    Cli::command().find_subcommand(word).is_some()
}

/// The lines of a block that are typed, without what is written beside them: those after `$`, or all if none has it.
fn typed(block: &Block) -> Vec<(usize, String)> {
    let has_prompt = block.lines.iter().any(|line| line.starts_with("$ "));
    let mut typed: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for (number, line) in (block.line..).zip(&block.lines) {
        let line = match line.strip_prefix("$ ") {
            Some(line) => line,
            None if has_prompt && !is_open => continue,
            None => line,
        };
        let (text, goes_on) = line.strip_suffix('\\').map_or((line, false), |text| (text, true));
        match typed.last_mut().filter(|_| is_open) {
            Some((_, last)) => *last = format!("{} {}", last.trim_end(), text.trim_start()),
            None => typed.push((number, text.to_owned())),
        }
        is_open = goes_on;
    }
    typed
}

/// The `kintsugi` commands of a line, which `&&` and `|` separate.
fn commands(line: &str) -> impl Iterator<Item = Vec<String>> {
    // An explanation stands after two spaces.
    let line = line.split_once("  ").map_or(line, |(command, _)| command);
    let words = words(line);
    let parts: Vec<Vec<String>> =
        words.split(|word| matches!(word.as_str(), "&&" | "|" | ";")).map(<[String]>::to_vec).collect();
    parts.into_iter().filter_map(|part| {
        let is_setting = |word: &&String| word.split_once('=').is_some_and(|(name, _)| !name.contains('-'));
        let first = part.iter().find(|word| !is_setting(word))?;
        let begin = part.iter().position(|word| word == "kintsugi")?;
        let is_run = first == "kintsugi" || LAUNCHERS.contains(&first.as_str());
        is_run.then(|| until_redirect(&part[begin..]))
    })
}

fn until_redirect(words: &[String]) -> Vec<String> {
    words.iter().take_while(|word| !word.starts_with('>')).cloned().collect()
}

/// The words of a line as a shell splits them, up to a comment.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// What clap says about a command line, if it does not parse.
fn problem(program: &mut Command, words: &[String], is_complete: bool) -> Option<String> {
    if words.get(1).is_some_and(|word| word == "COMMAND") {
        return None;
    }
    let words: Vec<String> = words.iter().filter_map(|word| filled(word)).collect();
    match program.try_get_matches_from_mut(&words) {
        Ok(matches) => {
            let (name, inner) = matches.subcommand()?;
            let inner =
                inner.try_get_many::<OsString>("command").ok().flatten().filter(|_| name == "launch")?;
            let inner = inner.map(|word| word.to_string_lossy().into_owned());
            problem(program, &[vec!["kintsugi".to_owned()], inner.collect()].concat(), is_complete)
        }
        Err(error) => {
            let text = error.to_string();
            let is_answer = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            let is_short = match error.kind() {
                ErrorKind::MissingRequiredArgument
                | ErrorKind::MissingSubcommand
                | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => true,
                ErrorKind::InvalidValue => text.contains("a value is required"),
                _ => false,
            };
            let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
            (!is_answer && (is_complete || !is_short)).then_some(first)
        }
    }
}

/// A word as it might be typed: a single capital letter stands for a number. `None` for what stands for other words.
fn filled(word: &str) -> Option<String> {
    let is_number = word.len() == 1 && word.chars().all(char::is_uppercase);
    let is_optional = word.starts_with('[') || word.ends_with("]…") || word.trim_matches('…').is_empty();
    match word {
        _ if is_number => Some("1".to_owned()),
        "..." => None,
        _ if is_optional || word.starts_with("--…") => None,
        word => Some(word.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_as_a_shell_does() {
        assert_eq!(words("a 'b c' --d=\"e f\" # g"), ["a", "b c", "--d=e f"]);
        assert_eq!(words("'' a#b"), ["", "a#b"]);
        let commands: Vec<_> =
            commands("A=1 srun -n 2 kintsugi plan > x && kintsugi train  trains it").collect();
        assert_eq!(commands, [vec!["kintsugi", "plan"], vec!["kintsugi", "train"]]);
        assert_eq!(super::commands("alias kintsugi=x").count(), 0);
    }
}
