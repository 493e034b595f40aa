//! One contiguous region of the arena, handed out first fit.

use std::collections::BTreeMap;

/// The free pieces of one region.
#[derive(Debug)]
pub(super) struct FirstFit {
    /// Offset and length of each free piece. No two of them touch.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
}

impl FirstFit {
    /// A region of which nothing is in use.
    pub(super) fn new(start: u64, bytes: u64) -> FirstFit {
        let whole = (bytes > 0).then_some((start, bytes));
        FirstFit { free: whole.into_iter().collect(), free_bytes: bytes }
    }

    /// The offset of `bytes` in the first free piece that is large enough.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let fit = self.free.iter().find(|&(_, &piece)| piece >= bytes);
        let (offset, piece) = fit.map(|(&offset, &piece)| (offset, piece))?;
        self.free.remove(&offset);
        if piece > bytes {
            self.free.insert(offset + bytes, piece - bytes);
        }
        self.free_bytes -= bytes;
        Some(offset)
    }

    /// Frees `bytes` at `offset`, and merges them with their free neighbours.
    pub(super) fn give_back(&mut self, offset: u64, bytes: u64) {
        let (mut start, mut end) = (offset, offset + bytes);
        if let Some((&before, &length)) = self.free.range(..offset).next_back()
            && before + length == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(length) = self.free.remove(&end) {
            end += length;
        }
        self.free.insert(start, end - start);
        self.free_bytes += bytes;
    }

    /// Bytes free, possibly in pieces.
    pub(super) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }
}
