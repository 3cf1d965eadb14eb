//! The search computes the peak of the fullest rank of every layout exactly as the full prediction does: to the byte.

use kintsugi_simulate::{Coverage, PeakMemory, predict};
use kintsugi_tensor::Device;
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};
use proptest::sample::select;

use crate::layouts::{bases, plan, strategies};

const DEVICES: [Device; 2] = [Device::Cpu { threads: 1 }, Device::Cuda { deterministic: true }];

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
}
