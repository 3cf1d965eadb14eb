//! The time of a kernel on a device: products by tiles and waves, everything else by the bytes that it moves.
//!
//! A product is divided into tiles, and the device's units process the tiles in waves. A wave takes as long as one
//! tile, and a tile takes as long as its terms plus a ramp for its start and end. The model takes the fastest of a few
//! tile shapes and splits of the sums, like a library that chooses among its kernels.

use std::collections::BTreeMap;

use kintsugi_spec::{AttentionPoint, DeviceSpec, FrameworkSpec, KernelPoint, ProductPoint};
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::AttentionShape;
use kintsugi_tensor::paper::{Kernel, KernelKind};

use super::unfused::{unfused, unfused_softmax};

/// The speed of a device under a framework.
#[derive(Clone, Debug)]
pub struct DeviceModel {
    peak_8bit: f64,
    peak_16bit: f64,
    peak_fp32: f64,
    bandwidth: f64,
    units: f64,
    matmul: f64,
    matmul_8bit: f64,
    /// The rate of attention under the power cap, as a share of the measured one. That of products is in `matmul`.
    capped: f64,
    boost: f64,
    misaligned: f64,
    ramp: f64,
    launch: f64,
    epilogue: Option<f64>,
    attention: Vec<AttentionPoint>,
    /// Of this engine's backward for sequences that libraries do not take.
    portable: Vec<AttentionPoint>,
    corrections: Vec<Correction>,
    kernels: Vec<KernelPoint>,
    framework: FrameworkSpec,
}

/// The ratio of a product's measured speed to the modelled one.
#[derive(Clone, Copy, Debug)]
struct Correction {
    point: ProductPoint,
    factor: f64,
}

/// A product: `batch` times `m × n` sums of `k` terms.
#[derive(Clone, Copy, Debug)]
struct Product {
    batch: f64,
    m: f64,
    n: f64,
    k: f64,
    /// Bytes of an element.
    width: f64,
    factors: Factors,
}

/// The types of a product's factors that have rates of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Factors {
    Fp32,
    SixteenBits,
    EightBits,
}

impl Factors {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::U8 => Factors::EightBits,
            DType::BF16 | DType::F16 => Factors::SixteenBits,
            DType::F64 | DType::F32 | DType::U32 => Factors::Fp32,
        }
    }

    fn measured(point: &ProductPoint) -> Self {
        if point.fp32 { Factors::Fp32 } else { Factors::SixteenBits }
    }
}

/// Tile shapes and the share of a unit's rate that each reaches.
const TILES: [(f64, f64, f64); 5] =
    [(256.0, 128.0, 1.0), (128.0, 256.0, 1.0), (128.0, 128.0, 0.94), (128.0, 64.0, 0.82), (64.0, 64.0, 0.65)];
/// The number of parts into which the sums may be split.
const SPLITS: [f64; 4] = [1.0, 2.0, 4.0, 8.0];
/// Rows of a block of queries in flash attention. The fast kernels of a backward take whole blocks only.
const QUERY_BLOCK: usize = 128;
/// Widths of heads are padded to a multiple of this in flash attention.
const HEAD_BLOCK: usize = 32;
/// Libraries have fast kernels for 16-bit products whose rows begin at multiples of 16 bytes: of this many numbers.
const ALIGNED: f64 = 8.0;
/// Seconds of a product before the power limit lowers the clock, and until it has.
const BOOSTED: (f64, f64) = (80e-6, 1.5e-3);

impl DeviceModel {
    /// The model of a device; `None` if its peaks are unknown.
    pub fn new(device: &DeviceSpec, framework: &FrameworkSpec) -> Option<Self> {
        let peak_fp32 = device.peak_fp32?;
        let mut model = DeviceModel {
            peak_8bit: device.peak_8bit.or(device.peak_16bit).unwrap_or(peak_fp32),
            peak_16bit: device.peak_16bit.unwrap_or(peak_fp32),
            peak_fp32,
            bandwidth: device.memory_bandwidth? * device.streaming.unwrap_or(0.8),
            units: device.units.unwrap_or(1) as f64,
            matmul: device.matmul.unwrap_or(0.8),
            matmul_8bit: device.matmul_8bit.or(device.matmul).unwrap_or(0.8),
            capped: device.capped_rate(),
            boost: 1.0,
            misaligned: device.misaligned.unwrap_or(1.0),
            ramp: device.ramp.unwrap_or(128.0),
            launch: device.launch.unwrap_or(4e-6),
            epilogue: device.epilogue,
            attention: device.attention.clone(),
            portable: device.portable_attention.clone(),
            corrections: Vec::new(),
            kernels: device.kernels.clone(),
            framework: framework.clone(),
        };
        let correction = |&point: &ProductPoint| {
            let width = if point.fp32 { 4.0 } else { 2.0 };
            let [m, n, k] = [point.m, point.n, point.k].map(|size| size as f64);
            let product = Product { batch: 1.0, m, n, k, width, factors: Factors::measured(&point) };
            Correction { point, factor: point.flops * model.tiled(product) / (2.0 * m * n * k) }
        };
        model.corrections = device.products.iter().map(correction).collect();
        model.matmul *= model.capped;
        model.matmul_8bit *= model.capped;
        Some(model)
    }

    /// The model of single products that are measured in bursts, before the power limit lowers the clock. In a step it always
    /// has.
    #[must_use]
    pub fn in_bursts(self, device: &DeviceSpec) -> Self {
        DeviceModel { boost: device.boost.unwrap_or(1.0), ..self }
    }

    /// Seconds of a kernel, with what the framework runs beside it.
    pub fn seconds(&self, kernel: &Kernel) -> f64 {
        let beside = unfused(kernel, &self.framework);
        self.alone(kernel) + beside.bytes / self.bandwidth + beside.launches * self.launch
    }

    fn alone(&self, kernel: &Kernel) -> f64 {
        let moving = kernel.bytes as f64 / self.bandwidth;
        match kernel.kind {
            KernelKind::Memory { fp32 } => {
                let measured = self.measured_kernel(kernel.name, fp32);
                let moving = measured.map_or(moving, |point| kernel.bytes as f64 / point.bandwidth);
                moving + self.launch
            }
            KernelKind::Product { m, n, k, dtype } => {
                let [m, n, k] = [m, n, k].map(|size| size as f64);
                let (width, factors) = (dtype.bytes() as f64, Factors::of(dtype));
                let product = self.product(Product { batch: 1.0, m, n, k, width, factors }).max(moving);
                let fused = kernel.flops as f64 - 2.0 * m * n * k;
                product + self.epilogue.map_or(0.0, |rate| fused / rate) + self.launch
            }
            KernelKind::Attention { shape, dtype, flash: true, backward } => {
                self.flash(kernel, shape, dtype, backward).max(moving) + self.launch
            }
            KernelKind::Attention { shape, dtype, flash: false, backward } => {
                self.plain(shape, dtype, backward)
            }
        }
    }

    /// The measurement of a kernel, in its own type if there is one.
    fn measured_kernel(&self, name: &str, fp32: bool) -> Option<&KernelPoint> {
        let of = |name: &str| {
            let points = || self.kernels.iter().filter(move |point| point.name == name);
            points().find(|point| point.fp32 == fp32).or_else(|| points().next())
        };
        // Profiles have one optimizer and one gated unit; the others are the same passes over memory.
        let like = match name {
            "lion" | "sgd" => Some("adamw"),
            "geglu" => Some("swiglu"),
            "geglu backward" => Some("swiglu backward"),
            _ => None,
        };
        of(name).or_else(|| like.and_then(of))
    }

    /// Seconds that the host needs to launch a kernel, and those that the framework runs beside it.
    pub fn host_seconds(&self, kernel: &Kernel) -> f64 {
        self.framework.host * (1.0 + unfused(kernel, &self.framework).launches)
    }

    fn flash(&self, kernel: &Kernel, shape: AttentionShape, dtype: DType, backward: bool) -> f64 {
        let fp32 = is_fp32(dtype);
        let portable =
            backward && self.framework.preset.is_none() && !shape.sequence.is_multiple_of(QUERY_BLOCK);
        let has_portable = portable && self.portable.iter().any(|point| point.fp32 == fp32);
        let points = if has_portable { &self.portable } else { &self.attention };
        let rate = self.attention_rate(points, shape, fp32, backward);
        let blocks = (shape.batch * shape.heads) as f64 * shape.sequence.div_ceil(QUERY_BLOCK) as f64;
        let waves = (blocks / self.units).ceil() * self.units / blocks;
        let padded = shape.head_dim.next_multiple_of(HEAD_BLOCK) as f64 / shape.head_dim as f64;
        let padded = if points.iter().any(|point| point.head_dim == shape.head_dim) { 1.0 } else { padded };
        let rate = rate * self.framework.attention * self.capped;
        kernel.flops as f64 / rate * waves.max(1.0) * padded
    }

    /// FLOP/s of flash attention, interpolated between the widths of heads that were measured by their distance.
    fn attention_rate(
        &self,
        points: &[AttentionPoint],
        shape: AttentionShape,
        fp32: bool,
        backward: bool,
    ) -> f64 {
        let peak = if fp32 { self.peak_fp32 } else { self.peak_16bit };
        let mut widths: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
        for point in points.iter().filter(|point| point.fp32 == fp32) {
            let rate = if backward { point.backward } else { point.forward };
            widths.entry(point.head_dim).or_default().push((point.sequence as f64, rate));
        }
        if widths.is_empty() {
            return peak * if backward { 0.35 } else { 0.45 };
        }
        let near = |head_dim: usize| 1.0 / (log_distance(head_dim, shape.head_dim).powi(2) + 1e-3);
        let weights: f64 = widths.keys().map(|&head_dim| near(head_dim)).sum();
        let rate = |points: &[(f64, f64)]| rate_at(points, shape.sequence as f64).ln();
        widths.iter().map(|(&width, points)| near(width) * rate(points)).sum::<f64>().div(weights).exp()
    }

    /// Plain attention with scores in memory: products over the whole square, and passes over the scores.
    fn plain(&self, shape: AttentionShape, dtype: DType, backward: bool) -> f64 {
        let (width, factors) = (dtype.bytes() as f64, Factors::of(dtype));
        let batch = (shape.batch * shape.heads) as f64;
        let [s, d] = [shape.sequence, shape.head_dim].map(|size| size as f64);
        let scores = Product { batch, m: s, n: s, k: d, width, factors };
        let sums = Product { batch, m: s, n: d, k: s, width, factors };
        let elements = shape.score_elements() as f64;
        let softmax = |passes: f64, backward: bool| {
            let beside = unfused_softmax(&self.framework, backward);
            let bytes = passes * width + self.framework.dropout + beside.bytes;
            elements * bytes / self.bandwidth + (1.0 + beside.launches) * self.launch
        };
        let forward = self.bound(scores) + self.bound(sums) + softmax(2.0, false);
        if backward {
            let own = self.bound(scores) + 3.0 * self.bound(sums) + softmax(3.0, true);
            own + self.framework.attention_again * forward
        } else {
            forward
        }
    }

    /// Seconds of a product with its launch; at least the time to move its bytes.
    fn bound(&self, product: Product) -> f64 {
        let Product { batch, m, n, k, width, .. } = product;
        let bytes = batch * width * (m * n + m * k + n * k);
        self.product(product).max(bytes / self.bandwidth) + self.launch
    }

    fn product(&self, product: Product) -> f64 {
        self.tiled(product) / (self.correction(product) * self.framework.products)
    }

    /// The ratio of measured to modelled rate, interpolated between the measured points.
    fn correction(&self, product: Product) -> f64 {
        let alike = self.corrections.iter().filter(|c| Factors::measured(&c.point) == product.factors);
        let near = |c: &Correction| {
            let along = |a: usize, b: f64| ((a as f64).ln() - b.ln()).powi(2);
            let distance =
                along(c.point.m, product.m) + along(c.point.n, product.n) + along(c.point.k, product.k);
            1.0 / (distance + 1e-3)
        };
        let (sum, weights) = alike.fold((0.0, 0.0), |(sum, weights), c| {
            let weight = near(c);
            (sum + weight * c.factor.ln(), weights + weight)
        });
        if weights > 0.0 { (sum / weights).exp() } else { 1.0 }
    }

    /// The best tiling of a product.
    fn tiled(&self, product: Product) -> f64 {
        let Product { batch, m, n, k, factors, .. } = product;
        let peak = match factors {
            Factors::Fp32 => self.matmul * self.peak_fp32,
            Factors::SixteenBits => self.matmul * self.peak_16bit,
            Factors::EightBits => self.matmul_8bit * self.peak_8bit,
        };
        let mut best = f64::INFINITY;
        for (rows, columns, share) in TILES {
            let tiles = batch * (m / rows).ceil() * (n / columns).ceil();
            for parts in SPLITS {
                let waves = (tiles * parts / self.units).ceil();
                let tile = 2.0 * rows * columns * (k / parts + self.ramp) * self.units / (peak * share);
                let sums = if parts > 1.0 { 8.0 * batch * parts * m * n / self.bandwidth } else { 0.0 };
                best = best.min(waves * tile + sums);
            }
        }
        let odd = factors == Factors::SixteenBits && [n, k].iter().any(|size| size % ALIGNED > 0.0);
        self.boosted(best) * if odd { self.misaligned } else { 1.0 }
    }

    /// A short product ends before the power limit lowers the clock.
    fn boosted(&self, seconds: f64) -> f64 {
        if self.boost <= 1.0 {
            return seconds;
        }
        let (from, until) = BOOSTED;
        let slowed = ((seconds / from).ln() / (until / from).ln()).clamp(0.0, 1.0);
        seconds * self.boost.powf(slowed - 1.0)
    }
}

use std::ops::Div;

/// The rate of attention at a length of sequences, from measured (length, rate). Tiles on the diagonal are half empty and a
/// block of queries has a start, so the time of a FLOP is a constant and a part that falls with the length. Both follow from the
/// two nearest lengths.
fn rate_at(points: &[(f64, f64)], sequence: f64) -> f64 {
    let mut nearest = points.to_vec();
    nearest.sort_by(|a, b| (a.0 / sequence).ln().abs().total_cmp(&(b.0 / sequence).ln().abs()));
    let first = nearest[0];
    let Some(&second) = nearest.iter().find(|point| point.0.total_cmp(&first.0).is_ne()) else {
        return first.1;
    };
    let slope = (1.0 / second.1 - 1.0 / first.1) / (1.0 / second.0 - 1.0 / first.0);
    let falling = 1.0 / first.1 + slope.max(0.0) * (1.0 / sequence - 1.0 / first.0);
    // Far beyond what was measured, noise in two points must not become a large factor.
    1.0 / falling.clamp(1.0 / (1.5 * first.1), 2.0 / first.1)
}

fn log_distance(a: usize, b: usize) -> f64 {
    (a as f64).ln() - (b as f64).ln()
}

fn is_fp32(dtype: DType) -> bool {
    dtype.bytes() >= 4
}

#[cfg(test)]
mod tests {
    use kintsugi_spec::Fusion;
    use kintsugi_tensor::ops::Scores;

    use super::*;

    fn device() -> DeviceSpec {
        DeviceSpec {
            peak_16bit: Some(100e12),
            peak_fp32: Some(10e12),
            memory_bandwidth: Some(1e12),
            units: Some(100),
            matmul: Some(0.8),
            ramp: Some(0.0),
            launch: Some(0.0),
            ..DeviceSpec::default()
        }
    }

    fn seconds(device: &DeviceSpec, m: usize, n: usize, k: usize) -> f64 {
        let kind = KernelKind::Product { m, n, k, dtype: DType::BF16 };
        let kernel = Kernel { name: "linear", flops: (2 * m * n * k) as u64, bytes: 0, kind };
        DeviceModel::new(device, &FrameworkSpec::default()).unwrap().seconds(&kernel)
    }

    #[test]
    fn a_product_of_whole_waves_reaches_the_given_share() {
        let (m, n, k) = (2560, 1280, 4096);
        let flops = (2 * m * n * k) as f64;
        assert!((flops / seconds(&device(), m, n, k) / 80e12 - 1.0).abs() < 1e-9);
        let one_more = flops / seconds(&device(), m + 1, n, k) / 80e12;
        assert!(one_more < 0.95, "a wave more for one row: {one_more}");
    }

    #[test]
    fn a_measured_product_is_predicted_as_it_was_measured() {
        let point = ProductPoint { m: 512, n: 768, k: 1024, fp32: false, flops: 33e12, burst: None };
        let device = DeviceSpec { products: vec![point], ..device() };
        let predicted = (2 * 512 * 768 * 1024) as f64 / seconds(&device, 512, 768, 1024);
        assert!((predicted / 33e12 - 1.0).abs() < 1e-6, "{predicted}");
    }

    #[test]
    fn products_in_8_bits_have_their_own_peak_and_share() {
        let device = DeviceSpec { peak_8bit: Some(200e12), matmul_8bit: Some(0.6), ..device() };
        let seconds = |device: &DeviceSpec, dtype| {
            let kind = KernelKind::Product { m: 2560, n: 1280, k: 4096, dtype };
            let kernel = Kernel { name: "linear", flops: 2 * 2560 * 1280 * 4096, bytes: 0, kind };
            DeviceModel::new(device, &FrameworkSpec::default()).unwrap().seconds(&kernel)
        };
        let faster = seconds(&device, DType::BF16) / seconds(&device, DType::U8);
        assert!((faster - 2.0 * 0.6 / 0.8).abs() < 1e-9, "{faster}");
        let unknown = DeviceSpec { peak_8bit: None, matmul_8bit: None, ..device };
        assert!((seconds(&unknown, DType::BF16) / seconds(&unknown, DType::U8) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_framework_in_primitives_has_slower_norms_and_a_fused_optimizer() {
        let mut framework = FrameworkSpec::default();
        framework.kernels.norm = Fusion::Eager;
        let model = DeviceModel::new(&device(), &framework).unwrap();
        let seconds = |name| {
            model.seconds(&Kernel { name, flops: 0, bytes: 1 << 30, kind: KernelKind::Memory { fp32: true } })
        };
        assert!((seconds("norm") / seconds("adamw") - 9.0).abs() < 1e-9);
    }

    #[test]
    fn only_single_products_run_before_the_power_limit_acts() {
        let kind = KernelKind::Product { m: 512, n: 512, k: 512, dtype: DType::BF16 };
        let kernel = Kernel { name: "linear", flops: 2 << 27, bytes: 0, kind };
        let device = DeviceSpec { boost: Some(1.5), ..device() };
        let model = DeviceModel::new(&device, &FrameworkSpec::default()).unwrap();
        let in_a_step = model.seconds(&kernel);
        assert!((in_a_step / model.in_bursts(&device).seconds(&kernel) - 1.5).abs() < 1e-9);
    }

    #[test]
    fn a_power_cap_slows_products_and_attention_and_nothing_else() {
        let shape = AttentionShape {
            batch: 100,
            sequence: 1024,
            heads: 16,
            kv_heads: 16,
            head_dim: 64,
            scores: Scores::PLAIN,
        };
        let attention = KernelKind::Attention { shape, dtype: DType::BF16, flash: true, backward: false };
        let product = KernelKind::Product { m: 4096, n: 4096, k: 4096, dtype: DType::BF16 };
        let point = ProductPoint { m: 512, n: 512, k: 512, fp32: false, flops: 5e12, burst: None };
        let measured = DeviceSpec { power_max: Some(700.0), products: vec![point], ..device() };
        let seconds = |power_cap, kind, flops, bytes| {
            let device = DeviceSpec { power_cap, ..measured.clone() };
            let model = DeviceModel::new(&device, &FrameworkSpec::default()).unwrap();
            model.seconds(&Kernel { name: "any", flops, bytes, kind })
        };
        let slower = |cap, kind, flops, bytes| {
            seconds(Some(cap), kind, flops, bytes) / seconds(None, kind, flops, bytes)
        };
        let root = 1.4_f64.sqrt();
        assert!((slower(500.0, product, 2 << 36, 0) - root).abs() < 1e-9);
        assert!((slower(500.0, attention, 1 << 40, 0) - root).abs() < 1e-9);
        assert!((slower(500.0, KernelKind::Memory { fp32: true }, 0, 1 << 30) - 1.0).abs() < 1e-9);
        assert!((slower(900.0, product, 2 << 36, 0) - 1.0).abs() < 1e-9, "beyond the most that it draws");
    }

    #[test]
    fn a_memory_bound_kernel_is_as_fast_as_it_was_measured_in_its_type() {
        let point = |name: &str, fp32, bandwidth| KernelPoint { name: name.into(), fp32, bandwidth };
        let points = vec![point("norm", true, 4e9), point("norm", false, 1e9), point("add", true, 2e9)];
        let device = DeviceSpec { kernels: points, ..device() };
        let model = DeviceModel::new(&device, &FrameworkSpec::default()).unwrap();
        let rate = |name, fp32| {
            let (flops, bytes, kind) = (0, 1 << 30, KernelKind::Memory { fp32 });
            bytes as f64 / model.seconds(&Kernel { name, flops, bytes, kind })
        };
        let rates = [rate("norm", true), rate("norm", false), rate("add", true), rate("add", false)];
        for (rate, measured) in rates.into_iter().zip([4e9, 1e9, 2e9, 2e9]) {
            assert!((rate / measured - 1.0).abs() < 1e-9, "{rates:?}");
        }
    }

    #[test]
    fn attention_is_as_measured_and_faster_for_longer_sequences() {
        let points = [(1024.0, 300.0), (2048.0, 400.0)];
        assert!(
            (rate_at(&points, 1024.0) - 300.0).abs() < 1e-9
                && (rate_at(&points, 2048.0) - 400.0).abs() < 1e-9
        );
        let long = rate_at(&points, 8192.0);
        assert!(long > 480.0 && long < 600.0, "{long}");
        assert!(
            (rate_at(&[(1024.0, 300.0)], 8192.0) - 300.0).abs() < 1e-9,
            "nothing is known of other lengths"
        );
    }

    #[test]
    fn this_engine_has_a_slower_backward_for_sequences_that_are_no_whole_blocks() {
        let point = |rate: f64| AttentionPoint {
            head_dim: 64,
            sequence: 1024,
            fp32: false,
            forward: 2.0 * rate,
            backward: rate,
        };
        let device =
            DeviceSpec { attention: vec![point(40e12)], portable_attention: vec![point(20e12)], ..device() };
        let per_score = |sequence: usize, backward: bool, framework: &FrameworkSpec| {
            let shape = AttentionShape {
                batch: 100,
                sequence,
                heads: 16,
                kv_heads: 16,
                head_dim: 64,
                scores: Scores::PLAIN,
            };
            let kind = KernelKind::Attention { shape, dtype: DType::BF16, flash: true, backward };
            let kernel = Kernel { name: "attention", flops: 1 << 40, bytes: 0, kind };
            DeviceModel::new(&device, framework).unwrap().seconds(&kernel)
        };
        let own = FrameworkSpec::default();
        let other = FrameworkSpec { preset: Some("eager".into()), ..FrameworkSpec::default() };
        let ratio = |backward, framework: &FrameworkSpec| {
            per_score(1000, backward, framework) / per_score(1024, backward, framework)
        };
        assert!((ratio(true, &own) - 2.0).abs() < 1e-9);
        assert!((ratio(false, &own) - 1.0).abs() < 1e-9 && (ratio(true, &other) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_device_without_peaks_has_no_model() {
        assert!(DeviceModel::new(&DeviceSpec::default(), &FrameworkSpec::default()).is_none());
    }
}
