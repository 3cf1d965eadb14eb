//! A plan and its prediction as text and tables, shared by all commands.

use std::collections::BTreeMap;

use kintsugi_comm::{Connection, MpiProcess, NcclProcess, nccl};
use kintsugi_plan::{Plan, Products};
use kintsugi_rank::{RankMemory, ReplicationMetrics};
use kintsugi_spec::{Level, units};
use serde::Serialize;

use crate::table::Table;

/// Traffic in the form of [`kintsugi_rank::StepMetrics`].
pub type CommBytes = BTreeMap<&'static str, BTreeMap<&'static str, u64>>;

/// A line of a description: a label, and what is said under it.
pub type Fact = (String, String);

/// A line of a description.
pub fn fact(label: &str, text: impl Into<String>) -> Fact {
    (label.to_owned(), text.into())
}

/// The lines as text.
pub fn lines(facts: &[Fact]) -> String {
    let line = |(label, text): &Fact| format!("{label:<8} {text}\n");
    facts.iter().map(line).collect()
}

/// The model and the layout.
pub fn plan(plan: &Plan) -> Vec<Fact> {
    std::iter::once(model(plan)).chain(layout(plan)).chain(placed(plan)).collect()
}

/// What copying the states costs, if they are copied.
pub fn copies(plan: &Plan, metrics: Option<&ReplicationMetrics>) -> Option<Fact> {
    let ReplicationMetrics { comm_bytes, node_bytes, seconds } = metrics?;
    let bytes: u64 = comm_bytes.values().flat_map(BTreeMap::values).sum();
    let time = seconds.map_or_else(String::new, |seconds| format!(" in {}", units::seconds(seconds)));
    let every = counted(plan.run.replicate_every as usize, "step", "steps");
    let text = format!(
        "every {every}: {} of states to neighbour nodes{time}, {} in the memory of a node",
        units::bytes(bytes),
        units::bytes(*node_bytes)
    );
    Some(fact("copies", text))
}

/// Where the ranks of a plan are, if its nodes were chosen.
pub fn placed(plan: &Plan) -> Vec<Fact> {
    let (Some(placement), Some(per_node)) = (&plan.cluster.placement, plan.cluster.topology.per_node) else {
        return Vec::new();
    };
    let lines = kintsugi_placement::describe(placement, plan.mesh.ranks(), per_node);
    let label = |number| if number == 0 { "placed" } else { "" };
    lines.into_iter().enumerate().map(|(number, line)| fact(label(number), line)).collect()
}

/// The model: `demo (gpt), 809 k parameters: 4 layers of width 128, …`.
pub fn model(plan: &Plan) -> Fact {
    let model = &plan.model;
    let kv_heads = match model.kv_heads {
        same if same == model.heads => String::new(),
        fewer => format!(" ({fewer} for keys and values)"),
    };
    let trained = match plan.trained_parameter_count() {
        all if all == plan.parameter_count() => String::new(),
        trained => format!(
            " ({} trained, {} frozen)",
            units::count(trained as f64),
            units::count((plan.parameter_count() - trained) as f64)
        ),
    };
    let text = format!(
        "{} ({}), {} parameters{trained}: {} of width {}, {}{kv_heads}, ffn {}, vocabulary {}",
        model.name,
        word(&model.family),
        units::count(plan.parameter_count() as f64),
        counted(model.layers, "layer", "layers"),
        model.hidden,
        counted(model.heads, "head", "heads"),
        model.ffn,
        model.vocab,
    );
    fact("model", text)
}

/// The layout: ranks, schedule, sharding, and how a step is divided.
fn layout(plan: &Plan) -> [Fact; 2] {
    let mesh = plan.mesh;
    let mut parts = vec![mesh.to_string()];
    if mesh.pp() > 1 {
        parts.push(word(&plan.pipeline.schedule));
    }
    parts.push(plan.sharding.name());
    if plan.sequence_parallel {
        parts.push("sequence parallel".to_owned());
    }
    if mesh.cp() > 1 {
        parts.push(format!("attention by {}", word(&plan.cp_attention)));
    }
    if plan.overlap_tp && mesh.tp() > 1 {
        parts.push("tp overlap".to_owned());
    }
    parts.push(format!("recompute {}", word(&plan.memory.recompute)));
    parts.push(word(&plan.precision.compute));
    if plan.precision.products == Products::Fp8 {
        parts.push("products in fp8".to_owned());
    }
    let batch = plan.batch;
    let ranks = counted(mesh.ranks(), "rank", "ranks");
    let layout = format!("{ranks} ({}): {}", plan.cluster.name, parts.join(", "));
    let step = format!(
        "{}: {} × {} × {} × {}",
        counted(plan.tokens_per_step(), "token", "tokens"),
        counted(mesh.dp(), "replica", "replicas"),
        counted(plan.micro_batches(), "micro-batch", "micro-batches"),
        counted(batch.micro, "sample", "samples"),
        counted(batch.sequence, "token", "tokens"),
    );
    [fact("layout", layout), fact("step", step)]
}

/// A number with its noun in singular or plural.
fn counted(number: usize, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

/// Where the ranks run, if they are processes.
pub fn processes(connection: Connection) -> Option<Fact> {
    let (size, threads, here, library) = match connection {
        Connection::Threads => return None,
        Connection::Mpi(MpiProcess { mpi, local_size, threads, .. }) => {
            (mpi.size, threads, local_size, format!("{} ({})", mpi.version, mpi.library))
        }
        Connection::Nccl(NcclProcess { rendezvous, local_size, threads, shares_gpus, .. }) => {
            let library = nccl::find().map(|(version, name)| format!("NCCL {version} ({name})"));
            let shared = if shares_gpus { "; they share GPUs (NCCL_MULTI_RANK_GPU_ENABLE=1)" } else { "" };
            (rendezvous.size, threads, local_size, library.unwrap_or_default() + shared)
        }
    };
    let threads = counted(threads, "thread", "threads");
    Some(fact("ranks", format!("{size} processes of {threads}, {here} on this node, by {library}")))
}

/// The largest value over the ranks of each category, of the total, and of the reserved bytes.
pub fn worst(ranks: &[RankMemory]) -> Vec<(&'static str, u64)> {
    let largest = |of: fn(&RankMemory) -> u64| ranks.iter().map(of).max().unwrap_or(0);
    let names = RankMemory::default().categories();
    let categories = names.iter().enumerate().map(|(i, &(name, _))| {
        let bytes = ranks.iter().map(|rank| rank.categories()[i].1).max();
        (name, bytes.unwrap_or(0))
    });
    let sums = [("total", largest(|rank| rank.total)), ("reserved", largest(|rank| rank.reserved))];
    categories.chain(sums).collect()
}

/// The largest value over the ranks of the bytes that the transport itself holds.
pub fn worst_transport(ranks: &[RankMemory]) -> u64 {
    ranks.iter().map(|rank| rank.transport).max().unwrap_or(0)
}

/// The traffic of a step as a table, innermost level first.
pub fn traffic_table(comm: &CommBytes) -> String {
    if comm.is_empty() {
        return "  traffic of a step: none\n".to_owned();
    }
    let mut table = Table::new(["traffic of a step, over all ranks", ""]);
    for (level, operations) in Level::ALL.iter().filter_map(|level| comm.get_key_value(level.name())) {
        for (operation, &bytes) in operations {
            table.row([format!("{level} {operation}"), units::bytes(bytes)]);
        }
    }
    table.to_string()
}

/// The value as a configuration writes it.
pub fn word(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).expect("words are plain values");
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
