//! Copies, products and attention, beside what the profile of the cluster predicts.

use std::time::Duration;

use kintsugi_calibrate::{Patience, Shapes, calibrate};
use kintsugi_gpu::PowerMeter;
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{DeviceKind, Plan};
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_spec::{AttentionPoint, DeviceSpec, Hardware, ModelSpec, ProductPoint};
use kintsugi_tensor::ops::AttentionShape;
use kintsugi_tensor::paper::{Kernel, KernelKind};
use kintsugi_tensor::{Backend, DType};
use serde::Serialize;

use super::Test;
use crate::progress::Progress;

/// What was measured.
#[derive(Serialize)]
pub struct Rates {
    /// Bytes/s that copies read and write.
    pub copies: Rate,
    /// FLOP/s.
    pub products: Vec<Rate>,
    /// FLOP/s.
    pub attention: Vec<Rate>,
}

/// One rate.
#[derive(Serialize)]
pub struct Rate {
    pub what: String,
    pub measured: f64,
    /// By the profile. `None` if it does not describe such a device.
    pub predicted: Option<f64>,
}

/// The model whose shapes are measured: the configuration's, or one that fills a GPU.
fn model(plan: &Plan, test: &Test) -> ModelSpec {
    if test.kind == DeviceKind::Cpu || test.brief {
        return plan.model.clone();
    }
    ConfigSource::text("model.preset = \"gpt2-124m\"").plan().expect("a preset is legal").model
}

/// Tokens of a product.
fn rows(plan: &Plan, test: &Test) -> usize {
    if test.kind == DeviceKind::Cpu || test.brief { plan.batch.sequence * plan.batch.micro } else { 8192 }
}

/// Bytes of device memory for all of it.
pub fn memory(test: &Test) -> u64 {
    if test.brief { 96 << 20 } else { 6 << 30 }
}

/// Measures a device.
pub fn measure(backend: &dyn Backend, meter: Option<&dyn PowerMeter>, plan: &Plan, test: &Test) -> Rates {
    let (rows, sequence) = (rows(plan, test), if test.brief { plan.batch.sequence } else { 1024 });
    let dtype = if test.kind == DeviceKind::Cpu { DType::F32 } else { DType::BF16 };
    let mut shapes = Shapes::of(&[model(plan, test)], &[1], &[rows], &[sequence], &[dtype]);
    if test.brief {
        shapes.copied = 1 << 12;
        shapes.attention.iter_mut().for_each(|shape| shape.batch = 1);
    }
    let patience = Patience {
        warm_up: Duration::from_secs(if test.brief { 0 } else { 5 }),
        sustained: Duration::from_millis(if test.brief { 1 } else { 200 }),
        rest: Duration::from_millis(20),
        shared: test.kind == DeviceKind::Cpu,
    };
    let progress = Progress::new("rates", 0);
    let known = plan.cluster.device.clone();
    let measured = calibrate(backend, meter, &shapes, patience, known, |done| {
        progress.set(done.done as u64, done.all as u64, "");
    });
    drop(progress);
    beside_profile(plan, &shapes, &measured)
}

/// The measured rates with those of the plan's device.
fn beside_profile(plan: &Plan, shapes: &Shapes, measured: &DeviceSpec) -> Rates {
    let dtype = shapes.dtypes[0];
    let hardware = if plan.run.device == DeviceKind::Cpu { Hardware::Cpu } else { Hardware::Gpu };
    let profile = Some(&plan.cluster.device).filter(|profile| profile.kind == Some(hardware));
    let model = profile.and_then(|profile| DeviceModel::new(profile, &plan.framework));
    let predict = |flops: f64, kernel: Kernel| model.as_ref().map(|model| flops / model.seconds(&kernel));
    let product = |&ProductPoint { m, n, k, flops: measured, .. }: &ProductPoint| {
        let flops = 2 * m * n * k;
        let bytes = dtype.bytes() * (m * n + m * k + n * k);
        let kind = KernelKind::Product { m, n, k, dtype };
        let kernel = Kernel { name: "linear", flops: flops as u64, bytes: bytes as u64, kind };
        Rate {
            what: format!("product {m} × {n} × {k}"), measured, predicted: predict(flops as f64, kernel)
        }
    };
    let attention = |(point, &shape): (&AttentionPoint, &AttentionShape)| {
        let AttentionShape { sequence, head_dim, .. } = shape;
        [(false, point.forward, 2), (true, point.backward, 5)].map(|(backward, measured, products)| {
            let flops = products * shape.score_elements() * head_dim;
            let kind = KernelKind::Attention { shape, dtype, flash: true, backward };
            let kernel = Kernel { name: "attention", flops: flops as u64, bytes: 0, kind };
            let pass = if backward { "backward" } else { "forward" };
            let what = format!("attention {pass}, heads of {head_dim}, {sequence} tokens");
            Rate { what, measured, predicted: predict(flops as f64, kernel) }
        })
    };
    let streaming = |device: &DeviceSpec| Some(device.memory_bandwidth? * device.streaming.unwrap_or(0.8));
    Rates {
        copies: Rate {
            what: "copies".to_owned(),
            measured: streaming(measured).unwrap_or(0.0),
            predicted: profile.and_then(streaming),
        },
        products: measured.products.iter().map(product).collect(),
        attention: measured.attention.iter().zip(&shapes.attention).flat_map(attention).collect(),
    }
}
