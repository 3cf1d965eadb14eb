//! A whole layer: its derivative, and modes of the backward that must give the same bits.

use kintsugi_comm::Solo;
use kintsugi_model::{Context, Shape, layer};
use kintsugi_plan::parameters::UnitLayout;
use kintsugi_plan::{AttentionKind, BackwardPart, Recompute, Unit};
use kintsugi_tensor::Buffer;

use crate::numbers::{
    assert_close, assert_derivative, assert_parameter_derivatives, assert_same, dot, random, random_weights,
};
use crate::test_rank::{MODELS, TestRank, plan, shape, window_starts};

/// How a layer computes its gradients.
#[derive(Clone, Copy)]
enum BackwardMode {
    /// Forward, then the whole backward.
    Straight,
    /// Forward, then the input part of the backward, then the weight part.
    InParts,
    /// A forward that saves only the input, then recomputation, then the whole backward.
    Rebuilt,
    /// Forward, then the backward of a layer whose weights are frozen.
    Frozen,
}

/// A layer of a small model with its inputs and weights.
struct Point {
    shape: Shape,
    layout: UnitLayout,
    x: Vec<f64>,
    weights: Vec<f64>,
    dy: Vec<f64>,
    /// The first token that each token attends to, with a document mask or a window.
    starts: Option<Vec<u32>>,
}

/// The results of a layer.
struct Outcome {
    y: Vec<f64>,
    dx: Vec<f64>,
    gradient: Vec<f64>,
}

impl Point {
    fn new(model: &[&str]) -> Self {
        let plan = plan(&[model]);
        let (shape, layout) = (shape(&plan, 0), plan.layout(Unit::Layer(0)));
        let len = shape.rows * shape.hidden;
        let weights = random_weights(&layout, 1, 0);
        let starts = window_starts(&shape);
        Point { shape, layout, x: random(len, 1), weights, dy: random(len, 2), starts }
    }

    fn y(&self, rank: &TestRank, x: &[f64], weights: &[f64]) -> Vec<f64> {
        let (unit, starts) = (rank.unit(&self.layout, weights), self.starts(rank));
        let (y, _) = layer::forward(&self.context(rank, starts.as_ref()), rank.buffer(x), &unit.weights());
        rank.values(y.view())
    }

    /// Runs the layer in memory filled with NaN; gradients are accumulated over `passes`.
    fn outcome(&self, mode: BackwardMode, passes: usize) -> Outcome {
        let rank = TestRank::new();
        let starts = self.starts(&rank);
        let ctx = self.context(&rank, starts.as_ref());
        let unit = rank.unit(&self.layout, &self.weights);
        let frozen = matches!(mode, BackwardMode::Frozen);
        let (w, g) = (unit.weights(), if frozen { unit.no_gradients() } else { unit.gradients() });
        let mut ends = None;
        for _ in 0..passes {
            let x = rank.buffer(&self.x);
            let (y, saved) = match mode {
                BackwardMode::Straight | BackwardMode::InParts | BackwardMode::Frozen => {
                    layer::forward(&ctx, x, &w)
                }
                BackwardMode::Rebuilt => {
                    let (y, x) = layer::evaluate(&ctx, x, &w);
                    (y, layer::rebuild(&ctx, x, &w))
                }
            };
            let part = match mode {
                BackwardMode::Straight | BackwardMode::Rebuilt => BackwardPart::Both,
                BackwardMode::InParts => BackwardPart::Input,
                BackwardMode::Frozen => BackwardPart::Frozen,
            };
            let (dx, weight_inputs) = layer::backward(&ctx, rank.buffer(&self.dy), saved, &w, &g, part);
            assert_eq!(weight_inputs.is_some(), part == BackwardPart::Input);
            if let Some(weight_inputs) = weight_inputs {
                layer::weight_part(&ctx, weight_inputs, &g);
            }
            ends = Some((rank.values(y.view()), rank.values(dx.view())));
        }
        let (y, dx) = ends.expect("at least one pass");
        Outcome { y, dx, gradient: rank.values(unit.gradient()) }
    }

    fn starts(&self, rank: &TestRank) -> Option<Buffer> {
        self.starts.as_ref().map(|starts| rank.tokens(starts))
    }

    fn context<'a>(&'a self, rank: &'a TestRank, starts: Option<&'a Buffer>) -> Context<'a> {
        Context { starts: starts.map(Buffer::view), ..rank.context(&Solo, &self.shape) }
    }
}

/// Every model with either attention, saving everything or not; one of them also with documents.
fn points() -> impl Iterator<Item = (String, Point)> {
    let attention = [AttentionKind::Flash, AttentionKind::Plain];
    let recompute = [Recompute::None, Recompute::Selective];
    let options = attention.into_iter().flat_map(move |a| recompute.map(|r| (a, r)));
    let masked = MODELS.map(|model| (model, false)).into_iter().chain([(MODELS[1], true)]);
    masked.flat_map(move |(model, masked)| {
        options.clone().map(move |(attention, recompute)| {
            let mut point = Point::new(model);
            (point.shape.attention_kind, point.shape.recompute) = (attention, recompute);
            if masked {
                point.starts = Some(starts(&point.shape));
            }
            (format!("{model:?}, {attention:?}, {recompute:?}, masked {masked}"), point)
        })
    })
}

/// Documents of 70 tokens, of 1, and of the rest.
fn starts(shape: &Shape) -> Vec<u32> {
    let start = |row| match row % shape.sequence {
        0..70 => 0,
        70 => 70,
        _ => 71,
    };
    (0..shape.rows).map(start).collect()
}

fn assert_same_outcome(what: &str, left: &Outcome, right: &Outcome) {
    assert_same(&format!("{what}: y"), &left.y, &right.y);
    assert_same(&format!("{what}: dx"), &left.dx, &right.dx);
    assert_same(&format!("{what}: gradient"), &left.gradient, &right.gradient);
}

#[test]
fn backward_is_the_derivative() {
    for (what, point) in points() {
        let (rank, Outcome { dx, gradient, .. }) =
            (TestRank::new(), point.outcome(BackwardMode::Straight, 1));
        let of_x = |x: &[f64]| dot(&point.dy, &point.y(&rank, x, &point.weights));
        assert_derivative(&format!("{what}, x"), of_x, &point.x, &dx, 0..dx.len());
        let of_weights = |weights: &[f64]| dot(&point.dy, &point.y(&rank, &point.x, weights));
        assert_parameter_derivatives(&what, &point.layout, of_weights, &point.weights, &gradient);
    }
}

#[test]
fn the_backward_in_parts_has_the_bits_of_the_backward_in_one() {
    for (what, point) in points() {
        assert_same_outcome(
            &what,
            &point.outcome(BackwardMode::InParts, 1),
            &point.outcome(BackwardMode::Straight, 1),
        );
    }
}

#[test]
fn a_frozen_layer_computes_the_gradient_of_its_input_and_no_other() {
    for (what, point) in points() {
        let (frozen, straight) =
            (point.outcome(BackwardMode::Frozen, 1), point.outcome(BackwardMode::Straight, 1));
        assert_same(&what, &frozen.dx, &straight.dx);
        assert!(frozen.gradient.iter().all(|number| number.is_nan()), "{what}: a gradient was written");
    }
}

#[test]
fn recomputation_changes_no_bit() {
    for (what, mut point) in points() {
        let straight = point.outcome(BackwardMode::Straight, 1);
        point.shape.recompute = Recompute::None;
        assert_same_outcome(&what, &straight, &point.outcome(BackwardMode::Straight, 1));
        point.shape.recompute = Recompute::Full;
        assert_same_outcome(&what, &point.outcome(BackwardMode::Rebuilt, 1), &straight);
    }
}

#[test]
fn a_second_backward_adds_to_the_first() {
    for (what, point) in points() {
        let twice: Vec<f64> =
            point.outcome(BackwardMode::Straight, 1).gradient.iter().map(|g| 2.0 * g).collect();
        for mode in [BackwardMode::Straight, BackwardMode::InParts] {
            assert_close(&what, &point.outcome(mode, 2).gradient, &twice, 1e-14);
        }
    }
}
