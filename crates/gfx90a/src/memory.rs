//! Global memory: the buffers of the host, each in an address range of its own, with bounds that every access is held to.

use crate::error::Fault;
use crate::memory_instructions::access::word;

/// Every buffer has this much of the address space, so an address tells its buffer.
const WINDOW_BITS: u32 = 32;

/// Where a buffer begins in its window. What is before it is out of bounds.
const FIRST: u64 = 0x1_0000;

/// Buffers, by their window.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    buffers: Vec<Buffer>,
}

#[derive(Debug)]
struct Buffer {
    name: String,
    bytes: Vec<u8>,
    writable: bool,
}

impl Memory {
    /// Adds a buffer and returns its address, a multiple of 65,536.
    pub(crate) fn add(&mut self, name: &str, bytes: Vec<u8>, writable: bool) -> u64 {
        self.buffers.push(Buffer { name: name.to_owned(), bytes, writable });
        (self.buffers.len() as u64) << WINDOW_BITS | FIRST
    }

    /// Removes the last buffer.
    pub(crate) fn remove_last(&mut self) {
        self.buffers.pop();
    }

    /// The bytes at an address.
    pub(crate) fn read(&self, address: u64, len: usize) -> Option<&[u8]> {
        let buffer = self.buffers.get(window(address)?)?;
        let offset = (address & ((1 << WINDOW_BITS) - 1)).checked_sub(FIRST)? as usize;
        buffer.bytes.get(offset..offset.checked_add(len)?)
    }

    /// The bytes at an address, to be written by the host or by a kernel.
    pub(crate) fn write(&mut self, address: u64, len: usize) -> Option<(&mut [u8], bool)> {
        let buffer = self.buffers.get_mut(window(address)?)?;
        let offset = (address & ((1 << WINDOW_BITS) - 1)).checked_sub(FIRST)? as usize;
        let writable = buffer.writable;
        Some((buffer.bytes.get_mut(offset..offset.checked_add(len)?)?, writable))
    }

    /// The fault of an access that is out of bounds.
    pub(crate) fn out_of_bounds(&self, lane: Option<usize>, address: u64, bytes: usize) -> Fault {
        let buffer = window(address).and_then(|index| self.buffers.get(index)).map(|buffer| {
            let offset = (address & ((1 << WINDOW_BITS) - 1)) as i64 - FIRST as i64;
            (buffer.name.clone(), offset, buffer.bytes.len())
        });
        Fault::OutOfBounds { lane, address, bytes, buffer }
    }

    /// Reads 1 to 4 bytes for a lane.
    pub(crate) fn load(&self, lane: Option<usize>, address: u64, bytes: usize) -> Result<u32, Fault> {
        let found = self.read(address, bytes).ok_or_else(|| self.out_of_bounds(lane, address, bytes))?;
        Ok(word(found))
    }

    /// Writes the lowest 1 to 4 bytes of a word for a lane.
    pub(crate) fn store(&mut self, lane: usize, address: u64, bytes: usize, value: u32) -> Result<(), Fault> {
        match self.write(address, bytes) {
            Some((found, true)) => {
                found.copy_from_slice(&value.to_le_bytes()[..bytes]);
                Ok(())
            }
            Some((_, false)) => Err(Fault::ReadOnly { lane, address }),
            None => Err(self.out_of_bounds(Some(lane), address, bytes)),
        }
    }
}

fn window(address: u64) -> Option<usize> {
    ((address >> WINDOW_BITS) as usize).checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_held_to_their_buffer() {
        let mut memory = Memory::default();
        let first = memory.add("first", vec![1, 2, 3, 4, 5, 6, 7, 8], true);
        let second = memory.add("second", vec![9; 4], false);
        assert_eq!(memory.load(Some(0), first + 4, 4), Ok(0x0807_0605));
        assert_eq!(memory.load(None, first + 6, 2), Ok(0x0807));
        let beyond = memory.load(Some(3), first + 5, 4).expect_err("one byte too far");
        assert_eq!(
            beyond.to_string(),
            "lane 3 accesses 4 bytes at 0x100010005, offset 5 of first, which has 8 bytes"
        );
        assert!(memory.load(None, first - 1, 1).is_err() && memory.load(None, 0, 4).is_err());
        assert_eq!(memory.store(0, first, 2, 0xabcd), Ok(()));
        assert_eq!(memory.load(None, first, 4), Ok(0x0403_abcd));
        assert!(matches!(memory.store(1, second, 4, 0), Err(Fault::ReadOnly { lane: 1, .. })));
    }
}
