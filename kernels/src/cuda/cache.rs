//! The KV pages of a span in device memory, and their mirror in the kv segment, which outlives the
//! worker.
//!
//! ```text
//! append    the kernel writes keys and values to the page, and to the outbox of the mirror
//! answer    is given after `synchronize`, which copies what was appended: what a client was told is in the mirror
//! restart   nothing is on the device; a page is copied from the mirror when a row first reads it
//! ```
//! After `synchronize` the mirror holds what the pages hold, so that copying a page from it once more
//! changes nothing. Without a mirror nothing is written to the host, and what the pages held ends
//! with the worker: whoever submits jobs must then never name what an earlier one wrote.

use std::ops::Range;

use shared::ids::PageId;
use shared::shm::kv::KvMap;

use super::gpu::{Gpu, GpuError};
use super::memory::PooledMemory;
use super::{Cuda, Pages};
use crate::kv::{PAGE_TOKENS, PageLayout, StepRow, check_rows};
use crate::ops::OpError;
use mirror::Mirror;

mod mirror;

/// Pages of all blocks of a span.
#[derive(Debug)]
pub struct Cache<G: Gpu> {
    layout: PageLayout,
    blocks: usize,
    pages: usize,
    /// `[blocks, pages]` pages.
    memory: PooledMemory<G>,
    mirror: Option<Mirror<G>>,
    /// Which pages the device holds, `[blocks, pages]`.
    ready: Vec<bool>,
}

impl<G: Gpu> Cache<G> {
    /// Room on the device for `pages` pages in each of `blocks` blocks, mirrored into `segment`
    /// when there is one, which is as large at least.
    ///
    /// # Errors
    /// When the segment is smaller, or the device has no memory.
    pub fn open(
        cuda: &mut Cuda<G>,
        layout: PageLayout,
        blocks: usize,
        pages: usize,
        segment: Option<KvMap>,
    ) -> Result<Cache<G>, OpError> {
        let count = blocks.saturating_mul(pages);
        let bytes = count.saturating_mul(layout.page_bytes());
        let memory = cuda.reserve(bytes)?;
        let mirror = segment.map(|segment| Mirror::open(cuda, layout, [blocks, pages], segment));
        Ok(Cache {
            layout,
            blocks,
            pages,
            memory,
            mirror: mirror.transpose()?,
            ready: vec![false; count],
        })
    }

    /// Takes the memory of units of `tokens` tokens of a block that are no recorded steps.
    ///
    /// # Errors
    /// When the device has none.
    pub fn reserve(&mut self, cuda: &mut Cuda<G>, tokens: usize) -> Result<(), OpError> {
        self.mirror.as_mut().map_or(Ok(()), |mirror| mirror.reserve(cuda, tokens))
    }

    /// Why mirroring is slower than it could be, if it is: the host does not let the device write
    /// its memory.
    pub fn slow_mirror(&self) -> Option<&GpuError> {
        self.mirror.as_ref().and_then(Mirror::is_slow)
    }

    /// Waits for all that was enqueued. What it appended is in the mirror then.
    ///
    /// # Errors
    /// When the device fails or failed.
    pub fn synchronize(&mut self, cuda: &mut Cuda<G>) -> Result<(), OpError> {
        match &mut self.mirror {
            None => cuda.wait(),
            Some(mirror) => mirror.deliver(cuda),
        }
    }

    /// Pages of the block at `index`, those of the prefixes of `rows` on the device.
    ///
    /// # Errors
    /// When there is no such block or page, or the device fails.
    pub fn block(
        &mut self,
        cuda: &mut Cuda<G>,
        index: usize,
        rows: &[StepRow<'_>],
    ) -> Result<Pages<'_>, OpError> {
        let mut one = self.blocks(cuda, index..index + 1, rows)?;
        one.pop().ok_or(OpError::Shape { op: "pages", what: "no such block" })
    }

    /// [`block`](Self::block) for several blocks, through which the same rows go.
    ///
    /// # Errors
    /// Those of [`block`](Self::block).
    pub fn blocks(
        &mut self,
        cuda: &mut Cuda<G>,
        blocks: Range<usize>,
        rows: &[StepRow<'_>],
    ) -> Result<Vec<Pages<'_>>, OpError> {
        check_rows(self.pages, rows)?;
        // Before the first outlet: what is fetched is delivered before.
        for index in blocks.clone() {
            self.hold(cuda, index, rows)?;
        }
        let bytes = self.pages * self.layout.page_bytes();
        let pages = Pages::each(self.layout, &mut self.memory, blocks.clone(), bytes);
        let Some(mirror) = &mut self.mirror else {
            return Ok(pages);
        };
        let mut with_outlets = Vec::with_capacity(pages.len());
        for (index, pages) in blocks.zip(pages) {
            let outlet = mirror.outlet(cuda, index, rows)?;
            // SAFETY: the outlet has a slot for each token of `rows`, and lives as long as `self`.
            with_outlets.push(unsafe { pages.with_outlet(outlet) });
        }
        Ok(with_outlets)
    }

    /// Brings the prefixes of `rows` in the block at `index` to the device.
    fn hold(
        &mut self,
        cuda: &mut Cuda<G>,
        index: usize,
        rows: &[StepRow<'_>],
    ) -> Result<(), OpError> {
        self.check_block(index)?;
        for row in rows {
            let read = row.prefix.div_ceil(PAGE_TOKENS);
            let used = (row.prefix + row.tokens).div_ceil(PAGE_TOKENS);
            for (number, page) in row.pages.iter().take(used).enumerate() {
                let entry = index * self.pages + page.0 as usize;
                if number < read && !self.ready[entry] {
                    self.fetch(cuda, entry)?;
                }
                self.ready[entry] = true;
            }
        }
        Ok(())
    }

    /// Copies the first tokens of pages of the block at `index` to others: (source, destination,
    /// tokens), in their order.
    ///
    /// # Errors
    /// When there is no such block or page, or the device fails.
    pub fn copy(
        &mut self,
        cuda: &mut Cuda<G>,
        index: usize,
        copies: &[(PageId, PageId, usize)],
    ) -> Result<(), OpError> {
        self.check_block(index)?;
        let Some(mirror) = &mut self.mirror else {
            return self.copy_on_device(cuda, index, copies);
        };
        mirror.deliver(cuda)?;
        let mut pages = mirror.block(index);
        for &(source, destination, tokens) in copies {
            pages.copy(source, destination, tokens)?;
            // Read from the mirror when it is next needed.
            self.ready[index * self.pages + destination.0 as usize] = false;
        }
        Ok(())
    }

    /// Copies whole pages: what a page has behind its first tokens is written before it is read.
    fn copy_on_device(
        &mut self,
        cuda: &mut Cuda<G>,
        index: usize,
        copies: &[(PageId, PageId, usize)],
    ) -> Result<(), OpError> {
        let bytes = self.layout.page_bytes();
        for &(source, destination, tokens) in copies {
            if tokens > PAGE_TOKENS {
                return Err(OpError::TooManyTokens { tokens, limit: PAGE_TOKENS });
            }
            let offset = |page: PageId| match page.0 as usize {
                number if number < self.pages => Ok((index * self.pages + number) * bytes),
                _ => Err(OpError::NoSuchPage { page, pages: self.pages }),
            };
            let (from, to) = (offset(source)?, offset(destination)?);
            if from != to {
                cuda.copy_within(&mut self.memory, from, to, bytes)?;
            }
        }
        Ok(())
    }

    /// Copies a page from the mirror to the device, if there is one.
    fn fetch(&mut self, cuda: &mut Cuda<G>, entry: usize) -> Result<(), OpError> {
        let Some(mirror) = &self.mirror else {
            return Ok(());
        };
        let at = entry * self.layout.page_bytes();
        cuda.upload_bytes(mirror.page(entry), &mut self.memory, at)
    }

    fn check_block(&self, index: usize) -> Result<(), OpError> {
        if index < self.blocks {
            return Ok(());
        }
        Err(OpError::Shape { op: "kv cache", what: "there is no such block" })
    }
}

#[cfg(all(test, feature = "emu"))]
mod tests {
    use shared::dtype::DType;
    use shared::shm::segment::MemfdSegment;

    use super::*;
    use crate::cuda::emu::Emu;
    use crate::cuda::ops::kv_append;
    use crate::ops::KvAppend;

    const LAYOUT: PageLayout = PageLayout { dtype: DType::F32, kv_heads: 2, head_dim: 4 };

    fn append(cuda: &mut Cuda<Emu>, cache: &mut Cache<Emu>, row: StepRow<'_>, value: f32) {
        let len = row.tokens * LAYOUT.kv_heads * LAYOUT.head_dim;
        let (mut keys, mut values) = (cuda.buffer(len), cuda.buffer(len));
        cuda.upload(&vec![value; len], &mut keys).unwrap();
        cuda.upload(&vec![-value; len], &mut values).unwrap();
        let mut pages = cache.block(cuda, 1, &[row]).unwrap();
        let args = KvAppend { keys: &*keys, values: &*values, rows: &[row], pages: &mut pages };
        kv_append::launch(cuda, args).unwrap();
    }

    fn page(cache: &mut Cache<Emu>, cuda: &mut Cuda<Emu>, entry: usize) -> (Vec<u8>, Vec<u8>) {
        cache.synchronize(cuda).unwrap();
        let bytes = LAYOUT.page_bytes();
        let mut device = vec![0; bytes];
        let at = entry * bytes;
        cuda.download_bytes(&cache.memory, at, &mut device).unwrap();
        (device, cache.mirror.as_ref().unwrap().page(entry).to_vec())
    }

    #[test]
    fn the_mirror_follows_the_pages_and_the_next_worker_reads_it() {
        let bytes = 2 * 4 * LAYOUT.page_bytes();
        let segment = MemfdSegment::create("sepal-test-mirror", bytes).unwrap();
        let tables = [PageId(3), PageId(0)];
        let row = |prefix, tokens| StepRow::new(tokens, prefix, &tables);
        let mut cuda = Cuda::new(Emu::new(1));
        let map = || KvMap::map(&segment).unwrap();
        let mut cache = Cache::open(&mut cuda, LAYOUT, 2, 4, Some(map())).unwrap();
        append(&mut cuda, &mut cache, row(0, 17), 1.5);
        let before = page(&mut cache, &mut cuda, 4 + 3);
        assert_eq!(before.0, before.1);
        // The second page, of which one token was written.
        cache.copy(&mut cuda, 1, &[(PageId(0), PageId(2), 1)]).unwrap();
        drop(cache);
        // The next worker: nothing on the device until a row reads it.
        let mut cuda = Cuda::new(Emu::new(1));
        let mut cache = Cache::open(&mut cuda, LAYOUT, 2, 4, Some(map())).unwrap();
        assert_ne!(page(&mut cache, &mut cuda, 4 + 3).0, before.0);
        append(&mut cuda, &mut cache, row(17, 1), 2.5);
        assert_eq!(page(&mut cache, &mut cuda, 4 + 3), before);
        let (device, mirror) = page(&mut cache, &mut cuda, 4);
        let token = LAYOUT.vector_bytes();
        assert_eq!(device[..2 * token], mirror[..2 * token]);
        assert_eq!(device[token..token + 4], 2.5f32.to_le_bytes());
        let copied = page(&mut cache, &mut cuda, 4 + 2).1;
        assert_eq!(copied[..token], device[..token]);
        assert!(cache.block(&mut cuda, 2, &[]).is_err());
    }

    #[test]
    fn pages_without_a_mirror_are_copied_on_the_device() {
        let tables = [PageId(3), PageId(0)];
        let row = StepRow::new(17, 0, &tables);
        let mut cuda = Cuda::new(Emu::new(1));
        let mut cache = Cache::open(&mut cuda, LAYOUT, 2, 4, None).unwrap();
        append(&mut cuda, &mut cache, row, 1.5);
        let mut copy = |copies: &[_]| cache.copy(&mut cuda, 1, copies);
        copy(&[(PageId(3), PageId(1), 16), (PageId(0), PageId(0), 1)]).unwrap();
        for wrong in [(PageId(4), PageId(1), 1), (PageId(0), PageId(1), 17)] {
            assert!(copy(&[wrong]).is_err());
        }
        let bytes = LAYOUT.page_bytes();
        let mut on_device = |entry: usize| {
            let mut page = vec![0; bytes];
            cuda.download_bytes(&cache.memory, entry * bytes, &mut page).unwrap();
            page
        };
        let copied = on_device(4 + 1);
        assert_eq!(copied, on_device(4 + 3));
        assert_eq!(copied[..4], 1.5f32.to_le_bytes());
        assert_ne!(copied, on_device(4 + 2));
    }
}
