//! The search computes the peak of the fullest rank of every layout exactly as the full prediction does: to the byte.

use kintsugi_plan::ScheduleKind;
use kintsugi_simulate::{Coverage, PeakMemory, predict};
use kintsugi_spec::{FrameworkSpec, KeepsSpec};
use kintsugi_tensor::Device;
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};
use proptest::sample::select;

use crate::layouts::{bases, plan, strategies};

const DEVICES: [Device; 2] = [Device::Cpu { threads: 1 }, Device::cuda(true)];

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn peak_memory_equals_that_of_the_full_prediction(
        base in bases(),
        layouts in vec(strategies(), 12),
        device in select(DEVICES.to_vec()),
    ) {
        let peaks = PeakMemory::new(device);
        for plan in layouts.iter().filter_map(|layout| plan(&base, layout)) {
            let full = predict(&plan, device, Coverage::WholeStep);
            let total = full.stages.iter().map(|stage| stage.total).max().unwrap();
            let reserved = full.stages.iter().map(|stage| stage.reserved).max().unwrap();
            prop_assert_eq!(peaks.of(&plan), total, "{}", plan.to_toml());
            prop_assert!(peaks.resident(&plan) <= total && total <= reserved, "{}", plan.to_toml());
        }
    }

    #[test]
    fn framework_memory_equals_that_of_the_full_prediction(
        base in bases(),
        layouts in vec(strategies(), 12),
        kept_tp in select(vec![None, Some(1.5)]),
        allocator in select(vec![0.0, 0.07]),
    ) {
        let mut base = base;
        base.framework = FrameworkSpec {
            kept: 1.3,
            kept_tp,
            allocator,
            reserve: 1000.0,
            logit_bytes: 10.0,
            parameter_bytes: 2.0,
            bucket_bytes: 1.0,
            keeps: KeepsSpec { stream: 2.0, norms: 4.0, heads: 2.0, ffn: 1.5, scores: 3.0 },
            layer_gradients: 2.0,
            ..base.framework
        };
        let peaks = PeakMemory::new(DEVICES[1]);
        for plan in layouts.iter().filter_map(|layout| plan(&base, layout)) {
            let full = predict(&plan, DEVICES[1], Coverage::WholeStep).under_framework(&plan);
            let reserved = full.stages.iter().map(|stage| stage.reserved).max().unwrap();
            let peak = peaks.of(&plan);
            prop_assert!(peak <= reserved, "{}", plan.to_toml());
            // With a split backward, what a framework adds may be most in the middle of a run of equal stages.
            if plan.pipeline.schedule != ScheduleKind::ZeroBubble {
                prop_assert_eq!(peak, reserved, "{}", plan.to_toml());
            }
        }
    }
}
