//! Code objects: ELF files with machine code, kernel descriptors and metadata in `MessagePack`.
//!
//! The format is described in LLVM's "User Guide for AMDGPU Backend", sections Code Object and Kernel Descriptor.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use object::elf;
use object::read::elf::{ElfFile64, ProgramHeader, SectionHeader};
use object::{LittleEndian, Object, ObjectSymbol};
use rmpv::Value;
use rustc_hash::FxHashMap;

use crate::assembly::{self, Line};
use crate::decode::{self, Instruction};
use crate::error::Error;

/// The type of the note that holds the metadata (`NT_AMDGPU_METADATA`).
const METADATA: u32 = 32;

/// Bytes of a kernel descriptor.
const DESCRIPTOR: usize = 64;

/// Rounding to the nearest, and subnormal numbers kept, in every format (`FLOAT_MODE` of `compute_pgm_rsrc1`).
const FLOAT_MODE: u32 = 0xf0;

/// Architectures whose waves and instructions are known here. Those of gfx942 that compilers use for Kintsugi's kernels are
/// nearly the same.
const EXECUTED: [&str; 2] = ["gfx90a", "gfx942"];

/// A loaded code object.
#[derive(Debug)]
pub struct CodeObject {
    /// The segments as they lie in memory.
    pub(crate) image: Vec<u8>,
    /// Such as `gfx90a`.
    architecture: String,
    kernels: BTreeMap<String, Rc<Kernel>>,
    lines: Vec<Line>,
    /// Kernels that have been decoded, by name.
    programs: RefCell<FxHashMap<String, Rc<Program>>>,
}

/// A kernel as its descriptor and metadata describe it.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// Offset of the first instruction in the image.
    pub(crate) entry: u64,
    /// Bytes of static LDS.
    pub(crate) lds: usize,
    /// Bytes of scratch memory of a lane.
    pub(crate) scratch: usize,
    /// Vector registers of a lane, accumulation registers among them.
    registers: usize,
    pub(crate) max_threads: u32,
    pub(crate) arguments: Vec<Slot>,
    /// Bytes of all arguments, hidden ones included.
    pub(crate) argument_bytes: usize,
    pub(crate) setup: Setup,
}

/// What a kernel needs, by its compiler's report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Bytes of static LDS.
    pub lds: usize,
    /// Bytes of scratch memory of a lane, where registers are spilled.
    pub scratch: usize,
    /// Vector registers of a lane, accumulation registers among them.
    pub registers: usize,
}

/// An argument's place.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) offset: usize,
    pub(crate) size: usize,
    /// Such as `global_buffer`, `by_value` or `hidden_block_count_x`.
    pub(crate) kind: String,
}

/// Which registers a wave starts with, and how it rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    /// Bits of `kernel_code_properties`: what the user registers hold, in this order.
    pub(crate) properties: u16,
    /// `compute_pgm_rsrc2`.
    pub(crate) system: u32,
    float_mode: u32,
}

/// A kernel's instructions, ready to run.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) instructions: Vec<Instruction>,
    pub(crate) lines: Vec<Line>,
    /// From an address in the image to the index of the instruction.
    pub(crate) index: FxHashMap<u64, usize>,
    /// Bytes of the smallest access to LDS: races are tracked in pieces of this size.
    pub(crate) lds_granule: usize,
}

impl CodeObject {
    /// Reads a code object and disassembles it.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|error| Error::File { path: path.into(), error })?;
        let failed = |reason: String| Error::CodeObject { path: path.into(), reason };
        let Loaded { image, architecture, kernels } = load(&bytes).map_err(failed)?;
        let lines = assembly::disassemble(path, &architecture)
            .map_err(|error| Error::File { path: PathBuf::from(assembly::OBJDUMP), error })?;
        Ok(CodeObject { image, architecture, kernels, lines, programs: RefCell::default() })
    }

    /// The names of the kernels, in alphabetical order.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// What a kernel needs.
    pub fn resources(&self, kernel: &str) -> Result<Resources, Error> {
        let Kernel { lds, scratch, registers, .. } = *self.kernel(kernel)?;
        Ok(Resources { lds, scratch, registers })
    }

    /// Bytes of each argument that a kernel takes, in order.
    pub fn argument_sizes(&self, kernel: &str) -> Result<Vec<usize>, Error> {
        let kernel = self.kernel(kernel)?;
        let visible = kernel.arguments.iter().filter(|slot| !slot.kind.starts_with("hidden_"));
        Ok(visible.map(|slot| slot.size).collect())
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<Rc<Kernel>, Error> {
        self.kernels.get(name).cloned().ok_or_else(|| Error::Launch {
            kernel: name.to_owned(),
            reason: "the code object has no kernel of this name".to_owned(),
        })
    }

    /// The instructions of a kernel, decoded when it is first used.
    pub(crate) fn program(&self, kernel: &Kernel) -> Result<Rc<Program>, Error> {
        if !EXECUTED.contains(&self.architecture.as_str()) {
            let reason = format!("code for {} is not executed here", self.architecture);
            return Err(Error::Launch { kernel: kernel.name.clone(), reason });
        }
        if let Some(program) = self.programs.borrow().get(&kernel.name) {
            return Ok(program.clone());
        }
        let begin = self.lines.partition_point(|line| line.address < kernel.entry);
        // A kernel ends where the next one begins.
        let next = self.kernels.values().map(|other| other.entry).filter(|&other| other > kernel.entry).min();
        let end =
            next.map_or(self.lines.len(), |next| self.lines.partition_point(|line| line.address < next));
        let program = Rc::new(decode::program(&kernel.name, &self.lines[begin..end])?);
        self.programs.borrow_mut().insert(kernel.name.clone(), program.clone());
        Ok(program)
    }

    /// The same code object with other instructions, for tests that a fault is noticed. `change` gets the text of every
    /// instruction and returns the text that takes its place, if any.
    #[must_use]
    pub fn with_changed_instructions(mut self, change: impl Fn(&str) -> Option<String>) -> Self {
        for line in &mut self.lines {
            if let Some(text) = change(&line.to_string()) {
                let address = line.address;
                let text =
                    format!("\t{text} // {address:012X}: {}", "00000000 ".repeat(line.bytes as usize / 4));
                *line = assembly::parse(&text).expect("an instruction");
            }
        }
        self.programs.borrow_mut().clear();
        self
    }
}

/// The contents of a code object, but for its instructions.
struct Loaded {
    image: Vec<u8>,
    architecture: String,
    kernels: BTreeMap<String, Rc<Kernel>>,
}

fn load(bytes: &[u8]) -> Result<Loaded, String> {
    let file = ElfFile64::<LittleEndian>::parse(bytes).map_err(|error| error.to_string())?;
    let mut image = Vec::new();
    for segment in
        file.elf_program_headers().iter().filter(|header| header.p_type.get(LittleEndian) == elf::PT_LOAD)
    {
        let (begin, size) = (segment.p_vaddr(LittleEndian) as usize, segment.p_memsz(LittleEndian) as usize);
        let data = segment.data(LittleEndian, bytes).map_err(|()| "a segment lies outside of the file")?;
        image.resize(image.len().max(begin + size), 0);
        image[begin..begin + data.len()].copy_from_slice(data);
    }
    if file.dynamic_relocations().is_some_and(|mut relocations| relocations.next().is_some()) {
        return Err("code objects with relocations are not supported".to_owned());
    }
    let metadata = metadata(&file, bytes)?;
    // Example: amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-
    let target = text(&metadata, "amdhsa.target").ok_or("no target")?;
    let name = &target[target.find("gfx").ok_or_else(|| format!("it is for {target:?}"))?..];
    let architecture = name.split(':').next().unwrap_or(name);
    let symbols: FxHashMap<&str, u64> =
        file.dynamic_symbols().filter_map(|symbol| Some((symbol.name().ok()?, symbol.address()))).collect();
    let list = field(&metadata, "amdhsa.kernels").and_then(Value::as_array).ok_or("no kernels")?;
    let mut kernels = BTreeMap::new();
    for entry in list {
        let name = text(entry, ".name").ok_or("a kernel without a name")?;
        let symbol = text(entry, ".symbol").ok_or("a kernel without a symbol")?;
        let at = *symbols.get(symbol).ok_or_else(|| format!("no symbol {symbol}"))?;
        let kernel = kernel(entry, name, at, &image).ok_or_else(|| format!("the metadata of {name}"))?;
        if kernel.setup.float_mode != FLOAT_MODE {
            return Err(format!("{name} rounds in another way, or takes subnormal numbers for zero"));
        }
        kernels.insert(name.to_owned(), Rc::new(kernel));
    }
    Ok(Loaded { image, architecture: architecture.to_owned(), kernels })
}

fn metadata(file: &ElfFile64<LittleEndian>, bytes: &[u8]) -> Result<Value, String> {
    for section in file.sections() {
        let header = section.elf_section_header();
        let Ok(Some(mut notes)) = header.notes(LittleEndian, bytes) else { continue };
        while let Ok(Some(note)) = notes.next() {
            if note.name() == b"AMDGPU" && note.n_type(LittleEndian) == METADATA {
                return rmpv::decode::read_value(&mut note.desc()).map_err(|error| error.to_string());
            }
        }
    }
    Err("it has no AMDGPU metadata".to_owned())
}

fn field<'a>(map: &'a Value, key: &str) -> Option<&'a Value> {
    map.as_map()?.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value)
}

fn text<'a>(map: &'a Value, key: &str) -> Option<&'a str> {
    field(map, key)?.as_str()
}

fn number(map: &Value, key: &str) -> Option<usize> {
    field(map, key)?.as_u64().map(|value| value as usize)
}

/// A kernel from its metadata and its descriptor at an address of the image.
fn kernel(metadata: &Value, name: &str, at: u64, image: &[u8]) -> Option<Kernel> {
    let descriptor = image.get(at as usize..at as usize + DESCRIPTOR)?;
    let word = |offset: usize| {
        let bytes = descriptor.get(offset..offset + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let offset = u64::from(word(16)?) | u64::from(word(20)?) << 32;
    let slots = field(metadata, ".args").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let slot = |entry: &Value| {
        let kind = text(entry, ".value_kind")?.to_owned();
        Some(Slot { offset: number(entry, ".offset")?, size: number(entry, ".size")?, kind })
    };
    Some(Kernel {
        name: name.to_owned(),
        entry: at.wrapping_add(offset),
        lds: word(0)? as usize,
        scratch: word(4)? as usize,
        registers: number(metadata, ".vgpr_count")?,
        max_threads: number(metadata, ".max_flat_workgroup_size")? as u32,
        arguments: slots.iter().map(slot).collect::<Option<_>>()?,
        argument_bytes: number(metadata, ".kernarg_segment_size")?,
        setup: Setup { properties: word(56)? as u16, system: word(52)?, float_mode: word(48)? >> 12 & 0xff },
    })
}
