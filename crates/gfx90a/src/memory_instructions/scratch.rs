//! Scratch memory: each lane's own, for arrays and spilled registers.

use crate::error::Fault;
use crate::wave::{LANES, Wave};

/// Reads 1 to 4 bytes of a lane's scratch memory.
pub(crate) fn load(wave: &Wave, lane: usize, offset: u64, bytes: usize) -> Result<u32, Fault> {
    let at = place(wave, lane, offset, bytes)?;
    let mut word = [0; 4];
    word[..bytes].copy_from_slice(&wave.scratch[at..at + bytes]);
    Ok(u32::from_le_bytes(word))
}

/// Writes the lowest 1 to 4 bytes of a word.
pub(crate) fn store(
    wave: &mut Wave,
    lane: usize,
    offset: u64,
    bytes: usize,
    value: u32,
) -> Result<(), Fault> {
    let at = place(wave, lane, offset, bytes)?;
    wave.scratch[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
    Ok(())
}

fn place(wave: &Wave, lane: usize, offset: u64, bytes: usize) -> Result<usize, Fault> {
    let size = wave.scratch.len() / LANES;
    if offset + bytes as u64 > size as u64 {
        return Err(Fault::OutsideScratch { lane, offset, size });
    }
    Ok(lane * size + offset as usize)
}
