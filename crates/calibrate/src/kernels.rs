//! Rates of memory-bound kernels, and of epilogues of products.
//!
//! The bytes of a kernel are those that the paper backend counts, so predictions use the rates as they are measured.

use kintsugi_spec::KernelPoint;
use kintsugi_tensor::ops::{
    Bits, BlockFormat, ColumnSum, CrossEntropy, Dequantize, Gradient, Linear, LossStatistics, Norm,
    NormBackward, Parameters, Quantize, Requantize, Residual, Segment, Squares, SumsOfSquares, Update,
    UpdateRule, control,
};
use kintsugi_tensor::paper::{Kernel, KernelKind, Paper};
use kintsugi_tensor::{Backend, Buffer, Category, DType, Device, View};

use super::bench::Bench;
use super::shapes::Rows;

/// Number of measurements in these types.
pub fn count(dtypes: &[DType]) -> usize {
    let shape = Rows { rows: 1, width: 16 };
    dtypes.iter().map(|&dtype| kernels(shape, dtype, dtypes).count()).sum::<usize>() + 2
}

type KernelFn = fn(&dyn Backend, &Tensors);

/// The kernels.
const KERNELS: [KernelFn; 17] = [
    add,
    norm,
    norm_backward,
    residual,
    column_sum,
    loss_statistics,
    cross_entropy,
    sums_of_squares,
    |backend, tensors| update(backend, tensors, UpdateRule::AdamW { betas: (0.9, 0.95), epsilon: 1e-8 }),
    |backend, tensors| update(backend, tensors, UpdateRule::Lion { betas: (0.9, 0.99) }),
    |backend, tensors| update(backend, tensors, UpdateRule::Sgd { momentum: 0.9, nesterov: false }),
    // Codes are written before other kernels read them.
    |backend, tensors| quantize(backend, tensors, INT8),
    |backend, tensors| dequantize(backend, tensors, INT8),
    |backend, tensors| requantize(backend, tensors, INT8),
    |backend, tensors| quantize(backend, tensors, INT4),
    |backend, tensors| dequantize(backend, tensors, INT4),
    |backend, tensors| requantize(backend, tensors, INT4),
];

const INT8: BlockFormat = BlockFormat { bits: Bits::Eight, block: 256 };
const INT4: BlockFormat = BlockFormat { bits: Bits::Four, block: 256 };
/// Slices of codes.
const SLICES: usize = 2;

/// Sustained bytes per second of every kernel, in every type.
pub fn rates(bench: &mut Bench, shape: Rows, dtypes: &[DType]) -> Vec<KernelPoint> {
    let backend = bench.backend;
    let mut points = Vec::new();
    for &dtype in dtypes {
        let tensors = Tensors::new(shape, dtype, |len, dtype| match dtype {
            DType::U32 => tokens(backend, len),
            DType::U8 => backend.allocate(len, dtype, Category::Activations),
            dtype => bench.numbers(len, dtype),
        });
        // The step is neither skipped nor scaled.
        backend.fill(0.0, tensors.control.view());
        for (kernel, on_paper) in kernels(shape, dtype, dtypes) {
            let seconds = bench.sustained(&|| kernel(backend, &tensors));
            points.push(KernelPoint {
                name: on_paper.name.to_owned(),
                fp32: is_fp32(&on_paper),
                bandwidth: on_paper.bytes as f64 / seconds,
            });
        }
    }
    points
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
        backend.linear(Linear {
            x,
            weight,
            bias: None,
            gelu,
            residual: None,
            out,
            rows,
            inputs,
            outputs,
            float8: None,
        });
    };
    let seconds = bench.sustained(&|| linear(true)) - bench.sustained(&|| linear(false));
    let operations = (kintsugi_tensor::paper::GELU * rows * outputs) as f64;
    (seconds > 0.0).then(|| operations / seconds)
}

/// The kernels to measure in a type, with their names and bytes from the paper backend. Those without 16-bit numbers are measured
/// in the first type only.
fn kernels(shape: Rows, dtype: DType, dtypes: &[DType]) -> impl Iterator<Item = (KernelFn, Kernel)> {
    let is_first = dtypes.first() == Some(&dtype);
    let kernels = KERNELS.into_iter().map(move |kernel| (kernel, on_paper(kernel, shape, dtype)));
    kernels.filter(move |(_, on_paper)| is_first || !is_fp32(on_paper))
}

fn is_fp32(kernel: &Kernel) -> bool {
    kernel.kind == KernelKind::Memory { fp32: true }
}

fn on_paper(kernel: KernelFn, shape: Rows, dtype: DType) -> Kernel {
    let paper = Paper::new(Device::Cpu { threads: 1 }).tracing();
    let tensors = Tensors::new(shape, dtype, |len, dtype| paper.allocate(len, dtype, Category::Activations));
    kernel(&paper, &tensors);
    paper.take_trace()[0]
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
    /// The gradient of a few layers, and what is added to it.
    gradient: [Buffer; 2],
    /// Their master weights and both moments.
    states: [Buffer; 3],
    /// Their weights, if they are not the master weights.
    weights: Option<Buffer>,
    /// Codes of the gradient.
    codes: Buffer,
    /// Codes of the sum of its slices.
    sums: Buffer,
    control: Buffer,
}

impl Tensors {
    fn new(shape: Rows, dtype: DType, make: impl Fn(usize, DType) -> Buffer) -> Self {
        let Rows { rows, width } = shape;
        let parameters = 48 * width * width;
        let (numbers, wide) = (|len| make(len, dtype), |len| make(len, DType::F32));
        Tensors {
            shape,
            activations: [(); 3].map(|()| numbers(rows * width)),
            features: [(); 4].map(|()| numbers(width)),
            statistics: wide(3 * rows),
            targets: make(rows, DType::U32),
            scalars: [(); 2].map(|()| wide(1)),
            gradient: [(); 2].map(|()| numbers(parameters)),
            states: [(); 3].map(|()| wide(parameters)),
            weights: (dtype != DType::F32).then(|| numbers(parameters)),
            codes: make(SLICES * INT8.slice_bytes(parameters / SLICES), DType::U8),
            sums: make(INT8.slice_bytes(parameters / SLICES), DType::U8),
            control: wide(control::LEN),
        }
    }

    /// The codes of the gradient.
    fn slices(&self, format: BlockFormat) -> View<'_> {
        self.codes.slice(0..SLICES * format.slice_bytes(self.gradient[0].len() / SLICES))
    }
}

fn added(buffer: &Buffer) -> Gradient<'_> {
    Gradient { view: buffer.view(), accumulate: true }
}

fn add(backend: &dyn Backend, tensors: &Tensors) {
    let [addend, gradient] = tensors.gradient.each_ref().map(Buffer::view);
    backend.add(addend, gradient);
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
        centred: true,
        dweight: Some(added(dweight)),
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
        soft_cap: None,
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
        z_loss: 0.0,
        soft_cap: None,
        rows,
        columns: width,
    });
}

fn sums_of_squares(backend: &dyn Backend, tensors: &Tensors) {
    let own = Some(tensors.scalars[0].view());
    let parts = [Squares { from: tensors.gradient[0].view(), own, counts: true }];
    backend.sums_of_squares(SumsOfSquares { parts: &parts, total: Some(tensors.scalars[1].view()) });
}

fn update(backend: &dyn Backend, tensors: &Tensors, rule: UpdateRule) {
    let gradient = tensors.gradient[0].view();
    let [master, first, second] = tensors.states.each_ref().map(Buffer::view);
    let weights = tensors.weights.as_ref().map(Buffer::view);
    let segments = [Segment { start: 0, len: gradient.len(), rate_factor: 1.0, decay: 0.1 }];
    let states = [Some(first), Some(second).filter(|_| rule.states() > 1)];
    let parameters = Parameters { gradient, master, states, weights, segments: &segments };
    backend.update(Update { parameters: &[parameters], control: tensors.control.view(), rule });
}

fn quantize(backend: &dyn Backend, tensors: &Tensors, format: BlockFormat) {
    let (x, out) = (tensors.gradient[0].view(), tensors.slices(format));
    backend.quantize(Quantize { x, out, slices: SLICES, format });
}

/// Restores numbers, as after a gather.
fn dequantize(backend: &dyn Backend, tensors: &Tensors, format: BlockFormat) {
    let out = Gradient { view: tensors.gradient[0].view(), accumulate: false };
    let codes = tensors.slices(format);
    backend.dequantize(Dequantize { codes, out, parts: 1, slices: SLICES, format });
}

/// Sums all slices to one.
fn requantize(backend: &dyn Backend, tensors: &Tensors, format: BlockFormat) {
    let elements = tensors.gradient[0].len() / SLICES;
    let (codes, out) = (tensors.slices(format), tensors.sums.slice(0..format.slice_bytes(elements)));
    backend.requantize(Requantize { codes, out, parts: SLICES, slices: 1, elements, format });
}
