//! What jobs need on a cluster, as data: a TOML file that is built in, or that a site copies and edits.
//!
//! Every value becomes a quoted word of the job script or an option of Slurm. None is run by a shell.

use std::collections::BTreeMap;
use std::path::Path;

use kintsugi_plan::{DeviceKind, Plan};
use kintsugi_spec::Cause;
use serde::Deserialize;

use crate::failure::{ErrorContext, Failure};
use crate::files::read_text;

/// The built-in sites.
const SITES: [(&str, &str); 3] = [
    ("cpu", include_str!("sites/cpu.toml")),
    ("nvidia", include_str!("sites/nvidia.toml")),
    ("frontier", include_str!("sites/frontier.toml")),
];

/// Options of Slurm that would run a program or pass the whole environment on.
const REFUSED: [&str; 9] = [
    "--prolog",
    "--epilog",
    "--task-prolog",
    "--task-epilog",
    "--multi-prog",
    "--wrap",
    "--export",
    "--export-file",
    "--get-user-env",
];

/// Seconds before the time limit at which a run saves and stops, if the site does not say.
const SIGNAL: u32 = 120;

/// A site.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Site {
    /// Whose allocation is used.
    pub account: Option<String>,
    /// Where jobs are queued.
    pub partition: Option<String>,
    /// The time limit, in Slurm's form.
    pub time: Option<String>,
    /// Seconds before the time limit at which a run saves and stops.
    pub signal: Option<u32>,
    /// The plugin of srun by which MPI finds the other ranks.
    pub mpi: Option<String>,
    /// Cores of a rank.
    pub cores_per_rank: Option<u32>,
    /// How GPUs are asked for; not at all if ranks run on CPUs.
    pub gpus: Option<GpuBinding>,
    /// Modules to load.
    pub modules: Vec<String>,
    /// Further options of sbatch.
    pub job_options: Vec<String>,
    /// Further options of srun.
    pub step_options: Vec<String>,
    /// Variables of the submitting shell that the job gets, besides the usual ones.
    pub pass: Vec<String>,
    /// Variables of the job.
    pub environment: BTreeMap<String, String>,
}

/// Which GPUs of its node a rank sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuBinding {
    /// All of them. The process takes the one of its number.
    Node,
    /// Its own only.
    Rank,
}

impl Site {
    /// The site of a name or a file, or the built-in one that suits the plan.
    pub fn find(given: Option<&str>, plan: &Plan) -> Result<Self, Failure> {
        let name = given.unwrap_or(match plan.run.device {
            _ if plan.cluster.name == "frontier" => "frontier",
            DeviceKind::Hip => "frontier",
            DeviceKind::Cuda => "nvidia",
            DeviceKind::Cpu => "cpu",
        });
        let text = match SITES.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => (*text).to_owned(),
            None if Path::new(name).exists() => read_text(Path::new(name))?,
            None => {
                let known = SITES.map(|(known, _)| known).join(", ");
                return Err(Failure::mistake(format!(
                    "--site {name} is neither a file nor a built-in site; the built-in ones are {known}"
                )));
            }
        };
        let wrong = |error| Failure::mistake(ErrorContext::new(format!("--site {name}"), error));
        let site: Site = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            wrong(Cause::new(format!("line {line}: {}", error.message().trim().replace('\n', " "))))
        })?;
        site.check().map_err(|rule| wrong(Cause::new(rule)))?;
        Ok(site)
    }

    /// The same with what the command line gives, which is checked like the file.
    pub fn with(mut self, options: &[(&str, Option<&String>)]) -> Result<Self, Failure> {
        for (name, value) in options.iter().filter_map(|(name, value)| Some((*name, (*value)?))) {
            match name {
                "account" => self.account = Some(value.clone()),
                "partition" => self.partition = Some(value.clone()),
                _ => self.time = Some(value.clone()),
            }
        }
        self.check().map_err(|rule| Failure::mistake(format!("--{rule}")))?;
        Ok(self)
    }

    /// Seconds before the time limit at which a run saves and stops.
    pub fn signal(&self) -> u32 {
        self.signal.unwrap_or(SIGNAL)
    }

    /// Why the site cannot be used, as `key = value …`.
    fn check(&self) -> Result<(), String> {
        let names = [("account", &self.account), ("partition", &self.partition), ("mpi", &self.mpi)];
        for (key, value) in names.into_iter().filter_map(|(key, value)| Some((key, value.as_ref()?))) {
            if !is_word(value, "-_.,@:+/") {
                return Err(format!("{key} = \"{value}\" is not a name"));
            }
        }
        if let Some(time) = self.time.as_ref().filter(|time| !is_time(time)) {
            return Err(format!("time = \"{time}\" is not a time of Slurm, as 90, 1:30:00 or 2-12:00:00"));
        }
        if self.mpi.as_deref() == Some("none") {
            return Err(
                "mpi = \"none\" starts ranks that cannot find each other; take one of srun --mpi=list".into(),
            );
        }
        if self.signal == Some(0) || self.cores_per_rank == Some(0) {
            return Err("signal and cores_per_rank are at least 1".into());
        }
        if let Some(module) = self.modules.iter().find(|module| !is_word(module, "-_.,@:+/=")) {
            return Err(format!("modules: \"{module}\" is not the name of a module"));
        }
        for option in self.job_options.iter().chain(&self.step_options) {
            let name = option.split('=').next().unwrap_or_default();
            if !option.starts_with('-') || option.contains(|c: char| c.is_control() || c == '\\') {
                return Err(format!("\"{option}\" is not an option of Slurm, as --constraint=nvme"));
            }
            if REFUSED.contains(&name) {
                return Err(format!("{name} is not allowed: it runs a program or passes on an environment"));
            }
        }
        for name in self.environment.keys().chain(&self.pass) {
            if !is_word(name, "_") {
                return Err(format!("\"{name}\" is not the name of a variable"));
            }
            if is_secret(name) {
                return Err(format!(
                    "{name} looks like a secret, and Slurm stores the script and its environment"
                ));
            }
        }
        match self.environment.iter().find(|(_, value)| value.contains(|c: char| c.is_control())) {
            Some((name, _)) => Err(format!("environment.{name} has a control character")),
            None => Ok(()),
        }
    }
}

/// Whether a variable may have a secret, by its name.
pub fn is_secret(name: &str) -> bool {
    let words = ["SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "KEY", "AUTH"];
    name.to_ascii_uppercase().split('_').any(|word| words.contains(&word))
}

fn is_word(text: &str, others: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
}

/// Whether a text is minutes, or has hours, minutes and seconds, and days before them.
fn is_time(text: &str) -> bool {
    let starts_well = text.starts_with(|c: char| c.is_ascii_digit());
    starts_well
        && text.ends_with(|c: char| c.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_digit() || ":-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        let site: Site = toml::from_str(text).expect("TOML");
        site.check().expect_err("it is refused")
    }

    #[test]
    fn built_in_sites_are_valid() {
        for (name, text) in SITES {
            let site: Site = toml::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"));
            site.check().unwrap_or_else(|rule| panic!("{name}: {rule}"));
        }
    }

    #[test]
    fn what_would_be_executed_or_stored_is_refused() {
        assert_eq!(refused("account = 'a; rm -r x'"), "account = \"a; rm -r x\" is not a name");
        assert_eq!(refused("modules = ['$(x)']"), "modules: \"$(x)\" is not the name of a module");
        assert!(refused("time = 'soon'").starts_with("time = \"soon\" is not a time of Slurm"));
        assert!(
            refused("step_options = ['--task-prolog=/tmp/x']").starts_with("--task-prolog is not allowed")
        );
        assert!(
            refused("job_options = [\"--mem=0\\n#SBATCH --wrap=x\"]").contains("is not an option of Slurm")
        );
        assert!(refused("environment = { HF_TOKEN = 'x' }").starts_with("HF_TOKEN looks like a secret"));
        assert!(refused("pass = ['WANDB_API_KEY']").starts_with("WANDB_API_KEY looks like a secret"));
        assert!(!is_secret("TOKENIZERS_PARALLELISM") && !is_secret("PATH"));
    }
}
