//! Every operation on random shapes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kintsugi_tensor::ops::{
    AttentionShape, Bits, GateFunction, LearningRate, LossScaler, RateCurve, Scores, Slices,
};
use kintsugi_tensor::{Backend, Buffer, DType};

use crate::comparison::{Comparison, compare, tolerance};
use crate::draw::Draw;
use crate::step::UpdateTypes;
use crate::test_backend::{COMPUTE, TestBackend, gradient_types};
use crate::{attention, cached_attention, elementwise, loss, norm, products, quantize, step, tables};

/// The largest size of the first round. Each round doubles it.
const FIRST: usize = 16;

/// One operation on one shape, in one type.
pub struct Case {
    /// What kind of operation it is.
    pub group: &'static str,
    /// The operation and its shape.
    pub what: String,
    /// The compute type.
    pub dtype: DType,
    /// The largest relative error.
    pub tolerance: f64,
    body: Box<Operation>,
}

/// Runs on a backend, and returns everything that it writes.
type Operation = dyn Fn(&TestBackend) -> Vec<Buffer>;

impl Case {
    /// Runs the operation on a device and on the CPU. The error says what the device reported.
    pub fn compare(&self, device: &dyn Backend) -> Result<Comparison, String> {
        let run = || compare(device, self.dtype, &*self.body);
        catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()))
                .unwrap_or_else(|| "the operation failed".to_owned())
        })
    }
}

/// So many rounds of all operations in every type, on larger and larger random shapes.
pub fn suite(seed: u64, rounds: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for round in 0..rounds {
        for (i, dtype) in COMPUTE.into_iter().enumerate() {
            let mut draw = Draw::new(seed ^ (3 * round + i) as u64, FIRST << round);
            add_operations(&mut Cases { cases: &mut cases, dtype }, &mut draw);
        }
    }
    cases
}

/// Where cases of one type are added.
struct Cases<'a> {
    cases: &'a mut Vec<Case>,
    dtype: DType,
}

impl Cases<'_> {
    fn add(
        &mut self,
        group: &'static str,
        what: String,
        body: impl Fn(&TestBackend) -> Vec<Buffer> + 'static,
    ) {
        let tolerance = tolerance(self.dtype);
        self.cases.push(Case { group, what, dtype: self.dtype, tolerance, body: Box::new(body) });
    }

    /// The same for an operation whose results are rounded to `coarsest` in between.
    fn add_coarse(
        &mut self,
        group: &'static str,
        what: String,
        coarsest: DType,
        body: impl Fn(&TestBackend) -> Vec<Buffer> + 'static,
    ) {
        self.add(group, what, body);
        if let Some(case) = self.cases.last_mut() {
            case.tolerance = tolerance(coarsest).max(tolerance(case.dtype));
        }
    }
}

fn add_operations(to: &mut Cases, draw: &mut Draw) {
    add_elementwise(to, draw);
    add_norms(to, draw);
    add_tables_and_loss(to, draw);
    add_attention(to, draw);
    add_products(to, draw);
    add_codes(to, draw);
    add_updates(to, draw);
}

fn add_elementwise(to: &mut Cases, draw: &mut Draw) {
    let len = draw.rows() * draw.width();
    let other = draw.one(&COMPUTE);
    let types = [to.dtype, other];
    to.add_coarse("copies", format!("{len} numbers to {other:?}"), other, move |backend| {
        elementwise::fill_copy_add(backend, len, types)
    });
    to.add("copies", "from the second number".to_owned(), elementwise::unaligned);
    let shape = [draw.rows(), draw.width(), draw.size(1..=40)];
    to.add("copies", format!("columns {shape:?}"), move |backend| elementwise::copy_columns(backend, shape));

    to.add("activations", format!("GELU of {len}"), move |backend| elementwise::gelu(backend, len));
    to.add("activations", format!("exact GELU of {len}"), move |backend| {
        elementwise::exact_gelu(backend, len)
    });
    let shape = [draw.rows(), draw.width()];
    for gate in [GateFunction::Silu, GateFunction::Gelu] {
        to.add("activations", format!("{} {shape:?}", gate.unit()), move |backend| {
            elementwise::gated(backend, shape, gate)
        });
    }

    let (shape, ends) = ([draw.rows(), draw.width()], [draw.size(0..=4), draw.size(0..=4)]);
    to.add("sums", format!("residual {shape:?} with {ends:?} addends and biases"), move |backend| {
        elementwise::residual(backend, shape, ends)
    });
    let (shape, sums) = ([draw.rows(), draw.width()], draw.one(&gradient_types(to.dtype)));
    to.add("sums", format!("columns {shape:?} in {sums:?}"), move |backend| {
        elementwise::column_sum(backend, shape, sums)
    });
    to.add("sums", format!("{len} squares"), move |backend| elementwise::sum_of_squares(backend, len));
    to.add("sums", "squares of many gradients".to_owned(), step::sums_of_squares);
}

fn add_norms(to: &mut Cases, draw: &mut Draw) {
    for centred in [false, true] {
        let (shape, gradients) = ((draw.rows(), draw.width() + 1), draw.one(&gradient_types(to.dtype)));
        let name = if centred { "LayerNorm" } else { "RMSNorm" };
        to.add("norms", format!("{name} {shape:?}, gradients in {gradients:?}"), move |backend| {
            norm::norm(backend, shape, centred, gradients)
        });
    }
    let shape = attention_shape(draw, 128);
    let (dims, inverse) = (2 * draw.size(1..=shape.head_dim / 2), draw.yes());
    to.add("norms", format!("rotary positions of {dims} in {shape:?}, inverse {inverse}"), move |backend| {
        norm::rotary(backend, shape, dims, inverse)
    });
}

fn add_tables_and_loss(to: &mut Cases, draw: &mut Draw) {
    let case = tables::Case {
        rows: draw.rows(),
        width: draw.width(),
        vocabulary: draw.size(3..=8 * draw.most),
        first: draw.size(0..=20),
        tokens: tables::spread,
    };
    let what = format!("tokens {} × {} of {}", case.rows, case.width, case.vocabulary);
    to.add("tables", what, move |backend| tables::embedding(backend, case, DType::F32));
    let shape = [draw.rows(), draw.width(), draw.rows(), draw.size(0..=5)];
    let shape = [shape[0], shape[1], shape[2].max(8), shape[3].min(7)];
    to.add("tables", format!("positions {shape:?}"), move |backend| {
        tables::positions(backend, shape, DType::F32)
    });

    let (columns, parts) = (draw.size(8..=16 * draw.most), draw.size(1..=3));
    let vocabulary = columns * parts - draw.size(0..=5);
    let soft_cap = draw.yes().then_some(1.5);
    let rows = draw.size(1..=draw.most / 4);
    let (case, wanted) = (loss::Case { rows, vocabulary, columns, parts, soft_cap }, draw.yes());
    to.add("loss", format!("{case:?}, with its gradient {wanted}"), move |backend| {
        loss::cross_entropy(backend, case, wanted)
    });
}

/// A shape with grouped queries.
fn attention_shape(draw: &mut Draw, most_dim: usize) -> AttentionShape {
    let kv_heads = draw.size(1..=2);
    AttentionShape {
        batch: draw.size(1..=2),
        sequence: draw.rows(),
        heads: kv_heads * draw.size(1..=3),
        kv_heads,
        head_dim: 8 * draw.size(1..=most_dim / 8),
        scores: Scores { soft_cap: draw.yes().then_some(1.5), ..Scores::PLAIN },
    }
}

fn add_attention(to: &mut Cases, draw: &mut Draw) {
    for (name, plain, packed) in [("flash", false, false), ("packed", false, true), ("plain", true, false)] {
        // At least one product of matrix instructions.
        let shape = AttentionShape { sequence: draw.rows() + 32, ..attention_shape(draw, 128) };
        let documents = if packed { vec![draw.rows(), draw.rows()] } else { Vec::new() };
        to.add("attention", format!("{name} {shape:?}, documents {documents:?}"), move |backend| {
            attention::attention(backend, shape, plain, &documents)
        });
    }
    let shape = attention_shape(draw, 128);
    to.add("attention", format!("over a cache {shape:?}"), move |backend| {
        cached_attention::cached_attention(
            backend,
            AttentionShape { sequence: shape.sequence.min(16), ..shape },
        )
    });
    if to.dtype != DType::F16 {
        let shape =
            AttentionShape { sequence: 4 * draw.size(1..=draw.most / 4), ..attention_shape(draw, 64) };
        let slices = Slices { parts: draw.size(2..=3), part: draw.size(0..=1) };
        to.add("attention", format!("{slices:?} of {shape:?}"), move |backend| {
            attention::attention_of_slices(backend, shape, slices)
        });
    }
}

fn add_products(to: &mut Cases, draw: &mut Draw) {
    let shape = (draw.rows(), draw.width(), draw.width());
    let (bias, gelu) = (draw.yes(), draw.yes());
    to.add("products", format!("{shape:?}, bias {bias}, GELU {gelu}"), move |backend| {
        products::linear(backend, shape, bias, gelu)
    });
    let shape = (draw.rows(), draw.width(), draw.width());
    to.add("products", format!("{shape:?} with a residual, bias {bias}"), move |backend| {
        products::ending(backend, shape, bias)
    });
    let (shape, gradients) = ((draw.rows(), draw.width(), draw.width()), draw.one(&gradient_types(to.dtype)));
    to.add("products", format!("gradients {shape:?} in {gradients:?}"), move |backend| {
        products::gradients(backend, shape, gradients, bias, [false, true])
    });
}

fn add_codes(to: &mut Cases, draw: &mut Draw) {
    let shape = [draw.size(1..=4), draw.width() + 7, draw.size(0..=3), draw.one(&[32, 128, 1024])];
    let bits = draw.one(&[Bits::Four, Bits::Eight]);
    to.add("codes", format!("{bits:?} of {shape:?}"), move |backend| {
        quantize::there_and_back(backend, shape, bits)
    });
    if let Some(case) = to.cases.last_mut() {
        case.tolerance = 0.0;
    }
}

/// The types of gradients are those of computation; weights are rounded to it.
fn add_updates(to: &mut Cases, draw: &mut Draw) {
    let (rule, skip) = (draw.one(&step::RULES), if draw.size(0..=3) == 0 { 1.0 } else { 0.0 });
    let weights = (to.dtype != DType::F32).then_some(to.dtype);
    let types = UpdateTypes { gradients: to.dtype, states: draw.one(&[DType::F32, DType::BF16]), weights };
    to.add_coarse("updates", format!("{rule:?}, {types:?}, skip {skip}"), types.coarsest(), move |backend| {
        step::update(backend, rule, types, skip)
    });
    if to.dtype == DType::F32 {
        let curve =
            draw.one(&[RateCurve::Cosine, RateCurve::Linear, RateCurve::InverseSqrt, RateCurve::Sqrt]);
        let rate = LearningRate { peak: 0.1, floor: 0.01, warmup: 2, curve, decay_start: 1, decay_steps: 3 };
        let scaler = draw.yes().then_some(LossScaler { window: 2, largest: 16.0 });
        to.add("updates", format!("control values by {curve:?}"), move |backend| {
            step::update_control(backend, rate, scaler, 1.0)
        });
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use kintsugi_tensor::cpu::CpuBackend;
    use kintsugi_tensor::cpu::memory::Heap;

    use super::*;

    #[test]
    fn the_cpu_agrees_with_itself_on_the_first_shapes() {
        let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
        let cases = suite(7, 2);
        assert!(cases.len() > 100, "{}", cases.len());
        for case in &cases {
            let Comparison { error, repeats, .. } =
                case.compare(&cpu).unwrap_or_else(|error| panic!("{}: {error}", case.what));
            assert!(error < 1e-12 && repeats, "{}: {error}", case.what);
        }
    }

    #[test]
    fn a_failure_of_the_device_is_a_message() {
        let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
        let body = Box::new(|_: &TestBackend| -> Vec<Buffer> { panic!("out of {}", "memory") });
        let case = Case { group: "g", what: String::new(), dtype: DType::F32, tolerance: 0.0, body };
        assert_eq!(case.compare(&cpu).expect_err("it panics"), "out of memory");
    }
}
