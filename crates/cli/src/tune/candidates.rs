//! The candidates of a tuning: every strategy that fits, for every value of the other settings.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Display;
use std::slice::from_ref;

use kintsugi_plan::Plan;
use kintsugi_plan::config::{ConfigSource, Strategy};
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_tune::trials::{Journal, Record, StepFigures, TrialCandidate, Values};
use kintsugi_tune::{
    Candidate, Limit, Only, OnlyError, Settings, search, strategies, strategies_that_fit, values,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::config::ConfigArguments;
use crate::describe;
use crate::failure::Failure;
use crate::host::planned_device;
use crate::plan::{begin_phase, limit, search_settings, supported};
use crate::progress::Progress;

/// Values of settings that a strategy does not decide, and the configuration with them.
struct Variant {
    /// `table.key=value`.
    sets: Vec<String>,
    /// The settings of the user with them.
    given: ConfigSource,
    base: Plan,
}

/// The candidates, and what they are made of.
pub struct Candidates {
    variants: Vec<Variant>,
    /// The variant and the strategy of each candidate.
    strategies: Vec<(usize, Strategy)>,
    /// What the tuner needs of each.
    pub all: Vec<TrialCandidate>,
    /// The index of the planner's first choice, if it can predict times.
    pub first: Option<usize>,
    /// The model, the batch and the machine, in a line.
    pub task: String,
    /// The settings that are not the same for all candidates.
    varying: Vec<String>,
}

/// The largest number of combinations of settings that a strategy does not decide.
const MAX_VARIANTS: usize = 256;
/// Strategies of one variant at most, if they cannot be timed.
const MAX_UNTIMED: usize = 100_000;

/// Settings that [`Candidates::describe`] treats on their own.
const ALWAYS_TOLD: [&str; 5] =
    ["parallel.tp", "parallel.pp", "parallel.dp", "batch.micro", "parallel.schedule"];

/// The last part of a key, in words.
fn short(key: &str) -> String {
    key.rsplit('.').next().unwrap_or(key).replace('_', " ")
}

impl Candidates {
    /// All candidates of a configuration in a space. Strategies with codes are among them only if the configuration or the
    /// space has codes, because codes change the numbers of a training. Nor are those that need more than `memory` bytes, which are
    /// predicted exactly.
    pub fn new(
        config: &ConfigArguments,
        space: &[String],
        executor: &str,
        memory: Option<u64>,
    ) -> Result<Self, Failure> {
        let mistake = |text: &dyn Display| Failure::mistake(format!("--space: {text}"));
        let (mut only, mut combinations) = (Vec::new(), vec![Vec::new()]);
        for text in space {
            let Some((key, words)) = text.split_once('=').filter(|(_, words)| !words.is_empty()) else {
                return Err(mistake(&OnlyError::Form(text.clone())));
            };
            if Only::is_decided(key.trim()) {
                only.push(Only::parse(text).map_err(|error| mistake(&error))?);
                continue;
            }
            let sets: Vec<String> =
                words.split(',').map(|word| format!("{}={}", key.trim(), word.trim())).collect();
            let longer = |before: &Vec<String>| {
                let before = before.clone();
                sets.iter().map(move |set| [&before[..], from_ref(set)].concat()).collect::<Vec<_>>()
            };
            combinations = combinations.iter().flat_map(longer).collect();
        }
        if combinations.len() > MAX_VARIANTS {
            let count = combinations.len();
            return Err(mistake(&format!("{count} combinations are too many (at most {MAX_VARIANTS})")));
        }
        let with_codes = space.iter().any(|text| text.starts_with("sharding.quantize_"));
        let mut found = Candidates {
            variants: Vec::new(),
            strategies: Vec::new(),
            all: Vec::new(),
            first: None,
            task: String::new(),
            varying: Vec::new(),
        };
        let mut picks = Vec::new();
        for sets in combinations {
            picks.extend(found.add_variant(config, sets, &only, with_codes, memory)?);
        }
        // The planner's first choice is the pick of the variant whose pick is the fastest for each token.
        let speed = |&index: &usize| {
            let candidate = &found.all[index];
            candidate.predicted.step_s.map_or(f64::INFINITY, |seconds| seconds / candidate.tokens as f64)
        };
        found.first = picks.into_iter().min_by(|a, b| speed(a).total_cmp(&speed(b)));
        found.task = config.task(executor)?;
        let mut keys: Vec<&String> =
            found.all.iter().flat_map(|candidate| candidate.settings.keys()).collect();
        keys.sort();
        keys.dedup();
        let values = |key: &&String| {
            let value = |candidate: &TrialCandidate| candidate.settings.get(*key).cloned();
            found.all.iter().map(value).collect::<BTreeSet<_>>().len()
        };
        found.varying = keys.into_iter().filter(|key| values(key) > 1).cloned().collect();
        Ok(found)
    }

    /// Adds the candidates of a variant. Returns the index of its pick.
    fn add_variant(
        &mut self,
        config: &ConfigArguments,
        sets: Vec<String>,
        only: &[Only],
        with_codes: bool,
        at_most: Option<u64>,
    ) -> Result<Option<usize>, Failure> {
        let source = config.read()?.sets(&sets);
        let (base, ranks) = source.search_base()?;
        let allows_codes = with_codes || base.sharding.quantized.iter().next().is_some();
        let found = strategies_of(&base, ranks, only)?;
        let is_wanted = |Found { strategy, figures }: &Found| {
            let has_codes = strategy.sharding.quantized.iter().next().is_some();
            let is_small = at_most.zip(figures.reserved_bytes).is_none_or(|(most, bytes)| bytes <= most);
            (allows_codes || !has_codes) && is_small
        };
        let limit = limit(&base);
        let variant = self.variants.len();
        let before = self.all.len();
        for Found { strategy, figures } in found.all.into_iter().filter(is_wanted) {
            let mut settings = values(&strategy);
            let other = sets.iter().filter_map(|set| set.split_once('='));
            settings.extend(other.map(|(key, value)| (key.to_owned(), value.to_owned())));
            let plan = base.with_strategy(&strategy)?;
            let most = limit.map(|limit| match limit {
                Limit::PerRank(bytes) => bytes,
                Limit::Shared(bytes) => bytes / plan.mesh.ranks() as u64,
            });
            let most = most.into_iter().chain(at_most).min();
            let memory = most.zip(figures.reserved_bytes).map(|(most, bytes)| bytes as f64 / most as f64);
            self.strategies.push((variant, strategy));
            self.all.push(TrialCandidate {
                settings,
                predicted: figures,
                memory,
                ranks,
                tokens: plan.tokens_per_step() as u64,
            });
        }
        let pick = found.pick.and_then(|pick| {
            let at = self.strategies[before..].iter().position(|(_, strategy)| *strategy == pick);
            let seconds = |at: &usize| self.all[*at].predicted.step_s.unwrap_or(f64::INFINITY);
            let fastest = || (before..self.all.len()).min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
            at.map(|at| before + at).or_else(fastest)
        });
        self.variants.push(Variant { given: config.given()?.sets(&sets), sets, base });
        Ok(pick)
    }

    /// Takes the trials that are none of these candidates out of a file of trials of the same task.
    pub fn outside(&self, journal: &mut Journal) -> Vec<Record> {
        let known: HashSet<&Values> = self.all.iter().map(|candidate| &candidate.settings).collect();
        journal.take(|record| record.task == self.task && !known.contains(&record.settings))
    }

    /// The index of the candidate with these settings.
    pub fn index_of(&self, settings: &Values) -> Option<usize> {
        self.all.iter().position(|candidate| candidate.settings == *settings)
    }

    /// The plan of a candidate.
    pub fn plan(&self, index: usize) -> Plan {
        let (variant, strategy) = &self.strategies[index];
        self.variants[*variant].base.with_strategy(strategy).expect("strategies are allowed")
    }

    /// The configuration of a candidate: the user's settings, those of its variant, and its strategy.
    pub fn config(&self, index: usize) -> Result<String, Failure> {
        let Variant { given, .. } = &self.variants[self.strategies[index].0];
        Ok(given.with_strategy_of(&self.plan(index), "kintsugi tune")?)
    }

    /// The settings of a trial in short, as `tp 2, pp 1, dp 2, micro 4, ZeRO-3`: the mesh, and every setting that is not the default.
    pub fn describe(&self, settings: &Values) -> String {
        let value = |key: &str| settings.get(key).map_or("", String::as_str);
        let mut words: Vec<String> = ["parallel.tp", "parallel.pp", "parallel.dp", "batch.micro"]
            .map(|key| format!("{} {}", short(key), value(key)))
            .into();
        if value("parallel.pp") != "1" {
            words.push(value("parallel.schedule").to_owned());
        }
        if value("sharding.zero") != "0" {
            let levels = ["sharding.weights", "sharding.gradients", "sharding.states"].map(value);
            let levels: Vec<&str> = levels.into_iter().filter(|level| *level != "none").collect();
            let zero = format!("ZeRO-{}", value("sharding.zero"));
            let is_whole = levels.iter().all(|level| *level == "cluster");
            words.push(if is_whole { zero } else { format!("{zero} over {}", levels.join("/")) });
            for (what, when) in
                [("sharding.weights", "sharding.gather"), ("sharding.gradients", "sharding.reduce")]
            {
                if value(what) != "none" {
                    words.push(format!("{} {}", short(when), value(when)));
                }
            }
        }
        let told = |key: &str| ALWAYS_TOLD.contains(&key) || key.starts_with("sharding.");
        let plain = |value: &str| ["none", "false", "even"].contains(&value);
        let others = self.varying.iter().filter(|key| !told(key) && !plain(value(key)));
        words.extend(others.map(|key| match (key.as_str(), value(key)) {
            ("parallel.virtual_stages", "1") => String::new(),
            ("parallel.sequence_parallel", _) => "sequence parallel".to_owned(),
            (key, value) => format!("{} {value}", short(key)),
        }));
        words.retain(|word| !word.is_empty());
        words.join(", ")
    }

    /// The configurations of all variants but the first, as sets.
    pub fn variants(&self) -> usize {
        self.variants.iter().filter(|variant| !variant.sets.is_empty()).count()
    }
}

/// A strategy that fits, and what is predicted for it.
struct Found {
    strategy: Strategy,
    figures: StepFigures,
}

/// The strategies of a variant, and the planner's pick.
struct FoundStrategies {
    all: Vec<Found>,
    pick: Option<Strategy>,
}

fn strategies_of(base: &Plan, ranks: usize, only: &[Only]) -> Result<FoundStrategies, Failure> {
    let supported = supported(base)?;
    if DeviceModel::new(&base.cluster.device, &base.framework).is_none() {
        let all = strategies(base, ranks, only, &supported, MAX_UNTIMED);
        let all = strategies_that_fit(base, planned_device(base, ranks), &all, limit(base));
        let untimed = |(strategy, peak): (Strategy, u64)| Found {
            strategy,
            figures: StepFigures { reserved_bytes: Some(peak), ..StepFigures::default() },
        };
        return Ok(FoundStrategies { all: all.into_iter().map(untimed).collect(), pick: None });
    }
    let progress = Progress::new("enumerating", 0);
    let settings = Settings { only, every: true, ..search_settings(base, ranks, &supported) };
    let found = search(&settings, &|phase, done, _| {
        begin_phase(&progress, phase);
        progress.add(done as u64);
    });
    let found = found.expect("the device has a model");
    if found.counts.bounded > 0 {
        let count = found.counts.enumerated;
        return Err(Failure::mistake(format!(
            "{count} strategies are too many for one tuning; restrict them with --space, as in --space parallel.tp=1,2"
        )));
    }
    let timed = |candidate: Candidate| Found {
        strategy: candidate.strategy,
        figures: StepFigures {
            step_s: Some(candidate.timing.step_s),
            energy_j: candidate.consumption.map(|used| used.joules),
            reserved_bytes: Some(candidate.peak),
        },
    };
    let pick = found.best.first().map(|candidate| candidate.strategy);
    Ok(FoundStrategies { all: found.timed.into_iter().map(timed).collect(), pick })
}

impl ConfigArguments {
    /// What is tuned, in a line that is the same for all strategies: the model, the batch, the machine, how trials run, and a hash of
    /// all other settings that decide how long a step takes.
    fn task(&self, executor: &str) -> Result<String, Failure> {
        let (base, ranks) = self.read()?.search_base()?;
        let (_, model) = describe::model(&base);
        let batch = &base.batch;
        Ok(format!(
            "{model}; {} × {} tokens a step in {} on {ranks} ranks of {}; {executor}; settings {:016x}",
            batch.global,
            batch.sequence,
            describe::word(&base.precision.compute),
            base.cluster.name,
            xxh3_64(timed_settings(&base).to_string().as_bytes()),
        ))
    }
}

/// The settings that decide how long a step takes, without those of a strategy, which every trial names.
fn timed_settings(base: &Plan) -> toml::Table {
    let mut table = base.to_table();
    let run = table.get("run").and_then(toml::Value::as_table).cloned().unwrap_or_default();
    let cluster = table.get("cluster").and_then(toml::Value::as_table).cloned().unwrap_or_default();
    // The rest of these tables says where files are, how long a run is, and what the planner believes.
    let of = |table: &toml::Table, keys: &[&str]| {
        let kept = table.iter().filter(|(key, _)| keys.contains(&key.as_str()));
        toml::Value::Table(kept.map(|(key, value)| (key.clone(), value.clone())).collect())
    };
    table.insert("run".to_owned(), of(&run, &["device", "transport", "deterministic", "graph"]));
    table.insert("cluster".to_owned(), of(&cluster, &["nodes", "per_node", "emulated"]));
    for other in ["data", "framework"] {
        table.remove(other);
    }
    table
}
