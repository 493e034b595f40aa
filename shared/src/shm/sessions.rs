//! Records of open sessions: one sealed memfd per run, made by the supervisor and handed to every
//! generation of netd, so that the sessions of a client survive the death of netd. netd alone maps
//! it; the supervisor holds the descriptor and reads nothing. What a record says is netd's business
//! (`netd::sessions::record`); here it is a string of bytes.
//!
//! ```text
//!   header   magic, version
//!   slot     current: 0 = no record, else the number of the newest complete one
//!            copy 0, copy 1: number, length, checksum, bytes
//! ```
//!
//! A record is written into the copy that is not current: number, length, checksum and bytes first,
//! then `current`. netd may die between any two stores: `current` then names the record before,
//! which is complete. The stores of a killed process stay visible in the order in which it made
//! them, and the exclusive lock of the mapping keeps two generations apart, so no reader ever runs
//! beside a writer. A record whose number, length or checksum is wrong is dropped.

use std::ptr;

use super::segment::{Mapping, MemfdSegment, SegmentError, Sharing};
use super::sync::{AtomicU64, Ordering};

/// Records that fit. Each belongs to one session that asked for it.
pub const SESSION_RECORDS: usize = 256;

/// Most bytes of a record: the page tables of 128 Ki tokens in one row, or of 4 Ki in 32 rows.
pub const RECORD_BYTES: usize = COPY_BYTES - COPY_HEADER;

/// Bytes of the segment. Memory is taken when a record is written.
pub const SESSIONS_BYTES: usize = HEADER_BYTES + SESSION_RECORDS * SLOT_BYTES;

/// First word: `SEPALSES`, big-endian.
const MAGIC: u64 = u64::from_be_bytes(*b"SEPALSES");
/// Changes with the layout here or of what netd writes.
const VERSION: u64 = 1;
const HEADER_BYTES: usize = 4096;
/// The word `current` has a cache line of its own.
const SLOT_HEADER: usize = 128;
const COPY_BYTES: usize = 64 << 10;
/// Number, length, checksum, and a reserved word.
const COPY_HEADER: usize = 32;
const SLOT_BYTES: usize = SLOT_HEADER + 2 * COPY_BYTES;

const _: () = assert!(SLOT_BYTES.is_multiple_of(8) && COPY_BYTES.is_multiple_of(8));

/// A record is longer than a copy holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a session record of {0} bytes is over the limit of {RECORD_BYTES}")]
pub struct TooLong(pub usize);

/// The mapped records, by netd alone.
#[derive(Debug)]
pub struct SessionRecords {
    mapping: Mapping,
}

impl SessionRecords {
    /// Maps `segment`. A segment of another version is emptied: its records mean nothing here.
    ///
    /// # Errors
    /// [`SegmentError::Busy`] while another netd maps it, [`SegmentError::WrongSize`] for another
    /// size than [`SESSIONS_BYTES`], [`SegmentError::System`] when there is no room for it.
    pub fn map(segment: &MemfdSegment) -> Result<SessionRecords, SegmentError> {
        if segment.len() != SESSIONS_BYTES {
            return Err(SegmentError::WrongSize {
                name: segment.name().to_owned(),
                expected_bytes: SESSIONS_BYTES as u64,
                actual_bytes: segment.len() as u64,
            });
        }
        let records = SessionRecords { mapping: segment.map(Sharing::Alone)? };
        let [magic, version] = [0, 8].map(|offset| records.load(offset));
        if (magic, version) != (Some(MAGIC), Some(VERSION)) {
            (0..SESSION_RECORDS).for_each(|slot| records.clear(slot));
            records.store(8, VERSION);
            records.store(0, MAGIC);
        }
        Ok(records)
    }

    /// A private copy of the record in `slot`, if there is a complete one.
    pub fn read(&self, slot: usize) -> Option<Vec<u8>> {
        let number = self.load(slot_offset(slot)?).filter(|number| *number != 0)?;
        let copy = copy_offset(slot, number)?;
        let [told, len, sum] =
            [0, 8, 16].map(|word| self.load(copy + word)).map(Option::unwrap_or_default);
        let len = usize::try_from(len).ok().filter(|len| *len <= RECORD_BYTES)?;
        let mut bytes = vec![0; len];
        self.copy_out(copy + COPY_HEADER, &mut bytes)?;
        (told == number && sum == checksum(number, &bytes)).then_some(bytes)
    }

    /// Makes `record` the record in `slot`; the one before is there until this one is complete.
    /// Slots beyond the last take nothing.
    ///
    /// # Errors
    /// [`TooLong`]; the record before stays.
    pub fn write(&self, slot: usize, record: &[u8]) -> Result<(), TooLong> {
        if record.len() > RECORD_BYTES {
            return Err(TooLong(record.len()));
        }
        let Some(offset) = slot_offset(slot) else { return Ok(()) };
        let number = self.load(offset).unwrap_or_default().wrapping_add(1).max(1);
        let Some(copy) = copy_offset(slot, number) else { return Ok(()) };
        self.store(copy, number);
        self.store(copy + 8, record.len() as u64);
        self.store(copy + 16, checksum(number, record));
        self.copy_in(copy + COPY_HEADER, record);
        // SYNC POINT sessions.current: whoever reads this number finds the stores above made.
        self.store(offset, number);
        Ok(())
    }

    /// Drops the record in `slot`.
    pub fn clear(&self, slot: usize) {
        if let Some(offset) = slot_offset(slot) {
            self.store(offset, 0);
        }
    }

    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let word = self.mapping.at(offset as u64, 8).ok()?;
        // SAFETY: the word is inside the mapping, which lives as long as `self`; every offset here
        // is a multiple of 8 from a page; all bit patterns are values of an atomic.
        Some(unsafe { &*word.cast::<AtomicU64>() })
    }

    fn load(&self, offset: usize) -> Option<u64> {
        Some(self.word(offset)?.load(Ordering::Acquire))
    }

    fn store(&self, offset: usize, value: u64) {
        if let Some(word) = self.word(offset) {
            word.store(value, Ordering::Release);
        }
    }

    fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Option<()> {
        let source = self.mapping.at(offset as u64, bytes.len()).ok()?;
        // SAFETY: the source was bounded above, no reference into the mapping exists, and no other
        // process writes while this one holds the lock.
        unsafe { ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len()) };
        Some(())
    }

    fn copy_in(&self, offset: usize, bytes: &[u8]) {
        if let Ok(target) = self.mapping.at(offset as u64, bytes.len()) {
            // SAFETY: the target was bounded above and overlaps no reference, as in copy_out().
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        }
    }
}

fn slot_offset(slot: usize) -> Option<usize> {
    (slot < SESSION_RECORDS).then(|| HEADER_BYTES + slot * SLOT_BYTES)
}

/// Where the record of `number` lies: two in a row use different copies.
fn copy_offset(slot: usize, number: u64) -> Option<usize> {
    let copy = usize::from(number % 2 == 1);
    Some(slot_offset(slot)? + SLOT_HEADER + copy * COPY_BYTES)
}

/// Detects damage, not forgery: who may write here may write a sum that fits.
fn checksum(number: u64, bytes: &[u8]) -> u64 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(MULTIPLIER).rotate_left(29);
    let start = mix(mix(MAGIC, number), bytes.len() as u64);
    bytes.chunks(8).fold(start, |sum, chunk| {
        let mut word = [0; 8];
        word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
        mix(sum, u64::from_le_bytes(word))
    })
}

#[cfg(test)]
mod tests;
