//! Messages between stages.

use kintsugi_comm::Tag;
use kintsugi_plan::{Block, Group, Message, MessageKind};
use kintsugi_tensor::Category;

use crate::rank::Rank;

impl Rank {
    pub(crate) fn send_start(&mut self, message: Message) {
        let waiting = match message.kind {
            MessageKind::Activation => &mut self.in_flight.inputs,
            MessageKind::Gradient => &mut self.in_flight.gradients,
        };
        let buffer = waiting
            .remove(&(message.block, message.micro))
            .expect("a block computes the message before it is sent");
        let pending = self.groups.get(Group::PIPELINE).send(message.peer, self.tag(message), buffer);
        self.in_flight.sending.insert(message, pending);
    }

    pub(crate) fn send_wait(&mut self, message: Message) {
        let pending = self.in_flight.sending.remove(&message).expect("a wait follows its start");
        drop(self.groups.get(Group::PIPELINE).wait(pending));
    }

    pub(crate) fn receive_start(&mut self, message: Message) {
        let shape = self.shape();
        let len = shape.own_rows * shape.hidden;
        let buffer = self.backend.allocate(len, shape.compute, Category::Activations);
        let pending = self.groups.get(Group::PIPELINE).receive(message.peer, self.tag(message), buffer);
        self.in_flight.receiving.insert(message, pending);
    }

    pub(crate) fn receive_wait(&mut self, message: Message) {
        let pending = self.in_flight.receiving.remove(&message).expect("a wait follows its start");
        let buffer = self.groups.get(Group::PIPELINE).wait(pending);
        let waiting = match message.kind {
            MessageKind::Activation => &mut self.in_flight.inputs,
            MessageKind::Gradient => &mut self.in_flight.gradients,
        };
        waiting.insert((message.block, message.micro), buffer);
    }

    /// Both ends compute the tag of a message from the receiving block, the micro-batch and the kind.
    fn tag(&self, message: Message) -> Tag {
        let blocks = self.plan.model.layers as u64 + 2;
        let block = match message.block {
            Block::Embedding => 0,
            Block::Layer(i) => 1 + i as u64,
            Block::Head => blocks - 1,
        };
        (message.micro as u64 * blocks + block) * 2 + u64::from(message.kind == MessageKind::Gradient)
    }
}
