//! The KV pages of a span in device memory, and their mirror in the kv segment, which outlives the worker.
//!
//! ```text
//! append    the kernel writes keys and values to the page and, over the bus, to the same place of the mirror
//! answer    is given after a download, which waits for the kernels: what a client was told is in the mirror
//! restart   nothing is on the device; a page is copied from the mirror when a row first reads it
//! ```
//! The mirror holds at any time what the pages hold, so that copying a page from it once more changes nothing.

use shared::ids::PageId;
use shared::shm::kv::KvMap;

use super::gpu::{Address, Gpu};
use super::memory::Memory;
use super::{Cuda, Pages};
use crate::kv::{KvPages, PAGE_TOKENS, PageLayout, StepRow, check_rows};
use crate::ops::OpError;

/// Pages of all blocks of a span.
#[derive(Debug)]
pub struct Cache<G: Gpu> {
    layout: PageLayout,
    blocks: usize,
    pages: usize,
    /// `[blocks, pages]` pages.
    memory: Memory<G>,
    /// Shaped alike. Registered with the device, which `cuda` keeps open longer than this lives.
    segment: KvMap,
    mirror: Address,
    /// Which pages the device holds, `[blocks, pages]`.
    ready: Vec<bool>,
}

impl<G: Gpu> Cache<G> {
    /// Room on the device for `pages` pages in each of `blocks` blocks, mirrored into `segment`, which is as large at least.
    ///
    /// # Errors
    /// When the segment is smaller, or the device has no memory or cannot reach the segment.
    pub fn open(
        cuda: &mut Cuda<G>,
        layout: PageLayout,
        blocks: usize,
        pages: usize,
        mut segment: KvMap,
    ) -> Result<Cache<G>, OpError> {
        let count = blocks.saturating_mul(pages);
        let bytes = count.saturating_mul(layout.page_bytes());
        let found = segment.len_bytes();
        if found < bytes {
            return Err(OpError::Short {
                op: "kv cache",
                what: "the segment",
                has: found,
                needs: bytes,
            });
        }
        let memory = cuda.reserve(bytes)?;
        let start = segment.values_mut::<u8>().as_mut_ptr();
        // SAFETY: the mapping lives in `segment`, which is dropped by the end of the process or after the device is idle (see Drop);
        // references into it are made only while nothing is enqueued.
        let mirror = unsafe { cuda.register(start, bytes) }?;
        Ok(Cache {
            layout,
            blocks,
            pages,
            memory,
            segment,
            mirror,
            ready: vec![false; count],
        })
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
        self.check_block(index)?;
        check_rows(self.pages, rows)?;
        for row in rows {
            let read = row.prefix.div_ceil(PAGE_TOKENS);
            let used = (row.prefix + row.tokens).div_ceil(PAGE_TOKENS);
            for (number, page) in row.pages.iter().take(used).enumerate() {
                let place = index * self.pages + page.0 as usize;
                if number < read && !self.ready[place] {
                    self.fetch(cuda, place)?;
                }
                self.ready[place] = true;
            }
        }
        let bytes = self.pages * self.layout.page_bytes();
        let pages = Pages::new(self.layout, &mut self.memory, index * bytes, bytes);
        // SAFETY: the mirror is registered and shaped as the pages.
        Ok(unsafe { pages.mirrored(self.mirror.offset(index * bytes)) })
    }

    /// Copies the first tokens of pages of the block at `index` to others: (source, destination, tokens), in their order.
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
        // The device writes the mirror too; from here on it has nothing to write.
        cuda.wait()?;
        let bytes = self.pages * self.layout.page_bytes();
        let block = self.segment.values_mut::<u8>();
        let block = block.get_mut(index * bytes..(index + 1) * bytes);
        let mut pages = KvPages::new(self.layout, block.unwrap_or_default());
        for &(source, destination, tokens) in copies {
            pages.copy(source, destination, tokens)?;
            // Read from the mirror when it is next needed.
            self.ready[index * self.pages + destination.0 as usize] = false;
        }
        Ok(())
    }

    /// Copies a page from the mirror to the device.
    fn fetch(&mut self, cuda: &mut Cuda<G>, place: usize) -> Result<(), OpError> {
        cuda.wait()?;
        let page = self
            .segment
            .page::<u8>(self.layout.page_bytes(), place)
            .unwrap_or_default();
        cuda.upload_bytes(page, &mut self.memory, place * self.layout.page_bytes())
    }

    fn check_block(&self, index: usize) -> Result<(), OpError> {
        if index < self.blocks {
            return Ok(());
        }
        Err(OpError::Shape {
            op: "kv cache",
            what: "there is no such block",
        })
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

    const LAYOUT: PageLayout = PageLayout {
        dtype: DType::F32,
        kv_heads: 2,
        head_dim: 4,
    };

    fn append(cuda: &mut Cuda<Emu>, cache: &mut Cache<Emu>, row: StepRow<'_>, value: f32) {
        let len = row.tokens * LAYOUT.kv_heads * LAYOUT.head_dim;
        let (mut keys, mut values) = (cuda.buffer(len), cuda.buffer(len));
        cuda.upload(&vec![value; len], &mut keys).unwrap();
        cuda.upload(&vec![-value; len], &mut values).unwrap();
        let mut pages = cache.block(cuda, 1, &[row]).unwrap();
        let args = KvAppend {
            keys: &*keys,
            values: &*values,
            rows: &[row],
            pages: &mut pages,
        };
        kv_append::launch(cuda, args).unwrap();
    }

    fn page(cache: &Cache<Emu>, cuda: &mut Cuda<Emu>, place: usize) -> (Vec<u8>, Vec<u8>) {
        let bytes = LAYOUT.page_bytes();
        let mut device = vec![0; bytes];
        let at = place * bytes;
        cuda.download_bytes(&cache.memory, at, &mut device).unwrap();
        let mirror = cache.segment.page::<u8>(bytes, place).unwrap().to_vec();
        (device, mirror)
    }

    #[test]
    fn the_mirror_follows_the_pages_and_the_next_worker_reads_it() {
        let bytes = 2 * 4 * LAYOUT.page_bytes();
        let segment = MemfdSegment::create("sepal-test-mirror", bytes).unwrap();
        let tables = [PageId(3), PageId(0)];
        let row = |prefix, tokens| StepRow {
            tokens,
            prefix,
            pages: &tables,
        };
        let mut cuda = Cuda::new(Emu::new(1));
        let map = || KvMap::map(&segment).unwrap();
        let mut cache = Cache::open(&mut cuda, LAYOUT, 2, 4, map()).unwrap();
        append(&mut cuda, &mut cache, row(0, 17), 1.5);
        let before = page(&cache, &mut cuda, 4 + 3);
        assert_eq!(before.0, before.1);
        // The second page, of which one token was written.
        cache
            .copy(&mut cuda, 1, &[(PageId(0), PageId(2), 1)])
            .unwrap();
        drop(cache);
        // The next worker: nothing on the device until a row reads it.
        let mut cuda = Cuda::new(Emu::new(1));
        let mut cache = Cache::open(&mut cuda, LAYOUT, 2, 4, map()).unwrap();
        assert_ne!(page(&cache, &mut cuda, 4 + 3).0, before.0);
        append(&mut cuda, &mut cache, row(17, 1), 2.5);
        assert_eq!(page(&cache, &mut cuda, 4 + 3), before);
        let (device, mirror) = page(&cache, &mut cuda, 4);
        let token = LAYOUT.vector_bytes();
        assert_eq!(device[..2 * token], mirror[..2 * token]);
        assert_eq!(device[token..token + 4], 2.5f32.to_le_bytes());
        let copied = page(&cache, &mut cuda, 4 + 2).1;
        assert_eq!(copied[..token], device[..token]);
        assert!(cache.block(&mut cuda, 2, &[]).is_err());
    }
}
