//! Side streams of a GPU: ordered against the compute stream by events.

use std::cell::RefCell;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::host_waits::HostWaits;
use super::replay::Replay;
use super::stream::{Stream, TimingEvent};
use crate::driver::{Driver, Event, Queue};
use crate::error::GpuError;
use kintsugi_tensor::{Launch, LaunchedTransfer, Mark};
use kintsugi_tensor::{SideEvent, SideStream, SideTransfer, StreamWatch};

/// Side streams have a higher priority than the compute stream, whose kernels would otherwise delay the few blocks of a
/// transfer until all of theirs have run.
const PRIORITY: i32 = -1;

/// A stream beside the compute stream of a rank.
pub(crate) struct GpuSideStream {
    compute: Stream,
    queue: Arc<dyn Queue>,
    /// The name in a trace.
    name: Arc<str>,
    events: EventPool,
    replay: Rc<Replay>,
}

/// Events without timestamps. An event can be recorded again as soon as a stream has been told to wait for it.
#[derive(Debug, Default)]
struct EventPool {
    all: RefCell<Vec<Box<dyn Event>>>,
    free: RefCell<Vec<usize>>,
}

impl EventPool {
    /// Records an event on a stream.
    fn record(&self, driver: &dyn Driver, queue: &dyn Queue) -> Result<usize, GpuError> {
        let free = self.free.borrow_mut().pop();
        let mut all = self.all.borrow_mut();
        let index = if let Some(index) = free {
            index
        } else {
            all.push(driver.event(false)?);
            all.len() - 1
        };
        all[index].record(queue)?;
        Ok(index)
    }

    /// Lets a stream wait for an event, which is free afterwards.
    fn wait(&self, queue: &dyn Queue, index: usize) -> Result<(), GpuError> {
        let waits = queue.wait(&*self.all.borrow()[index]);
        self.free.borrow_mut().push(index);
        waits
    }
}

impl GpuSideStream {
    /// A new stream on the device of `compute`.
    pub(crate) fn new(compute: &Stream, name: &str, replay: &Rc<Replay>) -> Result<Self, GpuError> {
        Ok(GpuSideStream {
            compute: compute.clone(),
            queue: compute.driver().stream(Some(PRIORITY))?,
            name: name.into(),
            events: EventPool::default(),
            replay: Rc::clone(replay),
        })
    }

    fn enqueue(
        &self,
        transfer: &SideTransfer,
        enqueue: &mut dyn FnMut(*mut c_void),
    ) -> Result<usize, GpuError> {
        let handle = self.queue.handle();
        self.compute.add_to_digest([handle as u64].into_iter().chain(transfer.words.iter().copied()));
        let before = self.events.record(&**self.compute.driver(), self.compute.queue())?;
        self.events.wait(&*self.queue, before)?;
        let (enqueued, begun) = (Instant::now(), self.timestamp()?);
        enqueue(handle);
        if let (Some(begun), Some(ended)) = (begun, self.timestamp()?) {
            let launched = LaunchedTransfer { stream: Arc::clone(&self.name), bytes: transfer.bytes };
            let (name, transfer) = ((transfer.name)(), Some(launched));
            self.compute.add_launch(Launch { name, transfer, enqueued, begun, ended });
        }
        self.events.record(&**self.compute.driver(), &*self.queue)
    }

    /// A timestamp on this stream, if launches are recorded.
    fn timestamp(&self) -> Result<Option<Mark>, GpuError> {
        let on = || TimingEvent::on(&**self.compute.driver(), &*self.queue);
        let event = self.compute.records_launches().then(on).transpose()?;
        Ok(event.map(Mark::on_device))
    }

    /// Waits for this stream. A failure belongs to an earlier operation, whose result reports it when it is read.
    fn synchronize(&self) {
        self.queue.drain();
    }

    fn done<T>(&self, result: Result<T, GpuError>) -> Option<T> {
        let deferred = |error| self.replay.defer_failure(error).map(|()| None);
        result.map(Some).or_else(deferred).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// The event of a transfer that a failing capture did not enqueue.
const NOT_ENQUEUED: usize = usize::MAX;

impl SideStream for GpuSideStream {
    fn start(&self, transfer: &SideTransfer, enqueue: &mut dyn FnMut(*mut c_void)) -> SideEvent {
        SideEvent(self.done(self.enqueue(transfer, enqueue)).unwrap_or(NOT_ENQUEUED))
    }

    fn join(&self, SideEvent(event): SideEvent) {
        if event != NOT_ENQUEUED {
            self.done(self.events.wait(self.compute.queue(), event));
        }
    }

    fn finish(&self) {
        self.replay.drop_graphs();
        self.synchronize();
    }

    fn watch(&self) -> Box<dyn StreamWatch> {
        Box::new(GpuWatch { queue: Arc::clone(&self.queue), waits: Arc::clone(self.compute.host_waits()) })
    }
}

/// See [`StreamWatch`].
struct GpuWatch {
    queue: Arc<dyn Queue>,
    waits: Arc<HostWaits>,
}

impl StreamWatch for GpuWatch {
    fn is_idle(&self) -> bool {
        self.queue.is_idle()
    }

    fn host_wait(&self) -> Option<u64> {
        self.waits.current()
    }
}

impl Drop for GpuSideStream {
    fn drop(&mut self) {
        self.synchronize();
    }
}
