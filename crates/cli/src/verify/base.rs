//! The configuration that all layouts share, and the one-rank run that they are compared with.

use kintsugi_comm::Connection;
use kintsugi_engine::verify::Layout;
use kintsugi_engine::{MemoryChoice, device};
use kintsugi_plan::config::{ConfigError, ConfigSource};
use kintsugi_plan::{
    AttentionKind, DeviceKind, HeadRows, MemoryOptions, Mesh, Pipeline, Plan, Recompute, ScheduleKind,
    Sharding,
};
use kintsugi_simulate::{Coverage, predict};
use kintsugi_spec::units;

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::host::{self, Bound};

/// Defaults without a CONFIG; `--set` overrides them.
const QUICK: [&str; 3] = ["batch.micro=1", "batch.global=8", "run.eval_every=0"];

/// The tables that a layout replaces. Nothing of them may remain from the given configuration.
const LAYOUT_TABLES: [&str; 3] = ["parallel", "sharding", "memory"];

/// The configuration without its layout.
pub struct Base {
    source: ConfigSource,
    /// Whether the model is the demo's.
    pub has_demo_model: bool,
    /// The device of all layouts.
    pub device: DeviceKind,
}

impl Base {
    /// Reads the configuration, with these `gpus` as the device if the ranks communicate by NCCL, and the CPU if none is given. It is
    /// resolved once without a layout, so that an error in it is not taken for a reason to skip a layout.
    pub fn new(arguments: &ConfigArguments, steps: u64, gpus: Option<DeviceKind>) -> Result<Self, Failure> {
        let steps = format!("run.steps={steps}");
        let mut source = arguments.read()?;
        if let Some(kind) = gpus {
            source = source.set(format!("run.device={}", kind.name()));
        } else if source.is_device_auto()? {
            source = source.set("run.device=cpu");
        }
        let mut plan = source.clone().set(&steps).plan()?;
        let quick = source.clone().sets_below(&QUICK);
        if !arguments.has_file()
            && let Ok(quick_plan) = quick.plan()
        {
            (source, plan) = (quick, quick_plan);
        }
        // Otherwise the default batch would grow with dp.
        let global = format!("batch.global={}", plan.batch.global);
        Ok(Base {
            has_demo_model: source.has_demo_model()?,
            device: plan.run.device,
            // Not every layout has several nodes, and no node is lost.
            source: source.without(&LAYOUT_TABLES).sets([&*steps, &*global, "run.replicate_every=0"]),
        })
    }

    /// The plan of a layout.
    pub fn plan(&self, layout: &Layout) -> Result<Plan, ConfigError> {
        self.source.clone().sets(&layout.model).sets(&layout.settings).plan()
    }
}

/// The same training on one rank: nothing is split, sharded or recomputed.
pub fn on_one_rank(plan: &Plan) -> Plan {
    Plan {
        mesh: Mesh::ONE,
        pipeline: Pipeline {
            schedule: ScheduleKind::OneForwardOneBackward,
            virtual_stages: 1,
            layers: vec![plan.model.layers],
            prefetch: 1,
            overlap: true,
        },
        sequence_parallel: false,
        overlap_tp: false,
        sharding: Sharding::ONE_REPLICA,
        memory: MemoryOptions {
            recompute: Recompute::None,
            attention: AttentionKind::Flash,
            head_rows: HeadRows::All,
        },
        ..plan.clone()
    }
}

/// How a layout's ranks allocate memory: on the CPU each tensor separately, so that the allocator detects errors; on a
/// GPU as planned.
pub fn memory(plan: &Plan, connection: Connection) -> MemoryChoice {
    match plan.run.device {
        DeviceKind::Cpu => MemoryChoice::Heap,
        DeviceKind::Cuda | DeviceKind::Hip => {
            let stages = predict(plan, device(plan, connection), Coverage::WholeStep).stages;
            MemoryChoice::Slab(stages.iter().map(|memory| memory.reserved).collect())
        }
    }
}

/// Refuses a check that does not fit on this machine, before anything runs. The largest layout decides.
pub fn check_fit<'a>(layouts: impl Iterator<Item = (&'a str, &'a Plan)>) -> Result<(), Failure> {
    // Ranks on a GPU use the GPU's memory, and planned memory that does not fit is refused there.
    let held = |plan: &Plan| if plan.run.device == DeviceKind::Cpu { ranks_need(plan) } else { 0 };
    let needs = layouts.map(|(name, plan)| (name, plan.mesh.ranks(), held(plan), recordings_need(plan)));
    let largest = needs.max_by_key(|(_, _, ranks, recordings)| ranks + recordings);
    match (largest, host::memory()) {
        (Some((name, ranks, held, recorded)), Some(Bound { bytes, holder }))
            if held + recorded > bytes.into() =>
        {
            Err(Failure::mistake(format!(
                "the layout \"{name}\" needs {} for its {ranks} ranks and {} for the comparison, but only {} are {holder}",
                in_units(held),
                in_units(recorded),
                units::bytes(bytes),
            )))
        }
        _ => Ok(()),
    }
}

/// Peak bytes of all ranks. 128 bits, because plans for whole clusters may be given.
fn ranks_need(plan: &Plan) -> u128 {
    let stages = predict(plan, device(plan, Connection::Threads), Coverage::ShortStep).stages;
    let one_of_each: u128 = stages.iter().map(|memory| u128::from(memory.total)).sum();
    one_of_each * plan.mesh.ranks_per_stage() as u128
}

/// Bytes of weights and gradients on the host, in f32. The one-rank run has both and bounds on weights; before that it has
/// gradients twice, and five numbers for each bound. A layout has both, and before they are joined, the parts of every rank.
fn recordings_need(plan: &Plan) -> u128 {
    let replicas = |shards: usize| plan.mesh.replicas() / shards;
    let one_rank = 3;
    let copies = one_rank + 2 + replicas(plan.sharding.weights) + replicas(plan.sharding.gradients);
    u128::from(plan.parameter_count()) * 4 * copies.max(3 + 5) as u128
}

fn in_units(bytes: u128) -> String {
    units::bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
}
