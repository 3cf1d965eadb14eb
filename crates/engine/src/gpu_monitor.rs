//! Measures a run's GPU: the memory in use according to the driver, and the energy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kintsugi_plan::{DeviceKind, Plan};
use kintsugi_tensor::cuda::libraries::devices;
use kintsugi_tensor::cuda::{Gpu, NvmlDevice};

/// Measures a GPU while a run uses it.
pub(crate) struct GpuMonitor {
    gpu: Gpu,
    /// Bytes that were free before the run allocated any. The driver's own context does not count as the run's.
    free: u64,
    energy: Option<EnergyMonitor>,
}

impl GpuMonitor {
    /// Starts to measure this process's GPU. `None` on a CPU, and if no GPU can be opened: the ranks report why.
    pub fn new(plan: &Plan, gpu: usize) -> Option<Self> {
        if plan.run.device == DeviceKind::Cpu {
            return None;
        }
        let gpu = Gpu::new(gpu % devices().ok()?.max(1)).ok()?;
        let (free, _) = gpu.memory().ok()?;
        let energy = gpu.nvml().and_then(EnergyMonitor::new);
        Some(GpuMonitor { gpu, free, energy })
    }

    /// Bytes that were allocated since.
    pub fn taken(&self) -> Option<u64> {
        let (free, _) = self.gpu.memory().ok()?;
        Some(self.free.saturating_sub(free))
    }

    /// Reading of the GPU's energy counter, in joules. Only differences have a meaning.
    pub fn joules(&self) -> Option<f64> {
        self.energy.as_ref().map(EnergyMonitor::joules)
    }
}

/// A thread that reads the energy counter, since a reading takes too long for the training loop to wait for it.
struct EnergyMonitor {
    joules: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl EnergyMonitor {
    /// The driver does not refresh the counter more often.
    const PAUSE: Duration = Duration::from_millis(20);

    fn new(nvml: NvmlDevice) -> Option<Self> {
        let joules = Arc::new(AtomicU64::new(nvml.energy()?.to_bits()));
        let stop = Arc::new(AtomicBool::new(false));
        let reader = thread::Builder::new().name("energy".to_owned()).spawn({
            let (joules, stop) = (Arc::clone(&joules), Arc::clone(&stop));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Some(read) = nvml.energy() {
                        joules.store(read.to_bits(), Ordering::Relaxed);
                    }
                    thread::sleep(Self::PAUSE);
                }
            }
        });
        Some(EnergyMonitor { joules, stop, reader: Some(reader.ok()?) })
    }

    fn joules(&self) -> f64 {
        f64::from_bits(self.joules.load(Ordering::Relaxed))
    }
}

impl Drop for EnergyMonitor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            // The thread only reads and sleeps, so it does not panic.
            reader.join().ok();
        }
    }
}
