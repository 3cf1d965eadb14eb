//! SOPP, and the SOP1 instructions that read or write the program counter: branches, barriers, waits and the end.

use rustc_hash::FxHashMap;

use crate::assembly::{Line, number};
use crate::error::Fault;
use crate::operand::{Operand, Type, operand, scalar};
use crate::wave::{State, Wave};

/// An instruction that decides what is executed next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Continues at an index if the condition holds.
    Branch(When, usize),
    /// Waits for the other waves of the workgroup.
    Barrier,
    End,
    /// Waits and hints. Memory accesses are complete as soon as they are executed.
    Nothing,
    /// Writes the address of the next instruction to a pair.
    GetAddress {
        to: u8,
    },
    /// Continues at the address in a pair, and writes the address of the next instruction to another.
    Jump {
        to: Option<u8>,
        from: u8,
    },
}

/// The condition of a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    Always,
    Scc(bool),
    VccIsZero(bool),
    ExecIsZero(bool),
}

/// Decodes a line. Branches get the index of their target.
pub(crate) fn decode(line: &Line, index: &FxHashMap<u64, usize>) -> Option<Flow> {
    let when = match line.mnemonic.as_str() {
        "s_branch" => When::Always,
        "s_cbranch_scc0" => When::Scc(false),
        "s_cbranch_scc1" => When::Scc(true),
        "s_cbranch_vccz" => When::VccIsZero(true),
        "s_cbranch_vccnz" => When::VccIsZero(false),
        "s_cbranch_execz" => When::ExecIsZero(true),
        "s_cbranch_execnz" => When::ExecIsZero(false),
        _ => return other(line),
    };
    // In words from the next instruction, as a signed number of 16 bits.
    let words = i64::from(number(line.operands.first()?)? as i16);
    let target = line.address.wrapping_add_signed(4 + 4 * words);
    Some(Flow::Branch(when, *index.get(&target)?))
}

fn other(line: &Line) -> Option<Flow> {
    let pair = |index: usize| match operand(line.operands.get(index)?, Type::B64)? {
        Operand::Scalar(first) => Some(first),
        _ => None,
    };
    Some(match line.mnemonic.as_str() {
        "s_barrier" => Flow::Barrier,
        "s_endpgm" => Flow::End,
        "s_nop" | "s_waitcnt" | "s_sleep" | "s_setprio" | "s_inst_prefetch" | "s_icache_inv"
        | "s_dcache_wb" | "s_dcache_inv" | "s_ttracedata" | "buffer_wbinvl1" | "buffer_wbinvl1_vol"
        | "buffer_wbl2" | "buffer_invl2" => Flow::Nothing,
        "s_getpc_b64" => Flow::GetAddress { to: pair(0)? },
        "s_setpc_b64" => Flow::Jump { to: None, from: pair(0)? },
        "s_swappc_b64" => Flow::Jump { to: Some(pair(0)?), from: pair(1)? },
        _ => return None,
    })
}

impl Flow {
    /// Executes the instruction; `wave.next` is the one after it. `code` is the address of the code object's image.
    pub(crate) fn run(
        self,
        wave: &mut Wave,
        addresses: impl Fn(usize) -> u64,
        index: &FxHashMap<u64, usize>,
        code: u64,
    ) -> Result<(), Fault> {
        match self {
            Flow::Branch(when, target) => {
                let holds = match when {
                    When::Always => true,
                    When::Scc(value) => wave.scc == value,
                    When::VccIsZero(value) => (wave.pair(scalar::VCC) == 0) == value,
                    When::ExecIsZero(value) => (wave.exec() == 0) == value,
                };
                if holds {
                    wave.next = target;
                }
            }
            Flow::Barrier => wave.state = State::AtBarrier,
            Flow::End => wave.state = State::Ended,
            Flow::Nothing => {}
            Flow::GetAddress { to } => wave.set_pair(to, code + addresses(wave.next)),
            Flow::Jump { to, from } => {
                let address = wave.pair(from);
                if let Some(to) = to {
                    wave.set_pair(to, code + addresses(wave.next));
                }
                let target = index.get(&address.wrapping_sub(code));
                wave.next = *target.ok_or(Fault::Jump { address })?;
            }
        }
        Ok(())
    }
}
