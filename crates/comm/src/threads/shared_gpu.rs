//! Moves the memory of a GPU that ranks share.

use std::fmt;
use std::rc::Rc;

use kintsugi_tensor::{AddressSpace, Backend, Buffer, Foreign};

use crate::region::{Region, assert_compatible};
use crate::ring::Action;

/// A GPU that ranks share, through one rank's stream on it.
///
/// The streams of different ranks are not ordered. So a rank synchronizes its own stream before it lets other ranks use its
/// memory, and after it has moved theirs.
#[derive(Clone)]
pub(super) struct SharedGpu {
    backend: Rc<dyn Backend>,
    memory: Rc<Foreign>,
}

impl SharedGpu {
    pub(super) fn new(backend: Rc<dyn Backend>) -> Self {
        SharedGpu { backend, memory: Rc::new(Foreign(AddressSpace::Device)) }
    }

    /// Waits until this rank's stream has run all enqueued operations.
    pub(super) fn synchronize(&self) {
        self.backend.synchronize();
    }

    /// Moves elements and waits for the copy.
    pub(super) fn move_elements(&self, action: Action, from: Region, to: Region) {
        assert_compatible(from, to);
        // SAFETY: both are parts of live buffers (see above) of one GPU, whose owners have synchronized their
        // streams. By the protocol, nobody writes `from` or uses `to` until this stream is synchronized, too.
        let [from, to] = [from, to].map(|region| unsafe {
            Buffer::foreign(&self.memory, region.address() as u64, region.len(), region.dtype())
        });
        match action {
            Action::Add => self.backend.add(from.view(), to.view()),
            Action::Copy => self.backend.copy(from.view(), to.view()),
        }
        self.synchronize();
    }
}

impl fmt::Debug for SharedGpu {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("SharedGpu")
    }
}
