//! FLAT, GLOBAL and SCRATCH: loads, stores and atomics by 64-bit addresses. A flat address may be in LDS or scratch memory.

use super::access::{Atomic, Shape, atomic, shape};
use super::scratch;
use crate::assembly::Line;
use crate::error::Fault;
use crate::lds::Lds;
use crate::memory::Memory;
use crate::operand::{Operand, PRIVATE_APERTURE, SHARED_APERTURE, Type, operand};
use crate::vop::vector_register;
use crate::wave::{LANES, Wave, WideLanes};

/// An instruction on memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flat {
    action: Action,
    space: Space,
    address: Address,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Load {
        to: u16,
        shape: Shape,
    },
    Store {
        data: u16,
        shape: Shape,
    },
    /// Old values go to `to`.
    Atomic {
        run: Atomic,
        to: Option<u16>,
        data: u16,
    },
    CompareAndSwap {
        to: Option<u16>,
        data: u16,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Flat,
    Global,
    Scratch,
}

/// The sum of a vector register, a scalar register and a constant.
#[derive(Clone, Copy, Debug)]
struct Address {
    vector: Operand,
    /// `Off`, if the vector register holds whole addresses.
    base: Operand,
    offset: i64,
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<Flat> {
    let (space, name) = line.mnemonic.split_once('_')?;
    let space = match space {
        "flat" => Space::Flat,
        "global" => Space::Global,
        "scratch" => Space::Scratch,
        _ => return None,
    };
    let register = |index: usize| vector_register(line.operands.get(index)?);
    let (action, address_at, base_at) = if let Some(kind) = name.strip_prefix("load_") {
        (Action::Load { to: register(0)?, shape: shape(kind)? }, 1, 2)
    } else if let Some(kind) = name.strip_prefix("store_") {
        (Action::Store { data: register(1)?, shape: shape(kind)? }, 0, 2)
    } else {
        let name = name.strip_prefix("atomic_").filter(|_| space != Space::Scratch)?;
        let first = usize::from(line.has("glc"));
        let to = if line.has("glc") { Some(register(0)?) } else { None };
        let data = register(first + 1)?;
        let action = match name {
            "cmpswap" => Action::CompareAndSwap { to, data },
            _ => Action::Atomic { run: atomic(name)?, to, data },
        };
        (action, first, first + 2)
    };
    let read = |index: usize, of| operand(line.operands.get(index)?, of);
    let base = if space == Space::Flat { Operand::Off } else { read(base_at, Type::B64)? };
    let offset = line.number("offset").unwrap_or(0);
    Some(Flat { action, space, address: Address { vector: read(address_at, Type::B64)?, base, offset } })
}

impl Flat {
    /// Bytes of the smallest piece of LDS that the instruction may access.
    pub(crate) fn granule(&self) -> Option<usize> {
        match self.action {
            Action::Load { shape, .. } | Action::Store { shape, .. } if self.space == Space::Flat => {
                Some(shape.bytes)
            }
            _ => None,
        }
    }

    /// Executes the instruction.
    pub(crate) fn run(&self, wave: &mut Wave, memory: &mut Memory, lds: &mut Lds) -> Result<(), Fault> {
        let addresses = self.addresses(wave);
        for lane in wave.active() {
            let address = addresses[lane];
            match self.action {
                Action::Load { to, shape } => {
                    for word in 0..shape.words {
                        let at = address.wrapping_add(4 * word as u64);
                        let value = self.load(wave, memory, lds, lane, at, shape.bytes)?;
                        let register = &mut wave.vector[usize::from(to) + word][lane];
                        *register = shape.loaded(value, *register);
                    }
                }
                Action::Store { data, shape } => {
                    for word in 0..shape.words {
                        let at = address.wrapping_add(4 * word as u64);
                        let value = shape.stored(wave.vector[usize::from(data) + word][lane]);
                        self.store(wave, memory, lds, lane, at, shape.bytes, value)?;
                    }
                }
                Action::Atomic { run, to, data } => {
                    let old = memory.load(Some(lane), address, 4)?;
                    memory.store(lane, address, 4, run(old, wave.vector[usize::from(data)][lane]))?;
                    if let Some(to) = to {
                        wave.vector[usize::from(to)][lane] = old;
                    }
                }
                Action::CompareAndSwap { to, data } => {
                    let old = memory.load(Some(lane), address, 4)?;
                    let [new, expected] = [0, 1].map(|i| wave.vector[usize::from(data) + i][lane]);
                    memory.store(lane, address, 4, if old == expected { new } else { old })?;
                    if let Some(to) = to {
                        wave.vector[usize::from(to)][lane] = old;
                    }
                }
            }
        }
        Ok(())
    }

    fn addresses(&self, wave: &Wave) -> WideLanes {
        let base = wave.uniform(self.address.base, self.space == Space::Global);
        let base = base.wrapping_add_signed(self.address.offset);
        let mut addresses = [base; LANES];
        if let Operand::Vector(register) = self.address.vector {
            let register = usize::from(register);
            // A whole address, or an offset of 32 bits to a scalar base.
            let whole = self.space == Space::Flat
                || (self.space == Space::Global && self.address.base == Operand::Off);
            for (lane, address) in addresses.iter_mut().enumerate() {
                let high = if whole { u64::from(wave.vector[register + 1][lane]) << 32 } else { 0 };
                *address = address.wrapping_add(high | u64::from(wave.vector[register][lane]));
            }
        }
        addresses
    }

    /// Where a flat address is, and its offset there.
    fn place(&self, address: u64) -> (Space, u64) {
        match self.space {
            Space::Flat if address >> 32 == u64::from(SHARED_APERTURE) => {
                (Space::Flat, address & 0xffff_ffff)
            }
            Space::Flat if address >> 32 == u64::from(PRIVATE_APERTURE) => {
                (Space::Scratch, address & 0xffff_ffff)
            }
            Space::Flat | Space::Global => (Space::Global, address),
            Space::Scratch => (Space::Scratch, address),
        }
    }

    fn load(
        &self,
        wave: &Wave,
        memory: &Memory,
        lds: &mut Lds,
        lane: usize,
        address: u64,
        bytes: usize,
    ) -> Result<u32, Fault> {
        match self.place(address) {
            (Space::Global, address) => memory.load(Some(lane), address, bytes),
            (Space::Scratch, offset) => scratch::load(wave, lane, offset, bytes),
            (Space::Flat, offset) => lds.load(wave.index, lane, offset, bytes),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "three memories, and a store to one of them")]
    fn store(
        &self,
        wave: &mut Wave,
        memory: &mut Memory,
        lds: &mut Lds,
        lane: usize,
        address: u64,
        bytes: usize,
        value: u32,
    ) -> Result<(), Fault> {
        match self.place(address) {
            (Space::Global, address) => memory.store(lane, address, bytes, value),
            (Space::Scratch, offset) => scratch::store(wave, lane, offset, bytes, value),
            (Space::Flat, offset) => lds.store(wave.index, lane, offset, bytes, value),
        }
    }
}
