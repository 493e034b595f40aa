//! Pages of the KV cache of one block, and the rows of a step that name them.
//!
//! ```text
//! pool of one block = [pages, kv_heads, 2, PAGE_TOKENS, head_dim]   block dtype
//!                                       ^ 0 keys (rotated), 1 values
//! position p of a row lies in slot p % PAGE_TOKENS of page pages[p / PAGE_TOKENS]
//! ```
//! Only slots below `prefix + tokens` of a row are ever read: whatever else the memory holds (old
//! sessions, NaN) does not matter.

use shared::dtype::DType;
use shared::ids::PageId;
pub use shared::model::PAGE_TOKENS;

use crate::error::OpError;

/// Shape of the pages of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageLayout {
    /// Element type: the block dtype.
    pub dtype: DType,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
}

impl PageLayout {
    /// Bytes of one key or value of one head.
    pub fn vector_bytes(&self) -> usize {
        self.head_dim * self.dtype.size_bytes()
    }

    /// Bytes of the keys and values of one position: what a token adds to one block.
    pub fn slot_bytes(&self) -> usize {
        self.kv_heads * 2 * self.vector_bytes()
    }

    /// Bytes of one page of one block.
    pub fn page_bytes(&self) -> usize {
        PAGE_TOKENS * self.slot_bytes()
    }
}

/// What a batch row contributes to a step: `tokens` new positions after `prefix` cached ones, kept
/// in `pages`.
#[derive(Clone, Copy, Debug)]
pub struct StepRow<'a> {
    /// New tokens of this row.
    pub tokens: usize,
    /// Tokens already in the cache; the first new one has this position.
    pub prefix: usize,
    /// Page table: ids of the pages of positions 0..16, 16..32, ...; may be longer than needed.
    pub pages: &'a [PageId],
    /// The adapter that its tokens go through, by its index among those of a block.
    pub adapter: Option<u32>,
    /// Positions of the row when its job is done, for encodings that depend on it.
    pub length: usize,
}

impl<'a> StepRow<'a> {
    /// A row without an adapter, whose job is done with these tokens.
    pub const fn new(tokens: usize, prefix: usize, pages: &'a [PageId]) -> StepRow<'a> {
        StepRow { tokens, prefix, pages, adapter: None, length: prefix.saturating_add(tokens) }
    }

    /// Page and slot of `position`. `check_rows` has made sure that the page exists.
    pub(crate) fn locate(&self, position: usize) -> (usize, usize) {
        (self.pages[position / PAGE_TOKENS].0 as usize, position % PAGE_TOKENS)
    }
}

/// All pages of one block, where they lie.
#[derive(Debug)]
pub struct KvPages<'a> {
    layout: PageLayout,
    pages: usize,
    bytes: &'a mut [u8],
}

impl<'a> KvPages<'a> {
    /// The pool of one block over `bytes`; trailing bytes that make no whole page are left out.
    pub fn new(layout: PageLayout, bytes: &'a mut [u8]) -> Self {
        let pages = bytes.len() / layout.page_bytes().max(1);
        KvPages { layout, pages, bytes }
    }

    /// Shape of a page.
    pub fn layout(&self) -> PageLayout {
        self.layout
    }

    /// Number of pages; ids are below it.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Copies the first `tokens` slots of page `source`, keys and values of every head, to page
    /// `destination`.
    ///
    /// # Errors
    /// When an id is not below [`pages`](Self::pages) or `tokens` is over [`PAGE_TOKENS`].
    pub fn copy(
        &mut self,
        source: PageId,
        destination: PageId,
        tokens: usize,
    ) -> Result<(), OpError> {
        for page in [source, destination] {
            if page.0 as usize >= self.pages {
                return Err(OpError::NoSuchPage { page, pages: self.pages });
            }
        }
        if tokens > PAGE_TOKENS {
            return Err(OpError::TooManyTokens { tokens, limit: PAGE_TOKENS });
        }
        let used = tokens * self.layout.vector_bytes();
        for head in 0..self.layout.kv_heads {
            for half in 0..2 {
                let from = self.offset(source.0 as usize, head, half);
                let to = self.offset(destination.0 as usize, head, half);
                self.bytes.copy_within(from..from + used, to);
            }
        }
        Ok(())
    }

    /// Puts the keys and values of one position, `[kv_heads, 2, head_dim]`, in a slot of a page.
    pub(crate) fn write(&mut self, page: usize, slot: usize, vectors: &[u8]) {
        let vector = self.layout.vector_bytes().max(1);
        for (index, from) in vectors.chunks_exact(vector).enumerate() {
            self.slot_mut(page, index / 2, index % 2, slot).copy_from_slice(from);
        }
    }

    /// Keys of one head in one page: `[PAGE_TOKENS, head_dim]`.
    pub(crate) fn keys(&self, page: usize, head: usize) -> &[u8] {
        self.half(page, head, 0)
    }

    /// Values of one head in one page: `[PAGE_TOKENS, head_dim]`.
    pub(crate) fn values(&self, page: usize, head: usize) -> &[u8] {
        self.half(page, head, 1)
    }

    /// The key (`half` 0) or value (1) of one head in one slot, to be written.
    pub(crate) fn slot_mut(
        &mut self,
        page: usize,
        head: usize,
        half: usize,
        slot: usize,
    ) -> &mut [u8] {
        let vector = self.layout.vector_bytes();
        let start = self.offset(page, head, half) + slot * vector;
        &mut self.bytes[start..start + vector]
    }

    fn half(&self, page: usize, head: usize, half: usize) -> &[u8] {
        let start = self.offset(page, head, half);
        &self.bytes[start..start + PAGE_TOKENS * self.layout.vector_bytes()]
    }

    fn offset(&self, page: usize, head: usize, half: usize) -> usize {
        ((page * self.layout.kv_heads + head) * 2 + half) * PAGE_TOKENS * self.layout.vector_bytes()
    }
}

/// Checks that every row has pages for all its positions and that every id it will use is below
/// `pages`.
pub(crate) fn check_rows(pages: usize, rows: &[StepRow<'_>]) -> Result<(), OpError> {
    for row in rows {
        let end = row
            .prefix
            .checked_add(row.tokens)
            .ok_or(OpError::TooManyTokens { tokens: row.tokens, limit: usize::MAX - row.prefix })?;
        let needed = end.div_ceil(PAGE_TOKENS);
        let used = row
            .pages
            .get(..needed)
            .ok_or(OpError::ShortPageTable { tokens: end, pages: row.pages.len() })?;
        if let Some(&page) = used.iter().find(|&&p| p.0 as usize >= pages) {
            return Err(OpError::NoSuchPage { page, pages });
        }
    }
    Ok(())
}

/// New tokens of all rows together.
pub fn total_tokens(rows: &[StepRow<'_>]) -> usize {
    rows.iter().map(|r| r.tokens).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: PageLayout = PageLayout { dtype: DType::F32, kv_heads: 2, head_dim: 3 };

    #[test]
    fn a_copy_moves_only_the_named_slots_of_every_head() {
        let size = LAYOUT.page_bytes();
        let mut bytes: Vec<u8> = (0..2 * size).map(|i| if i < size { 1 } else { 2 }).collect();
        KvPages::new(LAYOUT, &mut bytes).copy(PageId(0), PageId(1), 5).unwrap();
        let half = PAGE_TOKENS * LAYOUT.vector_bytes();
        for part in bytes[size..].chunks(half) {
            let moved = 5 * LAYOUT.vector_bytes();
            assert!(part[..moved].iter().all(|&b| b == 1) && part[moved..].iter().all(|&b| b == 2));
        }
    }

    #[test]
    fn ids_and_lengths_out_of_range_are_refused() {
        let mut bytes = vec![0; 2 * LAYOUT.page_bytes() + 1];
        let mut pages = KvPages::new(LAYOUT, &mut bytes);
        assert_eq!(pages.pages(), 2);
        assert_eq!(
            pages.copy(PageId(2), PageId(0), 1),
            Err(OpError::NoSuchPage { page: PageId(2), pages: 2 })
        );
        assert_eq!(
            pages.copy(PageId(0), PageId(9), 1),
            Err(OpError::NoSuchPage { page: PageId(9), pages: 2 })
        );
        assert!(pages.copy(PageId(0), PageId(1), 17).is_err());
        let row = |tokens, prefix, pages| StepRow::new(tokens, prefix, pages);
        assert!(check_rows(2, &[row(1, 15, &[PageId(1)])]).is_ok());
        assert!(check_rows(2, &[row(2, 15, &[PageId(1)])]).is_err());
        assert!(check_rows(2, &[row(2, 15, &[PageId(1), PageId(2)])]).is_err());
        assert!(check_rows(2, &[row(2, usize::MAX, &[PageId(1)])]).is_err());
    }
}
