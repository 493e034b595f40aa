//! Host memory that a device reaches by itself. It is registered in one piece. Where the driver
//! refuses that, it is registered in parts, as many from the first on as the driver accepts: hosts
//! may limit how much one call pins, or how much a process pins in all.

use std::ops::Range;
use std::sync::Arc;

use super::address::Address;
use super::gpu::{Gpu, GpuError};

/// Bytes of a part, whole pages.
const PART_BYTES: usize = 4 << 20;

/// Memory that is registered as long as this lives.
#[derive(Debug)]
pub(super) struct HostMemory<G: Gpu> {
    gpu: Arc<G>,
    /// Each begins where the one before it ends.
    parts: Vec<RegisteredRange>,
    /// Why it is not registered to its end.
    failure: Option<GpuError>,
}

#[derive(Debug)]
struct RegisteredRange {
    at: Range<usize>,
    address: Address,
}

impl<G: Gpu> HostMemory<G> {
    /// Registers `bytes` bytes from `start` on, as far as the driver allows.
    ///
    /// # Safety
    /// They stay mapped as long as this lives, and have no references while the device accesses
    /// them.
    pub(super) unsafe fn new(gpu: &Arc<G>, start: *mut u8, bytes: usize) -> HostMemory<G> {
        let mut memory = HostMemory { gpu: Arc::clone(gpu), parts: Vec::new(), failure: None };
        if bytes == 0 {
            return memory;
        }
        // SAFETY: the caller's.
        let is_whole = unsafe { memory.register(start, 0..bytes) };
        if !is_whole && bytes <= PART_BYTES {
            return memory;
        }
        let mut at = 0;
        while !is_whole && at < bytes {
            let end = bytes.min(at + PART_BYTES);
            // SAFETY: the caller's; a part of these bytes.
            if !unsafe { memory.register(start, at..end) } {
                return memory;
            }
            at = end;
        }
        memory.failure = None;
        memory
    }

    /// Whether the driver registered this part.
    ///
    /// # Safety
    /// As for `new`.
    unsafe fn register(&mut self, start: *mut u8, at: Range<usize>) -> bool {
        // SAFETY: the caller's.
        match unsafe { self.gpu.register(start.wrapping_add(at.start), at.len()) } {
            Ok(address) => self.parts.push(RegisteredRange { at, address }),
            Err(failure) => {
                self.failure = Some(failure);
                return false;
            }
        }
        true
    }

    /// Bytes from the start on that the device reaches.
    pub(super) fn bytes(&self) -> usize {
        self.parts.last().map_or(0, |part| part.at.end)
    }

    /// Why the device does not reach all of it.
    pub(super) fn failure(&self) -> Option<&GpuError> {
        self.failure.as_ref()
    }

    /// Where the device finds the bytes `wanted`, if it reaches them all: addresses, each for some
    /// of the bytes, counted from the first of `wanted`. A copy must not cross the end of a part.
    pub(super) fn pieces(
        &self,
        wanted: Range<usize>,
    ) -> Option<impl Iterator<Item = (Address, Range<usize>)>> {
        let Range { start, end } = wanted;
        if end > self.bytes() {
            return None;
        }
        let first = self.parts.partition_point(|part| part.at.end <= start);
        let parts = self.parts.get(first..).unwrap_or_default().iter();
        Some(parts.take_while(move |part| part.at.start < end).map(move |part| {
            let (from, to) = (part.at.start.max(start), part.at.end.min(end));
            let address = part.address.offset(from - part.at.start);
            (address, from - start..to - start)
        }))
    }
}

impl<G: Gpu> Drop for HostMemory<G> {
    fn drop(&mut self) {
        if self.parts.is_empty() {
            return;
        }
        // A device that does not answer any more does not access it any more.
        let _ = self.gpu.wait();
        for part in &self.parts {
            // SAFETY: registered by `register`; nothing is enqueued.
            unsafe { self.gpu.unregister(part.address) };
        }
    }
}

#[cfg(all(test, feature = "emu"))]
mod tests {
    use super::*;
    use crate::cuda::emu::Emu;

    const MIB: usize = 1 << 20;

    fn register(emu: Emu, memory: &mut [u8]) -> HostMemory<Emu> {
        // SAFETY: it outlives what is registered, in each test.
        unsafe { HostMemory::new(&Arc::new(emu), memory.as_mut_ptr(), memory.len()) }
    }

    fn pieces(memory: &HostMemory<Emu>, wanted: Range<usize>) -> Vec<(u64, Range<usize>)> {
        let found = memory.pieces(wanted).expect("the device reaches it");
        found.map(|(address, at)| (address.0, at)).collect()
    }

    #[test]
    fn memory_is_registered_in_one_piece_where_the_driver_allows_it() {
        let mut bytes = vec![0; 10 * MIB];
        let start = bytes.as_mut_ptr().expose_provenance() as u64;
        let memory = register(Emu::new(1), &mut bytes);
        assert_eq!((memory.bytes(), memory.failure()), (10 * MIB, None));
        assert_eq!(pieces(&memory, 5..9 * MIB), [(start + 5, 0..9 * MIB - 5)]);
        assert!(memory.pieces(5..10 * MIB + 1).is_none());
        assert!(register(Emu::new(1), &mut []).pieces(0..0).is_some());
    }

    #[test]
    fn memory_is_registered_in_parts_where_one_piece_is_too_large() {
        let mut bytes = vec![0; 10 * MIB];
        let start = bytes.as_mut_ptr().expose_provenance() as u64;
        let memory = register(Emu::new(1).with_registrations(5 * MIB, usize::MAX), &mut bytes);
        assert_eq!((memory.bytes(), memory.failure()), (10 * MIB, None));
        assert_eq!(memory.parts.len(), 3);
        let (second, third) = (start + 4 * MIB as u64, start + 8 * MIB as u64);
        assert_eq!(pieces(&memory, 4 * MIB..8 * MIB), [(second, 0..4 * MIB)]);
        let crossing = [
            (start + 7, 0..4 * MIB - 7),
            (second, 4 * MIB - 7..8 * MIB - 7),
            (third, 8 * MIB - 7..8 * MIB - 6),
        ];
        assert_eq!(pieces(&memory, 7..8 * MIB + 1), crossing);
    }

    #[test]
    fn memory_is_reached_as_far_as_the_driver_pins_it() {
        let mut bytes = vec![0; 10 * MIB];
        let memory = register(Emu::new(1).with_registrations(usize::MAX, 9 * MIB), &mut bytes);
        assert_eq!(memory.bytes(), 8 * MIB);
        assert!(memory.failure().is_some());
        assert!(
            memory.pieces(0..8 * MIB).is_some() && memory.pieces(8 * MIB..8 * MIB + 1).is_none()
        );
        drop(memory);
        let none = register(Emu::new(1).with_registrations(MIB, usize::MAX), &mut bytes);
        assert_eq!(none.bytes(), 0);
        assert!(none.pieces(0..1).is_none());
    }

    #[test]
    fn what_is_dropped_is_pinned_no_more() {
        let mut bytes = vec![0; 10 * MIB];
        let gpu = Arc::new(Emu::new(1).with_registrations(5 * MIB, 10 * MIB));
        for _ in 0..3 {
            // SAFETY: the bytes live longer.
            let memory = unsafe { HostMemory::new(&gpu, bytes.as_mut_ptr(), bytes.len()) };
            assert_eq!(memory.failure(), None);
        }
    }
}
