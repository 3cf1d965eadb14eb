//! The configuration keys of the pages: in the text, in commands, and in TOML blocks.

use std::sync::LazyLock;

use kintsugi_plan::config::{ConfigError, ConfigSource, Key, keys};

use super::Finding;
use super::commands::command_lines;
use super::markdown::{Code, Page};
use super::unavailable;

/// Options that take a key with its value.
const OPTIONS: [&str; 3] = ["--set", "--sweep", "--only"];

/// What ends a file name and no key, so that `run.toml` is a file.
const EXTENSIONS: [&str; 7] = ["toml", "json", "lock", "safetensors", "bin", "idx", "rs"];

/// Every key with its tables.
static KEYS: LazyLock<Vec<String>> = LazyLock::new(|| keys().iter().map(Key::path).collect());

/// A key in a page, with the value that the page gives it.
pub struct NamedKey {
    pub key: String,
    pub value: Option<String>,
}

impl NamedKey {
    /// The key that code begins with, if its first part is a table of the configuration: `parallel.tp = 4`, `--set
    /// parallel.tp=4`, `parallel.tp`, `batch = { micro = 2 }`.
    pub fn of(code: &str) -> Option<Self> {
        let option = OPTIONS.iter().find(|option| code.starts_with(**option));
        let code = code[option.map_or(0, |option| option.len())..].trim_start();
        let end = code.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'));
        let (key, rest) = code.split_at(end.unwrap_or(code.len()));
        // `--sweep` and `--only` take several values.
        let has_one = option.is_none_or(|option| *option == "--set");
        let value =
            rest.trim_start().strip_prefix('=').filter(|_| has_one).map(|value| value.trim().to_owned());
        let table = key.split('.').next();
        let is_known = KEYS.iter().any(|key| key.split('.').next() == table) && !key.ends_with('.');
        let is_whole_table = value.as_ref().is_some_and(|value| value.starts_with('{'));
        let is_file = key.rsplit('.').next().is_some_and(|last| EXTENSIONS.contains(&last));
        let is_key = is_known && (key.contains('.') || is_whole_table) && !is_file;
        (is_key && !rest.starts_with(['(', '-'])).then(|| NamedKey { key: key.to_owned(), value })
    }

    /// The error that the configuration has for it.
    pub fn error(&self) -> Option<String> {
        self.check().err().map(|error| error.to_string())
    }

    /// Sets the key to its value. Without a value, or with a placeholder as its value, only the key is checked.
    pub fn check(&self) -> Result<(), ConfigError> {
        let is_placeholder = |value: &&String| {
            value.contains('…')
                || value.contains("..")
                || (value.len() == 1 && value.chars().all(char::is_uppercase))
        };
        let set = |value: &str| ConfigSource::demo().set(format!("{}={value}", self.key)).check();
        match self.value.as_ref().filter(|value| !is_placeholder(value)) {
            Some(table) if table.starts_with('{') => {
                ConfigSource::text(format!("{} = {table}", self.key)).named("the text").check()
            }
            Some(value) => set(value),
            None if exists(&self.key) => Ok(()),
            None => set("1"),
        }
    }
}

/// Whether this is a key, or a table inside of a table.
fn exists(name: &str) -> bool {
    KEYS.iter().any(|key| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// The keys that do not exist, the values that they do not take, and the configurations that do not resolve.
pub fn findings(pages: &[Page]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for page in pages {
        for (line, key) in named(page) {
            findings.extend(key.error().map(|error| Finding::new(page, line, error)));
        }
        for block in page.blocks().iter().filter(|block| block.language == "toml") {
            let error = resolve(&block.lines.join("\n")).err();
            findings.extend(error.map(|error| Finding::new(page, block.line, error.to_string())));
        }
    }
    findings
}

/// The keys that a page names in its text and in its commands, with their lines.
fn named(page: &Page) -> Vec<(usize, NamedKey)> {
    let mut named: Vec<(usize, NamedKey)> = Vec::new();
    // The first cells of that page name options of other programs, and others what is refused.
    let is_comparison = page.name == unavailable::PAGE;
    let denied = if is_comparison { unavailable::denied(page) } else { Vec::new() };
    let is_ours = |code: &Code| {
        !is_comparison
            || (code.cell != Some(0)
                && !denied.iter().any(|(line, text)| *line == code.line && *text == code.text))
    };
    for code in page.codes().into_iter().filter(is_ours) {
        let before = named.last().filter(|(line, _)| is_comparison && *line == code.line && code.is_listed);
        let is_name = code.text.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        let key = match before.and_then(|(_, key)| key.key.rsplit_once('.')) {
            // `optimizer.lr`, `betas` are two keys of one table.
            Some((table, _)) if is_name => {
                Some(NamedKey { key: format!("{table}.{}", code.text), value: None })
            }
            _ => NamedKey::of(&code.text),
        };
        named.extend(key.map(|key| (code.line, key)));
    }
    for command in command_lines(page) {
        for words in command.words.windows(2).filter(|words| OPTIONS.contains(&words[0].as_str())) {
            let key = NamedKey::of(&words.join(" "));
            named.extend(key.map(|key| (command.line, key)));
        }
    }
    named
}

/// Resolves a block. One that leaves the model or its samples out is a part of a configuration.
fn resolve(text: &str) -> Result<(), ConfigError> {
    let source = ConfigSource::text(text).named("the block");
    match source.plan() {
        Err(ConfigError::Missing { .. }) => {
            source.sets_below(&["model.preset=demo", "batch.sequence=64"]).plan().map(drop)
        }
        resolved => resolved.map(drop),
    }
}
