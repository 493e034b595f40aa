//! Addresses in device memory, and the f32 values that lie there.

use crate::ops::Elements;

/// An address in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub u64);

impl Address {
    /// The address `bytes` further on.
    pub fn offset(self, bytes: usize) -> Address {
        Address(self.0.wrapping_add(bytes as u64))
    }
}

/// One f32 in device memory; on the host it has no bytes, so that no reference to it can be read or
/// written through.
#[derive(Debug)]
struct OnDevice;

/// f32 values in device memory, borrowed. The address of the slice is its address on the device.
#[derive(Debug)]
#[repr(transparent)]
pub struct Floats([OnDevice]);

impl Floats {
    /// The address of the first value.
    pub fn address(&self) -> Address {
        Address(self.0.as_ptr().addr() as u64)
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The values of `range`; `None` when it exceeds the slice.
    pub fn part(&self, range: std::ops::Range<usize>) -> Option<&Floats> {
        let (address, len) = self.range(range)?;
        // SAFETY: a slice of elements without bytes is valid at every address that is not 0.
        Some(unsafe { &*Floats::at(address, len) })
    }

    /// The values of `range`, mutable; `None` when it exceeds the slice.
    pub fn part_mut(&mut self, range: std::ops::Range<usize>) -> Option<&mut Floats> {
        let (address, len) = self.range(range)?;
        // SAFETY: as in `part`.
        Some(unsafe { &mut *Floats::at(address, len) })
    }

    fn range(&self, range: std::ops::Range<usize>) -> Option<(Address, usize)> {
        let len = range.end.checked_sub(range.start)?;
        (range.end <= self.len()).then(|| (self.address().offset(4 * range.start), len))
    }

    pub(super) fn at(address: Address, len: usize) -> *mut Floats {
        let start = std::ptr::without_provenance_mut::<OnDevice>(address.0 as usize);
        std::ptr::slice_from_raw_parts_mut(start, len) as *mut Floats
    }
}

impl Elements for Floats {
    fn len(&self) -> usize {
        self.0.len()
    }
}
