//! The recorded launches of a GPU.

use std::time::Duration;

use kintsugi_conformance::TestBackend;
use kintsugi_tensor::ops::Linear;
use kintsugi_tensor::{Backend, Category, DType};

use crate::test_backend::any_gpu;

const ROWS: usize = 256;
const WIDTH: usize = 128;

#[test]
fn recorded_launches_have_names_and_times() {
    let Some(gpu) = any_gpu() else { return };
    let backend = TestBackend { device: &gpu, dtype: DType::BF16 };
    let (x, weight) = (backend.input(ROWS * WIDTH, 1), backend.input(WIDTH * WIDTH, 2));
    let out = gpu.allocate(ROWS * WIDTH, DType::BF16, Category::Activations);
    let work = || {
        gpu.linear(Linear {
            x: x.view(),
            weight: weight.view(),
            bias: None,
            gelu: None,
            residual: None,
            out: out.view(),
            rows: ROWS,
            inputs: WIDTH,
            outputs: WIDTH,
            float8: None,
        });
        gpu.add(x.view(), out.view());
    };
    work();
    assert!(gpu.take_launches().is_empty(), "recording is off");
    let begun = gpu.mark();
    gpu.record_launches();
    work();
    let launches = gpu.take_launches();
    let ended = gpu.mark();
    let names: Vec<&str> = launches.iter().map(|launch| launch.name.as_str()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(names[0], "product 256 × 128 × 128");
    assert!(names[1].starts_with("add"), "{names:?}");
    let mut last = begun.since(&begun);
    for launch in &launches {
        let (from, to) = (launch.begun.since(&begun), launch.ended.since(&begun));
        assert!(last <= from && from < to, "{launches:?}");
        last = to;
    }
    assert!(last <= ended.since(&begun) && last < Duration::from_secs(1), "{launches:?}");
    work();
    assert!(gpu.take_launches().is_empty(), "recording has stopped");
}
