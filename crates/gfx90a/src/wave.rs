//! The registers of a wave: 64 lanes that execute one instruction at a time.

use crate::operand::{Condition, Operand, Source, Type, scalar};

/// Lanes of a wave.
pub(crate) const LANES: usize = 64;

/// A 32-bit value of every lane.
pub(crate) type Lanes = [u32; LANES];

/// A 64-bit value of every lane.
pub(crate) type WideLanes = [u64; LANES];

/// Vector registers v0 to v255, then accumulation registers a0 to a255.
const VECTOR_REGISTERS: usize = 512;

/// What a register holds before the first write: a NaN that no kernel makes.
const UNINITIALISED: u32 = 0x7fb1_0bad;

/// A wave's state.
#[derive(Clone, Debug)]
pub(crate) struct Wave {
    /// The number in the workgroup.
    pub(crate) index: usize,
    /// Index of the next instruction.
    pub(crate) next: usize,
    pub(crate) scalar: [u32; scalar::COUNT],
    /// The scalar condition code.
    pub(crate) scc: bool,
    pub(crate) vector: Vec<Lanes>,
    /// Scratch memory of the lanes, one after the other.
    pub(crate) scratch: Vec<u8>,
    pub(crate) state: State,
}

/// Whether a wave can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    AtBarrier,
    Ended,
}

impl Wave {
    /// A wave of which `lanes` take part.
    pub(crate) fn new(index: usize, lanes: usize, next: usize, scratch_per_lane: usize) -> Self {
        let mut wave = Wave {
            index,
            next,
            scalar: [UNINITIALISED; scalar::COUNT],
            scc: false,
            vector: vec![[UNINITIALISED; LANES]; VECTOR_REGISTERS],
            scratch: vec![0xff; scratch_per_lane * LANES],
            state: State::Running,
        };
        wave.set_exec(u64::MAX >> (LANES - lanes));
        wave
    }

    /// The lanes that take part in vector instructions, as bits.
    pub(crate) fn exec(&self) -> u64 {
        self.pair(scalar::EXEC)
    }

    pub(crate) fn set_exec(&mut self, mask: u64) {
        self.set_pair(scalar::EXEC, mask);
    }

    pub(crate) fn pair(&self, first: u8) -> u64 {
        let first = usize::from(first);
        u64::from(self.scalar[first]) | u64::from(self.scalar[first + 1]) << 32
    }

    pub(crate) fn set_pair(&mut self, first: u8, value: u64) {
        let first = usize::from(first);
        self.scalar[first] = value as u32;
        self.scalar[first + 1] = (value >> 32) as u32;
    }

    /// The value of an operand that is the same for all lanes. A value of 32 bits is extended by zeros.
    pub(crate) fn uniform(&self, operand: Operand, wide: bool) -> u64 {
        match operand {
            Operand::Scalar(first) if wide => self.pair(first),
            Operand::Scalar(register) => u64::from(self.scalar[usize::from(register)]),
            Operand::Constant(value) => value,
            Operand::Condition(Condition::Scc) => u64::from(self.scc),
            Operand::Condition(Condition::VccIsZero) => u64::from(self.pair(scalar::VCC) == 0),
            Operand::Condition(Condition::ExecIsZero) => u64::from(self.exec() == 0),
            Operand::Off => 0,
            Operand::Vector(_) => unreachable!("a vector register is different in every lane"),
        }
    }

    /// The 32-bit values of an operand, in its register or copied to `copy`.
    pub(crate) fn lanes<'a>(&'a self, operand: Operand, copy: &'a mut Lanes) -> &'a Lanes {
        match operand {
            Operand::Vector(register) => &self.vector[usize::from(register)],
            uniform => {
                copy.fill(self.uniform(uniform, false) as u32);
                copy
            }
        }
    }

    /// The values of a source as `of`, with its sign modifiers.
    pub(crate) fn wide_lanes(&self, source: Source, of: Type) -> WideLanes {
        let mut values = [0; LANES];
        match source.operand {
            Operand::Vector(register) => {
                let register = usize::from(register);
                for (value, &low) in values.iter_mut().zip(&self.vector[register]) {
                    *value = u64::from(low);
                }
                if of.is_wide() {
                    for (value, &high) in values.iter_mut().zip(&self.vector[register + 1]) {
                        *value |= u64::from(high) << 32;
                    }
                }
            }
            uniform => values.fill(self.uniform(uniform, of.is_wide())),
        }
        if source.absolute {
            values = values.map(|value| value & !of.sign());
        }
        if source.negate {
            values = values.map(|value| value ^ of.sign());
        }
        values
    }

    /// Writes a vector register in the lanes that take part.
    pub(crate) fn write(&mut self, register: u16, values: &Lanes) {
        let exec = self.exec();
        let to = &mut self.vector[usize::from(register)];
        if exec == u64::MAX {
            *to = *values;
            return;
        }
        for (lane, (to, &value)) in to.iter_mut().zip(values).enumerate() {
            if exec >> lane & 1 == 1 {
                *to = value;
            }
        }
    }

    /// Writes two vector registers in the lanes that take part.
    pub(crate) fn write_wide(&mut self, register: u16, values: &WideLanes) {
        self.write(register, &values.map(|value| value as u32));
        self.write(register + 1, &values.map(|value| (value >> 32) as u32));
    }

    /// Lanes that take part, in order.
    pub(crate) fn active(&self) -> impl Iterator<Item = usize> + use<> {
        let mut left = self.exec();
        std::iter::from_fn(move || {
            let lane = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            (lane < LANES).then_some(lane)
        })
    }
}
