//! What a launch passes to a kernel: arguments, the dispatch packet, and the registers that a wave starts with.
//!
//! LLVM's "User Guide for AMDGPU Backend", sections Kernel Dispatch and Initial Kernel Execution State.

use crate::code_object::Kernel;
use crate::memory_instructions::mubuf::SWIZZLE;
use crate::operand::{PRIVATE_APERTURE, SHARED_APERTURE};
use crate::wave::{LANES, Wave};

/// Bytes of a dispatch packet (`hsa_kernel_dispatch_packet_t`).
const PACKET: usize = 64;

/// Workgroups, threads of a workgroup, and bytes of dynamic LDS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Workgroups in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a workgroup in x, y and z.
    pub threads: [u32; 3],
    /// Bytes of dynamic LDS.
    pub shared: u32,
}

impl Grid {
    /// A grid in one dimension, without dynamic LDS.
    pub fn new(blocks: usize, threads: usize) -> Self {
        Grid { blocks: [blocks as u32, 1, 1], threads: [threads as u32, 1, 1], shared: 0 }
    }

    /// The same workgroups in three dimensions.
    #[must_use]
    pub fn blocks(self, x: usize, y: usize, z: usize) -> Self {
        Grid { blocks: [x, y, z].map(|count| count as u32), ..self }
    }

    /// The same with bytes of dynamic LDS.
    #[must_use]
    pub fn shared(self, bytes: usize) -> Self {
        Grid { shared: bytes as u32, ..self }
    }
}

/// An argument of a kernel, as its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument(Vec<u8>);

impl From<Vec<u8>> for Argument {
    fn from(bytes: Vec<u8>) -> Self {
        Argument(bytes)
    }
}

impl From<bool> for Argument {
    fn from(value: bool) -> Self {
        Argument(vec![u8::from(value)])
    }
}

macro_rules! argument_from {
    ($($number:ty),+) => {
        $(impl From<$number> for Argument {
            fn from(value: $number) -> Self {
                Argument(value.to_le_bytes().to_vec())
            }
        })+
    };
}

argument_from!(u32, i32, f32, u64, i64, f64);

/// The bytes that the kernel reads its arguments from, hidden ones included.
pub(crate) fn pack(kernel: &Kernel, grid: Grid, arguments: &[Argument]) -> Result<Vec<u8>, String> {
    // Compilers load whole pieces of 16 bytes.
    let mut bytes = vec![0; kernel.argument_bytes.next_multiple_of(16)];
    let (hidden, visible): (Vec<_>, Vec<_>) =
        kernel.arguments.iter().partition(|slot| slot.kind.starts_with("hidden_"));
    if visible.len() != arguments.len() {
        return Err(format!("{} arguments; the kernel takes {}", arguments.len(), visible.len()));
    }
    for (i, (slot, argument)) in visible.iter().zip(arguments).enumerate() {
        if slot.size != argument.0.len() {
            return Err(format!(
                "argument {i} has {} bytes; the kernel takes {}",
                argument.0.len(),
                slot.size
            ));
        }
        bytes[slot.offset..slot.offset + slot.size].copy_from_slice(&argument.0);
    }
    for slot in hidden {
        let value = hidden_value(&slot.kind, grid)
            .ok_or_else(|| format!("the kernel wants {}, which has no value here", slot.kind))?;
        bytes[slot.offset..slot.offset + slot.size].copy_from_slice(&value.to_le_bytes()[..slot.size]);
    }
    Ok(bytes)
}

/// The value of a hidden argument.
fn hidden_value(kind: &str, grid: Grid) -> Option<u64> {
    let axis = match kind.as_bytes().last()? {
        b'y' => 1,
        b'z' => 2,
        _ => 0,
    };
    Some(match kind.trim_end_matches(['x', 'y', 'z']) {
        "hidden_block_count_" => u64::from(grid.blocks[axis]),
        "hidden_group_size_" => u64::from(grid.threads[axis]),
        "hidden_grid_dims" => 3,
        "hidden_dynamic_lds_size" => u64::from(grid.shared),
        "hidden_private_base" => u64::from(PRIVATE_APERTURE),
        "hidden_shared_base" => u64::from(SHARED_APERTURE),
        // Every workgroup is whole, offsets are zero, and kernels neither print nor launch.
        "hidden_remainder_"
        | "hidden_global_offset_"
        | "hidden_none"
        | "hidden_printf_buffer"
        | "hidden_hostcall_buffer"
        | "hidden_default_queue"
        | "hidden_completion_action"
        | "hidden_multigrid_sync_arg"
        | "hidden_heap_v1"
        | "hidden_queue_ptr" => 0,
        _ => return None,
    })
}

/// The packet that a kernel reads the size of the grid from.
pub(crate) fn packet(grid: Grid, kernel: &Kernel) -> Vec<u8> {
    let mut bytes = vec![0; PACKET];
    for axis in 0..3 {
        let threads = grid.threads[axis];
        bytes[4 + 2 * axis..6 + 2 * axis].copy_from_slice(&(threads as u16).to_le_bytes());
        let total = grid.blocks[axis] * threads;
        bytes[12 + 4 * axis..16 + 4 * axis].copy_from_slice(&total.to_le_bytes());
    }
    bytes[24..28].copy_from_slice(&(kernel.scratch as u32).to_le_bytes());
    bytes[28..32].copy_from_slice(&(kernel.lds as u32 + grid.shared).to_le_bytes());
    bytes
}

/// Addresses that a wave may start with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    pub(crate) dispatch: u64,
    pub(crate) arguments: u64,
}

/// Writes the registers that a wave starts with.
pub(crate) fn set_up(
    wave: &mut Wave,
    kernel: &Kernel,
    grid: Grid,
    workgroup: [u32; 3],
    addresses: Addresses,
) {
    let properties = kernel.setup.properties;
    let pair = |value: u64| [value as u32, (value >> 32) as u32];
    let [dispatch, arguments] = [pair(addresses.dispatch), pair(addresses.arguments)];
    // A description of scratch memory: its base is zero in every lane, and there is no limit but the lane's own.
    let scratch = [0, SWIZZLE, u32::MAX, 0];
    let user: [&[u32]; 7] =
        [&scratch, &dispatch, &[0, 0], &arguments, &[0, 0], &[0, 0], &[kernel.scratch as u32]];
    let mut next = 0;
    let mut put = |values: &[u32], next: &mut usize| {
        wave.scalar[*next..*next + values.len()].copy_from_slice(values);
        *next += values.len();
    };
    for (bit, values) in user.iter().enumerate() {
        if properties >> bit & 1 == 1 {
            put(values, &mut next);
        }
    }
    let system = kernel.setup.system;
    // Registers for arguments that new firmware loads beforehand. The kernel loads them itself if it starts at its entry.
    next = next.max((system >> 1 & 31) as usize);
    for (axis, &place) in workgroup.iter().enumerate() {
        if system >> (7 + axis) & 1 == 1 {
            put(&[place], &mut next);
        }
    }
    if system >> 10 & 1 == 1 {
        put(&[0], &mut next);
    }
    // The offset of the wave's scratch memory: each wave has memory of its own.
    if system & 1 == 1 {
        put(&[0], &mut next);
    }
    // The place in the workgroup, 10 bits for each axis.
    let [x, y, _] = grid.threads;
    for lane in 0..LANES {
        let thread = (wave.index * LANES + lane) as u32;
        wave.vector[0][lane] = thread % x | (thread / x % y) << 10 | (thread / x / y) << 20;
    }
}
