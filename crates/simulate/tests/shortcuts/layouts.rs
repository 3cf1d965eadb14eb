//! Random layouts of small models.

use kintsugi_plan::config::{ConfigSource, LayerSplit, ShardingChoice, Strategy};
use kintsugi_plan::{Axis, Codes, Integer, Mesh, Plan, Quantized, Recompute, ScheduleKind, When};
use kintsugi_spec::Level;
use proptest::prelude::any;
use proptest::sample::select;
use proptest::strategy::Strategy as Generator;

/// Sizes without common structure.
const MODEL: &str = "[model]\nhidden = 24\nffn = 88\nheads = 4\nvocab = 211\n[batch]\nsequence = 10\n";

/// Plans with the settings that no strategy changes.
pub fn bases() -> impl Generator<Value = Plan> {
    let family = select(vec![
        "family = \"gpt\"",
        "family = \"gpt\"\ntied = false",
        "family = \"neox\"",
        "family = \"llama\"\nkv_heads = 2\nhead_dim = 6",
    ]);
    let overlap = (any::<bool>(), any::<bool>());
    let kept = (select(vec!["flash", "plain"]), select(vec!["\"all\"", "7"]));
    let options = (kept, any::<bool>(), overlap, 0..=3_usize, 0..=1_usize);
    let types = (select(vec!["fp32", "bf16"]), select(vec!["fp32", "compute"]), select(vec!["0.0", "0.3"]));
    let emulated = select(vec![
        "",
        "[cluster.emulated.cluster]\nbandwidth = 2e9\nlatency = 3e-4\n",
        "nodes_per_pod = 2\nlinks.pod.bandwidth = 30e9\n",
        "nodes_per_pod = 4\nemulated.pod.bandwidth = 4e9\nemulated.cluster.bandwidth = 2e9\n",
    ]);
    (family, 2..=16_usize, emulated, options, types).prop_map(
        |(
            family,
            layers,
            emulated,
            ((attention, head_rows), masked, (overlap, overlap_tp), prefetch, eval_every),
            (compute, gradients, interference),
        )| {
            let text = format!(
                "{MODEL}[memory]\nattention = \"{attention}\"\nhead_rows = {head_rows}\n\
                 [parallel]\noverlap = {overlap}\noverlap_tp = {overlap_tp}\nprefetch = {prefetch}\n[run]\neval_every = {eval_every}\n\
                 [precision]\ncompute = \"{compute}\"\ngradients = \"{gradients}\"\n\
                 [cluster]\npreset = \"frontier\"\n{emulated}[framework]\ninterference = {interference}\n\
                 [data]\nsource = \"corpus\"\nmask_documents = {masked}\n"
            );
            let text = text.replacen("[model]", &format!("[model]\nlayers = {layers}\n{family}"), 1);
            ConfigSource::text(&text).plan().unwrap_or_else(|error| panic!("{error}\n{text}"))
        },
    )
}

/// Codes of one kind of transfer or of several, with one block for all; in half of all cases none.
fn codes() -> impl Generator<Value = Quantized> {
    let integer = || select(vec![None, Some(Integer::Int8), Some(Integer::Int4)]);
    let coded = (any::<[bool; 2]>(), integer(), select(vec![32, 256]));
    (any::<bool>(), coded).prop_map(|(quantizes, ([weights, refresh], gradients, block))| {
        let codes = |integer| Codes { integer, block };
        let eight = |wanted: bool| wanted.then_some(codes(Integer::Int8));
        let gradients = gradients.map(codes);
        let quantized = Quantized { weights: eight(weights), refresh: eight(refresh), gradients };
        if quantizes { quantized } else { Quantized::NONE }
    })
}

/// A strategy and the number of micro-batches it runs.
pub fn strategies() -> impl Generator<Value = (Strategy, usize)> {
    let meshes = (select(vec![1, 2, 4]), 1..=8_usize, select(vec![1, 2, 3, 4, 8, 16]));
    // Numbers of levels, sorted: weights, gradients and states. One in two are over all replicas.
    let levels = [0..=4_usize, 0..=4, 0..=4, 0..=4];
    let placement = (any::<bool>(), 0..=3_usize, levels, codes());
    let schedule = select(vec![
        ScheduleKind::GPipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::Interleaved,
        ScheduleKind::ZeroBubble,
    ]);
    let when = || select(vec![When::MicroBatch, When::Step]);
    let recompute = select(vec![Recompute::None, Recompute::Selective, Recompute::Full]);
    let split =
        select(vec![LayerSplit::Even, LayerSplit::LighterEnds, LayerSplit::Last(1), LayerSplit::Last(2)]);
    (
        meshes,
        schedule,
        (2..=3_usize, split),
        (placement, when(), when()),
        recompute,
        any::<bool>(),
        1..=2_usize,
        1..=24_usize,
    )
        .prop_map(
            |(
                (tp, pp, dp),
                schedule,
                (chunks, split),
                ((by_level, zero, mut levels, quantized), gather, reduce),
                recompute,
                sequence,
                micro,
                batches,
            )| {
                let secondary = levels[3];
                levels[..3].sort_unstable();
                let over = |level: usize| level.checked_sub(1).map(|level| Level::ALL[level]);
                let level = |from: usize| {
                    if by_level { over(levels[3 - from]) } else { (zero >= from).then_some(Level::Cluster) }
                };
                // Codes of what is not sharded are refused.
                let quantized = Quantized {
                    weights: quantized.weights.filter(|_| level(1).is_some()),
                    refresh: quantized.refresh.filter(|_| level(1).is_some()),
                    gradients: quantized.gradients.filter(|_| level(1).is_some()),
                };
                let interleaved = schedule == ScheduleKind::Interleaved;
                let sharding = ShardingChoice {
                    weights: level(3),
                    gradients: level(2),
                    states: level(1),
                    secondary: over(secondary).filter(|_| by_level && level(3).is_some()),
                    gather,
                    reduce: if level(2).is_some() { reduce } else { When::Step },
                    quantized,
                };
                let strategy = Strategy {
                    mesh: Mesh::ONE.with(Axis::Pipeline, pp).with(Axis::Data, dp).with(Axis::Tensor, tp),
                    micro,
                    schedule,
                    virtual_stages: if interleaved { chunks } else { 1 },
                    split: if pp > 1 { split } else { LayerSplit::Even },
                    sequence_parallel: sequence,
                    sharding,
                    recompute,
                };
                (strategy, if interleaved { batches.next_multiple_of(pp) } else { batches })
            },
        )
}

/// The base with a strategy, if that is a legal plan.
pub fn plan(base: &Plan, (strategy, micro_batches): &(Strategy, usize)) -> Option<Plan> {
    let mut base = base.clone();
    base.batch.global = micro_batches * strategy.micro * strategy.mesh.dp();
    base.with_strategy(strategy).ok()
}
