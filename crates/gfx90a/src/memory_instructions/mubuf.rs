//! MUBUF: loads and stores by a buffer's description in four scalar registers. Compilers use them for scratch memory, whose
//! description swizzles the lanes, and for plain buffers whose size bounds every access.

use super::access::{Shape, shape};
use super::scratch;
use crate::assembly::Line;
use crate::error::Fault;
use crate::memory::Memory;
use crate::operand::{Operand, Type, operand};
use crate::vop::vector_register;
use crate::wave::Wave;

/// In the second word of a description: lanes have memory of their own.
pub(crate) const SWIZZLE: u32 = 1 << 31;

/// A load or store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    stores: bool,
    data: u16,
    shape: Shape,
    /// A register with an offset for every lane, if the instruction has `offen`.
    offsets: Option<u16>,
    description: u8,
    offset: Operand,
    constant: u64,
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<Buffer> {
    let name = line.mnemonic.strip_prefix("buffer_")?;
    let (stores, kind) = match name.strip_prefix("load_") {
        Some(kind) => (false, kind),
        None => (true, name.strip_prefix("store_")?),
    };
    if line.has("idxen") || line.has("lds") {
        return None;
    }
    let texts = &line.operands;
    let offsets = if line.has("offen") { Some(vector_register(texts.get(1)?)?) } else { None };
    let Operand::Scalar(description) = operand(texts.get(2)?, Type::B64)? else { return None };
    let offset = operand(texts.get(3)?, Type::B32)?;
    let constant = line.number("offset").unwrap_or(0) as u64;
    let (data, shape) = (vector_register(texts.first()?)?, shape(kind)?);
    Some(Buffer { stores, data, shape, offsets, description, offset, constant })
}

impl Buffer {
    /// Executes the instruction.
    pub(crate) fn run(&self, wave: &mut Wave, memory: &mut Memory) -> Result<(), Fault> {
        let words = [0, 1, 2].map(|i| wave.scalar[usize::from(self.description) + i]);
        let swizzles = words[1] & SWIZZLE != 0;
        if !swizzles && words[1] >> 16 & 0x3fff != 0 {
            return Err(Fault::Unsupported("a buffer with a stride".to_owned()));
        }
        let base = u64::from(words[0]) | u64::from(words[1] & 0xffff) << 32;
        let scalar_offset = wave.uniform(self.offset, false);
        for lane in wave.active() {
            let own = self.offsets.map_or(0, |register| u64::from(wave.vector[usize::from(register)][lane]));
            for word in 0..self.shape.words {
                let offset = own + self.constant + 4 * word as u64;
                let register = usize::from(self.data) + word;
                let bytes = self.shape.bytes;
                let inside = offset + bytes as u64 <= u64::from(words[2]);
                let address = base + scalar_offset + offset;
                let value = self.shape.stored(wave.vector[register][lane]);
                let loaded = match (self.stores, swizzles) {
                    (false, true) => scratch::load(wave, lane, scalar_offset + offset, bytes)?,
                    (true, true) => {
                        scratch::store(wave, lane, scalar_offset + offset, bytes, value)?;
                        continue;
                    }
                    // Beyond the size that the description gives, loads are zero and stores do nothing.
                    (false, false) if !inside => 0,
                    (true, false) if !inside => continue,
                    (false, false) => memory.load(Some(lane), address, bytes)?,
                    (true, false) => {
                        memory.store(lane, address, bytes, value)?;
                        continue;
                    }
                };
                let register = &mut wave.vector[register][lane];
                *register = self.shape.loaded(loaded, *register);
            }
        }
        Ok(())
    }
}
