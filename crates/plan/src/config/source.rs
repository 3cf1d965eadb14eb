//! A configuration as the user gives it: the text of a file, changes to it, and the cluster's profile.

use super::error::ConfigError;
use super::layers::Layers;
use super::{cluster, mesh, open, plan, sharding, training};
use crate::Plan;

/// The configuration that stands in for a file where there is none.
const DEMO: &str = include_str!("demo.toml");

/// A configuration that is not checked yet: the text of a file and the changes to it, which apply in the order in which
/// they were added.
///
/// ```
/// # use kintsugi_plan::config::ConfigSource;
/// let plan = ConfigSource::demo().set("parallel.tp=4").plan()?;
/// assert_eq!(plan.mesh.tp, 4);
/// # Ok::<(), kintsugi_plan::config::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ConfigSource {
    pub(super) file: NamedText,
    pub(super) is_demo: bool,
    pub(super) changes: Vec<Change>,
    pub(super) profile: Option<NamedText>,
}

/// TOML text, and what messages call it.
#[derive(Clone, Debug)]
pub(super) struct NamedText {
    pub(super) name: String,
    pub(super) text: String,
}

/// A change to what the file says.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// Sets one key: a `--set` argument, `table.key=value`.
    Set(String),
    /// Removes a table.
    Without(String),
}

/// Where a configuration's profile is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProfilePlace {
    /// In this file: `cluster.profile`.
    File(String),
    /// Where `calibrate` leaves the profile of this machine, if it has.
    Default,
    /// Nowhere: a preset or the configuration itself describes the cluster.
    None,
}

impl ConfigSource {
    /// The TOML text of a file.
    pub fn text(text: impl Into<String>) -> Self {
        let file = NamedText { name: "the configuration".to_owned(), text: text.into() };
        ConfigSource { file, is_demo: false, changes: Vec::new(), profile: None }
    }

    /// The built-in demo, which stands in for a file.
    pub fn demo() -> Self {
        ConfigSource { is_demo: true, ..ConfigSource::text(DEMO).named("the built-in demo") }
    }

    /// Sets what messages call the file.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.file.name = name.into();
        self
    }

    /// Sets one key, as in `table.key=value`, over what was given before.
    pub fn set(mut self, argument: impl Into<String>) -> Self {
        self.changes.push(Change::Set(argument.into()));
        self
    }

    /// Sets several keys, one after the other.
    pub fn sets<S: AsRef<str>>(self, arguments: impl IntoIterator<Item = S>) -> Self {
        arguments.into_iter().fold(self, |source, argument| source.set(argument.as_ref()))
    }

    /// Sets several keys over the file and under every other change.
    pub fn sets_below(mut self, arguments: &[&str]) -> Self {
        let sets = arguments.iter().map(|&argument| Change::Set(argument.to_owned()));
        self.changes.splice(0..0, sets);
        self
    }

    /// Removes whole tables from what was given before. A mistake in them is still refused.
    pub fn without(mut self, tables: &[&str]) -> Self {
        self.changes.extend(tables.iter().map(|&table| Change::Without(table.to_owned())));
        self
    }

    /// Lays a cluster's profile, the TOML text of the file `name`, over the presets and under the file.
    pub fn profile(mut self, name: impl Into<String>, text: impl Into<String>) -> Self {
        self.profile = Some(NamedText { name: name.into(), text: text.into() });
        self
    }

    /// Whether the built-in demo stands in for a file.
    pub fn is_demo(&self) -> bool {
        self.is_demo
    }

    /// The plan that the configuration means.
    pub fn plan(&self) -> Result<Plan, ConfigError> {
        plan(&Layers::read(self)?)
    }

    /// The plan on a single rank, with all that a [`Strategy`](super::Strategy) names left open, and the number of ranks
    /// that strategies are for: those of `cluster.nodes` where the configuration says it, else those of its own layout.
    pub fn open(&self) -> Result<(Plan, usize), ConfigError> {
        open(Layers::read(self)?)
    }

    /// What the configuration asks for and does not get, in sentences; `plan` is what it resolves to.
    pub fn notes(&self, plan: &Plan) -> Result<Vec<String>, ConfigError> {
        let layers = Layers::read_without_profile(self)?;
        let mut notes = sharding::notes(&layers.merged.sharding, &plan.sharding, plan.mesh);
        // All nodes of a preset are in the file that a run leaves behind; they are its size, not a request.
        let preset = layers.presets.cluster.nodes;
        let asked = layers.given.cluster.nodes.filter(|&nodes| preset != Some(nodes));
        notes.extend(mesh::note(plan.mesh, plan.batch, &plan.cluster, asked));
        notes.extend(training::note(&plan.optimizer, &plan.run));
        notes.extend(training::keep_best_note(&plan.run));
        Ok(notes)
    }

    /// Where the profile is that the configuration asks for.
    pub fn profile_place(&self) -> Result<ProfilePlace, ConfigError> {
        let cluster = Layers::given(self)?.cluster;
        Ok(match (&cluster.profile, cluster::preset(&cluster)) {
            (Some(path), _) => ProfilePlace::File(path.clone()),
            (None, Some("local")) => ProfilePlace::Default,
            _ => ProfilePlace::None,
        })
    }
}
