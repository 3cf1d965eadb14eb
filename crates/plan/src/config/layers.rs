//! The layers of a configuration: presets, the file and `--set`. Each is read separately, and later ones override
//! earlier ones.

use kintsugi_spec::presets;
use serde_path_to_error::{Path, Segment};
use strsim::levenshtein;
use toml::{Table, Value};

use super::deserialize::{Node, Problem};
use super::error::{ConfigError, either, invalid};
use super::keys::RawConfig;
use super::source::{Change, ConfigSource, NamedText};
use super::{cluster, demo, unavailable};

/// The layers, merged.
pub(super) struct Layers {
    /// All layers.
    pub(super) merged: RawConfig,
    /// Only the user's settings.
    pub(super) given: RawConfig,
    /// Only the settings of the presets.
    pub(super) presets: RawConfig,
}

impl Layers {
    /// Reads the user's settings, and merges them over the profile and the presets.
    pub(super) fn read(source: &ConfigSource) -> Result<Self, ConfigError> {
        Layers::over_presets(source, source.profile.as_ref())
    }

    /// Reads the user's settings, and merges them over the presets.
    pub(super) fn read_without_profile(source: &ConfigSource) -> Result<Self, ConfigError> {
        Layers::over_presets(source, None)
    }

    /// Reads only the user's settings.
    pub(super) fn given(source: &ConfigSource) -> Result<RawConfig, ConfigError> {
        read(&written(source)?, &source.file.name)
    }

    fn over_presets(source: &ConfigSource, profile: Option<&NamedText>) -> Result<Self, ConfigError> {
        let (table, name) = (written(source)?, &source.file.name);
        let given = read(&table, name)?;
        let mut below = data_layer(source);
        for (_, layer) in preset_layers(&given)? {
            overlay(&mut below, layer);
        }
        if let Some(NamedText { name, text }) = profile {
            let layer = parse(text, name)?;
            read(&layer, name)?;
            overlay(&mut below, layer);
        }
        let presets = read(&below, "a preset")?;
        overlay(&mut below, table);
        Ok(Layers { merged: read(&below, name)?, given, presets })
    }
}

/// The user's settings: the file with the changes to it.
pub(super) fn written(source: &ConfigSource) -> Result<Table, ConfigError> {
    let mut table = file(source)?;
    read(&table, &source.file.name)?;
    for change in &source.changes {
        match change {
            Change::Set(argument) => {
                overlay(&mut table, read_set(argument)?);
            }
            Change::Without(name) => {
                table.remove(name);
            }
        }
    }
    Ok(table)
}

/// The settings of the file, or of the demo as far as they apply.
pub(super) fn file(source: &ConfigSource) -> Result<Table, ConfigError> {
    let mut table = parse(&source.file.text, &source.file.name)?;
    if source.is_demo {
        demo::keep_what_applies(&mut table, &sets(source)?);
    }
    Ok(table)
}

/// The values of all `--set` arguments.
pub(super) fn sets(source: &ConfigSource) -> Result<Table, ConfigError> {
    let mut sets = Table::new();
    for change in &source.changes {
        if let Change::Set(argument) = change {
            overlay(&mut sets, read_set(argument)?);
        }
    }
    Ok(sets)
}

/// The settings of each layer with its name. Later layers override earlier ones.
pub(super) fn by_origin(source: &ConfigSource) -> Result<Vec<(String, Table)>, ConfigError> {
    let mut file = file(source)?;
    let mut sets = Table::new();
    for change in &source.changes {
        match change {
            Change::Set(argument) => overlay(&mut sets, read_set(argument)?),
            Change::Without(name) => {
                file.remove(name);
                sets.remove(name);
            }
        }
    }
    let presets = preset_layers(&Layers::given(source)?)?;
    let mut layers = vec![("data.source".to_owned(), data_layer(source))];
    layers.extend(presets.into_iter().map(|(name, layer)| (format!("preset {name}"), layer)));
    if let Some(NamedText { name, text }) = &source.profile {
        layers.push((format!("profile {name}"), parse(text, name)?));
    }
    let name = &source.file.name;
    layers.push((if source.is_demo { name.clone() } else { format!("file {name}") }, file));
    layers.push(("--set".to_owned(), sets));
    Ok(layers)
}

/// The lowest layer: what the token files say.
fn data_layer(source: &ConfigSource) -> Table {
    let vocab = source.data_vocab.and_then(|vocab| i64::try_from(vocab).ok());
    vocab.map(|vocab| nest(&["model", "vocab"], Value::Integer(vocab))).unwrap_or_default()
}

/// The settings of the presets that a configuration names, each with its name.
fn preset_layers(given: &RawConfig) -> Result<Vec<(&'static str, Table)>, ConfigError> {
    let error = |field| move |unknown| ConfigError::Preset { field, unknown };
    let model = given.model.preset.as_deref().map(presets::model).transpose();
    let cluster = cluster::preset(&given.cluster).map(presets::cluster_layers).transpose();
    let framework = given.framework.preset.as_deref().map(presets::framework).transpose();
    let model = model.map_err(error("model.preset"))?;
    let cluster = cluster.map_err(error("cluster.preset"))?.unwrap_or_default();
    let framework = framework.map_err(error("framework.preset"))?;
    let named = model.into_iter().chain(cluster).chain(framework);
    named.map(|preset| Ok((preset.name, parse(preset.text, preset.name)?))).collect()
}

pub(super) fn parse(text: &str, file: &str) -> Result<Table, ConfigError> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let before = error.span().map_or("", |span| &text[..span.start]);
        ConfigError::Syntax {
            file: file.to_owned(),
            line: before.matches('\n').count() + 1,
            reason: error.message().lines().collect::<Vec<_>>().join(", "),
        }
    })
}

/// `table.key=value` as a table. If the key takes text, a number, a boolean or a date becomes text: `run.out=20251116`
/// names a folder.
fn read_set(argument: &str) -> Result<Table, ConfigError> {
    let SetArgument { keys, text, value } = SetArgument::parse(argument)?;
    let is_bare = !matches!(value, Value::String(_) | Value::Array(_) | Value::Table(_));
    let typed = nest(&keys, value);
    let Err(error) = read(&typed, "--set") else { return Ok(typed) };
    let word = nest(&keys, Value::String(text.to_owned()));
    if is_bare && read(&word, "--set").is_ok() { Ok(word) } else { Err(error) }
}

/// The parts of a `--set` argument.
struct SetArgument<'a> {
    keys: Vec<&'a str>,
    /// The value as it was typed.
    text: &'a str,
    value: Value,
}

impl<'a> SetArgument<'a> {
    /// Parses an argument. A value that is not TOML is a string, so that words need no quotes. A date is a string too,
    /// because no key takes a date.
    fn parse(argument: &'a str) -> Result<Self, ConfigError> {
        let wrong =
            |reason: &str| ConfigError::Set { argument: argument.to_owned(), reason: reason.to_owned() };
        let (path, text) = argument.split_once('=').ok_or_else(|| wrong("write it as table.key=value"))?;
        let (path, text) = (path.trim(), text.trim());
        let keys: Vec<&str> = path.split('.').collect();
        if keys.len() < 2 || keys.iter().any(|key| key.is_empty()) {
            return Err(wrong("the key needs its table, as in table.key=value"));
        }
        if text.is_empty() {
            return Err(wrong("there is no value"));
        }
        let value = toml::from_str::<Table>(&format!("value = {text}"))
            .ok()
            .filter(|table| table.len() == 1)
            .and_then(|mut table| table.remove("value"))
            .filter(|value| !value.is_datetime())
            .unwrap_or_else(|| Value::String(text.to_owned()));
        Ok(SetArgument { keys, text, value })
    }
}

/// The value under the first key, nested in tables of the other keys.
fn nest(keys: &[&str], value: Value) -> Table {
    let (first, rest) = keys.split_first().expect("a set argument has keys");
    let wrap = |inner, key: &&str| Value::Table(Table::from_iter([((*key).to_owned(), inner)]));
    Table::from_iter([((*first).to_owned(), rest.iter().rev().fold(value, wrap))])
}

/// Keys of a table that say the same in two ways: a layer with one of them replaces the other in the layers below.
const ALTERNATIVES: [&str; 3] = ["steps", "tokens", "epochs"];

pub(super) fn overlay(base: &mut Table, layer: Table) {
    if ALTERNATIVES.iter().any(|&key| layer.contains_key(key)) {
        for key in ALTERNATIVES {
            base.remove(key);
        }
    }
    for (key, value) in layer {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => overlay(below, above),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

fn read(table: &Table, origin: &str) -> Result<RawConfig, ConfigError> {
    serde_path_to_error::deserialize(Node(Value::Table(table.clone())))
        .map_err(|error| explain(table, origin, error.path(), error.inner()))
}

fn explain(table: &Table, origin: &str, path: &Path, problem: &Problem) -> ConfigError {
    let key = |segment: &Segment| match segment {
        Segment::Map { key } => Some(key.clone()),
        _ => None,
    };
    // A wrong element makes the whole list invalid.
    let keys: Vec<String> = path.iter().map_while(key).collect();
    let in_list = path.iter().len() > keys.len();
    let rule = match problem {
        Problem::UnknownKey { known } => {
            let keys: Vec<String> = path.iter().filter_map(key).collect();
            if let Some(reason) = unavailable::reason(&keys.join(".")) {
                return ConfigError::NotAvailable { what: keys.join("."), reason };
            }
            let hint = hint(keys.last().expect("an unknown key has a name"), known);
            return ConfigError::UnknownKey { key: keys.join("."), origin: origin.to_owned(), hint };
        }
        Problem::UnknownWord { known } => {
            if let Some(reason) = value_at(table, &keys).as_str().and_then(unavailable::reason) {
                let what = format!("{} = {}", keys.join("."), value_at(table, &keys));
                return ConfigError::NotAvailable { what, reason };
            }
            let quoted: Vec<String> = known.iter().map(|word| format!("\"{word}\"")).collect();
            format!("is not known; use {}", either(&quoted))
        }
        Problem::Negative if in_list => "must be a list without negative numbers".to_owned(),
        Problem::Negative => "must not be negative".to_owned(),
        Problem::Expected(what) if in_list => format!("must be a list whose every element is {what}"),
        Problem::Expected(what) => format!("must be {what}"),
    };
    invalid(&keys.join("."), value_at(table, &keys), rule)
}

/// The value of a key of the table.
fn value_at<'a>(table: &'a Table, keys: &[String]) -> &'a Value {
    let (first, rest) = keys.split_first().expect("a wrong value has a key");
    rest.iter().fold(&table[first], |value, key| &value[key])
}

/// A key similar to `key`, or else the known keys.
fn hint(key: &str, known: &[&str]) -> String {
    let nearest = known.iter().map(|name| (levenshtein(key, name), name)).min_by_key(|&(edits, _)| edits);
    match nearest {
        Some((edits, name)) if edits <= 1 + key.len() / 4 => format!("did you mean {name}?"),
        _ => format!("there are {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of the argument's key after it was read.
    fn set(argument: &str) -> Value {
        let table = Value::Table(read_set(argument).unwrap());
        let path = argument.split('=').next().unwrap().trim();
        path.split('.').fold(&table, |value, key| &value[key]).clone()
    }

    #[test]
    fn a_set_value_is_toml_or_a_word() {
        assert_eq!(set("parallel.tp=2"), Value::Integer(2));
        assert_eq!(set("run.out = a/b c"), Value::String("a/b c".into()));
        assert_eq!(set("run.out=\"x\""), Value::String("x".into()));
        let list = Value::Array(vec![Value::Integer(1), Value::Integer(3)]);
        assert_eq!(set("parallel.layers_per_stage=[1, 3]"), list);
        assert_eq!(set("run.out=1\nc=2"), Value::String("1\nc=2".into()));
    }

    #[test]
    fn steps_tokens_and_epochs_replace_each_other() {
        let steps =
            |source: ConfigSource| source.plan().map(|plan| plan.run.steps).map_err(|e| e.to_string());
        // A step of the demo has 32 · 64 tokens.
        let demo = ConfigSource::demo;
        assert_eq!(steps(demo().set("run.tokens=20480")), Ok(10));
        assert_eq!(steps(demo().set("run.tokens=20481")), Ok(11));
        assert_eq!(steps(demo().set("run.tokens=20480").set("run.steps=7")), Ok(7));
        assert_eq!(steps(demo().set("run.tokens=20480").set("run.seed=7").set("batch.global=64")), Ok(5));
        let epochs = |source: ConfigSource| source.plan().map(|plan| plan.run.epochs);
        assert_eq!(epochs(demo().set("run.tokens=20480").set("run.epochs=1.5")), Ok(Some(1.5)));
        assert_eq!(epochs(demo().set("run.epochs=1.5").set("run.tokens=20480")), Ok(None));
        let both = ConfigSource::text("model.preset = \"demo\"\nrun = { steps = 7, epochs = 2 }\n");
        let sentence = "run.epochs = 2 and run.steps = 7 both say how long the run is; leave one out";
        assert_eq!(steps(both), Err(sentence.to_owned()));
        let both = ConfigSource::text("model.preset = \"demo\"\nrun = { steps = 7, tokens = 20480 }\n");
        let sentence = "run.tokens = 20480 and run.steps = 7 both say how long the run is; leave one out";
        assert_eq!(steps(both.set("batch.sequence=64")), Err(sentence.to_owned()));
    }

    #[test]
    fn a_key_that_takes_text_takes_a_bare_number_boolean_or_date_as_typed() {
        for text in
            ["20251116", "007", "1_000", "0x10", "1e3", "1.50", "inf", "true", "2025-11-16", "10:30:00"]
        {
            for key in ["run.out", "model.init", "model.preset", "data.source", "cluster.device.name"] {
                assert_eq!(set(&format!("{key}={text}")), Value::String(text.into()), "{key}");
            }
        }
        assert_eq!(set("run.resume=20251116"), Value::String("20251116".into()));
        assert_eq!(set("run.resume=true"), Value::Boolean(true));
        assert_eq!(set("parallel.dp=4"), Value::Integer(4));
    }

    #[test]
    fn a_key_that_takes_no_text_refuses_the_value_as_it_was_typed() {
        let sentence = |argument| read_set(argument).unwrap_err().to_string();
        assert_eq!(sentence("parallel.tp=2.5"), "parallel.tp = 2.5 must be a whole number");
        assert_eq!(sentence("run.out=[1]"), "run.out = [1] must be a string");
    }
}
