//! What the GPU of a run says of itself: the memory that was taken, by the driver's count, and the energy that it used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kintsugi_plan::{DeviceKind, Plan};
use kintsugi_tensor::cuda::{Card, Meter};

/// A card that is watched while a run goes on.
pub(crate) struct CardWatch {
    card: Card,
    /// Bytes that were free before the run took any; the driver's own context is not counted as the run's.
    free: u64,
    energy: Option<EnergyWatch>,
}

impl CardWatch {
    /// Begins to watch the plan's card. `None` on a CPU, and where there is no card to ask: the ranks will say why.
    pub fn new(plan: &Plan) -> Option<Self> {
        if plan.run.device == DeviceKind::Cpu {
            return None;
        }
        let card = Card::new(0).ok()?;
        let (free, _) = card.memory().ok()?;
        let energy = card.meter().and_then(EnergyWatch::new);
        Some(CardWatch { card, free, energy })
    }

    /// Bytes that were taken since.
    pub fn taken(&self) -> Option<u64> {
        let (free, _) = self.card.memory().ok()?;
        Some(self.free.saturating_sub(free))
    }

    /// Joules that the card has used, by its own count, which starts anywhere.
    pub fn joules(&self) -> Option<f64> {
        self.energy.as_ref().map(EnergyWatch::joules)
    }
}

/// A thread that reads the meter: a reading takes longer than a step may wait for it.
struct EnergyWatch {
    joules: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl EnergyWatch {
    /// The meter itself is not refreshed more often than this.
    const PAUSE: Duration = Duration::from_millis(20);

    fn new(meter: Meter) -> Option<Self> {
        let joules = Arc::new(AtomicU64::new(meter.energy()?.to_bits()));
        let stop = Arc::new(AtomicBool::new(false));
        let reader = thread::Builder::new().name("energy".to_owned()).spawn({
            let (joules, stop) = (Arc::clone(&joules), Arc::clone(&stop));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Some(read) = meter.energy() {
                        joules.store(read.to_bits(), Ordering::Relaxed);
                    }
                    thread::sleep(Self::PAUSE);
                }
            }
        });
        Some(EnergyWatch { joules, stop, reader: Some(reader.ok()?) })
    }

    fn joules(&self) -> f64 {
        f64::from_bits(self.joules.load(Ordering::Relaxed))
    }
}

impl Drop for EnergyWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            // It only reads and sleeps.
            reader.join().ok();
        }
    }
}
