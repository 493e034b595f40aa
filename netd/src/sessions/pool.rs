//! KV memory of the served span: a budget in token-blocks, as Petals announces it, and the pages
//! behind it.
//!
//! A session asks for `rows × max_length` tokens in each of its blocks. It is charged exactly that
//! against the budget, and takes concrete page ids at once: `rows × (ceil(max_length / 16) + 1)` of
//! them, the lowest that are free in *all* its blocks. The extra page per row is what copy-on-write
//! needs (see [`super::table`]). The pool is larger than the budget by that rounding and those
//! spare pages, for a bounded number of rows; admission checks both.
//!
//! One page id names the same rows in the pool of every block, so that a session has one table per
//! row whatever its blocks. Pages may be in use by disjoint sets of blocks at once: free sets are
//! kept per block.

use shared::block::{BlockIndex, Span};
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;

/// What a session wants to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvRequest {
    /// Its blocks, in any order, each at most once.
    pub blocks: Vec<BlockIndex>,
    /// Sequences.
    pub rows: u32,
    /// Tokens per sequence.
    pub max_length: u32,
}

impl KvRequest {
    /// What the budget is charged: `rows × max_length × blocks`.
    pub fn token_blocks(&self) -> u64 {
        u64::from(self.rows)
            .saturating_mul(u64::from(self.max_length))
            .saturating_mul(self.blocks.len() as u64)
    }

    /// Page ids it takes: for every row those of `max_length` tokens and one to copy to.
    pub fn pages(&self) -> u64 {
        let row = match self.max_length as usize {
            0 => 0,
            tokens => tokens.div_ceil(PAGE_TOKENS) as u64 + 1,
        };
        u64::from(self.rows).saturating_mul(row)
    }
}

/// Memory that was granted. It must be given back to the pool it came from.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "granted memory is in use until it is given back"]
pub struct Grant {
    pages: Vec<PageId>,
    blocks: Vec<usize>,
    token_blocks: u64,
}

impl Grant {
    /// The page ids, ascending.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// What the budget is charged for it.
    pub fn token_blocks(&self) -> u64 {
        self.token_blocks
    }
}

/// Why memory was not granted. Numbers are token-blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolRefusal {
    /// More than the whole pool holds: waiting cannot help.
    #[error("{asked} token-blocks are more than the {most} of the whole cache")]
    Never {
        asked: u64,
        /// The most that could be granted.
        most: u64,
    },
    /// Others hold too much of the budget or of the pages now.
    #[error("{asked} token-blocks were asked for, {free} are free")]
    NotNow {
        asked: u64,
        /// Free in the budget.
        free: u64,
    },
    /// The peer holds, or would hold, more than it may.
    #[error(
        "{asked} token-blocks were asked for by a peer that holds {held} and may hold {most} now"
    )]
    OverShare {
        asked: u64,
        /// What the peer holds.
        held: u64,
        /// What it may hold now.
        most: u64,
    },
    /// A block outside the span, or named twice.
    #[error("block {0} is not served or is named twice")]
    BadBlock(BlockIndex),
}

/// Budget and pages of all blocks of a span.
#[derive(Debug)]
pub struct Pool {
    span: Span,
    pages: u32,
    budget: u64,
    used: u64,
    /// Per block of the span: one bit per page, set = in use.
    in_use: Vec<Vec<u64>>,
}

impl Pool {
    /// An empty pool of `pages` pages per block, with a budget of `cache_tokens` tokens per block
    /// (shared among the blocks, as in Petals).
    pub fn new(span: Span, pages: u32, cache_tokens: u32) -> Pool {
        let words = (pages as usize).div_ceil(64);
        let mut bits = vec![0u64; words];
        // Bits beyond the last page are never free.
        if let (Some(last), tail @ 1..) = (bits.last_mut(), pages % 64) {
            *last = u64::MAX << tail;
        }
        Pool {
            span,
            pages,
            budget: u64::from(cache_tokens) * span.block_count() as u64,
            used: 0,
            in_use: vec![bits; span.block_count()],
        }
    }

    /// Token-blocks of the whole budget.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Token-blocks that are free: what `rpc_info` calls `cache_tokens_available`.
    pub fn free(&self) -> u64 {
        self.budget - self.used
    }

    /// What the DHT record calls `cache_tokens_left`: keys and values count as one token each
    /// (Petals, `MemoryCache` and `Server._announce`), so twice [`Self::free`].
    pub fn cache_tokens_left(&self) -> u64 {
        2 * self.free()
    }

    /// Whether `request` could be granted if nobody held anything; its blocks, counted from the
    /// first of the span.
    ///
    /// # Errors
    /// [`PoolRefusal::Never`] and [`PoolRefusal::BadBlock`].
    pub fn check(&self, request: &KvRequest) -> Result<Vec<usize>, PoolRefusal> {
        let blocks = self.locals(&request.blocks)?;
        let (asked, pages) = (request.token_blocks(), request.pages());
        if asked > self.budget || pages > u64::from(self.pages) {
            return Err(PoolRefusal::Never { asked, most: self.most(request) });
        }
        Ok(blocks)
    }

    /// Takes what `request` asks for.
    ///
    /// # Errors
    /// [`PoolRefusal`]; nothing is taken then.
    pub fn take(&mut self, request: &KvRequest) -> Result<Grant, PoolRefusal> {
        let blocks = self.check(request)?;
        let (asked, pages) = (request.token_blocks(), request.pages());
        let refused = PoolRefusal::NotNow { asked, free: self.free() };
        if asked > self.free() {
            return Err(refused);
        }
        let pages = self.lowest_free(&blocks, pages as usize).ok_or(refused)?;
        for &block in &blocks {
            pages.iter().for_each(|page| set(&mut self.in_use[block], *page));
        }
        self.used += asked;
        Ok(Grant { pages, blocks, token_blocks: asked })
    }

    /// Token-blocks that must come free before `request` can be granted; at least one where pages
    /// are missing, 0 if there is room.
    pub fn missing(&self, request: &KvRequest) -> u64 {
        let missing = request.token_blocks().saturating_sub(self.free());
        let pages = request.pages() as usize;
        match self.check(request) {
            Ok(blocks) if missing == 0 => u64::from(self.lowest_free(&blocks, pages).is_none()),
            Ok(_) => missing,
            // Waiting cannot help.
            Err(_) => 0,
        }
    }

    /// Takes these pages for `request`, whose session held them before.
    ///
    /// # Errors
    /// [`PoolRefusal::NotNow`] when they are not as many as `request` takes, not ascending, beyond the
    /// pool or in use, and as [`Self::take`]; nothing is taken then.
    pub fn retake(&mut self, request: &KvRequest, pages: &[PageId]) -> Result<Grant, PoolRefusal> {
        let blocks = self.check(request)?;
        let asked = request.token_blocks();
        let is_ascending = pages.is_sorted_by(|one, next| one < next);
        let is_inside = pages.last().is_none_or(|last| last.0 < self.pages);
        let fits = asked <= self.free() && pages.len() as u64 == request.pages();
        let is_free = |page: &PageId| {
            blocks.iter().all(|&b| self.in_use[b][page.0 as usize / 64] >> (page.0 % 64) & 1 == 0)
        };
        if !(fits && is_ascending && is_inside && pages.iter().all(is_free)) {
            return Err(PoolRefusal::NotNow { asked, free: self.free() });
        }
        for &block in &blocks {
            pages.iter().for_each(|page| set(&mut self.in_use[block], *page));
        }
        self.used += asked;
        Ok(Grant { pages: pages.to_vec(), blocks, token_blocks: asked })
    }

    /// Takes memory back.
    pub fn give_back(&mut self, grant: Grant) {
        for &block in &grant.blocks {
            grant.pages.iter().for_each(|page| clear(&mut self.in_use[block], *page));
        }
        self.used -= grant.token_blocks;
    }

    fn locals(&self, blocks: &[BlockIndex]) -> Result<Vec<usize>, PoolRefusal> {
        let mut seen = vec![false; self.span.block_count()];
        let local = |&block: &BlockIndex| {
            let local = self.span.local(block).filter(|&l| !std::mem::replace(&mut seen[l], true));
            local.ok_or(PoolRefusal::BadBlock(block))
        };
        blocks.iter().map(local).collect()
    }

    /// The largest charge that a request of this shape could ever be granted.
    fn most(&self, request: &KvRequest) -> u64 {
        let spare = u64::from(request.rows);
        let tokens = u64::from(self.pages).saturating_sub(spare) * PAGE_TOKENS as u64;
        self.budget.min(tokens.saturating_mul(request.blocks.len() as u64))
    }

    fn lowest_free(&self, blocks: &[usize], count: usize) -> Option<Vec<PageId>> {
        let mut found = Vec::with_capacity(count);
        for word in 0..(self.pages as usize).div_ceil(64) {
            let taken = blocks.iter().fold(0, |bits, &block| bits | self.in_use[block][word]);
            let mut free = !taken;
            while free != 0 && found.len() < count {
                found.push(PageId(word as u32 * 64 + free.trailing_zeros()));
                free &= free - 1;
            }
            if found.len() == count {
                return Some(found);
            }
        }
        (found.len() == count).then_some(found)
    }
}

fn set(bits: &mut [u64], page: PageId) {
    bits[page.0 as usize / 64] |= 1 << (page.0 % 64);
}

fn clear(bits: &mut [u64], page: PageId) {
    bits[page.0 as usize / 64] &= !(1 << (page.0 % 64));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn span() -> Span {
        Span::new(2, 6).unwrap()
    }

    fn request(blocks: std::ops::Range<u32>, rows: u32, max_length: u32) -> KvRequest {
        KvRequest { blocks: blocks.map(BlockIndex).collect(), rows, max_length }
    }

    #[test]
    fn both_currencies_count_what_petals_counts() {
        let mut pool = Pool::new(span(), 1536, 16384);
        assert_eq!((pool.free(), pool.cache_tokens_left()), (65536, 131_072));
        let grant = pool.take(&request(2..4, 3, 100)).unwrap();
        assert_eq!(pool.free(), 65536 - 2 * 3 * 100);
        pool.give_back(grant);
        assert_eq!(pool.free(), 65536);
    }

    #[test]
    fn a_session_takes_the_lowest_ids_free_in_all_its_blocks() {
        let mut pool = Pool::new(span(), 100, 1600);
        let first = pool.take(&request(2..4, 1, 17)).unwrap();
        assert_eq!(first.pages(), [PageId(0), PageId(1), PageId(2)]);
        let apart = pool.take(&request(4..6, 1, 16)).unwrap();
        assert_eq!(apart.pages(), [PageId(0), PageId(1)]);
        let across = pool.take(&request(3..5, 1, 1)).unwrap();
        assert_eq!(across.pages(), [PageId(3), PageId(4)]);
        pool.give_back(first);
        let again = pool.take(&request(2..3, 1, 32)).unwrap();
        assert_eq!(again.pages(), [PageId(0), PageId(1), PageId(2)]);
    }

    #[test]
    fn budget_and_pages_are_both_checked() {
        let mut pool = Pool::new(span(), 10, 100);
        let refused = pool.take(&request(2..6, 1, 101)).unwrap_err();
        assert_eq!(refused, PoolRefusal::Never { asked: 404, most: 400 });
        // 11 rows of one token fit the budget but not the pages.
        assert!(matches!(pool.take(&request(2..3, 11, 1)), Err(PoolRefusal::Never { .. })));
        let held = pool.take(&request(2..6, 4, 1)).unwrap();
        let refused = pool.take(&request(2..6, 2, 1)).unwrap_err();
        assert_eq!(refused, PoolRefusal::NotNow { asked: 8, free: 384 });
        pool.give_back(held);
        assert!(pool.take(&request(2..6, 2, 1)).is_ok());
    }

    #[test]
    fn foreign_and_repeated_blocks_are_refused() {
        let mut pool = Pool::new(span(), 10, 100);
        for blocks in [vec![6], vec![1], vec![2, 3, 2]] {
            let blocks = blocks.into_iter().map(BlockIndex).collect();
            let refused = pool.take(&KvRequest { blocks, rows: 1, max_length: 1 });
            assert!(matches!(refused, Err(PoolRefusal::BadBlock(_))));
        }
    }

    #[test]
    fn pages_of_a_session_are_retaken_as_they_were_or_not_at_all() {
        let wanted = request(2..4, 1, 17);
        let ids = |pages: &[u32]| pages.iter().copied().map(PageId).collect::<Vec<_>>();
        let mut pool = Pool::new(span(), 10, 100);
        for wrong in [&[3, 5][..], &[3, 5, 5], &[5, 3, 7], &[3, 5, 10], &[3, 5, u32::MAX]] {
            assert!(pool.retake(&wanted, &ids(wrong)).is_err(), "{wrong:?}");
        }
        let held = pool.retake(&wanted, &ids(&[3, 5, 7])).unwrap();
        assert_eq!(pool.free(), 400 - 34);
        assert!(pool.retake(&request(3..5, 1, 17), &ids(&[0, 1, 7])).is_err(), "in use");
        let other = pool.retake(&request(4..6, 1, 17), &ids(&[3, 5, 7])).unwrap();
        assert_eq!(pool.take(&wanted).unwrap().pages(), ids(&[0, 1, 2]));
        pool.give_back(other);
        pool.give_back(held);
        assert!(pool.retake(&request(2..7, 1, 17), &ids(&[3, 5, 7])).is_err(), "not served");
    }

    #[test]
    fn empty_sessions_take_nothing() {
        let mut pool = Pool::new(span(), 1, 16);
        assert_eq!(pool.take(&request(2..6, 5, 0)).unwrap().pages(), []);
        assert_eq!(pool.take(&request(2..6, 0, 9)).unwrap().pages(), []);
    }

    proptest! {
        /// No two live grants that share a block share a page, every page is inside the pool, and all comes back.
        #[test]
        fn grants_never_overlap(pages in 1u32..130, steps in prop::collection::vec(
            (any::<bool>(), 2u32..6, 1u32..4, 0u32..4, 0u32..70), 1..60,
        )) {
            let mut pool = Pool::new(span(), pages, 400);
            let mut live: Vec<(KvRequest, Grant)> = Vec::new();
            for (give, start, length, rows, max_length) in steps {
                if give && !live.is_empty() {
                    pool.give_back(live.swap_remove(start as usize % live.len()).1);
                    continue;
                }
                let wanted = request(start..(start + length).min(6), rows, max_length);
                let Ok(grant) = pool.take(&wanted) else { continue };
                prop_assert_eq!(grant.pages().len() as u64, wanted.pages());
                prop_assert!(grant.pages().iter().all(|page| page.0 < pages));
                for (other, held) in &live {
                    if other.blocks.iter().any(|block| wanted.blocks.contains(block)) {
                        prop_assert!(held.pages().iter().all(|page| !grant.pages().contains(page)));
                    }
                }
                live.push((wanted, grant));
            }
            live.into_iter().for_each(|(_, grant)| pool.give_back(grant));
            prop_assert_eq!(pool.free(), pool.budget());
            prop_assert_eq!(pool.lowest_free(&[0, 1, 2, 3], pages as usize).map(|p| p.len()), Some(pages as usize));
        }
    }
}
