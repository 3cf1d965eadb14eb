//! Measures a run's GPU: the memory in use according to the driver, and the energy. Watches its health.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kintsugi_gpu::Gpu;
use kintsugi_plan::Plan;

use crate::gpu_health::GpuHealth;
use crate::job::platform;

/// Measures a GPU while a run uses it.
pub(crate) struct GpuMonitor {
    gpu: Gpu,
    /// Bytes that were free before the run allocated any. The driver's own context does not count as the run's.
    free: u64,
    energy: Option<EnergyMonitor>,
    _health: Option<GpuHealth>,
}

impl GpuMonitor {
    /// Starts to measure the GPU of the ranks of this process, and writes its state to the run's folder `out`, if it has one. `None` on
    /// a CPU, and if no GPU can be opened: the ranks report why.
    pub fn new(plan: &Plan, gpu: usize, out: Option<&Path>, ranks: Range<usize>) -> Option<Self> {
        let platform = platform(plan.run.device)?;
        let gpu = platform.gpu(gpu % platform.devices().ok()?.max(1)).ok()?;
        let (free, _) = gpu.memory().ok()?;
        let energy = gpu.power_meter().and_then(|meter| EnergyMonitor::new(move || meter.energy()));
        let health = out.and_then(|out| GpuHealth::watch(gpu.sensors()?, out.to_owned(), ranks));
        Some(GpuMonitor { gpu, free, energy, _health: health })
    }

    /// Bytes that were allocated since.
    pub fn taken(&self) -> Option<u64> {
        let (free, _) = self.gpu.memory().ok()?;
        Some(self.free.saturating_sub(free))
    }

    /// The newest reading of the GPU's energy counter.
    pub fn energy(&self) -> Option<EnergyReading> {
        self.energy.as_ref().map(|energy| energy.readings().newest)
    }

    /// The mean power since a reading, in watts. If there is no newer reading, the power between the last two.
    pub fn watts(&self, since: EnergyReading) -> Option<f64> {
        self.energy.as_ref()?.readings().watts(since)
    }
}

/// The energy counter at some time. Only differences have a meaning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EnergyReading {
    at: Instant,
    joules: f64,
}

/// The last two readings of the energy counter. Both are the first reading until there is a second.
#[derive(Clone, Copy, Debug)]
struct LastReadings {
    previous: EnergyReading,
    newest: EnergyReading,
}

impl LastReadings {
    fn add(&mut self, newest: EnergyReading) {
        *self = LastReadings { previous: self.newest, newest };
    }

    /// See [`GpuMonitor::watts`].
    fn watts(&self, since: EnergyReading) -> Option<f64> {
        let since = if since.at < self.newest.at { since } else { self.previous };
        let seconds = self.newest.at.saturating_duration_since(since.at).as_secs_f64();
        (seconds > 0.0).then(|| (self.newest.joules - since.joules) / seconds)
    }
}

/// A thread that reads the energy counter, since a reading takes milliseconds, for which the training loop should not wait.
struct EnergyMonitor {
    readings: Arc<Mutex<LastReadings>>,
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl EnergyMonitor {
    /// The time between two readings. A reading keeps a core busy for about 4 ms. The counter is cumulative, so rarer
    /// readings lose no energy.
    const PAUSE: Duration = Duration::from_millis(100);

    /// Reads a counter from now on. `None` if it cannot be read.
    fn new(read: impl Fn() -> Option<f64> + Send + 'static) -> Option<Self> {
        let read = move || Some(EnergyReading { joules: read()?, at: Instant::now() });
        let first = read()?;
        let readings = Arc::new(Mutex::new(LastReadings { previous: first, newest: first }));
        let stop = Arc::new(AtomicBool::new(false));
        let reader = thread::Builder::new().name("energy".to_owned()).spawn({
            let (readings, stop) = (Arc::clone(&readings), Arc::clone(&stop));
            move || {
                loop {
                    thread::park_timeout(Self::PAUSE);
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    if let Some(reading) = read() {
                        readings.lock().unwrap_or_else(PoisonError::into_inner).add(reading);
                    }
                }
            }
        });
        Some(EnergyMonitor { readings, stop, reader: Some(reader.ok()?) })
    }

    fn readings(&self) -> LastReadings {
        *self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for EnergyMonitor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            reader.thread().unpark();
            // The thread only reads and sleeps, so it does not panic.
            reader.join().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn power_is_taken_between_readings_and_lasts_until_the_next() {
        let zero = Instant::now();
        let reading = |ms, joules| EnergyReading { at: zero + Duration::from_millis(ms), joules };
        let mut readings = LastReadings { previous: reading(0, 10.0), newest: reading(0, 10.0) };
        assert_eq!(readings.watts(reading(0, 10.0)), None, "one reading has no power");
        readings.add(reading(500, 60.0));
        readings.add(reading(1000, 260.0));
        assert_eq!(readings.watts(reading(0, 10.0)), Some(250.0));
        assert_eq!(readings.watts(reading(500, 60.0)), Some(400.0));
        assert_eq!(readings.watts(reading(1000, 260.0)), Some(400.0), "a step shorter than a pause");
    }

    #[test]
    fn the_counter_is_read_ten_times_a_second_at_most() {
        let begun = Instant::now();
        let count = Arc::new(AtomicUsize::new(0));
        let monitor = EnergyMonitor::new({
            let count = Arc::clone(&count);
            move || Some(count.fetch_add(1, Ordering::Relaxed) as f64)
        });
        thread::sleep(Duration::from_millis(250));
        drop(monitor);
        let (count, pauses) = (count.load(Ordering::Relaxed), begun.elapsed().as_millis() as usize / 100);
        // One at the start, and one after each pause.
        assert!((1..=pauses + 1).contains(&count), "{count} readings in {pauses} pauses");
    }
}
