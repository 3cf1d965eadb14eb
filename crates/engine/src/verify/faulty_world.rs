//! The ranks of a job with a communicator that makes a deliberate mistake.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::{Collective, Communicator, Pending, RankFailure, Tag, Traffic, World};
use kintsugi_plan::{Group, Plan};
use kintsugi_rank::SUMS;
use kintsugi_tensor::{Backend, Buffer, DType, View};

use super::Fault;

/// The ranks of a job. Sums over dp have a fault on some of them.
pub(super) struct FaultyWorld {
    world: Arc<dyn World>,
    fault: Fault,
    /// The groups over which gradients are first reduced: dp, or its innermost part.
    faulty: [Group; 2],
    /// The size of dp, and the index of every rank in it.
    dp: (usize, Vec<usize>),
}

impl FaultyWorld {
    pub fn new(world: Arc<dyn World>, fault: Fault, plan: &Plan) -> Self {
        let innermost = plan.sharding.groups().find(|&part| part != Group::DATA);
        let indices = (0..world.ranks()).map(|rank| plan.mesh.replica(plan.mesh.coordinate(rank))).collect();
        let faulty = [Group::DATA, innermost.unwrap_or(Group::DATA)];
        FaultyWorld { world, fault, faulty, dp: (plan.mesh.replicas(), indices) }
    }

    /// The factors of a rank's input to a sum and of its result, if they are not 1.
    fn factors(&self, rank: usize) -> Option<(f32, f32)> {
        let (size, index) = (self.dp.0, self.dp.1[rank]);
        match self.fault {
            Fault::DropRank if index == 0 => Some((0.0, 1.0)),
            Fault::MissingAverage => Some((size as f32, 1.0)),
            Fault::Overflow if index == 1 => Some((f32::INFINITY, 1.0)),
            Fault::Drift if index == 0 => Some((1.0, 1.0 + 2.0 * f32::EPSILON)),
            _ => None,
        }
    }
}

impl World for FaultyWorld {
    fn ranks(&self) -> usize {
        self.world.ranks()
    }

    fn local_ranks(&self) -> Range<usize> {
        self.world.local_ranks()
    }

    fn group(
        &self,
        group: Group,
        members: &[usize],
        me: usize,
        backend: &Rc<dyn Backend>,
    ) -> Box<dyn Communicator> {
        let inner = self.world.group(group, members, me, backend);
        match self.factors(me) {
            Some((input_factor, output_factor)) if self.faulty.contains(&group) => Box::new(ScalingGroup {
                group: inner,
                backend: Rc::clone(backend),
                input_factor,
                output_factor,
            }),
            _ => inner,
        }
    }

    fn skip_group(&self, group: Group, size: usize) {
        self.world.skip_group(group, size);
    }

    fn is_on_device(&self) -> bool {
        self.world.is_on_device()
    }

    fn transport_bytes(&self) -> Result<u64, RankFailure> {
        self.world.transport_bytes()
    }

    fn traffic(&self, rank: usize) -> Traffic {
        self.world.traffic(rank)
    }

    fn gather(&self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, RankFailure> {
        self.world.gather(bytes)
    }

    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure> {
        self.world.broadcast(bytes)
    }

    fn post(&self, bytes: &[u8]) {
        self.world.post(bytes);
    }

    fn take_post(&self, from: usize) -> Option<Vec<u8>> {
        self.world.take_post(from)
    }

    fn barrier(&self) -> Result<(), RankFailure> {
        self.world.barrier()
    }

    fn abort(&self, reason: RankFailure) {
        self.world.abort(reason);
    }

    fn finished_pieces(&self) -> u64 {
        self.world.finished_pieces()
    }

    fn failure(&self) -> Option<RankFailure> {
        self.world.failure()
    }

    fn host(&self) -> Option<String> {
        self.world.host()
    }

    fn is_first(&self) -> bool {
        self.world.is_first()
    }
}

/// A group that scales this rank's input to a sum, or this rank's result.
struct ScalingGroup {
    group: Box<dyn Communicator>,
    backend: Rc<dyn Backend>,
    input_factor: f32,
    output_factor: f32,
}

impl ScalingGroup {
    /// Scales codes by 0, or by infinity: then their scales are NaN. Another factor cannot be applied without their format.
    fn scale_codes(&self, view: View<'_>) {
        let byte = match self.input_factor {
            0.0 => 0,
            factor if factor.is_infinite() => u8::MAX,
            _ => return,
        };
        self.backend.upload_bytes(&vec![byte; view.len()], view);
    }

    fn scale(&self, view: View<'_>, factor: f32) {
        let scaled: Vec<f32> = self.backend.read(view).iter().map(|x| x * factor).collect();
        self.backend.upload(&scaled, view);
    }
}

impl Communicator for ScalingGroup {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        // Only gradients: scaling the norm's sums would be too easy to detect.
        if collective.sums() && buffer.len() > SUMS {
            self.scale(buffer.slice(range.clone()), self.input_factor);
        }
        if collective == Collective::AllToAll {
            self.scale_codes(buffer.slice(range.start..range.start + range.len() / 2));
        }
        self.group.start(collective, buffer, range)
    }

    fn send(&self, to: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.group.send(to, tag, buffer)
    }

    fn receive(&self, from: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.group.receive(from, tag, buffer)
    }

    fn wait(&self, pending: Pending) -> Buffer {
        let buffer = self.group.wait(pending);
        if buffer.len() > SUMS && buffer.dtype() != DType::U8 {
            self.scale(buffer.view(), self.output_factor);
        }
        buffer
    }

    fn failure(&self) -> Option<RankFailure> {
        self.group.failure()
    }
}
