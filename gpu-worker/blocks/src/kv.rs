//! The KV pages of this rank: one pool of pages per block of its span, one after the other in the
//! kv segment.
//!
//! ```text
//! segment = [blocks of the span, pages, kv_heads, 2, PAGE_TOKENS, head_dim]   block dtype
//! ```
//! Which page belongs to whom is netd's business; here a page id is only a number below the size of
//! the pool.

use kernels::ops::OpError;
use kernels::{DType, KvPages, PageLayout};
use model::BlockSpec;
use shared::job::PageCopy;

/// Shape of the KV pages of one block.
pub fn page_layout(spec: &BlockSpec, dtype: DType) -> PageLayout {
    PageLayout { dtype, kv_heads: spec.kv_heads, head_dim: spec.head_dim }
}

/// Shape of the kv segment of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Shape of a page of one block.
    pub layout: PageLayout,
    /// Blocks of the span.
    pub blocks: usize,
    /// Pages per block.
    pub pages: usize,
}

impl KvShape {
    /// Bytes of the pool of one block.
    pub fn block_bytes(&self) -> usize {
        self.pages.saturating_mul(self.layout.page_bytes())
    }

    /// Bytes of the segment.
    pub fn segment_bytes(&self) -> usize {
        self.blocks.saturating_mul(self.block_bytes())
    }

    /// The error of a segment of `found` bytes, which is too small.
    pub fn too_small(&self, found: usize) -> OpError {
        let (op, what, needs) = ("kv cache", "the segment", self.segment_bytes());
        OpError::Short { op, what, has: found, needs }
    }
}

/// The pages of all blocks, over the mapped segment.
#[derive(Debug)]
pub struct KvPool<'a> {
    shape: KvShape,
    bytes: &'a mut [u8],
}

impl<'a> KvPool<'a> {
    /// The pool over `bytes`, the segment from its start.
    ///
    /// # Errors
    /// [`OpError::Short`] when the shape does not fit into it.
    pub fn new(shape: KvShape, bytes: &'a mut [u8]) -> Result<Self, OpError> {
        match bytes.len() < shape.segment_bytes() {
            true => Err(shape.too_small(bytes.len())),
            false => Ok(KvPool { shape, bytes }),
        }
    }

    /// Pages of the block at `index` in the span; `None` beyond it.
    pub fn block(&mut self, index: usize) -> Option<KvPages<'_>> {
        let size = self.shape.block_bytes();
        let start = index.checked_mul(size).filter(|_| index < self.shape.blocks)?;
        Some(KvPages::new(self.shape.layout, self.bytes.get_mut(start..start + size)?))
    }

    /// The same for as long as the bytes are borrowed.
    pub fn into_block(self, index: usize) -> Option<KvPages<'a>> {
        let size = self.shape.block_bytes();
        let start = index.checked_mul(size).filter(|_| index < self.shape.blocks)?;
        Some(KvPages::new(self.shape.layout, self.bytes.get_mut(start..start + size)?))
    }

    /// Makes the copies of a job in the block at `index`, in their order. To be done in every block
    /// of the job before it writes anything.
    ///
    /// # Errors
    /// [`OpError::NoSuchPage`] or [`OpError::TooManyTokens`]; copies before the wrong one are made.
    ///
    /// # Panics
    /// When there is no such block, which the check of a job excludes.
    pub fn copy(&mut self, index: usize, copies: &[PageCopy]) -> Result<(), OpError> {
        let mut pages = self.block(index).expect("a checked job names blocks of the span");
        copies
            .iter()
            .try_for_each(|copy| pages.copy(copy.source, copy.destination, copy.tokens as usize))
    }
}

#[cfg(test)]
mod tests {
    use kernels::DType;
    use shared::ids::PageId;

    use super::*;

    const SHAPE: KvShape = KvShape {
        layout: PageLayout { dtype: DType::Bf16, kv_heads: 2, head_dim: 4 },
        blocks: 3,
        pages: 5,
    };

    #[test]
    fn a_segment_must_hold_the_shape() {
        let mut bytes = vec![0; SHAPE.segment_bytes()];
        let short = bytes.len() - 1;
        assert!(KvPool::new(SHAPE, &mut bytes[..short]).is_err());
        let mut pool = KvPool::new(SHAPE, &mut bytes).unwrap();
        assert_eq!(pool.block(2).unwrap().pages(), 5);
        assert!(pool.block(3).is_none());
        assert!(pool.block(usize::MAX).is_none());
    }

    #[test]
    fn copies_stay_within_their_block() {
        let mut bytes = vec![7; SHAPE.segment_bytes()];
        let (block, page) = (SHAPE.block_bytes(), SHAPE.layout.page_bytes());
        bytes[block..block + page].fill(1);
        let copies = [PageCopy { source: PageId(0), destination: PageId(4), tokens: 16 }];
        KvPool::new(SHAPE, &mut bytes).unwrap().copy(1, &copies).unwrap();
        let is_copied = |range: std::ops::Range<usize>| bytes[range].iter().all(|&b| b == 1);
        assert!(is_copied(block + 4 * page..2 * block));
        assert!(
            bytes[..block].iter().chain(&bytes[block + page..block + 4 * page]).all(|&b| b == 7)
        );
        assert!(bytes[2 * block..].iter().all(|&b| b == 7));
        let wrong = [PageCopy { source: PageId(5), destination: PageId(4), tokens: 16 }];
        let refused = KvPool::new(SHAPE, &mut bytes).unwrap().copy(0, &wrong);
        assert_eq!(refused, Err(OpError::NoSuchPage { page: PageId(5), pages: 5 }));
    }
}
