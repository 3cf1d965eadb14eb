//! A model that comes with its weights: what the configuration leaves out is what the folder of weights has.

use std::path::PathBuf;

use kintsugi_spec::{Family, ModelSpec};
use toml::{Table, Value};

use super::error::{ConfigError, invalid};
use super::layers::{Layers, parse};
use super::raw::RawModel;
use super::{read, text_and_name, write};

/// The folder of weights that a configuration starts from, if it does.
pub fn init(file: Option<&str>, file_name: &str, sets: &[String]) -> Result<Option<PathBuf>, ConfigError> {
    Ok(read(None, file, file_name, sets)?.merged.model.init.map(PathBuf::from))
}

/// The text of a configuration with `model`, the model of its folder of weights, written into it. What the
/// configuration says of the model itself must be the same; only padding, and fewer positions, may differ.
pub fn with_model_of_init(
    file: Option<&str>,
    file_name: &str,
    sets: &[String],
    model: &ModelSpec,
) -> Result<String, ConfigError> {
    let (text, name) = text_and_name(file, file_name);
    let mut table = parse(text, name)?;
    if file.is_none() {
        // The demo's own model gives way.
        table.remove("model");
    }
    let said = Layers::read(None, &text_of(&table), name, sets)?.merged.model;
    // Its sizes are the folder's, whatever preset has the same.
    let folder = RawModel { preset: None, ..write::model(model) };
    let (said, folder) = (table_of(&said), table_of(&folder));
    let written = table.entry("model").or_insert_with(|| Value::Table(Table::new()));
    let Value::Table(written) = written else { unreachable!("the model has been read as a table") };
    for (key, value) in folder {
        match said.get(&key) {
            None => {
                written.insert(key, value);
            }
            Some(given) if *given == value || may_differ(model, &key, given) => {}
            Some(given) => {
                let rule = format!("is not what model.init holds, which is {value}; leave it out");
                return Err(invalid(&format!("model.{key}"), given, rule));
            }
        }
    }
    Ok(text_of(&table))
}

/// Padding is the layout's, and positions that are not wanted can be left behind.
fn may_differ(model: &ModelSpec, key: &str, given: &Value) -> bool {
    let fewer = given.as_integer().is_some_and(|given| given as usize <= model.positions);
    key == "vocab_multiple" || (key == "positions" && (fewer || model.family != Family::Gpt))
}

fn table_of(raw: &RawModel) -> Table {
    Table::try_from(raw).expect("a model is a table of numbers and words")
}

fn text_of(table: &Table) -> String {
    toml::to_string(table).expect("it was parsed from text")
}
