//! The arena: one sealed memfd per netd generation through which tensors pass between netd and the
//! workers. netd writes a client's hidden states into an input slot once; a worker reads them, and
//! writes its result into an output slot. Which bytes belong to which slot is decided by netd
//! alone (`netd/src/workers/allocator.rs`).
//!
//! No reference into the arena is ever handed out: another process may write any byte at any time.
//! Values go in and out by raw bounded copies; what was read is a private copy, checked and then
//! used.

use std::ptr;

use super::segment::{Mapping, MemfdSegment, OutOfBounds, Plain, SegmentError, Sharing};

/// A mapped arena. Cheap to share in an `Arc`; all methods may be called from any thread.
#[derive(Debug)]
pub struct ArenaMap {
    mapping: Mapping,
}

impl ArenaMap {
    /// Maps `segment`, beside others that map it as an arena. The descriptor is not needed any
    /// more.
    ///
    /// # Errors
    /// [`SegmentError::Busy`] when the segment is mapped as KV pages, [`SegmentError::System`] when
    /// there is no room for it.
    pub fn map(segment: &MemfdSegment) -> Result<ArenaMap, SegmentError> {
        Ok(ArenaMap { mapping: segment.map(Sharing::Shared)? })
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "no segment is empty")]
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Copies `values` to `offset` (bytes; any alignment).
    ///
    /// # Errors
    /// [`OutOfBounds`] when they would leave the arena; nothing is written then.
    pub fn write<T: Plain>(&self, offset: u64, values: &[T]) -> Result<(), OutOfBounds> {
        let target = self.mapping.at(offset, size_of_val(values))?;
        // SAFETY: the target was bounded above, and does not overlap `values`, since no reference
        // into the arena exists.
        unsafe {
            ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), target, size_of_val(values))
        };
        Ok(())
    }

    /// Fills `values` with what lies at `offset` (bytes; any alignment).
    ///
    /// # Errors
    /// [`OutOfBounds`] when that would leave the arena; nothing is read then.
    pub fn read<T: Plain>(&self, offset: u64, values: &mut [T]) -> Result<(), OutOfBounds> {
        let source = self.mapping.at(offset, size_of_val(values))?;
        // SAFETY: the source was bounded above; `T: Plain` takes any bytes, even torn ones; no
        // overlap, as in write().
        unsafe {
            ptr::copy_nonoverlapping(source, values.as_mut_ptr().cast::<u8>(), size_of_val(values))
        };
        Ok(())
    }

    /// Address of the `len` bytes at `offset`, for a device that copies from and to them by itself.
    ///
    /// # Errors
    /// [`OutOfBounds`] when they would leave the arena.
    pub fn pointer(&self, offset: u64, len: usize) -> Result<*mut u8, OutOfBounds> {
        self.mapping.at(offset, len)
    }

    /// Lets `fill` write values one after the other into the `len` bytes at `offset`: conversion in
    /// place, without a buffer between. Returns what `fill` returns.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the bytes would leave the arena; `fill` is not called then.
    pub fn write_with<Out>(
        &self,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut SlotWriter<'_>) -> Out,
    ) -> Result<Out, OutOfBounds> {
        let next = self.mapping.at(offset, len)?;
        Ok(fill(&mut SlotWriter { next, left: len, _arena: self }))
    }
}

/// Writes values one after the other into a range of the arena, never beyond it.
#[derive(Debug)]
pub struct SlotWriter<'a> {
    next: *mut u8,
    left: usize,
    _arena: &'a ArenaMap,
}

impl SlotWriter<'_> {
    /// Bytes not written yet.
    pub fn left_bytes(&self) -> usize {
        self.left
    }

    /// Writes the values of `values` for which there is room, in order, and tells how many those
    /// were.
    pub fn extend<T: Plain>(&mut self, values: impl IntoIterator<Item = T>) -> usize {
        let room = self.left / size_of::<T>();
        let start = self.next.cast::<T>();
        let mut written = 0;
        for value in values.into_iter().take(room) {
            // SAFETY: `written < room` values of the range are before this one, so that it ends
            // inside the range.
            let target = unsafe { start.add(written) };
            // SAFETY: the target is inside the mapping, as above; it need not be aligned.
            unsafe { target.write_unaligned(value) };
            written += 1;
        }
        self.advance(written * size_of::<T>());
        written
    }

    fn advance(&mut self, bytes: usize) {
        // SAFETY: `bytes` were just written within the `left` bytes of the range.
        self.next = unsafe { self.next.add(bytes) };
        self.left -= bytes;
    }
}

#[cfg(test)]
mod tests;
