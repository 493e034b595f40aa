//! AMX: eight registers that are tiles of a matrix, and products of two tiles.
//!
//! ```text
//! tile                16 rows of 64 bytes, or fewer of either, as configured
//! product C += A B    A [m rows][k pairs]   B [k pairs][n columns]   C [m rows][n columns] in f32
//! ```
//!
//! Kernels are written over [`Tiles`], which the machine's instructions implement ([`Hardware`]) and a
//! model of them ([`Model`]). The model computes what the manual of the processors says, bit by bit, so
//! that the same kernels are tested on machines without tiles.
//!
//! Tiles take 8 KiB of a thread's state. The kernel saves them at a switch of threads only while they are
//! in use, so a [`Session`] lasts for one piece of work and releases them.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1 chapter 18 and volume
//! 2; Linux, `Documentation/arch/x86/xstate.rst`.

mod hardware;
mod model;
mod support;
#[cfg(test)]
mod tests;

pub(super) use hardware::Hardware;
pub(super) use model::Model;
pub(super) use support::is_available;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(super) const ROW_BYTES: usize = 64;
/// Tile registers.
const REGISTERS: usize = 8;

/// Rows of a tile register, and bytes of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) rows: usize,
    pub(super) row_bytes: usize,
}

/// Shapes of all tile registers, as `ldtilecfg` reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(super) struct TileConfig([u8; 64]);

impl TileConfig {
    /// Where the bytes of a row, two bytes for each register, and the rows begin.
    const ROW_BYTES_AT: usize = 16;
    const ROWS_AT: usize = 48;

    /// A configuration of registers that are used; others have no rows.
    ///
    /// # Panics
    /// When a shape is larger than a register, or rows are no whole pairs.
    pub(super) const fn new(shapes: [Shape; REGISTERS]) -> TileConfig {
        let mut bytes = [0; 64];
        // The only palette that there is.
        bytes[0] = 1;
        let mut i = 0;
        while i < REGISTERS {
            let Shape { rows, row_bytes } = shapes[i];
            assert!(rows <= ROWS && row_bytes <= ROW_BYTES && row_bytes.is_multiple_of(4));
            assert!((rows == 0) == (row_bytes == 0));
            bytes[Self::ROW_BYTES_AT + 2 * i] = row_bytes as u8;
            bytes[Self::ROWS_AT + i] = rows as u8;
            i += 1;
        }
        TileConfig(bytes)
    }

    /// The shape of a register.
    fn shape(&self, tile: usize) -> Shape {
        let row_bytes = usize::from(self.0[Self::ROW_BYTES_AT + 2 * tile]);
        Shape { rows: usize::from(self.0[Self::ROWS_AT + tile]), row_bytes }
    }
}

/// The tile instructions. Registers are numbered from 0 to 7.
///
/// # Safety
/// Every unsafe method asks that the machine has the instructions, that this thread has a configuration
/// with the registers that are named, and that the memory exists.
pub(super) trait Tiles: Default {
    /// Configures all registers, which become zero.
    unsafe fn configure(&mut self, config: &TileConfig);
    /// Gives all registers up.
    unsafe fn release(&mut self);
    /// Sets a register to zero.
    unsafe fn zero<const T: usize>(&mut self);
    /// Loads a register from rows that lie `stride` bytes apart.
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize);
    /// Stores a register in rows that lie `stride` bytes apart.
    unsafe fn store<const T: usize>(&self, to: *mut u8, stride: usize);
    /// Adds the product of two registers, `A` of pairs of bfloat16 and `B` of as many rows as `A` has
    /// pairs, to `C` of f32: of each element the products of the first halves of the pairs in their
    /// order, plus those of the second halves, plus what was there. Subnormal numbers count as zero.
    unsafe fn multiply_add<const C: usize, const A: usize, const B: usize>(&mut self);
}

/// Tiles that a piece of work uses and releases at its end.
#[derive(Default)]
pub(super) struct TileSession<T: Tiles> {
    tiles: T,
    config: Option<TileConfig>,
}

impl<T: Tiles> TileSession<T> {
    /// The tiles as `config` says: zero, or with what they hold if that was the configuration already.
    ///
    /// # Safety
    /// The machine has the instructions.
    #[inline]
    pub(super) unsafe fn with(&mut self, config: &TileConfig) -> &mut T {
        if self.config.as_ref() != Some(config) {
            // SAFETY: as the caller says.
            unsafe { self.tiles.configure(config) };
            self.config = Some(*config);
        }
        &mut self.tiles
    }
}

impl<T: Tiles> Drop for TileSession<T> {
    fn drop(&mut self) {
        if self.config.is_some() {
            // SAFETY: they were configured.
            unsafe { self.tiles.release() };
        }
    }
}
