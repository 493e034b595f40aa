//! A job that was accepted: its checked body, how its rows are cut, and which rows, values and pages
//! a unit of it has. Arithmetic only; the memory of a job that has begun is the engine's.

use std::ops::Range;

use kernels::StepRow;
use shared::ids::{JobId, PageId};
use shared::job::{JobBody, SlotRef, WorkKind};
use shared::model::PAGE_TOKENS;

use crate::schedule::Walk;

/// Consecutive tokens of one row that are never cut further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub row: usize,
    /// First token, counted within the job.
    pub start: usize,
    pub tokens: usize,
}

/// A job between its acceptance and its answer: what it asks for, and how its rows are cut.
#[derive(Debug)]
pub struct Job {
    /// Number of the job in the life of this worker, for injected faults.
    pub number: u64,
    pub id: JobId,
    /// When netd submitted it, CLOCK_MONOTONIC.
    pub submitted_ns: u64,
    /// What the job asks for; checked.
    pub body: JobBody,
    pieces: Vec<Piece>,
    /// Page tables of a job without cache.
    scratch_tables: Vec<Vec<PageId>>,
}

impl Job {
    /// The job `body`, cut into pieces of at most `piece_tokens` tokens; the first of a worker until
    /// its number says another, submitted when the clock began.
    pub fn new(id: JobId, body: JobBody, piece_tokens: usize) -> Job {
        let pieces = cut(&body, piece_tokens);
        let scratch_tables = match body.kind {
            WorkKind::Decode | WorkKind::Prefill => Vec::new(),
            WorkKind::Forward | WorkKind::Backward => scratch_tables(&body),
        };
        Job { number: 0, id, submitted_ns: 0, body, pieces, scratch_tables }
    }

    /// The job at its first block.
    pub fn walk(&self) -> Walk {
        let there = self.body.blocks.iter().map(|b| b.0);
        let kind = self.body.kind;
        let blocks = match kind {
            WorkKind::Backward => there.clone().chain(there.rev()).collect(),
            WorkKind::Decode | WorkKind::Prefill | WorkKind::Forward => there.collect(),
        };
        Walk::new(kind, blocks, self.pieces.iter().map(|p| p.tokens).collect())
    }

    /// Whether `position` is that of the last block before the backward pass, of which only keys and
    /// values are needed.
    pub fn needs_keys_only(&self, position: usize) -> bool {
        self.body.kind == WorkKind::Backward && position + 1 == self.body.blocks.len()
    }

    /// What a unit at `position` of a job for gradients computes in its backward pass: the index of
    /// the block in the body, and the pieces, which are taken from the last to the first. `None` in
    /// the forward pass.
    pub fn backward_at(
        &self,
        position: usize,
        pieces: Range<usize>,
    ) -> Option<(usize, Range<usize>)> {
        let blocks = self.body.blocks.len();
        if self.body.kind != WorkKind::Backward || position < blocks {
            return None;
        }
        let block = (2 * blocks).checked_sub(position + 1)?;
        let count = self.pieces.len();
        Some((block, count.checked_sub(pieces.end)?..count.checked_sub(pieces.start)?))
    }

    /// Positions of the sums of keys and values that some pieces, on the way back, touch: up to the
    /// last of theirs in each row.
    pub fn touched(&self, pieces: Range<usize>) -> Range<usize> {
        let pieces = self.pieces.get(pieces).unwrap_or_default();
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return 0..0;
        };
        let tokens = self.body.tokens as usize;
        first.row * tokens..last.row * tokens + last.start + last.tokens
    }

    /// Number of pieces.
    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    /// For each of the rows that [`rows`](Self::rows) gives, its first token within the job.
    pub fn row_starts(&self, pieces: Range<usize>) -> Vec<usize> {
        let mut rows: Vec<usize> = self
            .pieces
            .get(pieces)
            .unwrap_or_default()
            .iter()
            .map(|p| p.row * self.body.tokens as usize)
            .collect();
        rows.dedup();
        rows
    }

    /// Tokens of all rows.
    pub fn token_count(&self) -> usize {
        self.body.total_tokens() as usize
    }

    /// The gradient of the prompts of the block at `position`, which is that of the hidden states to
    /// which they were added: for each row, the values of the hidden states, and the slot for them.
    pub fn prompt_gradient_parts(&self, position: usize) -> Vec<(Range<usize>, SlotRef)> {
        let body = &self.body;
        let (Some(prompts), Some(slot)) = (body.prompts, body.prompt_gradient) else {
            return Vec::new();
        };
        let (batch, row) = (body.batch as usize, body.tokens as usize * body.hidden as usize);
        let values = prompts.tokens as usize * body.hidden as usize;
        let bytes = values * body.dtype.size_bytes();
        let part = |index: usize| {
            let offset = slot.offset + ((position * batch + index) * bytes) as u64;
            (index * row..index * row + values, SlotRef { offset, len: bytes as u64 })
        };
        (0..batch).map(part).collect()
    }

    /// Bytes of the pages of all blocks of the job, each page of `page_bytes`: of one block at a
    /// time, or of every block for gradients.
    pub fn scratch_bytes(&self, page_bytes: usize) -> usize {
        let last = match self.body.kind {
            WorkKind::Backward => self.body.blocks.len().saturating_sub(1),
            WorkKind::Decode | WorkKind::Prefill | WorkKind::Forward => 0,
        };
        self.scratch_range(last, page_bytes).end
    }

    /// Bytes of the pages of the block at `position` within those of the job.
    pub fn scratch_range(&self, position: usize, page_bytes: usize) -> Range<usize> {
        let bytes = self.scratch_pages() * page_bytes;
        let first = match self.body.kind {
            WorkKind::Backward => position * bytes,
            WorkKind::Decode | WorkKind::Prefill | WorkKind::Forward => 0,
        };
        first..first + bytes
    }

    /// Pages of one block that a job without cache needs for itself.
    pub fn scratch_pages(&self) -> usize {
        self.scratch_tables.iter().map(Vec::len).sum()
    }

    /// The rows of some pieces, for the block; consecutive pieces of one row become one.
    pub fn rows(&self, pieces: Range<usize>) -> Vec<StepRow<'_>> {
        let tables =
            if self.body.kind.is_step() { &self.body.pages.tables } else { &self.scratch_tables };
        let mut rows: Vec<StepRow<'_>> = Vec::new();
        let mut last = None;
        for piece in self.pieces.get(pieces).unwrap_or_default() {
            match rows.last_mut().filter(|_| last == Some(piece.row)) {
                Some(row) => row.tokens += piece.tokens,
                None => rows.push(StepRow {
                    tokens: piece.tokens,
                    prefix: self.prefix(piece.row) + piece.start,
                    pages: tables.get(piece.row).map_or(&[], Vec::as_slice),
                    adapter: self.body.adapter,
                    length: self.prefix(piece.row) + self.body.tokens as usize,
                }),
            }
            last = Some(piece.row);
        }
        rows
    }

    /// The part of the hidden states that some pieces are, as values; pieces in order lie one after
    /// the other.
    pub fn values(&self, pieces: Range<usize>) -> Range<usize> {
        let (tokens, hidden) = (self.tokens(pieces), self.body.hidden as usize);
        tokens.start * hidden..tokens.end * hidden
    }

    /// Their tokens among those of the job.
    pub fn tokens(&self, pieces: Range<usize>) -> Range<usize> {
        let tokens = |range: Range<usize>| -> usize {
            self.pieces.get(range).unwrap_or_default().iter().map(|p| p.tokens).sum()
        };
        let start = tokens(0..pieces.start);
        start..start + tokens(pieces)
    }

    /// The deep prompts that fall on some pieces: `(values of the hidden states, values of the
    /// prompts)`, for the block at `position` of the job.
    pub fn prompt_parts(
        &self,
        position: usize,
        pieces: Range<usize>,
    ) -> Vec<(Range<usize>, Range<usize>)> {
        let Some(prompts) = self.body.prompts else {
            return Vec::new();
        };
        let (batch, tokens) = (prompts.batch as usize, prompts.tokens as usize);
        let (hidden, job_tokens) = (self.body.hidden as usize, self.body.tokens as usize);
        let part = |piece: &Piece| {
            let count = tokens
                .min(piece.start + piece.tokens)
                .checked_sub(piece.start)
                .filter(|&n| n > 0)?;
            let prompt_row = if batch == 1 { 0 } else { piece.row };
            let to = (piece.row * job_tokens + piece.start) * hidden;
            let from = ((position * batch + prompt_row) * tokens + piece.start) * hidden;
            Some((to..to + count * hidden, from..from + count * hidden))
        };
        self.pieces.get(pieces).unwrap_or_default().iter().filter_map(part).collect()
    }

    fn prefix(&self, row: usize) -> usize {
        self.body.pages.prefixes.get(row).map_or(0, |&n| n as usize)
    }
}

/// Cuts the rows of a job at multiples of `piece_tokens` in absolute position, so that where a row
/// is cut depends neither on load nor on how its tokens came in steps. Decode steps are not cut.
fn cut(body: &JobBody, piece_tokens: usize) -> Vec<Piece> {
    let tokens = body.tokens as usize;
    let mut pieces = Vec::new();
    for row in 0..body.batch as usize {
        let prefix = body.pages.prefixes.get(row).map_or(0, |&n| n as usize);
        let mut start = 0;
        while start < tokens {
            let at = prefix + start;
            let end = match body.kind {
                WorkKind::Decode => tokens,
                _ => tokens.min((at / piece_tokens + 1) * piece_tokens - prefix),
            };
            pieces.push(Piece { row, start, tokens: end - start });
            start = end;
        }
    }
    pieces
}

/// Page tables of a job without cache: each row has its own pages, one after the other.
fn scratch_tables(body: &JobBody) -> Vec<Vec<PageId>> {
    let pages = body.tokens.div_ceil(PAGE_TOKENS as u32);
    (0..body.batch).map(|row| (row * pages..(row + 1) * pages).map(PageId).collect()).collect()
}

#[cfg(test)]
mod tests {
    use shared::job::{Prompts, StepPages};
    use testkit::jobs::job_body;

    use super::*;

    fn body(kind: WorkKind, prefixes: &[u32], tokens: u32) -> JobBody {
        let pages = StepPages {
            prefixes: prefixes.to_vec(),
            tables: prefixes.iter().map(|_| vec![PageId(7)]).collect(),
            copies: vec![],
        };
        JobBody { pages, ..job_body(kind, prefixes.len() as u32, tokens, 2) }
    }

    fn cuts(job: &JobBody) -> Vec<(usize, usize, usize)> {
        cut(job, 64).iter().map(|p| (p.row, p.start, p.tokens)).collect()
    }

    #[test]
    fn rows_are_cut_at_fixed_positions_whatever_their_prefix() {
        assert_eq!(
            cuts(&body(WorkKind::Prefill, &[5, 64], 100)),
            [(0, 0, 59), (0, 59, 41), (1, 0, 64), (1, 64, 36)]
        );
        assert_eq!(cuts(&body(WorkKind::Forward, &[0], 65)), [(0, 0, 64), (0, 64, 1)]);
    }

    #[test]
    fn a_decode_step_is_one_piece_per_row() {
        assert_eq!(cuts(&body(WorkKind::Decode, &[63, 10], 2)), [(0, 0, 2), (1, 0, 2)]);
    }

    #[test]
    fn pieces_of_one_row_join_and_cover_their_values() {
        let job = Job::new(JobId(1), body(WorkKind::Prefill, &[5, 64], 100), 64);
        let rows: Vec<_> = job.rows(1..4).iter().map(|r| (r.prefix, r.tokens)).collect();
        assert_eq!(rows, [(64, 41), (64, 100)]);
        assert_eq!(job.rows(1..4).iter().map(|r| r.length).collect::<Vec<_>>(), [105, 164]);
        assert_eq!(job.values(1..4), 59 * 4..200 * 4);
    }

    #[test]
    fn gradients_go_through_the_blocks_and_pieces_there_and_back() {
        let job = Job::new(JobId(1), body(WorkKind::Backward, &[0, 0], 100), 64);
        assert_eq!(job.walk().blocks, [0, 1, 1, 0]);
        assert_eq!(job.piece_count(), 4);
        assert_eq!(job.backward_at(1, 0..4), None);
        assert_eq!(job.backward_at(2, 0..1), Some((1, 3..4)));
        assert_eq!(job.backward_at(3, 1..4), Some((0, 0..3)));
        assert_eq!(job.row_starts(1..4), [0, 100]);
        assert_eq!(job.touched(0..1), 0..64);
        assert_eq!(job.touched(1..4), 0..200);
        assert_eq!(job.touched(2..3), 100..164);
        assert_eq!(job.scratch_range(1, 10), 140..280);
    }

    #[test]
    fn prompts_fall_on_the_first_tokens_of_their_row() {
        let mut body = body(WorkKind::Prefill, &[0, 0], 100);
        body.prompts = Some(Prompts { slot: SlotRef { offset: 0, len: 0 }, batch: 2, tokens: 70 });
        let job = Job::new(JobId(1), body, 64);
        let parts = job.prompt_parts(1, 0..4);
        let at = |tokens: Range<usize>| tokens.start * 4..tokens.end * 4;
        let expected = [
            (at(0..64), at(140..204)),
            (at(64..70), at(204..210)),
            (at(100..164), at(210..274)),
            (at(164..170), at(274..280)),
        ];
        assert_eq!(parts, expected);
    }
}
