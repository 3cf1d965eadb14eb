//! A configuration as the user gives it: the text of a file, changes to it, and the cluster's profile.

use std::path::PathBuf;

use super::demo::{self, DEMO};
use super::error::ConfigError;
use super::keys::RawConfig;
use super::layers::{self, Layers};
use super::{cluster, mesh, plan, search_base, sharding};
use crate::{DeviceKind, Plan};

/// A configuration that is not checked yet: the text of a file and the changes to it, which apply in the order in which
/// they were added.
///
/// ```
/// # use kintsugi_plan::config::ConfigSource;
/// let plan = ConfigSource::demo().set("parallel.tp=4").plan()?;
/// assert_eq!(plan.mesh.tp(), 4);
/// # Ok::<(), kintsugi_plan::config::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ConfigSource {
    pub(super) file: NamedText,
    pub(super) is_demo: bool,
    pub(super) changes: Vec<Change>,
    pub(super) profile: Option<NamedText>,
    /// The vocabulary of the data's token files, if it is known.
    pub(super) data_vocab: Option<usize>,
}

/// TOML text, and its name in messages.
#[derive(Clone, Debug)]
pub(super) struct NamedText {
    pub(super) name: String,
    pub(super) text: String,
}

/// A change to the file's settings.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// Sets one key: a `--set` argument, `table.key=value`.
    Set(String),
    /// Removes a table.
    Without(String),
}

/// Where to find a configuration's profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProfilePlace {
    /// In this file, given by `cluster.profile`.
    File(String),
    /// The default path of `calibrate`, if that file exists.
    Default,
    /// There is none: a preset or the configuration itself describes the cluster.
    None,
}

/// The data whose vocabulary the model has, if the configuration gives none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabSource {
    /// The prefixes of the token files.
    pub prefixes: Vec<PathBuf>,
    /// The tokenizer, if `data.tokenizer` names one.
    pub tokenizer: Option<String>,
}

impl ConfigSource {
    /// The TOML text of a file.
    pub fn text(text: impl Into<String>) -> Self {
        let file = NamedText { name: "the configuration".to_owned(), text: text.into() };
        ConfigSource { file, is_demo: false, changes: Vec::new(), profile: None, data_vocab: None }
    }

    /// The built-in demo, which is used if no file is given. Once a change names another model or another cluster, nothing
    /// of the demo remains but its model, and that only if no other is named.
    pub fn demo() -> Self {
        ConfigSource { is_demo: true, ..ConfigSource::text(DEMO).named("the built-in demo") }
    }

    /// Sets the name of the file in messages.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.file.name = name.into();
        self
    }

    /// Sets one key, as in `table.key=value`. It overrides earlier settings.
    pub fn set(mut self, argument: impl Into<String>) -> Self {
        self.changes.push(Change::Set(argument.into()));
        self
    }

    /// Sets several keys, one after the other.
    pub fn sets<S: AsRef<str>>(self, arguments: impl IntoIterator<Item = S>) -> Self {
        arguments.into_iter().fold(self, |source, argument| source.set(argument.as_ref()))
    }

    /// Sets several keys. They override the file, and every other change overrides them.
    pub fn sets_below(mut self, arguments: &[&str]) -> Self {
        let sets = arguments.iter().map(|&argument| Change::Set(argument.to_owned()));
        self.changes.splice(0..0, sets);
        self
    }

    /// Removes whole tables from the earlier settings. An error in them is still reported.
    pub fn without(mut self, tables: &[&str]) -> Self {
        self.changes.extend(tables.iter().map(|&table| Change::Without(table.to_owned())));
        self
    }

    /// Adds the profile of a cluster: the TOML text of the file `name`. It overrides presets, and the file overrides
    /// it.
    pub fn profile(mut self, name: impl Into<String>, text: impl Into<String>) -> Self {
        self.profile = Some(NamedText { name: name.into(), text: text.into() });
        self
    }

    /// Sets the vocabulary of the data's token files. It is `model.vocab` if neither a preset nor the user gives that.
    pub fn with_data_vocab(mut self, vocab: usize) -> Self {
        self.data_vocab = Some(vocab);
        self
    }

    /// The data that decides `model.vocab`. `None` if the vocabulary is given, or if the data is the demo corpus.
    pub fn vocab_source(&self) -> Result<Option<VocabSource>, ConfigError> {
        let RawConfig { model, data, .. } = Layers::read_without_profile(self)?.merged;
        let prefixes = data.source.filter(|_| model.vocab.is_none()).and_then(|sources| sources.prefixes());
        Ok(prefixes.map(|prefixes| VocabSource { prefixes, tokenizer: data.tokenizer }))
    }

    /// Checks that the text is TOML with known keys and values of the right kind. [`plan`](Self::plan) checks more.
    pub fn check(&self) -> Result<(), ConfigError> {
        Layers::given(self).map(drop)
    }

    /// Whether the model is that of the built-in demo: there is no file, and no change names another model.
    pub fn has_demo_model(&self) -> Result<bool, ConfigError> {
        Ok(self.is_demo && layers::file(self)?.contains_key("model"))
    }

    /// Whether the configuration leaves the device to be chosen (`run.device = "auto"`).
    pub fn is_device_auto(&self) -> Result<bool, ConfigError> {
        Ok(DeviceKind::given(&Layers::read_without_profile(self)?.merged.run).is_none())
    }

    /// Resolves the configuration to a plan. `run.device = "auto"` is the kind of device that the cluster describes; a command
    /// that runs the plan on this machine sets the device itself.
    pub fn plan(&self) -> Result<Plan, ConfigError> {
        plan(&Layers::read(self)?)
    }

    /// The base of a search over strategies: the plan on a single rank, without the settings that a
    /// [`Strategy`](super::Strategy) decides, and the number of ranks of the strategies. That number follows from
    /// `cluster.nodes` if the configuration gives it, else from the configuration's own layout.
    pub fn search_base(&self) -> Result<(Plan, usize), ConfigError> {
        search_base(Layers::read(self)?)
    }

    /// Settings of the configuration that `plan`, the plan that it resolves to, does not fulfil; one sentence each.
    pub fn notes(&self, plan: &Plan) -> Result<Vec<String>, ConfigError> {
        let layers = Layers::read_without_profile(self)?;
        let mut notes = Vec::new();
        if self.is_demo {
            notes.extend(demo::note(&layers::file(self)?, &layers::sets(self)?));
        }
        notes.extend(sharding::notes(&layers.merged.sharding, &plan.sharding, plan.mesh));
        // The `config.toml` that a run writes contains the preset's number of nodes. That is the cluster's size, not a
        // request.
        let preset = layers.presets.cluster.nodes;
        let asked = layers.given.cluster.nodes.filter(|&nodes| preset != Some(nodes));
        notes.extend(mesh::note(plan.mesh, plan.batch, &plan.cluster, asked));
        notes.extend(mesh::default_note(&layers.merged.parallel, &plan.cluster, layers.given.cluster.nodes));
        notes.extend(plan.optimizer.note(&plan.run));
        notes.extend(plan.run.keep_best_note());
        Ok(notes)
    }

    /// Where to find the profile of this configuration.
    pub fn profile_place(&self) -> Result<ProfilePlace, ConfigError> {
        let cluster = Layers::given(self)?.cluster;
        Ok(match (&cluster.profile, cluster::preset(&cluster)) {
            (Some(path), _) => ProfilePlace::File(path.clone()),
            (None, Some("local")) => ProfilePlace::Default,
            _ => ProfilePlace::None,
        })
    }
}
