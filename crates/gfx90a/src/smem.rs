//! SMEM: loads from memory into scalar registers.

use crate::assembly::{Line, number};
use crate::error::Fault;
use crate::memory::Memory;
use crate::operand::{Operand, Type, operand, scalar};
use crate::wave::Wave;

/// A scalar load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScalarLoad {
    to: u8,
    words: u8,
    base: u8,
    /// Whether the base is a buffer's description, four registers, rather than an address.
    from_buffer: bool,
    offset: Operand,
    constant: i64,
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<ScalarLoad> {
    let (kind, from_buffer) = match line.mnemonic.strip_prefix("s_buffer_load_") {
        Some(kind) => (kind, true),
        None => (line.mnemonic.strip_prefix("s_load_")?, false),
    };
    let words = match kind {
        "dword" => 1,
        "dwordx2" => 2,
        "dwordx4" => 4,
        "dwordx8" => 8,
        "dwordx16" => 16,
        _ => return None,
    };
    let [to, base] = [0, 1].map(|i| operand(line.operands.get(i)?, Type::B64));
    let (Some(Operand::Scalar(to)), Some(Operand::Scalar(base))) = (to, base) else { return None };
    let text = line.operands.get(2)?;
    let (offset, constant) = match number(text) {
        Some(constant) => (Operand::Off, constant),
        None => (operand(text, Type::B32)?, line.number("offset").unwrap_or(0)),
    };
    Some(ScalarLoad { to, words, base, from_buffer, offset, constant })
}

impl ScalarLoad {
    /// Executes the instruction.
    pub(crate) fn run(&self, wave: &mut Wave, memory: &Memory) -> Result<(), Fault> {
        let offset = wave.uniform(self.offset, false).wrapping_add_signed(self.constant);
        let mut base = wave.pair(self.base);
        if self.from_buffer {
            // The upper 16 bits are the stride.
            base &= (1 << 48) - 1;
            let size = u64::from(wave.scalar[usize::from(self.base) + 2]);
            if offset + 4 * u64::from(self.words) > size {
                return Err(memory.out_of_bounds(None, base + offset, 4 * usize::from(self.words)));
            }
        }
        let address = base.wrapping_add(offset) & !3;
        for word in 0..self.words {
            let value = memory.load(None, address + 4 * u64::from(word), 4)?;
            let register = usize::from(self.to + word);
            debug_assert!(register < scalar::COUNT, "a load beyond the scalar registers");
            wave.scalar[register] = value;
        }
        Ok(())
    }
}
