//! Vector instructions between lanes and scalar registers, which take no part in EXEC.

use super::{base_name, vector_register};
use crate::assembly::Line;
use crate::operand::{Operand, Type, operand};
use crate::wave::{LANES, Wave};

/// An instruction that reads or writes one lane.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OneLane {
    ReadFirst {
        to: u8,
        from: Operand,
    },
    Read {
        to: u8,
        from: u16,
        lane: Operand,
    },
    Write {
        to: u16,
        value: Operand,
        lane: Operand,
    },
    /// Exchanges two registers, in the lanes that take part.
    Swap {
        registers: [u16; 2],
    },
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<OneLane> {
    let text = |index: usize| line.operands.get(index).map(String::as_str);
    let number = |index: usize| operand(text(index)?, Type::B32);
    let scalar = || match number(0)? {
        Operand::Scalar(register) => Some(register),
        _ => None,
    };
    Some(match base_name(&line.mnemonic) {
        "v_readfirstlane_b32" => OneLane::ReadFirst { to: scalar()?, from: number(1)? },
        "v_readlane_b32" => {
            OneLane::Read { to: scalar()?, from: vector_register(text(1)?)?, lane: number(2)? }
        }
        "v_writelane_b32" => {
            OneLane::Write { to: vector_register(text(0)?)?, value: number(1)?, lane: number(2)? }
        }
        "v_swap_b32" => OneLane::Swap { registers: [vector_register(text(0)?)?, vector_register(text(1)?)?] },
        _ => return None,
    })
}

impl OneLane {
    /// Executes the instruction.
    pub(crate) fn run(self, wave: &mut Wave) {
        let lane_of = |wave: &Wave, lane: Operand| wave.uniform(lane, false) as usize % LANES;
        match self {
            OneLane::ReadFirst { to, from } => {
                // Lane 0 if none takes part.
                let lane = wave.exec().trailing_zeros() as usize % LANES;
                let mut copy = [0; LANES];
                wave.scalar[usize::from(to)] = wave.lanes(from, &mut copy)[lane];
            }
            OneLane::Read { to, from, lane } => {
                let lane = lane_of(wave, lane);
                wave.scalar[usize::from(to)] = wave.vector[usize::from(from)][lane];
            }
            OneLane::Write { to, value, lane } => {
                let (lane, value) = (lane_of(wave, lane), wave.uniform(value, false) as u32);
                wave.vector[usize::from(to)][lane] = value;
            }
            OneLane::Swap { registers: [a, b] } => {
                let values = [a, b].map(|register| wave.vector[usize::from(register)]);
                wave.write(a, &values[1]);
                wave.write(b, &values[0]);
            }
        }
    }
}
