//! From lines of text to instructions that run.

use rustc_hash::FxHashMap;

use crate::assembly::Line;
use crate::code_object::Program;
use crate::error::Error;
use crate::memory_instructions::{ds, flat, mubuf};
use crate::vop::{mask, readlane};
use crate::{mfma, smem, sop, sopp, vop, vop3p};

/// An instruction, by its class.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Instruction {
    Scalar(sop::Scalar),
    ScalarLoad(smem::ScalarLoad),
    Flow(sopp::Flow),
    Vector(vop::Vector),
    Masked(mask::Masked),
    OneLane(readlane::OneLane),
    Packed(vop3p::Packed),
    Mfma(mfma::Mfma),
    Ds(ds::Ds),
    Flat(flat::Flat),
    Buffer(mubuf::Buffer),
}

impl Instruction {
    /// Bytes of the smallest piece of LDS that the instruction accesses.
    fn lds_granule(&self) -> Option<usize> {
        match self {
            Instruction::Ds(ds) => ds.granule(),
            Instruction::Flat(flat) => flat.granule(),
            _ => None,
        }
    }
}

/// Decodes the lines of a kernel, which are in the order of their addresses.
pub(crate) fn program(kernel: &str, lines: &[Line]) -> Result<Program, Error> {
    let index: FxHashMap<u64, usize> =
        lines.iter().enumerate().map(|(index, line)| (line.address, index)).collect();
    let mut instructions = Vec::with_capacity(lines.len());
    let mut unknown: Vec<String> = Vec::new();
    for line in lines {
        match instruction(line, &index) {
            Some(instruction) => instructions.push(instruction),
            None if !unknown.iter().any(|text| text.starts_with(&format!("{} ", line.mnemonic))) => {
                unknown.push(line.to_string());
            }
            None => {}
        }
    }
    if !unknown.is_empty() {
        return Err(Error::UnknownInstructions { kernel: kernel.to_owned(), instructions: unknown });
    }
    let lds_granule = instructions.iter().filter_map(Instruction::lds_granule).min().unwrap_or(4);
    Ok(Program { instructions, lines: lines.to_vec(), index, lds_granule })
}

fn instruction(line: &Line, index: &FxHashMap<u64, usize>) -> Option<Instruction> {
    if line.mnemonic.starts_with("s_") {
        return sop::decode(line)
            .map(Instruction::Scalar)
            .or_else(|| smem::decode(line).map(Instruction::ScalarLoad))
            .or_else(|| sopp::decode(line, index).map(Instruction::Flow));
    }
    if line.mnemonic.starts_with("v_") {
        return vop::decode(line)
            .map(Instruction::Vector)
            .or_else(|| mask::decode(line).map(Instruction::Masked))
            .or_else(|| vop3p::decode(line).map(Instruction::Packed))
            .or_else(|| readlane::decode(line).map(Instruction::OneLane))
            .or_else(|| mfma::decode(line).map(Instruction::Mfma));
    }
    ds::decode(line)
        .map(Instruction::Ds)
        .or_else(|| flat::decode(line).map(Instruction::Flat))
        .or_else(|| mubuf::decode(line).map(Instruction::Buffer))
        .or_else(|| sopp::decode(line, index).map(Instruction::Flow))
}
