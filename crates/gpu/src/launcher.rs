//! What every kernel launch needs: the kernels, the scratch buffer, and the number of blocks that fill the GPU.

use super::driver::{DeviceRange, Grid, Properties};
use super::error::GpuError;
use super::kernels::{Kernels, Source, suffix};
use super::stream::{Argument, Stream, Table};
use kintsugi_tensor::{AddressSpace, View};

/// Elements that a thread moves at once if alignment allows (`PACK` of `common.cuh`).
pub(crate) const PACK: usize = 8;

/// Packs are moved in pieces of this many bytes.
const PIECE_BYTES: u64 = 16;

/// In kernels that sum columns: adjacent columns per block, and groups of threads that share the rows (`common.cuh`).
pub(crate) const LANES: usize = 32;
const GROUPS: usize = 8;

/// Threads of a block that sums columns.
pub(crate) const COLUMN_THREADS: u32 = (LANES * GROUPS) as u32;

/// Threads per block of elementwise kernels.
const FLAT_THREADS: usize = 256;

/// Launches kernels on one stream, with the stream's scratch buffer.
#[derive(Debug)]
pub(crate) struct Launcher {
    stream: Stream,
    kernels: Kernels,
    scratch: DeviceRange,
}

impl Launcher {
    pub(crate) fn new(stream: &Stream, kernels: Kernels, scratch: DeviceRange) -> Self {
        Launcher { stream: stream.clone(), kernels, scratch }
    }

    /// The grid of a grid-stride kernel over a flat array: as many blocks as the GPU runs at once, but no more than
    /// there is work for.
    pub(crate) fn flat(&self, elements: usize, wide: bool) -> Grid {
        const BLOCKS_PER_MULTIPROCESSOR: usize = 8;
        let turns = if wide { elements.div_ceil(PACK) } else { elements };
        let most = self.multiprocessors() * BLOCKS_PER_MULTIPROCESSOR;
        Grid::new(turns.div_ceil(FLAT_THREADS).clamp(1, most), FLAT_THREADS as u32)
    }

    /// Number of chunks into which the rows are split. With `columns` blocks per chunk they fill the GPU, and their
    /// partial sums fit into the scratch buffer.
    pub(crate) fn row_chunks(&self, rows: usize, columns: usize, bytes_per_chunk: usize) -> usize {
        const BLOCKS_PER_MULTIPROCESSOR: usize = 4;
        let filling = (self.multiprocessors() * BLOCKS_PER_MULTIPROCESSOR).div_ceil(columns);
        let most = (self.scratch_bytes() / bytes_per_chunk).min(rows.div_ceil(GROUPS));
        filling.clamp(1, most.max(1))
    }

    /// One block per row. Its threads share the row's `items`: whole warps, at most `most` threads.
    pub(crate) fn per_row(&self, rows: usize, items: usize, most: usize) -> Grid {
        let warp = self.properties().warp;
        Grid::new(rows, items.next_multiple_of(warp).clamp(warp, most) as u32)
    }

    /// The kernels.
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Streaming multiprocessors of the device.
    pub(crate) fn multiprocessors(&self) -> usize {
        self.properties().multiprocessors
    }

    /// What decides how kernels are launched.
    pub(crate) fn properties(&self) -> &Properties {
        self.stream.properties()
    }

    /// The address of the stream's scratch buffer. Fails if it has fewer than `bytes`.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<u64, GpuError> {
        if bytes as u64 > self.scratch.bytes {
            let have = self.scratch.bytes;
            return Err(GpuError::Unsupported(format!(
                "a kernel needs {bytes} bytes of {have} scratch bytes"
            )));
        }
        Ok(self.scratch.address)
    }

    /// Bytes of the scratch buffer.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch.bytes as usize
    }

    /// Sets bytes of the scratch buffer to zero.
    pub(crate) fn clear_scratch(&self, at: u64, bytes: usize) -> Result<(), GpuError> {
        let inside =
            self.scratch.address <= at && at + bytes as u64 <= self.scratch.address + self.scratch.bytes;
        assert!(inside, "clearing outside of the scratch");
        // SAFETY: within the scratch, which lives as long as the backend.
        unsafe { self.stream.clear(at, bytes) }
    }

    /// Enqueues the kernel `name` of a file. Does nothing if the grid is empty.
    ///
    /// # Safety
    /// As [`Stream::launch`].
    pub(crate) unsafe fn launch(
        &self,
        source: &'static Source,
        name: &str,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with_table(source, name, grid, &[], arguments) }
    }

    /// The same for a file that is compiled with definitions.
    ///
    /// # Safety
    /// As [`Stream::launch`].
    pub(crate) unsafe fn launch_defined(
        &self,
        source: &'static Source,
        definitions: &[String],
        name: &str,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        if grid.blocks.0 == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch_defined(source, definitions, name, grid, &[], arguments) }
    }

    /// The same for a kernel that takes a table by value before its other arguments.
    ///
    /// # Safety
    /// As [`Stream::launch`].
    pub(crate) unsafe fn launch_with_table(
        &self,
        source: &'static Source,
        name: &str,
        grid: Grid,
        table: Table,
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        if grid.blocks.0 == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch_with_table(source, name, grid, table, arguments) }
    }
}

/// The suffix in kernel names of the type that these views share.
pub(crate) fn common_suffix(views: &[View]) -> Result<&'static str, GpuError> {
    let dtype = views[0].dtype();
    assert!(
        views.iter().all(|view| view.dtype() == dtype),
        "a view has another type than the operation works in"
    );
    suffix(dtype)
}

/// The device address of a view. Panics if the view is not device memory.
pub(crate) fn device_address(view: View) -> u64 {
    assert_eq!(view.address_space(), AddressSpace::Device, "the GPU cannot reach this memory");
    view.address()
}

/// The device address of a view, as an argument.
pub(crate) fn pointer(view: View) -> Argument {
    device_address(view).into()
}

/// The device address of a view, or null.
pub(crate) fn pointer_or_null(view: Option<View>) -> Argument {
    view.map_or(Argument::from(0_u64), pointer)
}

/// A size, as the kernels' `long long`.
pub(crate) fn size(value: usize) -> Argument {
    (value as u64).into()
}

/// Whether all of these views can be moved in pieces of 16 bytes.
pub(crate) fn aligned_flat(views: &[View]) -> bool {
    views.iter().all(|view| view.address().is_multiple_of(PIECE_BYTES))
}

/// Whether every row of `width` elements can be moved in whole packs, in all of these views.
pub(crate) fn aligned(width: usize, views: &[View]) -> bool {
    width.is_multiple_of(PACK) && aligned_flat(views)
}
