//! Embedding, layer and head over two tensor-parallel ranks against one: outputs, loss and every gradient.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use kintsugi_comm::threads::ThreadsWorld;
use kintsugi_comm::{Communicator, Solo, ring};
use kintsugi_model::{Context, embedding, head, layer};
use kintsugi_plan::parameters::{ParameterKind, PlacedParameter, TensorSplit, UnitLayout};
use kintsugi_plan::{BackwardPart, Group, Plan, Unit};
use kintsugi_spec::Topology;
use kintsugi_tensor::Buffer;

use crate::numbers::{assert_close, random_tokens, random_weights};
use crate::test_rank::{MODELS, TestRank, UnitBuffers, plan, shape, window_starts};

const TP: usize = 2;
const TOLERANCE: f64 = 1e-12;

/// The results of a pass through the model on one rank.
struct PassResults {
    loss: f64,
    streams: Streams,
    /// The gradient of every unit.
    gradients: BTreeMap<Unit, Vec<f64>>,
}

/// This rank's rows of the residual stream before and after the layer, and of their gradients.
struct Streams {
    x: Vec<f64>,
    y: Vec<f64>,
    dy: Vec<f64>,
    dx: Vec<f64>,
}

/// Forward and backward of the whole model on one rank.
fn pass(plan: &Plan, group: &dyn Communicator, part: BackwardPart) -> PassResults {
    let (rank, shape) = (TestRank::new(), shape(plan, group.rank()));
    let layouts: Vec<UnitLayout> = plan.units().into_iter().map(|unit| plan.layout(unit)).collect();
    let unit = |layout| rank.unit(layout, &random_weights(layout, group.size(), group.rank()));
    let starts = window_starts(&shape).map(|starts| rank.tokens(&starts));
    let starts = starts.as_ref().map(Buffer::view);
    let model = Model {
        rank: &rank,
        ctx: Context { starts, ..rank.context(group, &shape) },
        units: layouts.iter().map(|layout| (layout.unit, unit(layout))).collect(),
        output: if plan.model.tied {
            (Unit::Table, ParameterKind::Table)
        } else {
            (Unit::Head, ParameterKind::Output)
        },
    };
    let [tokens, targets] = [4, 5].map(|seed| random_tokens(plan.rows(), plan.model.vocab, seed));
    let (loss, streams) = model.run(&tokens, &targets, part);
    let gradients = model.units.iter().map(|(&name, unit)| (name, rank.values(unit.gradient()))).collect();
    PassResults { loss, streams, gradients }
}

struct Model<'a> {
    rank: &'a TestRank,
    ctx: Context<'a>,
    units: BTreeMap<Unit, UnitBuffers<'a>>,
    /// The unit and parameter of the output matrix.
    output: (Unit, ParameterKind),
}

impl Model<'_> {
    fn run(&self, tokens: &[u32], targets: &[u32], part: BackwardPart) -> (f64, Streams) {
        let (rank, ctx) = (self.rank, &self.ctx);
        let (tokens, targets) = (rank.tokens(tokens), rank.tokens(targets));
        let (table, positions) = (&self.units[&Unit::Table], self.units.get(&Unit::Positions));
        let layer_unit = &self.units[&Unit::Layer(0)];

        let position_weights = positions.map(UnitBuffers::weights);
        let embedded = embedding::forward(ctx, tokens.view(), &table.weights(), position_weights.as_ref());
        let x = rank.values(embedded.view());
        let (out, saved) = layer::forward(ctx, embedded, &layer_unit.weights());
        let y = rank.values(out.view());

        let (sum, scale) = (rank.buffer(&[0.0]), rank.buffer(&[1024.0]));
        let loss = head::Loss { sum: sum.view(), scale: scale.view() };
        let w = self.head_weights();
        let head_saved = head::forward(ctx, out, targets, &w, loss);
        let (norm, output) = (self.units[&Unit::Head].gradients(), self.head_output());
        let (dout, weight_inputs) = head::backward(ctx, head_saved, &w, loss.scale, &norm, &output, part);
        if let Some(weight_inputs) = weight_inputs {
            head::weight_part(ctx, &weight_inputs, &output);
        }
        let dy = rank.values(dout.view());

        let (w, g) = (layer_unit.weights(), layer_unit.gradients());
        let (dembedded, weight_inputs) = layer::backward(ctx, dout, saved, &w, &g, part);
        if let Some(weight_inputs) = weight_inputs {
            layer::weight_part(ctx, weight_inputs, &g);
        }
        let position_gradients = positions.map(UnitBuffers::gradients);
        let table = table.gradients();
        embedding::backward(ctx, &dembedded, tokens.view(), &table, position_gradients.as_ref());
        (rank.values(sum.view())[0], Streams { x, y, dy, dx: rank.values(dembedded.view()) })
    }

    fn head_weights(&self) -> head::HeadWeights<'_> {
        let (unit, kind) = self.output;
        let output = self.units[&unit].weights().get(kind);
        head::HeadWeights { norm: self.units[&Unit::Head].weights(), output }
    }

    fn head_output(&self) -> head::OutputGradient<'_> {
        let (unit, kind) = self.output;
        head::OutputGradient { gradients: self.units[&unit].gradients(), kind }
    }
}

/// The same pass on every rank of a world of [`TP`].
fn parallel_passes(plan: &Plan, part: BackwardPart) -> Vec<PassResults> {
    // A rank whose peer has panicked would otherwise wait for ever.
    let world = ThreadsWorld::new(Topology::ONE_NODE, TP, Duration::from_secs(60));
    let members: Vec<usize> = (0..TP).collect();
    let (world, members) = (&world, &members);
    thread::scope(|scope| {
        let run = |rank| move || pass(plan, &world.host_group(Group::TENSOR, members, rank), part);
        let threads: Vec<_> = (0..TP).map(|rank| scope.spawn(run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// Compares rows: each rank has a part of each chunk of them, or all have the same.
fn assert_stream(what: &str, parts: &[&[f64]], whole: &[f64], plan: &Plan) {
    if plan.sequence_parallel {
        let chunks = shape(plan, 0).chunks;
        let chunk = |i: usize| parts.iter().map(move |part| &part[ring::chunk(part.len(), chunks, i)]);
        let rows: Vec<f64> = (0..chunks).flat_map(chunk).flatten().copied().collect();
        return assert_close(what, &rows, whole, TOLERANCE);
    }
    for part in parts {
        assert_close(what, part, whole, TOLERANCE);
    }
}

/// Compares a parameter's gradient on all ranks with its gradient on one, without vocabulary padding.
///
/// A parameter that every rank holds whole has the whole gradient on every rank. With sequence parallelism, and if the heads
/// of several ranks share the parameter, each rank has a part, and the parts add up.
fn assert_gradient(
    what: &str,
    parts: &[&[f64]],
    placed: &PlacedParameter,
    whole: &[f64],
    sequence_parallel: bool,
) {
    let parameter = &placed.parameter;
    if parameter.split == TensorSplit::Whole && !sequence_parallel && !parameter.is_shared_by_heads() {
        for part in parts {
            assert_close(what, part, whole, TOLERANCE);
        }
        return;
    }
    let mut sum = vec![0.0; parameter.shape[0] * parameter.shape[1]];
    for (rank, part) in parts.iter().enumerate() {
        for (local, value) in part.iter().enumerate() {
            sum[parameter.global_index(TP, rank, local)] += value;
        }
    }
    let valid = parameter.valid_elements();
    assert_close(what, &sum[..valid], &whole[..valid], TOLERANCE);
    assert!(sum[valid..].iter().all(|&g| g == 0.0), "{what}: padding has no gradient");
}

fn assert_passes(what: &str, plan: &Plan, one: &Plan, part: BackwardPart) {
    let (ranks, expected) = (parallel_passes(plan, part), pass(one, &Solo, part));
    for rank in &ranks {
        assert_close(&format!("{what}: loss"), &[rank.loss], &[expected.loss], TOLERANCE);
    }
    let stream = |name: &str, of: fn(&Streams) -> &Vec<f64>| {
        let parts: Vec<&[f64]> = ranks.iter().map(|rank| of(&rank.streams).as_slice()).collect();
        assert_stream(&format!("{what}: {name}"), &parts, of(&expected.streams), plan);
    };
    stream("x", |s| &s.x);
    stream("y", |s| &s.y);
    stream("dy", |s| &s.dy);
    stream("dx", |s| &s.dx);
    for unit in plan.units() {
        for (placed, whole) in plan.layout(unit).placed.iter().zip(&one.layout(unit).placed) {
            let parts: Vec<&[f64]> =
                ranks.iter().map(|rank| &rank.gradients[&unit][placed.range.clone()]).collect();
            let what = format!("{what}: {}", placed.parameter.name());
            let whole = &expected.gradients[&unit][whole.range.clone()];
            assert_gradient(&what, &parts, placed, whole, plan.sequence_parallel);
        }
    }
}

/// Three samples for two ranks: with sequence parallelism one of them is split.
const BATCH: &[&str] = &["batch.micro=3", "batch.global=6"];

#[test]
fn two_ranks_agree_with_one() {
    for model in MODELS {
        let one = plan(&[model, BATCH]);
        for rows in ["parallel.sequence_parallel=false", "parallel.sequence_parallel=true"] {
            for recompute in ["memory.recompute=none", "memory.recompute=selective"] {
                for part in [BackwardPart::Both, BackwardPart::Input] {
                    let split_again = part == BackwardPart::Input && recompute.ends_with("selective");
                    let overlap = ["parallel.overlap_tp=false", "parallel.overlap_tp=true"];
                    for overlap in overlap.into_iter().take(if split_again { 1 } else { 2 }) {
                        let sets = ["parallel.tp=2", rows, recompute, overlap];
                        let plan = plan(&[model, BATCH, &sets]);
                        assert_passes(&format!("{model:?}, {sets:?}, {part:?}"), &plan, &one, part);
                    }
                }
            }
        }
    }
}

#[test]
fn two_ranks_agree_with_one_if_logits_are_divided() {
    let model = MODELS[0];
    let one = plan(&[model, BATCH]);
    for rows in ["parallel.sequence_parallel=false", "parallel.sequence_parallel=true"] {
        for overlap in ["parallel.overlap_tp=false", "parallel.overlap_tp=true"] {
            for part in [BackwardPart::Both, BackwardPart::Input] {
                let sets = ["parallel.tp=2", rows, overlap, "memory.head_rows=64"];
                let plan = plan(&[model, BATCH, &sets]);
                assert_passes(&format!("{sets:?}, {part:?}"), &plan, &one, part);
            }
        }
    }
}
