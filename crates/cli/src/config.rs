//! The configuration that every command takes: a file and `--set`.

use std::path::{Path, PathBuf};

use clap::Args;
use etcetera::{BaseStrategy, choose_base_strategy};
use kintsugi_checkpoint::{CheckpointError, WeightsFolder};
use kintsugi_data::{TokenFile, Tokenizer};
use kintsugi_plan::Plan;
use kintsugi_plan::config::{ConfigSource, ProfilePlace, VocabSource};

use crate::failure::{ErrorContext, Failure};
use crate::files::read_text;

/// The arguments that select a configuration.
#[derive(Args)]
pub struct ConfigArguments {
    /// Configuration file; without it the built-in demo is used
    ///
    /// If --set names another model or another cluster, nothing of the demo remains.
    #[arg(value_name = "CONFIG.toml")]
    file: Option<PathBuf>,
    /// Device profile written by `kintsugi calibrate`; overrides the cluster's preset
    #[arg(long, value_name = "FILE.toml")]
    profile: Option<PathBuf>,
    /// Overrides one value of the file, as in --set parallel.tp=4
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    sets: Vec<String>,
    /// The text of a configuration instead of a file, from a caller of the library.
    #[arg(skip)]
    text: Option<String>,
    /// The nodes that `kintsugi plan --place` has chosen; overrides cluster.placement
    #[arg(long, value_name = "FILE.toml")]
    placement: Option<PathBuf>,
}

impl ConfigArguments {
    /// The configuration of a file, or the demo, with a profile and values laid over it.
    pub fn new(file: Option<PathBuf>, profile: Option<PathBuf>, sets: Vec<String>) -> Self {
        ConfigArguments { file, profile, sets, text: None, placement: None }
    }

    /// The configuration in a text, with values laid over it.
    pub fn of_text(text: String, sets: Vec<String>) -> Self {
        ConfigArguments { file: None, profile: None, sets, text: Some(text), placement: None }
    }

    /// Whether a file was named.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// The file that was named.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The values that override those of the file.
    pub fn sets(&self) -> &[String] {
        &self.sets
    }

    /// Whether any value of the file is overridden.
    pub fn has_sets(&self) -> bool {
        !self.sets.is_empty()
    }

    /// The settings that the user gave: the file, or the demo, and `--set`. A profile that the command line names is written
    /// as a key.
    pub fn given(&self) -> Result<ConfigSource, Failure> {
        let source = self.file_and_sets()?;
        let Some(path) = &self.profile else { return Ok(source) };
        let path = toml::Value::from(path.display().to_string());
        // Without a preset, a configuration with a profile describes a cluster of its own.
        let preset = (source.profile_place()? == ProfilePlace::Default).then_some("cluster.preset=local");
        Ok(source.sets(preset).set(format!("cluster.profile={path}")))
    }

    fn file_and_sets(&self) -> Result<ConfigSource, Failure> {
        let source = match (&self.file, &self.text) {
            (Some(path), _) => ConfigSource::text(read_text(path)?).named(path.display().to_string()),
            (None, Some(text)) => ConfigSource::text(text).named("the configuration"),
            (None, None) => ConfigSource::demo(),
        };
        let source = source.sets(&self.sets);
        let Some(path) = &self.placement else { return Ok(source) };
        let text: toml::Table = toml::from_str(&read_text(path)?).map_err(|error: toml::de::Error| {
            Failure::mistake(ErrorContext::new(path.display().to_string(), error.message()))
        })?;
        let placement = text.get("cluster").and_then(|cluster| cluster.get("placement"));
        let placement = placement.ok_or_else(|| {
            let name = path.display();
            Failure::mistake(format!(
                "{name} has no table cluster.placement; kintsugi plan --place writes one"
            ))
        })?;
        Ok(source.set(format!("cluster.placement={placement}")))
    }

    /// Reads the file, the cluster's profile, and the model of the weights folder that the file names.
    pub fn read(&self) -> Result<ConfigSource, Failure> {
        let source = self.file_and_sets()?;
        let path = match (&self.profile, source.profile_place()?) {
            (Some(path), _) => Some(path.clone()),
            (None, ProfilePlace::File(path)) => Some(PathBuf::from(path)),
            (None, ProfilePlace::Default) => default_profile().filter(|path| path.exists()),
            (None, ProfilePlace::None) => None,
        };
        let source = with_data_vocab(match path {
            Some(path) => source.profile(path.display().to_string(), read_text(&path)?),
            None => source,
        })?;
        with_init_model(source)
    }

    /// The plan of the configuration.
    pub fn plan(&self) -> Result<Plan, Failure> {
        Ok(self.read()?.plan()?)
    }

    /// The plan, and notes about settings that it does not fulfil.
    pub fn plan_with_notes(&self) -> Result<(Plan, Vec<String>), Failure> {
        let source = self.read()?;
        let plan = source.plan()?;
        let notes = source.notes(&plan)?;
        Ok((plan, notes))
    }
}

/// Adds the model of the weights folder that the configuration names, if it names one.
fn with_init_model(source: ConfigSource) -> Result<ConfigSource, Failure> {
    let Some(folder) = source.init_folder()? else { return Ok(source) };
    match WeightsFolder::read_model(&folder) {
        Ok(model) => Ok(source.with_init_model(&model)?),
        // A complete configuration needs the folder only for the weights, and a resumed run not even for those.
        Err(_) if source.plan().is_ok() => Ok(source),
        Err(error) => Err(unreadable_weights(&folder, error)),
    }
}

/// Adds the vocabulary of the data, if the configuration leaves that of the model out: the largest that the token files or
/// their tokenizer state.
fn with_data_vocab(source: ConfigSource) -> Result<ConfigSource, Failure> {
    let Some(VocabSource { prefixes, tokenizer }) = source.vocab_source()? else { return Ok(source) };
    // The weights decide, and the folder is read next.
    if source.init_folder()?.is_some() {
        return Ok(source);
    }
    let mut vocab =
        tokenizer.map(|name| Tokenizer::open(&name)).transpose()?.map(|tokenizer| tokenizer.vocab());
    for prefix in prefixes {
        vocab = vocab.max(TokenFile::open(&prefix)?.about().map(|about| about.vocab));
    }
    Ok(match vocab {
        Some(vocab) => source.with_data_vocab(vocab),
        None => source,
    })
}

/// The failure to read the folder of `model.init`. A name that is not a folder may be one of the Hugging Face hub, from which
/// nothing is downloaded here.
pub fn unreadable_weights(folder: &Path, error: CheckpointError) -> Failure {
    let name = folder.display();
    if folder.exists() {
        return Failure::mistake(ErrorContext::new("model.init", error));
    }
    let local =
        folder.file_name().map_or_else(|| name.to_string(), |name| name.to_string_lossy().into_owned());
    Failure::mistake(format!(
        "model.init = \"{name}\" is not a folder; it takes a folder with config.json and safetensors, or a checkpoint of a run. \
         A model of the Hugging Face hub has to be downloaded first, as with: hf download {name} --local-dir {local}"
    ))
}

/// The default profile of this machine: `KINTSUGI_PROFILE`, or `kintsugi/local.toml` in the user's configuration folder
/// (`XDG_CONFIG_HOME`, else `~/.config`).
pub fn default_profile() -> Option<PathBuf> {
    let named = std::env::var_os("KINTSUGI_PROFILE").map(PathBuf::from);
    named.or_else(|| Some(choose_base_strategy().ok()?.config_dir().join("kintsugi").join("local.toml")))
}
