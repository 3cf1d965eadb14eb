//! Transfers on a side stream: ordered by events, recorded in traces, and part of captured graphs.

use std::ffi::c_void;
use std::rc::Rc;

use cudarc::driver::result::memcpy_dtod_async;
use kintsugi_gpu::GpuBackend;
use kintsugi_tensor::{
    Backend, Buffer, Category, DType, ReplayOutcome, ReplayRequest, SideEvent, SideStream, SideTransfer,
};

use crate::test_backend::gpu;

/// Long enough that a missing dependency shows.
const LEN: usize = 4 << 20;

/// Copies one buffer to another on a side stream, as a transport would.
fn copy_on(side: &dyn SideStream, from: &Buffer, to: &Buffer) -> SideEvent {
    let (source, target) = (from.view().address(), to.view().address());
    let transfer =
        SideTransfer { name: &|| "copy".to_owned(), bytes: 4 * LEN as u64, words: &[source, target] };
    side.start(&transfer, &mut |stream: *mut c_void| {
        // SAFETY: both buffers have `LEN` elements of f32, and live until the test has read its result.
        let copied = unsafe { memcpy_dtod_async(target, source, LEN * 4, stream.cast()) };
        copied.expect("a copy between live buffers");
    })
}

/// Adds `from` to `total` by way of a copy on a side stream, and increases `from` meanwhile and afterwards.
struct CopyingStep<'a> {
    gpu: &'a GpuBackend,
    side: Rc<dyn SideStream>,
    from: Buffer,
    copy: Buffer,
    total: Buffer,
    one: Buffer,
}

impl<'a> CopyingStep<'a> {
    fn new(gpu: &'a GpuBackend) -> Self {
        let filled = |value| {
            let buffer = gpu.allocate(LEN, DType::F32, Category::Activations);
            gpu.fill(value, buffer.view());
            buffer
        };
        let side = gpu.side_stream("side").expect("a GPU has streams");
        CopyingStep { gpu, side, from: filled(0.0), copy: filled(9.0), total: filled(0.0), one: filled(1.0) }
    }

    fn enqueue(&self) {
        self.gpu.add(self.one.view(), self.from.view());
        let copied = copy_on(&*self.side, &self.from, &self.copy);
        // Independent work, which may run at the same time.
        self.gpu.fill(1.0, self.one.view());
        self.side.join(copied);
        self.gpu.add(self.copy.view(), self.total.view());
    }

    /// The first and the last of the totals, which are small integers.
    fn totals(&self) -> [u64; 2] {
        [0, LEN - 1].map(|index| self.gpu.read_scalar(self.total.view(), index) as u64)
    }
}

#[test]
fn a_transfer_runs_between_what_is_before_and_after_it() {
    let Some(gpu) = gpu() else { return };
    let step = CopyingStep::new(&gpu);
    let before = gpu.host_waits();
    for _ in 0..10 {
        step.enqueue();
    }
    assert_eq!(gpu.host_waits(), before, "the host waits for no transfer");
    assert_eq!(step.totals(), [55; 2]);
    assert!(gpu.host_waits() > before, "a read waits");
}

#[test]
fn a_transfer_is_recorded_with_the_name_of_its_stream() {
    let Some(gpu) = gpu() else { return };
    let step = CopyingStep::new(&gpu);
    step.enqueue();
    gpu.synchronize();
    gpu.record_launches();
    let begun = gpu.mark();
    step.enqueue();
    let launches = gpu.take_launches();
    let streams: Vec<_> =
        launches.iter().map(|launch| launch.transfer.as_ref().map(|found| &*found.stream)).collect();
    assert_eq!(streams, [None, Some("side"), None, None], "{launches:?}");
    let copy = &launches[1];
    let [first, copied, last] = [&launches[0], copy, &launches[3]].map(|launch| launch.ended.since(&begun));
    assert_eq!(copy.name, "copy");
    assert!(first <= copied && copied <= last, "{launches:?}");
}

#[test]
fn a_captured_step_contains_its_transfers() {
    let Some(gpu) = gpu() else { return };
    let step = CopyingStep::new(&gpu);
    let mut outcomes = Vec::new();
    let before = gpu.host_waits();
    for _ in 0..8 {
        outcomes.push(gpu.replay_step(&mut |what| match what {
            ReplayRequest::WholeStep => step.enqueue(),
            ReplayRequest::Tokens(_) => {}
        }));
    }
    assert_eq!(
        outcomes.iter().filter(|&outcome| *outcome == ReplayOutcome::Replayed).count(),
        3,
        "{outcomes:?}"
    );
    assert!(
        gpu.host_waits() <= before.map(|waits| waits + 3),
        "only replays may wait, for the launch before the last one"
    );
    assert_eq!(step.totals(), [36; 2]);
    step.side.finish();
    step.enqueue();
    assert_eq!(step.totals(), [45; 2]);
}
