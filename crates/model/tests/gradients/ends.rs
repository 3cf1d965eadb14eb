//! The two ends of the model: the embedding with and without positions, the head tied and untied.

use kintsugi_comm::Solo;
use kintsugi_model::{Shape, embedding, head};
use kintsugi_plan::parameters::{ParameterKind, UnitLayout};
use kintsugi_plan::{BackwardPart, Block, Plan, Unit};
use kintsugi_tensor::Buffer;

use crate::numbers::{
    assert_close, assert_derivative, assert_parameter_derivatives, assert_same, dot, random, random_tokens,
    random_weights,
};
use crate::test_rank::{TestRank, UnitBuffers, plan, shape};

/// Large, so that gradients are large compared with the tolerance.
const LOSS_SCALE: f64 = 1024.0;

/// A block with the weights of all its units, and its tokens or targets.
struct Point {
    plan: Plan,
    shape: Shape,
    layouts: Vec<UnitLayout>,
    weights: Vec<Vec<f64>>,
    tokens: Vec<u32>,
}

impl Point {
    fn new(block: Block, sets: &[&str]) -> Self {
        let plan = plan(&[sets]);
        let layouts: Vec<UnitLayout> = plan.block_units(block).into_iter().map(|u| plan.layout(u)).collect();
        let weights = layouts.iter().map(|layout| random_weights(layout, 1, 0)).collect();
        let tokens = random_tokens(plan.rows(), plan.model.vocab, 4);
        Point { shape: shape(&plan, 0), layouts, weights, tokens, plan }
    }

    fn units<'a>(&'a self, rank: &TestRank, weights: &[Vec<f64>]) -> Vec<UnitBuffers<'a>> {
        self.layouts.iter().zip(weights).map(|(layout, weights)| rank.unit(layout, weights)).collect()
    }

    fn embedded(&self, rank: &TestRank, weights: &[Vec<f64>]) -> Vec<f64> {
        let units = self.units(rank, weights);
        let (ctx, tokens) = (rank.context(&Solo, &self.shape), rank.tokens(&self.tokens));
        let positions = units.get(1).map(UnitBuffers::weights);
        rank.values(embedding::forward(&ctx, tokens.view(), &units[0].weights(), positions.as_ref()).view())
    }

    /// The gradients of table and positions, accumulated over `passes`.
    fn embedding_gradients(&self, dx: &[f64], passes: usize) -> Vec<Vec<f64>> {
        let rank = TestRank::new();
        let units = self.units(&rank, &self.weights);
        let (ctx, tokens) = (rank.context(&Solo, &self.shape), rank.tokens(&self.tokens));
        let positions = units.get(1).map(UnitBuffers::gradients);
        for _ in 0..passes {
            let (dx, table) = (rank.buffer(dx), units[0].gradients());
            embedding::backward(&ctx, &dx, tokens.view(), &table, positions.as_ref());
        }
        units.iter().map(|unit| rank.values(unit.gradient())).collect()
    }

    fn head_loss(&self, rank: &TestRank, x: &[f64], weights: &[Vec<f64>]) -> f64 {
        let units = self.units(rank, weights);
        let loss = LossBuffers::new(rank);
        let (ctx, x) = (rank.context(&Solo, &self.shape), rank.buffer(x));
        let targets = rank.tokens(&self.tokens);
        head::evaluate(&ctx, &x, targets.view(), &self.head_weights(&units), loss.get());
        rank.values(loss.sum.view())[0]
    }

    /// Loss, the gradient of `x`, and the gradients of all units, accumulated over `passes`.
    fn head_outcome(&self, x: &[f64], part: BackwardPart, passes: usize) -> (f64, Vec<f64>, Vec<Vec<f64>>) {
        let rank = TestRank::new();
        let units = self.units(&rank, &self.weights);
        let (ctx, w) = (rank.context(&Solo, &self.shape), self.head_weights(&units));
        let norm = units.last().expect("the head's own unit").gradients();
        let output = head::OutputGradient { gradients: units[0].gradients(), kind: self.output_slot() };
        let mut ends = None;
        for _ in 0..passes {
            let loss = LossBuffers::new(&rank);
            let targets = rank.tokens(&self.tokens);
            let saved = head::forward(&ctx, rank.buffer(x), targets, &w, loss.get());
            let scale = loss.scale.view();
            let (dx, weight_inputs) = head::backward(&ctx, saved, &w, scale, &norm, &output, part);
            assert_eq!(weight_inputs.is_some(), part == BackwardPart::Input);
            if let Some(weight_inputs) = weight_inputs {
                head::weight_part(&ctx, &weight_inputs, &output);
            }
            ends = Some((rank.values(loss.sum.view())[0], rank.values(dx.view())));
        }
        let (loss, dx) = ends.expect("at least one pass");
        (loss, dx, units.iter().map(|unit| rank.values(unit.gradient())).collect())
    }

    /// The units are the embedding table, if it is tied, and the head's own.
    fn head_weights<'a>(&self, units: &'a [UnitBuffers]) -> head::HeadWeights<'a> {
        let norm = units.last().expect("the head's own unit").weights();
        head::HeadWeights { norm, output: units[0].weights().get(self.output_slot()) }
    }

    fn output_slot(&self) -> ParameterKind {
        if self.plan.model.tied { ParameterKind::Table } else { ParameterKind::Output }
    }

    /// Checks every parameter of every unit.
    fn assert_derivatives(&self, what: &str, f: impl Fn(&[Vec<f64>]) -> f64, gradients: &[Vec<f64>]) {
        for (i, layout) in self.layouts.iter().enumerate() {
            let of_unit = |unit: &[f64]| {
                let mut weights = self.weights.clone();
                unit.clone_into(&mut weights[i]);
                f(&weights)
            };
            assert_parameter_derivatives(what, layout, of_unit, &self.weights[i], &gradients[i]);
        }
    }
}

struct LossBuffers {
    sum: Buffer,
    scale: Buffer,
}

impl LossBuffers {
    fn new(rank: &TestRank) -> Self {
        LossBuffers { sum: rank.buffer(&[0.0]), scale: rank.buffer(&[LOSS_SCALE]) }
    }

    fn get(&self) -> head::Loss<'_> {
        head::Loss { sum: self.sum.view(), scale: self.scale.view() }
    }
}

const EMBEDDINGS: [&str; 2] = ["model.family=gpt", "model.family=llama"];

#[test]
fn the_embedding_has_its_derivative() {
    for family in EMBEDDINGS {
        let (rank, point) = (TestRank::new(), Point::new(Block::Embedding, &[family]));
        assert_eq!(point.layouts.iter().any(|l| l.unit == Unit::Positions), family == "model.family=gpt");
        let dx = random(point.shape.rows * point.shape.hidden, 3);
        let f = |weights: &[Vec<f64>]| dot(&dx, &point.embedded(&rank, weights));
        point.assert_derivatives(family, f, &point.embedding_gradients(&dx, 1));
    }
}

#[test]
fn a_second_embedding_adds_to_the_first() {
    for family in EMBEDDINGS {
        let point = Point::new(Block::Embedding, &[family]);
        let dx = random(point.shape.rows * point.shape.hidden, 3);
        let (once, twice) = (point.embedding_gradients(&dx, 1), point.embedding_gradients(&dx, 2));
        for (once, twice) in once.iter().zip(&twice) {
            let doubled: Vec<f64> = once.iter().map(|g| 2.0 * g).collect();
            assert_close(family, twice, &doubled, 1e-14);
        }
    }
}

const HEADS: [&[&str]; 4] = [
    &["model.family=gpt", "model.tied=true"],
    &["model.family=gpt", "model.tied=false"],
    &["model.family=llama", "model.tied=false"],
    &["model.family=llama", "model.tied=false", "memory.head_rows=70"],
];

#[test]
fn the_head_has_the_derivative_of_the_loss() {
    for sets in HEADS {
        let (rank, point, what) = (TestRank::new(), Point::new(Block::Head, sets), format!("{sets:?}"));
        assert!(point.shape.valid_tokens < point.shape.vocab, "the vocabulary has padding");
        let x = random(point.shape.rows * point.shape.hidden, 3);
        let (loss, dx, gradients) = point.head_outcome(&x, BackwardPart::Both, 1);
        assert_same(&what, &[loss], &[point.head_loss(&rank, &x, &point.weights)]);
        let factor = LOSS_SCALE / point.plan.tokens_per_step() as f64;
        let of_x = |x: &[f64]| factor * point.head_loss(&rank, x, &point.weights);
        assert_derivative(&format!("{what}, x"), of_x, &x, &dx, 0..dx.len());
        point.assert_derivatives(&what, |w| factor * point.head_loss(&rank, &x, w), &gradients);
    }
}

#[test]
fn the_head_in_parts_and_twice_has_the_gradients_of_the_head_in_one() {
    for sets in HEADS {
        let (point, what) = (Point::new(Block::Head, sets), format!("{sets:?}"));
        let x = random(point.shape.rows * point.shape.hidden, 3);
        let (_, dx, once) = point.head_outcome(&x, BackwardPart::Both, 1);
        let (_, dx_in_parts, in_parts) = point.head_outcome(&x, BackwardPart::Input, 1);
        let (_, _, twice) = point.head_outcome(&x, BackwardPart::Both, 2);
        assert_same(&what, &dx_in_parts, &dx);
        for ((once, in_parts), twice) in once.iter().zip(&in_parts).zip(&twice) {
            assert_same(&what, in_parts, once);
            let doubled: Vec<f64> = once.iter().map(|g| 2.0 * g).collect();
            assert_close(&what, twice, &doubled, 1e-14);
        }
    }
}

#[test]
fn logits_of_some_rows_at_a_time_give_the_same_loss_and_gradients() {
    let whole = Point::new(Block::Head, &["model.tied=true"]);
    let x = random(whole.shape.rows * whole.shape.hidden, 3);
    let (loss, dx, gradients) = whole.head_outcome(&x, BackwardPart::Both, 1);
    for head_rows in ["memory.head_rows=1", "memory.head_rows=128", "memory.head_rows=299"] {
        let point = Point::new(Block::Head, &["model.tied=true", head_rows]);
        assert!(point.shape.divides_head(), "{head_rows}");
        assert_close(head_rows, &[point.head_loss(&TestRank::new(), &x, &point.weights)], &[loss], 1e-13);
        for part in [BackwardPart::Both, BackwardPart::Input] {
            let outcome = point.head_outcome(&x, part, 1);
            assert_close(head_rows, &[outcome.0], &[loss], 1e-13);
            assert_close(head_rows, &outcome.1, &dx, 1e-12);
            for (divided, whole) in outcome.2.iter().zip(&gradients) {
                assert_close(head_rows, divided, whole, 1e-12);
            }
        }
    }
}
