//! What rank 0 tells the other ranks of its group, as the bytes of a record of the plan log. All
//! numbers are little-endian.
//!
//! ```text
//! Link    1 | netd generation u32                                  drop all jobs, take the arena of this netd
//! Begin   2 | key u64 | number u64 | id u64 | body                 make its page copies, read its input
//! Unit    3 | block u32 | blocks u32 | members:                    run it
//!             key u64 | position u32 | first piece u32 | end u32
//! Drop    4 | key u64                                              forget it: rank 0 could not begin it
//! ```
//!
//! The first number is a `u32`. A job whose last unit ran is forgotten without a record. A body is
//! as [`JobBody`] encodes it, and rank 0 has checked it; so does who reads it.

use std::ops::Range;

use shared::ids::{Generation, JobId};
use shared::job::JobBody;

use crate::schedule::{JobKey, Unit, UnitMember};

const LINK: u32 = 1;
const BEGIN: u32 = 2;
const UNIT: u32 = 3;
const DROP: u32 = 4;

/// A record that was read. Its form is right; whether its jobs exist is not known.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    Link { netd_generation: Generation },
    Begin(Begin<'a>),
    Unit(Unit),
    Drop(JobKey),
}

/// A job that begins.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Begin<'a> {
    pub(super) key: JobKey,
    /// Number of the job in the life of rank 0, for injected faults.
    pub(super) number: u64,
    pub(super) id: JobId,
    /// The encoded [`JobBody`].
    pub(super) body: &'a [u8],
}

/// The bytes are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a record of kind {kind} with {bytes} bytes is malformed")]
pub(super) struct Malformed {
    /// Its first number; 0 if it has none.
    pub(super) kind: u32,
    pub(super) bytes: usize,
}

impl Record<'_> {
    /// Reads a record that another process wrote.
    pub(super) fn decode(bytes: &[u8]) -> Result<Record<'_>, Malformed> {
        let mut reader = RecordReader(bytes);
        let kind = reader.word().unwrap_or(0);
        let record = reader.record(kind);
        record.filter(|_| reader.0.is_empty()).ok_or(Malformed { kind, bytes: bytes.len() })
    }
}

/// A new netd.
pub(super) fn link(netd_generation: Generation, out: &mut Vec<u8>) {
    word(LINK, out);
    word(netd_generation.0, out);
}

/// A job begins.
pub(super) fn begin(key: JobKey, number: u64, id: JobId, body: &JobBody, out: &mut Vec<u8>) {
    word(BEGIN, out);
    for long in [key.0, number, id.0] {
        out.extend(long.to_le_bytes());
    }
    body.encode_to(out);
}

/// A unit is to be run.
pub(super) fn unit(unit: &Unit, out: &mut Vec<u8>) {
    word(UNIT, out);
    word(unit.block, out);
    word(unit.count, out);
    for UnitMember { job, position, pieces } in &unit.members {
        out.extend(job.0.to_le_bytes());
        for index in [*position, pieces.start, pieces.end] {
            // More pieces than that no job has; whoever reads it refuses the record.
            word(u32::try_from(index).unwrap_or(u32::MAX), out);
        }
    }
}

/// A job is to be forgotten.
pub(super) fn remove(key: JobKey, out: &mut Vec<u8>) {
    word(DROP, out);
    out.extend(key.0.to_le_bytes());
}

fn word(word: u32, out: &mut Vec<u8>) {
    out.extend(word.to_le_bytes());
}

/// The rest of a record.
struct RecordReader<'a>(&'a [u8]);

impl<'a> RecordReader<'a> {
    fn record(&mut self, kind: u32) -> Option<Record<'a>> {
        Some(match kind {
            LINK => Record::Link { netd_generation: Generation(self.word()?) },
            BEGIN => {
                let (key, number, id) = (JobKey(self.long()?), self.long()?, JobId(self.long()?));
                Record::Begin(Begin { key, number, id, body: std::mem::take(&mut self.0) })
            }
            UNIT => Record::Unit(self.unit()?),
            DROP => Record::Drop(JobKey(self.long()?)),
            _ => return None,
        })
    }

    fn unit(&mut self) -> Option<Unit> {
        let (block, count) = (self.word()?, self.word()?);
        let mut members = Vec::new();
        while !self.0.is_empty() {
            let (job, position) = (JobKey(self.long()?), self.index()?);
            let pieces = Range { start: self.index()?, end: self.index()? };
            members.push(UnitMember { job, position, pieces });
        }
        Some(Unit { block, count, members })
    }

    fn index(&mut self) -> Option<usize> {
        usize::try_from(self.word()?).ok()
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }
}

#[cfg(test)]
mod tests;
