//! A group of one rank: collectives do nothing.

use std::ops::Range;

use kintsugi_tensor::Buffer;

use crate::{Collective, Communicator, Pending, RankFailure, Tag, TransferKind};

/// The only rank of its group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Communicator for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        assert!(collective != Collective::AllToAll, "a group of one rank has nobody to exchange chunks with");
        Pending::new(buffer, range, TransferKind::Collective { collective, sequence: 0 })
    }

    fn send(&self, to: usize, tag: Tag, _: Buffer) -> Pending {
        panic!("a group of one rank has nobody to send to (rank {to}, tag {tag})");
    }

    fn receive(&self, from: usize, tag: Tag, _: Buffer) -> Pending {
        panic!("a group of one rank has nobody to receive from (rank {from}, tag {tag})");
    }

    fn wait(&self, pending: Pending) -> Buffer {
        pending.finish()
    }

    fn failure(&self) -> Option<RankFailure> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use kintsugi_tensor::{Arena, Category, DType, Memory};

    use super::*;

    fn buffer() -> Buffer {
        buffer_in(&(Rc::new(Arena::on_paper()) as Rc<dyn Memory>))
    }

    fn buffer_in(memory: &Rc<dyn Memory>) -> Buffer {
        Buffer::new(memory, 4, DType::F32, Category::Communication)
    }

    #[test]
    fn a_collective_gives_the_same_buffer_back() {
        let buffer = buffer();
        let address = buffer.address();
        let pending = Solo.start(Collective::AllReduce, buffer, 1..3);
        assert_eq!(Solo.wait(pending).address(), address);
    }

    #[test]
    fn a_transfer_that_is_dropped_keeps_its_memory() {
        let memory: Rc<dyn Memory> = Rc::new(Arena::on_paper());
        drop(Solo.start(Collective::AllReduce, buffer_in(&memory), 0..4));
        assert_eq!(Rc::strong_count(&memory), 2);
        assert_ne!(buffer_in(&memory).address(), 0, "the first block is never given out again");
    }

    #[test]
    #[should_panic(expected = "nobody to exchange chunks with")]
    fn there_is_nobody_to_exchange_chunks_with() {
        let _ = Solo.start(Collective::AllToAll, buffer(), 0..4);
    }

    #[test]
    #[should_panic(expected = "nobody to send to")]
    fn there_is_nobody_to_send_to() {
        let _ = Solo.send(0, 0, buffer());
    }

    #[test]
    #[should_panic(expected = "nobody to receive from")]
    fn there_is_nobody_to_receive_from() {
        let _ = Solo.receive(0, 0, buffer());
    }
}
