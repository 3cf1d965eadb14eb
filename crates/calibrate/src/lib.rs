//! Measures devices and links: the rates from which the time of a step is predicted.
//!
//! Measurements call the [`Backend`] that training uses, so every device that can train can be measured. Each rate is
//! measured twice: in *bursts* on a rested device, and *sustained*, back to back on a device that is as hot and as slow as
//! in training. Plans use the sustained rates.

mod attention;
mod background_load;
mod bench;
mod bytes;
mod collectives;
mod kernels;
mod links;
mod products;
mod shapes;

pub use background_load::under_background_load;
pub use collectives::{Arrangement, TransferKind, TransferTime, time_transfers};
pub use links::thread_links;
pub use shapes::{Rows, Shapes};

use std::time::Duration;

use kintsugi_gpu::PowerMeter;
use kintsugi_spec::{AttentionPoint, DeviceSpec, ProductPoint};
use kintsugi_tensor::Backend;

use bench::Bench;

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Warm-up before sustained rates are measured.
    pub warm_up: Duration,
    /// Duration of each sustained measurement.
    pub sustained: Duration,
    /// Pause before every burst.
    pub rest: Duration,
    /// Whether other programs may run on the device. Then the median of many short runs counts: the steps of a training are
    /// disturbed as often as these runs are.
    pub shared: bool,
}

/// The progress of a calibration.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Measurements done.
    pub done: usize,
    /// Total number of measurements.
    pub all: usize,
}

/// Measures a device. Its name, its memory and its data-sheet figures are taken from `known`. `meter` reads the device's
/// power, if NVML is available.
pub fn calibrate(
    backend: &dyn Backend,
    meter: Option<&dyn PowerMeter>,
    shapes: &Shapes,
    patience: Patience,
    known: DeviceSpec,
    on_progress: impl FnMut(Progress),
) -> DeviceSpec {
    let mut bench = Bench::new(backend, meter, patience, on_progress, shapes.count());
    let power_idle = bench.idle_power().or(known.power_idle);
    let launch = bytes::launch(&mut bench);
    let bursts = rates(&mut bench, shapes, Bench::burst);
    let heat = bench.warm_up(shapes.product_types(shapes.dtypes[0]), shapes.warm);
    let bandwidth = bytes::streaming(&mut bench, shapes.copied);
    let sustained = rates(&mut bench, shapes, Bench::sustained);
    let kernels = shapes.kernels.map(|shape| kernels::rates(&mut bench, shape, &shapes.dtypes));
    let epilogue = shapes.kernels.and_then(|shape| kernels::epilogue(&mut bench, shape));
    let products: Vec<ProductPoint> = sustained
        .products
        .iter()
        .zip(&bursts.products)
        .map(|(sustained, burst)| ProductPoint { burst: Some(burst.flops), ..*sustained })
        .collect();
    let peaks = [(known.peak_16bit, false), (known.peak_fp32, true)]
        .map(|(known, fp32)| Peak::new(known, &products, fp32));
    let memory_bandwidth = known.memory_bandwidth.unwrap_or(bandwidth);
    DeviceSpec {
        peak_16bit: peaks[0].flops,
        peak_fp32: peaks[1].flops,
        matmul: peaks.iter().filter_map(|peak| peak.reached).reduce(f64::max),
        memory_bandwidth: Some(memory_bandwidth),
        streaming: Some((bandwidth / memory_bandwidth).min(1.0)),
        launch: Some(launch),
        power_idle,
        power_max: heat.or(known.power_max),
        attention: sustained.attention,
        products,
        kernels: kernels.unwrap_or_default(),
        epilogue,
        ..known
    }
}

/// The peak of products of one type.
struct Peak {
    /// FLOP/s, from the data sheet if there is one, or else the highest measured rate.
    flops: Option<f64>,
    /// The share that products reach when sustained, if the type was measured.
    reached: Option<f64>,
}

impl Peak {
    fn new(known: Option<f64>, products: &[ProductPoint], fp32: bool) -> Self {
        let best = |rate: fn(&ProductPoint) -> f64| {
            products.iter().filter(|point| point.fp32 == fp32).map(rate).reduce(f64::max)
        };
        let flops = known.or_else(|| best(|point| point.burst.unwrap_or(point.flops)));
        let sustained = best(|point| point.flops);
        let reached = sustained.zip(flops).map(|(sustained, peak)| (sustained / peak).min(1.0));
        Peak { flops, reached }
    }
}

/// One pass over all shapes.
struct Rates {
    products: Vec<ProductPoint>,
    attention: Vec<AttentionPoint>,
}

/// Seconds that one run of some work takes.
type Timing<'a> = fn(&mut Bench<'a>, &dyn Fn()) -> f64;

fn rates<'a>(bench: &mut Bench<'a>, shapes: &Shapes, timing: Timing<'a>) -> Rates {
    let mut rates = Rates { products: Vec::new(), attention: Vec::new() };
    for &dtype in &shapes.dtypes {
        let (products, types) = (shapes.products.iter(), shapes.product_types(dtype));
        rates.products.extend(products.map(|&shape| products::rate(bench, types, shape, timing)));
        let attention = shapes.attention.iter();
        rates.attention.extend(attention.map(|&shape| attention::rate(bench, dtype, shape, timing)));
    }
    rates
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use kintsugi_plan::config::ConfigSource;
    use kintsugi_tensor::DType;
    use kintsugi_tensor::cpu::CpuBackend;
    use kintsugi_tensor::cpu::memory::Heap;

    use super::*;

    #[test]
    fn every_shape_of_a_model_gets_a_rate() {
        let backend = CpuBackend::new(Rc::new(Heap::default()), 1);
        let model = ConfigSource::demo().set("model.vocab=200").plan().expect("the demo").model;
        let kernels = Some(Rows { rows: 8, width: 16 });
        let dtypes = [DType::F32, DType::BF16];
        let shapes = Shapes { copied: 1 << 10, kernels, ..Shapes::of(&[model], &[1], &[8], &[16], &dtypes) };
        let patience = Patience {
            warm_up: Duration::ZERO,
            sustained: Duration::ZERO,
            rest: Duration::ZERO,
            shared: true,
        };
        let mut seen = Vec::new();
        let device = calibrate(&backend, None, &shapes, patience, DeviceSpec::default(), |progress| {
            seen.push((progress.done, progress.all));
        });
        let last = seen.last().copied();
        assert_eq!(last, Some((shapes.count(), shapes.count())), "the bar ends where it said");
        assert_eq!(device.products.len(), 30, "five layers, three products each, in two types");
        assert_eq!(device.products.iter().filter(|point| point.fp32).count(), 15);
        let rates = device.products.iter().map(|point| point.flops);
        assert!(
            rates
                .chain(device.peak_fp32)
                .chain(device.peak_16bit)
                .chain(device.launch)
                .all(|rate| rate > 0.0 && rate.is_finite())
        );
        let rates = device.kernels.iter().map(|point| point.bandwidth);
        assert!(rates.clone().count() > 5 && rates.into_iter().all(|rate| rate > 0.0 && rate.is_finite()));
        let narrow = |name: &str| {
            let points = device.kernels.iter().filter(|point| point.name == name);
            points.filter(|point| !point.fp32).count()
        };
        assert_eq!(["norm", "adamw", "quantize int8", "quantize int4"].map(narrow), [1; 4]);
        assert_eq!(narrow("requantize int4"), 0, "codes alone have no other type");
        assert!(device.attention.iter().all(|point| point.forward > 0.0 && point.backward > 0.0));
    }
}
