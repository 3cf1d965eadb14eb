//! Writes a configuration with the strategy that a search chose: the user's settings, and only what a strategy decides.

use toml::{Table, Value};

use super::error::ConfigError;
use super::keys::{RawParallel, RawSharding};
use super::layers::{self, Layers, overlay};
use super::source::ConfigSource;
use super::strategy::DECIDED;
use super::{sharding, write};
use crate::{Pipeline, Plan, ScheduleKind};

/// The order of the tables.
const TABLES: [&str; 11] = [
    "model",
    "batch",
    "parallel",
    "sharding",
    "precision",
    "memory",
    "optimizer",
    "data",
    "cluster",
    "framework",
    "run",
];

impl ConfigSource {
    /// The TOML text of this configuration with the strategy of `plan`, a plan for the same model, batch and cluster, which
    /// the command `chooser` chose. Presets stay names, and defaults are left out: the text resolves to `plan` on every machine.
    pub fn with_strategy_of(&self, plan: &Plan, chooser: &str) -> Result<String, ConfigError> {
        let presets = Layers::read_without_profile(self)?.presets;
        let mut table = layers::written(self)?;
        let parallel = inner(&mut table, "parallel");
        parallel.retain(|key, _| !DECIDED.contains(&key));
        parallel.extend(of_parallel(plan)?);
        *inner(&mut table, "sharding") = of_sharding(plan, &presets.sharding);
        inner(&mut table, "batch").insert("micro".to_owned(), Value::Integer(plan.batch.micro as i64));
        let recompute = Value::try_from(plan.memory.recompute).expect("a word");
        inner(&mut table, "memory").insert("recompute".to_owned(), recompute);
        let mut text = format!(
            "# The strategy is the choice of {chooser}: batch.micro, [parallel], [sharding] and memory.recompute.\n"
        );
        for name in TABLES {
            if let Some(Value::Table(values)) = table.remove(name).filter(|value| *value != empty()) {
                let one = Table::from_iter([(name.to_owned(), Value::Table(values))]);
                text.push('\n');
                text += &toml::to_string(&one).expect("it was parsed from text");
            }
        }
        Ok(text)
    }
}

/// The layout. Keys whose default is the same are left out, except those that everybody looks for.
fn of_parallel(plan: &Plan) -> Result<Table, ConfigError> {
    let all = write::parallel(plan);
    let even = RawParallel { layers_per_stage: None, ..all.clone() };
    let even = Pipeline::resolve(&even, plan.mesh, plan.model.layers, plan.batch)?;
    let chosen = RawParallel {
        layers_per_stage: all.layers_per_stage.filter(|layers| *layers != even.layers),
        virtual_stages: all.virtual_stages.filter(|_| plan.pipeline.schedule == ScheduleKind::Interleaved),
        sequence_parallel: all.sequence_parallel.filter(|_| plan.mesh.tp() > 1),
        ..all
    };
    let mut table = Table::try_from(chosen).expect("a table of numbers and words");
    table.retain(|key, _| DECIDED.contains(&key));
    Ok(table)
}

/// The fewest keys that give the plan's sharding over those of the presets.
fn of_sharding(plan: &Plan, presets: &RawSharding) -> Table {
    let table = |raw: &RawSharding| Table::try_from(raw).expect("a table of numbers and words");
    let below = table(presets);
    let is_enough = |keys: &Table| {
        let mut merged = below.clone();
        overlay(&mut merged, keys.clone());
        let raw: RawSharding = merged.try_into().expect("its keys are those of its table");
        sharding::resolve(&raw, plan.mesh, &plan.cluster, &plan.framework).as_ref() == Ok(&plan.sharding)
    };
    let all = table(&write::sharding(plan));
    let with_stage = |stage: i64| {
        let mut keys = all.clone();
        keys.insert("zero".to_owned(), Value::Integer(stage));
        for key in all.keys() {
            let value = keys.remove(key);
            if let (false, Some(value)) = (is_enough(&keys), value) {
                keys.insert(key.clone(), value);
            }
        }
        keys
    };
    (0..=3).map(with_stage).min_by_key(Table::len).expect("there are stages")
}

/// A table of the configuration, which may be missing.
fn inner<'a>(table: &'a mut Table, name: &str) -> &'a mut Table {
    match table.entry(name).or_insert_with(empty) {
        Value::Table(inner) => inner,
        _ => unreachable!("the configuration has been read as tables"),
    }
}

fn empty() -> Value {
    Value::Table(Table::new())
}

#[cfg(test)]
mod tests {
    use kintsugi_spec::Level;

    use super::*;
    use crate::config::{LayerSplit, ShardingChoice, Strategy};
    use crate::{Axis, Mesh, Quantized, Recompute, When};

    const FILE: &str = "[model]\npreset = \"llama3-8b\"\n[batch]\nglobal = 64\n[parallel]\ntp = 8\nprefetch = 2\n\
                        [sharding]\nzero = 2\nreduce = \"step\"\n[memory]\nattention = \"plain\"\n\
                        [cluster]\npreset = \"h100\"\nnodes = 2\n[run]\nout = \"mine\"\n";

    fn strategies() -> Vec<Strategy> {
        let plain = Strategy {
            mesh: Mesh::ONE.with(Axis::Data, 16),
            micro: 2,
            schedule: ScheduleKind::OneForwardOneBackward,
            virtual_stages: 1,
            split: LayerSplit::Even,
            sequence_parallel: false,
            sharding: ShardingChoice::NONE,
            recompute: Recompute::Full,
        };
        let all = ShardingChoice {
            weights: Some(Level::Cluster),
            gradients: Some(Level::Cluster),
            states: Some(Level::Cluster),
            secondary: None,
            gather: When::Step,
            reduce: When::MicroBatch,
            quantized: Quantized::NONE,
        };
        let hybrid = ShardingChoice { weights: Some(Level::Node), gather: When::MicroBatch, ..all };
        let all_axes = Mesh::ONE.with(Axis::Pipeline, 4).with(Axis::Data, 2).with(Axis::Tensor, 2);
        let interleaved = Strategy {
            mesh: all_axes,
            schedule: ScheduleKind::Interleaved,
            virtual_stages: 2,
            sequence_parallel: true,
            ..plain
        };
        vec![
            plain,
            Strategy { sharding: all, ..plain },
            Strategy { sharding: hybrid, ..plain },
            interleaved,
            Strategy { mesh: all_axes, split: LayerSplit::Last(5), ..plain },
        ]
    }

    #[test]
    fn the_text_has_the_users_keys_and_the_strategy_and_resolves_to_it() {
        for more in [&[][..], &["framework.preset=deepspeed-zero3"], &["framework.preset=nanotron"]] {
            let source = ConfigSource::text(FILE).sets(more);
            let (base, _) = source.search_base().unwrap();
            for strategy in strategies() {
                let plan = base.with_strategy(&strategy).unwrap();
                let text = source.with_strategy_of(&plan, "a test").unwrap();
                assert_eq!(ConfigSource::text(&text).plan().as_ref(), Ok(&plan), "{text}");
                assert!(text.lines().count() <= 36, "{text}");
                assert!(!text.contains("device") && !text.contains("deterministic"), "{text}");
            }
        }
    }

    #[test]
    fn keys_that_a_search_would_lose_are_refused() {
        for key in ["collectives=hierarchical", "secondary_use=backward", "quantize_refresh=int8"] {
            let error = ConfigSource::text(FILE).set(format!("sharding.{key}")).search_base().unwrap_err();
            let name = key.split('=').next().unwrap();
            assert!(error.to_string().contains(&format!("sharding.{name}")), "{error}");
            assert!(error.to_string().contains("a search decides [sharding]"), "{error}");
        }
        let (base, _) =
            ConfigSource::text(FILE).set("sharding.preset=zero++".to_owned()).search_base().unwrap();
        assert!(base.sharding.quantized.weights.is_some() && base.sharding.quantized.gradients.is_some());
    }

    #[test]
    fn a_known_stage_is_one_key() {
        let source = ConfigSource::text(FILE);
        let (base, _) = source.search_base().unwrap();
        let text = source.with_strategy_of(&base.with_strategy(&strategies()[1]).unwrap(), "a test").unwrap();
        assert!(text.contains("\n[sharding]\ngather = \"step\"\nzero = 3\n"), "{text}");
        assert!(
            text.contains(
                "\n[parallel]\ncp = 1\ndp = 16\npp = 1\nprefetch = 2\nschedule = \"1f1b\"\ntp = 1\n"
            ),
            "{text}"
        );
        assert!(text.contains("\n[memory]\nattention = \"plain\"\nrecompute = \"full\"\n"), "{text}");
        assert!(
            text.contains("\n[run]\nout = \"mine\"\n") && text.contains("[model]\npreset = \"llama3-8b\"\n")
        );
    }

    #[test]
    fn nothing_of_the_demo_is_written_once_a_model_is_named() {
        let source = ConfigSource::demo().sets([
            "model.preset=llama3-8b",
            "cluster.preset=h100",
            "cluster.nodes=2",
            "batch.global=64",
        ]);
        let (base, ranks) = source.search_base().unwrap();
        assert_eq!((ranks, base.batch.sequence), (16, 8192));
        let text = source.with_strategy_of(&base.with_strategy(&strategies()[1]).unwrap(), "a test").unwrap();
        assert!(
            !text.contains("[optimizer]") && !text.contains("[data]") && !text.contains("sequence"),
            "{text}"
        );
    }
}
