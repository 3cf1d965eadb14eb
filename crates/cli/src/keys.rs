//! `kintsugi config`: the keys of the configuration, a template, and the values that a configuration resolves to.

use std::fmt::Write as _;

use clap::Args;
use kintsugi_draw::chart::wrap;
use kintsugi_plan::config::{Key, ResolvedValue, keys};
use serde::Serialize;

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::output::Output;
use crate::table::terminal_width;

/// Explains the keys of the configuration.
///
/// It prints every key with its default, its allowed values and its meaning; with --template a file to start from, and with
/// --resolved the values of a configuration.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Prints a configuration file in which every key is commented out
    #[arg(long, conflicts_with_all = ["resolved", "json"])]
    template: bool,
    /// Prints every value of the configuration, and where it comes from
    #[arg(long)]
    resolved: bool,
    /// Prints a list of objects as JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi config
      every key with its default and its values
  kintsugi config --template > run.toml
      a file to start from
  kintsugi config run.toml --set parallel.tp=4 --resolved
      every value that a run would have, and where it comes from";

/// Width of text that is not printed to a terminal.
const WIDTH: usize = 100;

/// The default of keys without one.
const NONE: &str = "none";

/// A key in JSON.
#[derive(Serialize)]
struct KeyRow {
    key: String,
    default: Option<String>,
    allowed: String,
}

/// A resolved value in JSON.
#[derive(Serialize)]
struct ValueRow {
    key: String,
    value: toml::Value,
    origin: String,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    if arguments.resolved {
        let values = arguments.config.read()?.resolved()?;
        if !output.json {
            return output.text(&resolved_text(&values));
        }
        let row = |ResolvedValue { key, value, origin }| ValueRow { key, value, origin };
        return output.result(&values.into_iter().map(row).collect::<Vec<_>>());
    }
    if arguments.config.has_file() || arguments.config.has_sets() {
        let text = "a file and --set only have an effect with --resolved; add --resolved, or leave them out";
        return Err(Failure::mistake(text));
    }
    let keys: Vec<Key> = keys().into_iter().map(Key::plain).collect();
    if arguments.template {
        return output.text(&template(&keys));
    }
    if !output.json {
        return output.text(&keys_text(&keys, terminal_width().unwrap_or(WIDTH)));
    }
    let row = |key: &Key| KeyRow {
        key: key.path(),
        default: Some(key.default.clone()).filter(|default| default != NONE),
        allowed: key.meaning.clone(),
    };
    output.result(&keys.iter().map(row).collect::<Vec<_>>())
}

/// Every key as text, table by table.
fn keys_text(keys: &[Key], width: usize) -> String {
    let mut text = String::new();
    for table in keys.chunk_by(|a, b| a.table == b.table) {
        writeln!(text, "[{}]", table[0].table).expect("a string");
        for key in table {
            writeln!(text, "  {}  ({})", key.name, default_text(key)).expect("a string");
            for line in wrap(&key.meaning, width.saturating_sub(6)) {
                writeln!(text, "      {line}").expect("a string");
            }
        }
        text.push('\n');
    }
    text
}

/// `default: 4`, or `required unless a preset gives it`.
fn default_text(key: &Key) -> String {
    if key.default.starts_with("required") {
        key.default.clone()
    } else {
        format!("default: {}", key.default)
    }
}

/// A configuration in which everything is commented out. A default that depends on other keys is written beside its
/// key.
fn template(keys: &[Key]) -> String {
    let mut text =
        "# A Kintsugi configuration. To set a key, remove the # before it and before its table.\n".to_owned();
    for table in keys.chunk_by(|a, b| a.table == b.table) {
        // An empty inner table would already have an effect.
        let inner = table[0].table.contains('.') && table.iter().all(|key| key.default_value().is_none());
        let mark = if inner { "#" } else { "" };
        write!(text, "\n{mark}[{}]\n", table[0].table).expect("a string");
        for key in table {
            for line in wrap(&key.meaning, WIDTH - 2) {
                writeln!(text, "# {line}").expect("a string");
            }
            match key.default_value() {
                Some(value) => writeln!(text, "#{} = {value}\n", key.name),
                None if key.default == NONE => writeln!(text, "#{} =\n", key.name),
                None => writeln!(text, "#{} =  # {}\n", key.name, default_text(key)),
            }
            .expect("a string");
        }
    }
    text
}

/// The values as lines of TOML, each with its origin in a comment.
fn resolved_text(values: &[ResolvedValue]) -> String {
    let lines: Vec<String> = values.iter().map(|value| format!("{} = {}", value.key, value.value)).collect();
    // Long lists would push every comment to the right.
    let width = lines.iter().map(|line| line.chars().count()).filter(|&count| count <= 48).max().unwrap_or(0);
    let line = |(line, value): (&String, &ResolvedValue)| format!("{line:<width$}  # {}\n", value.origin);
    lines.iter().zip(values).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kintsugi_plan::config::ConfigSource;

    #[test]
    fn the_template_is_a_configuration_and_stays_one_without_its_comment_marks() {
        let text = template(&keys().into_iter().map(Key::plain).collect::<Vec<_>>());
        // Described beside a cluster.
        let free = |key: &Key| !key.table.starts_with("cluster.");
        let given = format!("{text}\n[demo]\n");
        assert!(ConfigSource::text(given).plan().unwrap_err().to_string().contains("unknown key demo"));
        let keys: Vec<Key> = keys().into_iter().filter(free).map(Key::plain).collect();
        let filled: String = template(&keys)
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(key)
                    if !key.starts_with([' ', '[']) && !key.contains(" =  # ") && !key.ends_with('=') =>
                {
                    key
                }
                _ => line,
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        let sets = ["model.preset=demo", "batch.sequence=64"];
        let plan = ConfigSource::text(filled).sets(sets).plan().unwrap();
        assert_eq!(plan, ConfigSource::text("").sets(sets).plan().unwrap(), "all defaults");
    }
}
