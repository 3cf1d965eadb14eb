//! Watches the health of a run's GPU. Its state is beside the flight recorders of the ranks, so that a verdict shows it even if the
//! process has died.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kintsugi_gpu::Sensors;
use kintsugi_run::GpuState;

/// How often the state is written. Errors are written at once.
const PERIOD: Duration = Duration::from_secs(5);

/// The longest wait for an error, after which the thread looks whether it ends.
const WAIT: Duration = Duration::from_millis(100);

/// A thread that writes the state of a GPU. It writes it for the last time when it is dropped.
pub(crate) struct GpuHealth {
    stop: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

impl GpuHealth {
    /// Watches the GPU of these ranks, whose run has the folder `out`. `None` if no thread can be started.
    pub fn watch(sensors: Box<dyn Sensors>, out: PathBuf, ranks: Range<usize>) -> Option<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let watcher = thread::Builder::new().name("gpu health".to_owned()).spawn({
            let stop = Arc::clone(&stop);
            move || {
                let before = sensors.memory_errors().unwrap_or(0);
                let (mut state, mut written) = (GpuState::default(), None::<Instant>);
                loop {
                    let is_last = stop.load(Ordering::Relaxed);
                    let errors = sensors.memory_errors().unwrap_or(0).saturating_sub(before);
                    let xid = if is_last { None } else { sensors.wait_for_error(WAIT) };
                    let is_new = errors != state.memory_errors || xid.is_some();
                    state.memory_errors = errors;
                    if let Some(xid) = xid {
                        state.add_xid(xid);
                    }
                    if is_last || is_new || written.is_none_or(|written| written.elapsed() >= PERIOD) {
                        written = Some(Instant::now());
                        state.clock_mhz = sensors.clocks();
                        state.power_w = sensors.power().zip(sensors.power_limit()).map(Into::into);
                        state.temperature_c = sensors.temperature();
                        // Training does not depend on it.
                        ranks.clone().for_each(|rank| drop(state.write(&out, rank)));
                    }
                    if is_last {
                        return;
                    }
                }
            }
        });
        Some(GpuHealth { stop, watcher: Some(watcher.ok()?) })
    }
}

impl Drop for GpuHealth {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(watcher) = self.watcher.take() {
            // The thread only reads, writes and waits, so it does not panic.
            watcher.join().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use kintsugi_gpu::PowerMeter;

    use super::*;

    /// A GPU that has had errors before, and gets one more and a critical one.
    #[derive(Debug, Default)]
    struct TestGpu {
        looks: AtomicU64,
    }

    impl PowerMeter for TestGpu {
        fn energy(&self) -> Option<f64> {
            None
        }

        fn power(&self) -> Option<f64> {
            Some(310.0)
        }

        fn power_limit(&self) -> Option<f64> {
            Some(700.0)
        }
    }

    impl Sensors for TestGpu {
        fn clocks(&self) -> Option<[u32; 2]> {
            Some([1200, 1980])
        }

        fn temperature(&self) -> Option<u32> {
            None
        }

        fn memory_errors(&self) -> Option<u64> {
            Some(5 + self.looks.load(Ordering::Relaxed).min(1))
        }

        fn wait_for_error(&self, limit: Duration) -> Option<u64> {
            thread::sleep(limit / 10);
            (self.looks.fetch_add(1, Ordering::Relaxed) == 2).then_some(79)
        }
    }

    #[test]
    fn errors_since_the_run_began_are_written_at_once() {
        let out = std::env::temp_dir().join(format!("kintsugi-gpu-health-{}", std::process::id()));
        let health = GpuHealth::watch(Box::new(TestGpu::default()), out.clone(), 4..6).expect("a thread");
        let begun = Instant::now();
        let has_error = || GpuState::read(&out, 5).is_some_and(|state| !state.xids.is_empty());
        while !has_error() {
            assert!(begun.elapsed() < PERIOD, "it is not written at once");
            thread::sleep(Duration::from_millis(1));
        }
        drop(health);
        let state = [4, 5].map(|rank| GpuState::read(&out, rank).expect("it was written"));
        std::fs::remove_dir_all(&out).ok();
        assert_eq!(state[0], state[1]);
        assert_eq!(state[0].to_string(), "Xid 79, uncorrected ECC errors: 1, 1200 of 1980 MHz, 310 of 700 W");
    }
}
