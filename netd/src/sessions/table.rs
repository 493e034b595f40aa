//! Page tables of one session: one table per row, over the pages that the session was granted.
//!
//! A step runs in three moves. [`SessionTables::begin`] rolls back, reorders rows by reference, and
//! plans what is written: a page that more than one row refers to is never written, the row gets a
//! copy. [`SessionTables::commit`] makes the new tables the session's, once the step was answered;
//! until then the old ones keep their pages, so that the step can be submitted again (it writes
//! only at or after its prefix, so that doing it twice equals once) or given up
//! ([`SessionTables::abort`]).
//!
//! # Why the pages always suffice
//! After the rollback to position `p` every old table has at most `ceil(p / 16)` pages. A step of
//! `n` tokens needs per row at most one copy (of the page that `p` lies in) and the pages from
//! `ceil(p / 16)` to `ceil((p + n) / 16)`. Old and new together are at most `ceil(max_length / 16)
//! + 1` per row, which is what [`super::pool::KvRequest::pages`] takes.

use shared::ids::PageId;
use shared::job::{PageCopy, StepPages};
use shared::model::PAGE_TOKENS;

use super::pool::KvRequest;

/// Why a step cannot be planned. The texts go to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// `start_from_position` lies beyond what the cache holds.
    #[error(
        "start_from_position {start} is beyond the {prefix} tokens in the cache of this session"
    )]
    BeyondPrefix {
        start: u64,
        /// In the cache.
        prefix: u32,
    },
    /// The step would leave the session's length (text of Petals' `inference_session.py` and
    /// `block_functions.py`).
    #[error(
        "Maximum length exceeded: prefix {prefix} + current {tokens} exceeds pre-allocated maximum {max_length}"
    )]
    TooLong {
        /// Tokens in the cache.
        prefix: u32,
        /// Tokens of the step.
        tokens: u32,
        /// Length of the session.
        max_length: u32,
    },
    /// Not one hypo id per row.
    #[error("hypo_ids has {got} elements for a batch of {rows}")]
    HypoCount {
        /// Elements.
        got: usize,
        rows: usize,
    },
    /// A hypo id that names no row.
    #[error("hypo_ids element {index} is {value}, which is not a row of a batch of {rows}")]
    HypoRange { index: usize, value: i64, rows: usize },
}

/// The tables of one session. Pages are handled as indexes into those granted.
#[derive(Debug)]
pub struct SessionTables {
    pages: Vec<PageId>,
    /// Per granted page: references from `rows`.
    refs: Vec<u32>,
    /// Granted pages that neither `rows` nor a step under way refers to; the lowest is last.
    free: Vec<u32>,
    rows: Vec<Vec<u32>>,
    prefix: u32,
    max_length: u32,
    pending: Option<PendingSession>,
}

#[derive(Debug)]
struct PendingSession {
    refs: Vec<u32>,
    rows: Vec<Vec<u32>>,
    prefix: u32,
}

impl SessionTables {
    /// Empty tables of `rows` rows over `pages`, which must be as many as
    /// [`super::pool::KvRequest::pages`] says.
    pub fn new(rows: usize, max_length: u32, pages: &[PageId]) -> SessionTables {
        SessionTables {
            refs: vec![0; pages.len()],
            free: (0..pages.len() as u32).rev().collect(),
            pages: pages.to_vec(),
            rows: vec![Vec::new(); rows],
            prefix: 0,
            max_length,
            pending: None,
        }
    }

    /// The tables of a session that another netd served: `rows` name, by index into `pages`, where
    /// its first `prefix` tokens lie. `None` unless every index is one of `pages`, each row has the
    /// pages of `prefix` tokens and no more, and a page that rows share has one position in all.
    pub fn restore(
        rows: Vec<Vec<u32>>,
        prefix: u32,
        max_length: u32,
        pages: &[PageId],
    ) -> Option<SessionTables> {
        let length = (prefix as usize).div_ceil(PAGE_TOKENS);
        let mut refs = vec![0u32; pages.len()];
        let mut positions = vec![None; pages.len()];
        let request = KvRequest { blocks: Vec::new(), rows: rows.len() as u32, max_length };
        if prefix > max_length || pages.len() as u64 != request.pages() {
            return None;
        }
        for row in &rows {
            if row.len() != length {
                return None;
            }
            for (position, &page) in row.iter().enumerate() {
                *refs.get_mut(page as usize)? += 1;
                if *positions.get_mut(page as usize)?.get_or_insert(position) != position {
                    return None;
                }
            }
        }
        let is_free = |page: &u32| refs.get(*page as usize) == Some(&0);
        let free = (0..pages.len() as u32).rev().filter(is_free).collect();
        let pages = pages.to_vec();
        Some(SessionTables { pages, refs, free, rows, prefix, max_length, pending: None })
    }

    /// The pages of each row up to the last token that was answered, as indexes into those granted.
    pub fn rows(&self) -> &[Vec<u32>] {
        &self.rows
    }

    /// Largest number of tokens per row.
    pub fn max_length(&self) -> u32 {
        self.max_length
    }

    /// Tokens in the cache.
    pub fn prefix(&self) -> u32 {
        self.prefix
    }

    /// Checks a step of `tokens` tokens from `start` (`None`: from the end of the cache) without
    /// changing anything; returns the position it starts from.
    ///
    /// # Errors
    /// [`TableError::BeyondPrefix`], [`TableError::TooLong`].
    pub fn check(&self, start: Option<u64>, tokens: u32) -> Result<u32, TableError> {
        let prefix = match start {
            None => self.prefix,
            Some(start) => match u32::try_from(start) {
                Ok(start) if start <= self.prefix => start,
                _ => {
                    return Err(TableError::BeyondPrefix { start, prefix: self.prefix });
                }
            },
        };
        match prefix.checked_add(tokens) {
            Some(end) if end <= self.max_length => Ok(prefix),
            _ => Err(TableError::TooLong { prefix, tokens, max_length: self.max_length }),
        }
    }

    /// Forgets the tokens from `start` on, which [`Self::check`] returned. What a zero-token step
    /// does.
    pub fn roll_back(&mut self, start: u32) {
        let keep = (start as usize).div_ceil(PAGE_TOKENS);
        for row in &mut self.rows {
            for page in row.drain(keep.min(row.len())..) {
                let refs = &mut self.refs[page as usize];
                *refs -= 1;
                if *refs == 0 {
                    self.free.push(page);
                }
            }
        }
        self.prefix = self.prefix.min(start);
    }

    /// Rolls back to `start`, takes row `hypo_ids[i]` for row `i`, and plans a step of `tokens > 0`
    /// tokens. A step that was begun before must have been committed or aborted.
    ///
    /// # Errors
    /// [`TableError`]; nothing has changed then.
    pub fn begin(
        &mut self,
        start: Option<u64>,
        tokens: u32,
        hypo_ids: Option<&[i64]>,
    ) -> Result<StepPages, TableError> {
        let prefix = self.check(start, tokens)?;
        let order = self.row_order(hypo_ids)?;
        self.abort();
        self.roll_back(prefix);
        let mut rows: Vec<Vec<u32>> = order.iter().map(|&row| self.rows[row].clone()).collect();
        let mut refs = vec![0u32; self.refs.len()];
        rows.iter().flatten().for_each(|&page| refs[page as usize] += 1);
        let copies = self.unshare(prefix, &mut rows, &mut refs);
        let end = (prefix as usize + tokens as usize).div_ceil(PAGE_TOKENS);
        for row in &mut rows {
            while row.len() < end {
                row.push(self.fresh(&mut refs));
            }
        }
        let tables =
            rows.iter().map(|row| row.iter().map(|&page| self.page(page)).collect()).collect();
        let prefixes = vec![prefix; rows.len()];
        self.pending = Some(PendingSession { refs, rows, prefix: prefix + tokens });
        Ok(StepPages { prefixes, tables, copies })
    }

    /// The step was answered: its tables are the session's.
    pub fn commit(&mut self) {
        let Some(pending) = self.pending.take() else {
            return;
        };
        for (page, (old, new)) in self.refs.iter().zip(&pending.refs).enumerate() {
            if *old > 0 && *new == 0 {
                self.free.push(page as u32);
            }
        }
        (self.refs, self.rows, self.prefix) = (pending.refs, pending.rows, pending.prefix);
    }

    /// The step failed: the tables are as before it, but for the tokens that it rolled back, which
    /// are gone.
    pub fn abort(&mut self) {
        let Some(pending) = self.pending.take() else {
            return;
        };
        for (page, (old, new)) in self.refs.iter().zip(&pending.refs).enumerate() {
            if *old == 0 && *new > 0 {
                self.free.push(page as u32);
            }
        }
    }

    fn row_order(&self, hypo_ids: Option<&[i64]>) -> Result<Vec<usize>, TableError> {
        let rows = self.rows.len();
        let Some(ids) = hypo_ids else {
            return Ok((0..rows).collect());
        };
        if ids.len() != rows {
            return Err(TableError::HypoCount { got: ids.len(), rows });
        }
        let row = |(index, &value): (usize, &i64)| {
            let row = usize::try_from(value).ok().filter(|&row| row < rows);
            row.ok_or(TableError::HypoRange { index, value, rows })
        };
        ids.iter().enumerate().map(row).collect()
    }

    /// Gives every row but the last a copy of the page in which `prefix` lies, where rows share it.
    fn unshare(&mut self, prefix: u32, rows: &mut [Vec<u32>], refs: &mut [u32]) -> Vec<PageCopy> {
        let (position, tokens) = (prefix as usize / PAGE_TOKENS, prefix % PAGE_TOKENS as u32);
        let mut copies = Vec::new();
        if tokens == 0 {
            return copies;
        }
        for row in rows {
            let source = row[position];
            if refs[source as usize] > 1 {
                let destination = self.fresh(refs);
                refs[source as usize] -= 1;
                row[position] = destination;
                copies.push(PageCopy {
                    source: self.page(source),
                    destination: self.page(destination),
                    tokens,
                });
            }
        }
        copies
    }

    fn fresh(&mut self, refs: &mut [u32]) -> u32 {
        let page = self.free.pop().expect("the module's header counts the pages that a step needs");
        refs[page as usize] = 1;
        page
    }

    fn page(&self, index: u32) -> PageId {
        self.pages[index as usize]
    }
}

#[cfg(test)]
mod tests;
