//! The cost of an op, in picoseconds: its kernels, its transfers and their order.

use kintsugi_spec::Level;

use super::sharing::Sharing;

/// Picoseconds.
pub type Time = u64;

/// The cost of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferCost {
    /// The level that it occupies.
    pub level: Level,
    /// How long it occupies the level.
    pub time: Time,
    /// How much later it arrives, while the level is free for the next transfer: the latency of emulated links. A library's
    /// transfers follow each other on a stream, so their latency is part of `time`.
    pub latency: Time,
}

impl TransferCost {
    /// The cost of a transfer that has arrived when its level is free again.
    pub fn new(level: Level, time: Time) -> Self {
        TransferCost { level, time, latency: 0 }
    }

    /// What is left of the transfer after its ranks have copied data for so long. The latency comes last.
    pub(super) fn without(self, copying: Time) -> Self {
        let rest = self.duration().saturating_sub(copying);
        let latency = self.latency.min(rest);
        TransferCost { time: rest - latency, latency, ..self }
    }

    /// From its start to its arrival.
    pub fn duration(self) -> Time {
        self.time.saturating_add(self.latency)
    }
}

/// The cost of an op for the rank that runs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCost {
    /// In kernels, or waiting for a slower host.
    pub compute: Time,
    /// In transfers inside the op. They block, unless its [`OpOrder`] overlaps them with kernels.
    pub links: Time,
    /// The transfer that the op starts without waiting.
    pub started: Option<TransferCost>,
}

/// The kernels and transfers of an op in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpOrder {
    /// What happens one after the other on the stream of the kernels.
    pub segments: Vec<Segment>,
    /// Whether kernels run between the start of a transfer and its wait.
    pub overlaps: bool,
}

/// A part of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Runs kernels, or waits for a slower host.
    Run(Time),
    /// Starts a transfer. Those over one level follow each other.
    Start(TransferCost),
    /// Waits for the transfer with this number, counted from the op's first.
    Wait(usize),
}

impl OpOrder {
    /// The total times of its kernels and of its transfers.
    pub(super) fn cost(&self) -> OpCost {
        let mut cost = OpCost::default();
        for &segment in &self.segments {
            match segment {
                Segment::Run(time) => cost.compute = cost.compute.saturating_add(time),
                Segment::Start(transfer) => cost.links = cost.links.saturating_add(transfer.duration()),
                Segment::Wait(_) => {}
            }
        }
        cost
    }

    /// Calls `transfer` with the number, start and end of each transfer of an op that took from `start` to `end`. Other
    /// transfers may have made it slower than it is alone, evenly from its start to its end.
    pub(crate) fn place(&self, start: Time, end: Time, mut transfer: impl FnMut(usize, Time, Time)) {
        let alone = self.duration().max(1);
        let at =
            |moment: Time| start + (u128::from(moment) * u128::from(end - start) / u128::from(alone)) as Time;
        self.play(|number, begin, end| transfer(number, at(begin), at(end)));
    }

    /// The time of the op with nothing beside it.
    pub fn duration(&self) -> Time {
        self.play(|_, _, _| {})
    }

    /// Runs the op alone. Calls `transfer` with the number, start and end of each transfer, and returns the op's end.
    fn play(&self, mut transfer: impl FnMut(usize, Time, Time)) -> Time {
        let (mut now, mut stream, mut ends) = (0, [0; Level::ALL.len()], Vec::new());
        for &segment in &self.segments {
            match segment {
                Segment::Run(time) => now = Time::saturating_add(now, time),
                Segment::Start(started) => {
                    let free = &mut stream[started.level];
                    let begin = now.max(*free);
                    *free = begin.saturating_add(started.time);
                    let end = free.saturating_add(started.latency);
                    transfer(ends.len(), begin, end);
                    ends.push(end);
                }
                Segment::Wait(number) => now = now.max(ends[number]),
            }
        }
        now
    }
}

/// Converts seconds to picoseconds.
pub fn picoseconds(seconds: f64) -> Time {
    (seconds * 1e12).round() as Time
}

impl OpCost {
    pub(super) fn plus(self, other: OpCost) -> OpCost {
        OpCost {
            compute: self.compute.saturating_add(other.compute),
            links: self.links.saturating_add(other.links),
            started: None,
        }
    }

    pub(super) fn minus(self, other: OpCost) -> OpCost {
        OpCost {
            compute: self.compute.saturating_sub(other.compute),
            links: self.links.saturating_sub(other.links),
            started: None,
        }
    }

    /// The cost for a rank that shares its core. It copies the data of its transfers itself, which takes `copying`. The rest of
    /// a transfer is time on emulated links.
    pub(super) fn shared(self, sharing: Sharing, copying: Time) -> OpCost {
        let slowed = |time: Time| (time as f64 * sharing.slowdown).round() as Time;
        match self.started {
            Some(transfer) => OpCost {
                compute: slowed(self.compute.saturating_add(copying)),
                links: slowed(self.links),
                started: Some(transfer.without(copying)).filter(|transfer| transfer.duration() > 0),
            },
            None => OpCost {
                compute: slowed(self.compute),
                links: slowed(copying).saturating_add(self.links.saturating_sub(copying)),
                started: None,
            },
        }
    }

    pub(super) fn times(self, n: u64) -> OpCost {
        OpCost { compute: self.compute.saturating_mul(n), links: self.links.saturating_mul(n), started: None }
    }
}
