//! A group whose transfers are observed: when each is started, waited for and finished.

use std::ops::Range;
use std::rc::Rc;

use kintsugi_spec::Group;
use kintsugi_tensor::Buffer;

use crate::paper::{Entry, Transfer};
use crate::{Collective, Communicator, Pending, RankFailure, Tag};

/// Is told about the transfers of a rank. A transfer is named by the address of its buffer, which no other pending
/// transfer of the rank has.
pub trait TransferObserver {
    /// A transfer is about to start.
    fn starts(&self, transfer: Entry, address: u64);
    /// The rank is about to wait for a transfer.
    fn waits(&self, address: u64);
    /// The wait has returned.
    fn ended(&self, address: u64);
}

/// A group that tells an observer about its transfers.
pub struct ObservedGroup {
    inner: Box<dyn Communicator>,
    group: Group,
    observer: Rc<dyn TransferObserver>,
}

impl ObservedGroup {
    /// `inner`, which is the group `group`, with an observer.
    pub fn new(inner: Box<dyn Communicator>, group: Group, observer: Rc<dyn TransferObserver>) -> Self {
        ObservedGroup { inner, group, observer }
    }

    fn starts(&self, transfer: Transfer, buffer: &Buffer, len: usize) {
        let (group, dtype) = (self.group, buffer.dtype());
        self.observer.starts(Entry { group, transfer, len, dtype }, buffer.address());
    }
}

impl Communicator for ObservedGroup {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        self.starts(Transfer::Collective(collective), &buffer, range.len());
        self.inner.start(collective, buffer, range)
    }

    fn send(&self, to: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.starts(Transfer::Send { to }, &buffer, buffer.len());
        self.inner.send(to, tag, buffer)
    }

    fn receive(&self, from: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.starts(Transfer::Receive { from }, &buffer, buffer.len());
        self.inner.receive(from, tag, buffer)
    }

    fn wait(&self, pending: Pending) -> Buffer {
        let address = pending.buffer.address();
        self.observer.waits(address);
        let buffer = self.inner.wait(pending);
        self.observer.ended(address);
        buffer
    }

    fn failure(&self) -> Option<RankFailure> {
        self.inner.failure()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use kintsugi_tensor::{Arena, Category, DType, Memory};

    use super::*;
    use crate::Solo;

    #[derive(Default)]
    struct Record(RefCell<Vec<String>>);

    impl TransferObserver for Record {
        fn starts(&self, transfer: Entry, address: u64) {
            let Entry { group, len, .. } = transfer;
            let name = transfer.operation().name();
            self.0.borrow_mut().push(format!("start {name} of {len} over {group} at {address}"));
        }

        fn waits(&self, address: u64) {
            self.0.borrow_mut().push(format!("wait {address}"));
        }

        fn ended(&self, address: u64) {
            self.0.borrow_mut().push(format!("end {address}"));
        }
    }

    #[test]
    fn an_observer_is_told_the_order_of_starts_and_waits() {
        let memory: Rc<dyn Memory> = Rc::new(Arena::on_paper());
        let buffer = || Buffer::new(&memory, 64, DType::F32, Category::Communication);
        let record = Rc::new(Record::default());
        let group =
            ObservedGroup::new(Box::new(Solo), Group::TENSOR, Rc::clone(&record) as Rc<dyn TransferObserver>);
        let one = group.start(Collective::AllReduce, buffer(), 0..32);
        let other = group.start(Collective::AllGather, buffer(), 0..64);
        let _first = group.wait(one);
        let _second = group.wait(other);
        let expected = [
            "start all_reduce of 32 over tp at 0",
            "start all_gather of 64 over tp at 256",
            "wait 0",
            "end 0",
            "wait 256",
            "end 256",
        ];
        assert_eq!(*record.0.borrow(), expected);
    }
}
