//! Rates of memory-bound kernels, and of epilogues of products.
//!
//! The bytes of a kernel are those that the paper backend counts, so predictions use the rates as they are measured.

use kintsugi_spec::KernelPoint;
use kintsugi_tensor::ops::{
    AdamW, Bits, BlockFormat, ColumnSum, CrossEntropy, Dequantize, Gradient, Linear, LossStatistics, Norm,
    NormBackward, Parameters, Quantize, Requantize, Residual, Segment, Squares, SumsOfSquares, control,
};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Buffer, Category, DType, Device};

use super::bench::Bench;
use super::shapes::Rows;

/// Number of measurements.
pub const COUNT: usize = KERNELS.len() + 2;

/// The kernels.
const KERNELS: [fn(&dyn Backend, &Tensors); 12] = [
    add,
    norm,
    norm_backward,
    residual,
    column_sum,
    loss_statistics,
    cross_entropy,
    sums_of_squares,
    adamw,
    quantize,
    dequantize,
    requantize,
];

/// The codes of gradients, which have the most passes in a step with codes.
const CODES: BlockFormat = BlockFormat { bits: Bits::Four, block: 256 };

/// Sustained bytes per second of every kernel.
pub fn rates(bench: &mut Bench, shape: Rows) -> Vec<KernelPoint> {
    let backend = bench.backend;
    let tensors = Tensors::new(shape, |len, dtype| match dtype {
        DType::U32 => tokens(backend, len),
        // The first kernel that writes codes runs before those that read them.
        DType::U8 => backend.allocate(len, dtype, Category::Activations),
        dtype => bench.numbers(len, dtype),
    });
    // The step is neither skipped nor scaled.
    backend.fill(0.0, tensors.control.view());
    let point = |kernel: fn(&dyn Backend, &Tensors)| {
        let (name, bytes) = on_paper(kernel, shape);
        let seconds = bench.sustained(&|| kernel(backend, &tensors));
        KernelPoint { name, bandwidth: bytes / seconds }
    };
    KERNELS.map(point).to_vec()
}

/// Operations per second of a GELU epilogue; `None` if its cost is too small to measure.
pub fn epilogue(bench: &mut Bench, shape: Rows) -> Option<f64> {
    let Rows { rows, width } = shape;
    let (inputs, outputs) = (width, 4 * width);
    let backend = bench.backend;
    let [x, weight] = [rows * inputs, outputs * inputs].map(|len| bench.numbers(len, DType::F32));
    let [out, gelu] = [(); 2].map(|()| bench.numbers(rows * outputs, DType::F32));
    let linear = |fused: bool| {
        let gelu = fused.then(|| gelu.view());
        let (x, weight, out) = (x.view(), weight.view(), out.view());
        backend.linear(Linear { x, weight, bias: None, gelu, residual: None, out, rows, inputs, outputs });
    };
    let seconds = bench.sustained(&|| linear(true)) - bench.sustained(&|| linear(false));
    let operations = (kintsugi_tensor::paper::GELU * rows * outputs) as f64;
    (seconds > 0.0).then(|| operations / seconds)
}

/// The name and the bytes of a kernel, from the paper backend.
fn on_paper(kernel: fn(&dyn Backend, &Tensors), shape: Rows) -> (String, f64) {
    let paper = Paper::new(Device::Cpu { threads: 1 }).tracing();
    let tensors = Tensors::new(shape, |len, dtype| paper.allocate(len, dtype, Category::Activations));
    kernel(&paper, &tensors);
    let kernel = paper.take_trace()[0];
    (kernel.name.to_owned(), kernel.bytes as f64)
}

fn tokens(backend: &dyn Backend, len: usize) -> Buffer {
    let buffer = backend.allocate(len, DType::U32, Category::Activations);
    backend.upload_tokens(&vec![0; len], buffer.view());
    buffer
}

/// The tensors that the kernels read and write.
struct Tensors {
    shape: Rows,
    /// `[rows, width]`.
    activations: [Buffer; 3],
    /// `[width]`.
    features: [Buffer; 4],
    /// `[rows, 3]`.
    statistics: Buffer,
    /// `[rows]`.
    targets: Buffer,
    /// `[1]`.
    scalars: [Buffer; 2],
    /// The parameters of a few layers: gradient, master weights and both moments.
    parameters: [Buffer; 4],
    /// Codes of one of `parameters`, sent and received.
    codes: [Buffer; 2],
    control: Buffer,
}

impl Tensors {
    fn new(shape: Rows, make: impl Fn(usize, DType) -> Buffer) -> Self {
        let Rows { rows, width } = shape;
        let numbers = |len| make(len, DType::F32);
        Tensors {
            shape,
            activations: [(); 3].map(|()| numbers(rows * width)),
            features: [(); 4].map(|()| numbers(width)),
            statistics: numbers(3 * rows),
            targets: make(rows, DType::U32),
            scalars: [(); 2].map(|()| numbers(1)),
            parameters: [(); 4].map(|()| numbers(48 * width * width)),
            codes: [(); 2].map(|()| make(CODES.slice_bytes(48 * width * width), DType::U8)),
            control: numbers(control::LEN),
        }
    }
}

fn added(buffer: &Buffer) -> Gradient<'_> {
    Gradient { view: buffer.view(), accumulate: true }
}

fn add(backend: &dyn Backend, tensors: &Tensors) {
    let [x, y, _] = &tensors.activations;
    backend.add(x.view(), y.view());
}

fn norm(backend: &dyn Backend, tensors: &Tensors) {
    let Rows { rows, width } = tensors.shape;
    let [x, y, _] = tensors.activations.each_ref().map(Buffer::view);
    let [weight, bias, ..] = tensors.features.each_ref().map(Buffer::view);
    let statistics = tensors.statistics.slice(0..2 * rows);
    backend.norm(Norm { x, weight, bias: Some(bias), out: y, statistics, epsilon: 1e-5, rows, width });
}

fn norm_backward(backend: &dyn Backend, tensors: &Tensors) {
    let Rows { rows, width } = tensors.shape;
    let [x, dy, residual] = tensors.activations.each_ref().map(Buffer::view);
    let [weight, dweight, dbias, _] = &tensors.features;
    backend.norm_backward(NormBackward {
        dy,
        x,
        statistics: tensors.statistics.slice(0..2 * rows),
        weight: weight.view(),
        residual: Some(residual),
        residual_sum: None,
        dx: dy,
        dweight: added(dweight),
        dbias: Some(added(dbias)),
        rows,
        width,
    });
}

fn residual(backend: &dyn Backend, tensors: &Tensors) {
    let Rows { rows, width } = tensors.shape;
    let [x, y, out] = tensors.activations.each_ref().map(Buffer::view);
    let (addends, biases) = ([y], [tensors.features[0].view()]);
    backend.residual(Residual { x, addends: &addends, biases: &biases, out, rows, width });
}

fn column_sum(backend: &dyn Backend, tensors: &Tensors) {
    let Rows { rows, width } = tensors.shape;
    let x = tensors.activations[0].view();
    backend.column_sum(ColumnSum { x, out: added(&tensors.features[3]), rows, width });
}

fn loss_statistics(backend: &dyn Backend, tensors: &Tensors) {
    let Rows { rows, width } = tensors.shape;
    backend.loss_statistics(LossStatistics {
        logits: tensors.activations[0].view(),
        targets: tensors.targets.view(),
        first: 0,
        valid: width,
        statistics: tensors.statistics.view(),
        rows,
        columns: width,
    });
}

fn cross_entropy(backend: &dyn Backend, tensors: &Tensors) {
    let Rows { rows, width } = tensors.shape;
    let [loss, scale] = tensors.scalars.each_ref().map(Buffer::view);
    backend.cross_entropy(CrossEntropy {
        logits: tensors.activations[0].view(),
        targets: tensors.targets.view(),
        first: 0,
        valid: width,
        statistics: tensors.statistics.view(),
        parts: 1,
        loss,
        scale: Some(scale),
        factor: 1.0,
        rows,
        columns: width,
    });
}

fn sums_of_squares(backend: &dyn Backend, tensors: &Tensors) {
    let own = Some(tensors.scalars[0].view());
    let parts = [Squares { from: tensors.parameters[0].view(), own, counts: true }];
    backend.sums_of_squares(SumsOfSquares { parts: &parts, total: Some(tensors.scalars[1].view()) });
}

fn adamw(backend: &dyn Backend, tensors: &Tensors) {
    let [gradient, master, first_moment, second_moment] = tensors.parameters.each_ref().map(Buffer::view);
    let segments = [Segment { start: 0, len: gradient.len(), decay: true }];
    let parameters =
        Parameters { gradient, master, first_moment, second_moment, weights: None, segments: &segments };
    backend.adamw(AdamW {
        parameters: &[parameters],
        control: tensors.control.view(),
        betas: (0.9, 0.95),
        epsilon: 1e-8,
        weight_decay: 0.1,
    });
}

fn quantize(backend: &dyn Backend, tensors: &Tensors) {
    let (x, out) = (tensors.parameters[0].view(), tensors.codes[0].view());
    backend.quantize(Quantize { x, out, slices: 1, columns: 1, format: CODES });
}

fn dequantize(backend: &dyn Backend, tensors: &Tensors) {
    let (codes, out) = (tensors.codes[0].view(), added(&tensors.parameters[0]));
    backend.dequantize(Dequantize { codes, out, parts: 1, slices: 1, format: CODES });
}

fn requantize(backend: &dyn Backend, tensors: &Tensors) {
    let [codes, out] = tensors.codes.each_ref().map(Buffer::view);
    let elements = tensors.parameters[0].len();
    backend.requantize(Requantize { codes, out, parts: 1, slices: 1, columns: 1, elements, format: CODES });
}
