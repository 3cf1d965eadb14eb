//! The configuration that every command takes: a file and `--set`.

use std::path::{Path, PathBuf};

use clap::Args;
use kintsugi_checkpoint::WeightsFolder;
use kintsugi_plan::Plan;
use kintsugi_plan::config::{
    ConfigError, Profile, ProfilePlace, init, notes, profile, resolve_on, resolve_open, resolve_without_on,
    with_model_of_init,
};

use crate::failure::Failure;
use crate::files::read_text;

/// Which configuration.
#[derive(Args)]
pub struct ConfigArguments {
    /// Configuration file; without one, the built-in demo
    #[arg(value_name = "CONFIG.toml")]
    file: Option<PathBuf>,
    /// A device as `kintsugi calibrate` measured it, in place of what the cluster's preset says
    #[arg(long, value_name = "FILE.toml")]
    profile: Option<PathBuf>,
    /// Sets one value over the file's, as in --set parallel.tp=4
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    sets: Vec<String>,
}

/// A configuration that has been read: settings can be laid under and over what was given.
pub struct Config {
    text: Option<String>,
    name: String,
    sets: Vec<String>,
    /// The profile of the cluster: its file and what is in it.
    profile: Option<(String, String)>,
}

impl ConfigArguments {
    /// Whether a file was named.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Whether it is this very file that was named.
    pub fn is_file(&self, path: &Path) -> bool {
        let named = self.file.as_ref().and_then(|file| file.canonicalize().ok());
        named.is_some() && named == path.canonicalize().ok()
    }

    /// Whether anything is laid over the file.
    pub fn has_sets(&self) -> bool {
        !self.sets.is_empty()
    }

    /// Reads the file, and the model of the folder of weights that it names.
    pub fn read(&self) -> Result<Config, Failure> {
        let text = self.file.as_deref().map(read_text).transpose()?;
        let name = self.file.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        let path = match (&self.profile, profile(text.as_deref(), &name, &self.sets)?) {
            (Some(path), _) => Some(path.clone()),
            (None, ProfilePlace::File(path)) => Some(PathBuf::from(path)),
            (None, ProfilePlace::Default) => default_profile().filter(|path| path.exists()),
            (None, ProfilePlace::None) => None,
        };
        let profile = path.map(|path| Ok::<_, Failure>((path.display().to_string(), read_text(&path)?)));
        let config = Config { text, name, sets: self.sets.clone(), profile: profile.transpose()? };
        config.with_model_of_init()
    }

    /// The plan it means.
    pub fn resolve(&self) -> Result<Plan, Failure> {
        Ok(self.read()?.resolve(&[], &[])?)
    }

    /// The plan, and what the configuration asks for and does not get.
    pub fn resolve_with_notes(&self) -> Result<(Plan, Vec<String>), Failure> {
        let config = self.read()?;
        let plan = config.resolve(&[], &[])?;
        let notes = notes(config.text.as_deref(), &config.name, &config.sets, &plan)?;
        Ok((plan, notes))
    }
}

impl Config {
    /// The plan with `under` laid under what `--set` gave, and `over` over it.
    pub fn resolve(&self, under: &[&str], over: &[String]) -> Result<Plan, ConfigError> {
        let sets = [self.sets_over(under), over.to_vec()].concat();
        resolve_on(self.profile(), self.text.as_deref(), &self.name, &sets)
    }

    /// The plan with its strategy left open, and the ranks that strategies are for.
    pub fn resolve_open(&self) -> Result<(Plan, usize), ConfigError> {
        resolve_open(self.profile(), self.text.as_deref(), &self.name, &self.sets)
    }

    /// The same without what was given in `tables`, file and `--set` alike.
    pub fn resolve_without(
        &self,
        tables: &[&str],
        under: &[&str],
        over: &[String],
    ) -> Result<Plan, ConfigError> {
        resolve_without_on(
            self.profile(),
            tables,
            self.text.as_deref(),
            &self.name,
            &self.sets_over(under),
            over,
        )
    }

    fn profile(&self) -> Option<Profile<'_>> {
        self.profile.as_ref().map(|(name, text)| Profile { name, text })
    }

    /// The same with the model of the folder of weights that it names, if it names one.
    fn with_model_of_init(self) -> Result<Config, Failure> {
        let Some(folder) = init(self.text.as_deref(), &self.name, &self.sets)? else { return Ok(self) };
        let model = match WeightsFolder::read_model(&folder) {
            Ok(model) => model,
            // A file that says everything needs the folder only for the weights, and to resume not even for those.
            Err(_) if self.text.is_some() && self.resolve(&[], &[]).is_ok() => return Ok(self),
            Err(error) => return Err(Failure::Mistake(format!("model.init: {error}"))),
        };
        let text = with_model_of_init(self.text.as_deref(), &self.name, &self.sets, &model)?;
        let name = if self.text.is_some() { self.name } else { "the built-in demo".to_owned() };
        Ok(Config { text: Some(text), name, sets: self.sets, profile: self.profile })
    }

    fn sets_over(&self, under: &[&str]) -> Vec<String> {
        under.iter().map(ToString::to_string).chain(self.sets.iter().cloned()).collect()
    }
}

/// Where the profile of this machine lies: `KINTSUGI_PROFILE`, or `kintsugi/local.toml` in the folder for
/// configurations.
pub fn default_profile() -> Option<PathBuf> {
    let named = std::env::var_os("KINTSUGI_PROFILE").map(PathBuf::from);
    let folder = || {
        let configured = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
        configured.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")))
    };
    named.or_else(|| Some(folder()?.join("kintsugi").join("local.toml")))
}
