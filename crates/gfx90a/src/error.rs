//! What can be wrong with a code object or a launch, and what a kernel can do wrong while it runs.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a code object cannot be loaded, or a kernel did not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written, or a program cannot be started.
    #[error("{path}: {error}")]
    File {
        /// The file or the program.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// The compiler is missing or refused the source.
    #[error("{0}")]
    Compiler(String),
    /// The file is not a code object that this crate understands.
    #[error("{path}: {reason}")]
    CodeObject {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The launch does not fit the kernel.
    #[error("{kernel}: {reason}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What is wrong.
        reason: String,
    },
    /// The kernel has instructions that the interpreter does not know.
    #[error("{kernel}: unknown instructions: {}", .instructions.join("; "))]
    UnknownInstructions {
        /// The kernel.
        kernel: String,
        /// Each of them once, as text.
        instructions: Vec<String>,
    },
    /// The kernel did something wrong while it ran.
    #[error("{0}")]
    Fault(Box<FaultReport>),
}

/// What a kernel did wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// The kernel.
    pub kernel: String,
    /// The workgroup's place in the grid.
    pub workgroup: [u32; 3],
    /// The wave's number in its workgroup.
    pub wave: usize,
    /// The instruction's address in the code object.
    pub address: u64,
    /// The instruction as text.
    pub instruction: String,
    /// What it did.
    pub fault: Fault,
}

impl fmt::Display for FaultReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let FaultReport { kernel, workgroup, wave, address, instruction, fault } = self;
        write!(f, "{kernel}, workgroup {workgroup:?}, wave {wave}, at {address:#x} ({instruction}): {fault}")
    }
}

/// What an instruction did wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An access to memory outside of all buffers.
    OutOfBounds {
        /// The lane, or `None` for a scalar access.
        lane: Option<usize>,
        /// The first byte's address.
        address: u64,
        /// Bytes that were accessed.
        bytes: usize,
        /// The buffer in whose neighbourhood the address is, and how far from its beginning.
        buffer: Option<(String, i64, usize)>,
    },
    /// A write to memory that the host passed for reading only, or to the code.
    ReadOnly {
        /// The lane.
        lane: usize,
        /// The address.
        address: u64,
    },
    /// An access to LDS beyond what the workgroup has.
    OutsideLds {
        /// The lane.
        lane: usize,
        /// The first byte's offset.
        offset: u64,
        /// Bytes that were accessed.
        bytes: usize,
        /// Bytes that the workgroup has.
        size: usize,
    },
    /// An access to scratch memory beyond what a lane has.
    OutsideScratch {
        /// The lane.
        lane: usize,
        /// The first byte's offset.
        offset: u64,
        /// Bytes that a lane has.
        size: usize,
    },
    /// Two waves accessed the same bytes of LDS without a barrier in between, and one of them wrote.
    Race {
        /// Offset in LDS.
        offset: usize,
        /// The other wave.
        other: usize,
        /// Whether the other wave had written.
        other_wrote: bool,
    },
    /// Two lanes of one instruction wrote different values to the same bytes of LDS.
    LanesDisagree {
        /// Offset in LDS.
        offset: usize,
    },
    /// A jump to an address that is not an instruction of the code object.
    Jump {
        /// The address.
        address: u64,
    },
    /// The workgroup executed more instructions than a launch may.
    TooLong,
    /// Something that the hardware could do, but the interpreter cannot.
    Unsupported(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Fault::OutOfBounds { lane, address, bytes, buffer } => {
                match lane {
                    Some(lane) => write!(f, "lane {lane} accesses {bytes} bytes at {address:#x}")?,
                    None => write!(f, "a scalar access to {bytes} bytes at {address:#x}")?,
                }
                match buffer {
                    Some((name, offset, size)) => {
                        write!(f, ", offset {offset} of {name}, which has {size} bytes")
                    }
                    None => write!(f, ", where there is no buffer"),
                }
            }
            Fault::ReadOnly { lane, address } => {
                write!(f, "lane {lane} writes to {address:#x}, which is for reading only")
            }
            Fault::OutsideLds { lane, offset, bytes, size } => {
                write!(
                    f,
                    "lane {lane} accesses {bytes} bytes at offset {offset} of LDS; the workgroup has {size}"
                )
            }
            Fault::OutsideScratch { lane, offset, size } => {
                write!(
                    f,
                    "lane {lane} accesses offset {offset} of its scratch memory, which has {size} bytes"
                )
            }
            Fault::Race { offset, other, other_wrote } => {
                let verb = if *other_wrote { "written" } else { "read" };
                write!(f, "offset {offset} of LDS was {verb} by wave {other} since the last barrier")
            }
            Fault::LanesDisagree { offset } => {
                write!(f, "lanes write different values to offset {offset} of LDS")
            }
            Fault::Jump { address } => write!(f, "a jump to {address:#x}, which is not an instruction"),
            Fault::TooLong => write!(f, "the workgroup does not end"),
            Fault::Unsupported(what) => write!(f, "{what}"),
        }
    }
}
