//! A model that comes from a folder of weights: the folder supplies what the configuration leaves out.

use std::path::PathBuf;

use kintsugi_spec::ModelSpec;
use toml::{Table, Value};

use super::error::{ConfigError, invalid};
use super::keys::RawModel;
use super::layers::{self, Layers};
use super::source::ConfigSource;
use super::write;

impl ConfigSource {
    /// The folder of initial weights (`model.init`), if there is one.
    pub fn init_folder(&self) -> Result<Option<PathBuf>, ConfigError> {
        Ok(Layers::read_without_profile(self)?.merged.model.init.map(PathBuf::from))
    }

    /// Writes `model`, the model of the weights folder, into the configuration's text, and its longest sample as the sequence
    /// if the configuration has none. Keys of the model that the configuration sets must agree with it; only the name, padding
    /// and a smaller number of positions may differ.
    pub fn with_init_model(mut self, model: &ModelSpec) -> Result<Self, ConfigError> {
        let mut table = layers::file(&self)?;
        let merged = Layers::read_without_profile(&self)?.merged;
        self.is_demo = false;
        let said = merged.model;
        if merged.batch.sequence.is_none() {
            let longest = said.positions.map_or(model.positions, |given| given.min(model.positions));
            let batch = table.entry("batch").or_insert_with(|| Value::Table(Table::new()));
            let Value::Table(batch) = batch else { unreachable!("the batch has been read as a table") };
            batch.insert("sequence".to_owned(), Value::Integer(longest as i64));
        }
        // The sizes come from the folder, even if a preset has the same sizes.
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
        self.file.text = text_of(&table);
        Ok(self)
    }
}

/// A name is free, padding depends on the layout, unused positions can be dropped, and loaded weights need no initial values.
fn may_differ(model: &ModelSpec, key: &str, given: &Value) -> bool {
    let fewer = given.as_integer().is_some_and(|given| given as usize <= model.positions);
    ["name", "vocab_multiple", "init_std"].contains(&key)
        || (key == "positions" && (fewer || !model.has_learned_positions()))
}

fn table_of(raw: &RawModel) -> Table {
    Table::try_from(raw).expect("a model is a table of numbers and words")
}

fn text_of(table: &Table) -> String {
    toml::to_string(table).expect("it was parsed from text")
}
