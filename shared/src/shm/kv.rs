//! The KV pages of a CPU worker, in a sealed memfd that outlives it: a new generation maps the same
//! pages and goes on where the dead one stopped. What lies where is the worker's business; here it
//! is one array of numbers.
//!
//! This is the one type that gives out references into a segment. It may, because the segment is
//! mapped by one `KvMap` at a time: mapping takes an exclusive lock on the memfd, which neither
//! another process nor another `KvMap` of this one can take until this value is dropped or the
//! process has ended, and an arena mapping of the same memfd is excluded as well. netd has no
//! descriptor of it; the supervisor has one and never maps it.

use super::segment::{Mapping, MemfdSegment, Plain, SegmentError, Sharing};

/// The KV segment of one worker, mapped by it alone.
#[derive(Debug)]
pub struct KvMap {
    mapping: Mapping,
}

impl KvMap {
    /// Maps `segment`, which the worker of an earlier generation may have filled. The descriptor is
    /// not needed any more.
    ///
    /// # Errors
    /// [`SegmentError::Busy`] while anybody else maps it (a worker that is not dead yet),
    /// [`SegmentError::System`] when there is no room for it.
    pub fn map(segment: &MemfdSegment) -> Result<KvMap, SegmentError> {
        Ok(KvMap { mapping: segment.map(Sharing::Alone)? })
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "no segment is empty")]
    pub fn len_bytes(&self) -> usize {
        self.mapping.len()
    }

    /// The whole pool as numbers of one type; bytes beyond the last whole one are left out. Starts
    /// at a page of memory, so that any alignment up to 4096 bytes within the pool holds in memory
    /// too.
    pub fn values<T: Plain>(&self) -> &[T] {
        let count = self.mapping.len() / size_of::<T>();
        // SAFETY: the mapping is page-aligned and holds `count` values; `T: Plain` takes any bytes;
        // the lock keeps every other writer out, and this process writes through `&mut self` only.
        unsafe { std::slice::from_raw_parts(self.mapping.base().as_ptr().cast(), count) }
    }

    /// As [`values`](Self::values), for writing; to be split among threads like any slice.
    pub fn values_mut<T: Plain>(&mut self) -> &mut [T] {
        let count = self.mapping.len() / size_of::<T>();
        // SAFETY: as in values(), and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base().as_ptr().cast(), count) }
    }

    /// Page `index` of a pool cut into pages of `page_values` numbers; `None` beyond its end or for
    /// empty pages.
    pub fn page<T: Plain>(&self, page_values: usize, index: usize) -> Option<&[T]> {
        let start = index.checked_mul(page_values)?;
        self.values().get(start..start.checked_add(page_values)?).filter(|page| !page.is_empty())
    }

    /// As [`page`](Self::page), for writing.
    pub fn page_mut<T: Plain>(&mut self, page_values: usize, index: usize) -> Option<&mut [T]> {
        let start = index.checked_mul(page_values)?;
        self.values_mut()
            .get_mut(start..start.checked_add(page_values)?)
            .filter(|page| !page.is_empty())
    }
}

#[cfg(test)]
mod tests;
