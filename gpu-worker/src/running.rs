//! A job that was accepted: its checked body, how its rows are cut, and its hidden states on the way through the blocks.
//! Everything here is private memory of the worker.

use std::time::Instant;

use kernels::{Backend, StepRow};
use shared::ids::{JobId, PageId};
use shared::job::{JobBody, JobKind};
use shared::model::PAGE_TOKENS;

use crate::block::Store;
use crate::engine::Parked;
use crate::schedule::{Class, DECODE_TOKENS, TaskShape};

/// Consecutive tokens of one row that are never cut further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The row.
    pub row: usize,
    /// First token, counted within the job.
    pub start: usize,
    /// Tokens.
    pub tokens: usize,
}

/// A job between its acceptance and its answer.
#[derive(Debug)]
pub struct Running<B: Backend> {
    /// Number of the job in the life of this worker, for injected faults.
    pub number: u64,
    /// Its name.
    pub id: JobId,
    /// What it asks for; checked.
    pub body: JobBody,
    /// When netd submitted it, CLOCK_MONOTONIC.
    pub submitted_ns: u64,
    /// When work on it began; `None` before its copies are made and its input is read.
    pub begun: Option<Begun<B>>,
    pieces: Vec<Piece>,
    /// Page tables of a job without cache.
    scratch_tables: Vec<Vec<PageId>>,
}

/// What a job needs while it runs.
pub struct Begun<B: Backend> {
    /// Since when.
    pub at: Instant,
    /// From submission to then, in nanoseconds.
    pub queue_ns: u64,
    /// Hidden states `[batch, tokens, hidden]`.
    pub hidden: States<B>,
    /// Deep prompts `[blocks, batch or 1, prompt tokens, hidden]`; empty without.
    pub prompts: Vec<f32>,
    /// Pages of one block for a job without cache `[rows × pages of a row]`, of each of its blocks for gradients; empty for a step.
    pub scratch: Vec<u8>,
    /// What gradients need besides.
    pub back: Option<Back>,
    /// What of it all is not here but in the job's region of the device.
    pub parked: Option<Parked>,
    /// And what forward leaves for them in each block; empty without.
    pub kept: Vec<Store<B>>,
}

/// Hidden states between two blocks.
pub enum States<B: Backend> {
    /// On the device, from the first block to the last.
    Device(B::Buffer),
    /// On the host: those of jobs so large that a device would have to plan for them. Each unit takes its own along.
    Host(Vec<f32>),
}

/// What a job for gradients keeps between its units. In bytes per token: blocks × (hidden + keys and values, with the pages) in
/// the block dtype, and a few rows of f32.
#[derive(Debug)]
pub struct Back {
    /// Input of each block, before prompts, in the block dtype.
    pub inputs: Vec<Vec<u8>>,
    /// Gradient of the hidden states that are at hand `[batch, tokens, hidden]`; the result in the end.
    pub gradient: Vec<f32>,
    /// Sums of the gradients of the keys of one block `[batch, tokens, kv_heads, head_dim]`.
    pub keys: Vec<f32>,
    /// The same of the values.
    pub values: Vec<f32>,
    /// Gradient of the prompts `[blocks, batch, prompt tokens, hidden]`; empty without.
    pub prompts: Vec<f32>,
}

impl<B: Backend> Begun<B> {
    /// Some of the hidden states, if they are on the device.
    pub fn device_part(&self, values: std::ops::Range<usize>) -> Option<&B::Floats> {
        match &self.hidden {
            States::Device(all) => B::part(all, values),
            States::Host(_) => None,
        }
    }

    /// The same, to be written.
    pub fn device_part_mut(&mut self, values: std::ops::Range<usize>) -> Option<&mut B::Floats> {
        match &mut self.hidden {
            States::Device(all) => B::part_mut(all, values),
            States::Host(_) => None,
        }
    }
}

impl<B: Backend> std::fmt::Debug for Begun<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Begun")
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Running<B> {
    /// The job `body`, cut into pieces of at most `piece_tokens` tokens.
    pub fn new(
        number: u64,
        id: JobId,
        submitted_ns: u64,
        body: JobBody,
        piece_tokens: usize,
    ) -> Running<B> {
        let pieces = cut(&body, piece_tokens);
        let scratch_tables = match body.kind {
            JobKind::Step => Vec::new(),
            JobKind::Forward | JobKind::Backward => scratch_tables(&body),
        };
        Running {
            number,
            id,
            body,
            submitted_ns,
            begun: None,
            pieces,
            scratch_tables,
        }
    }

    /// What the schedule must know.
    pub fn shape(&self) -> TaskShape {
        let class = match self.body.kind {
            JobKind::Step if is_decode(&self.body) => Class::Decode,
            JobKind::Step => Class::Prefill,
            JobKind::Forward => Class::Forward,
            JobKind::Backward => Class::Backward,
        };
        let there = self.body.blocks.iter().map(|b| b.0);
        let blocks = match self.body.kind {
            JobKind::Backward => there.clone().chain(there.rev()).collect(),
            JobKind::Step | JobKind::Forward => there.collect(),
        };
        TaskShape {
            class,
            blocks,
            pieces: self.pieces.iter().map(|p| p.tokens).collect(),
        }
    }

    /// Whether `position` is that of the last block before the way back, which needs no more of it than its keys and values.
    pub fn turns_at(&self, position: usize) -> bool {
        self.body.kind == JobKind::Backward && position + 1 == self.body.blocks.len()
    }

    /// Where a job for gradients is on its way back, if it is: the place of the block in the body, and the pieces, which are taken from
    /// the last to the first.
    pub fn back(
        &self,
        position: usize,
        pieces: std::ops::Range<usize>,
    ) -> Option<(usize, std::ops::Range<usize>)> {
        let blocks = self.body.blocks.len();
        if self.body.kind != JobKind::Backward || position < blocks {
            return None;
        }
        let block = (2 * blocks).checked_sub(position + 1)?;
        let count = self.pieces.len();
        Some((
            block,
            count.checked_sub(pieces.end)?..count.checked_sub(pieces.start)?,
        ))
    }

    /// Positions of the sums of keys and values that some pieces, on the way back, touch: up to the last of theirs in each row.
    pub fn touched(&self, pieces: std::ops::Range<usize>) -> std::ops::Range<usize> {
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
    pub fn row_starts(&self, pieces: std::ops::Range<usize>) -> Vec<usize> {
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

    /// For each of the rows that [`rows`](Self::rows) gives, its positions when the job is done.
    pub fn row_lengths(&self, pieces: std::ops::Range<usize>) -> Vec<usize> {
        let pieces = self.pieces.get(pieces).unwrap_or_default();
        let mut rows: Vec<usize> = pieces.iter().map(|piece| piece.row).collect();
        rows.dedup();
        let tokens = self.body.tokens as usize;
        rows.into_iter()
            .map(|row| self.prefix(row) + tokens)
            .collect()
    }

    /// Bytes of the pages of the block at `position` within those of the job.
    pub fn scratch_range(&self, position: usize, page_bytes: usize) -> std::ops::Range<usize> {
        let bytes = self.scratch_pages() * page_bytes;
        let first = match self.body.kind {
            JobKind::Backward => position * bytes,
            JobKind::Step | JobKind::Forward => 0,
        };
        first..first + bytes
    }

    /// Pages of one block that a job without cache needs for itself.
    pub fn scratch_pages(&self) -> usize {
        self.scratch_tables.iter().map(Vec::len).sum()
    }

    /// The rows of some pieces, for the block; consecutive pieces of one row become one.
    pub fn rows(&self, pieces: std::ops::Range<usize>) -> Vec<StepRow<'_>> {
        let tables = if self.body.kind == JobKind::Step {
            &self.body.page_tables
        } else {
            &self.scratch_tables
        };
        let mut rows: Vec<StepRow<'_>> = Vec::new();
        let mut last = None;
        for piece in self.pieces.get(pieces).unwrap_or_default() {
            match rows.last_mut().filter(|_| last == Some(piece.row)) {
                Some(row) => row.tokens += piece.tokens,
                None => rows.push(StepRow {
                    tokens: piece.tokens,
                    prefix: self.prefix(piece.row) + piece.start,
                    pages: tables.get(piece.row).map_or(&[], Vec::as_slice),
                }),
            }
            last = Some(piece.row);
        }
        rows
    }

    /// The part of the hidden states that some pieces are, as values; pieces in order lie one after the other.
    pub fn values(&self, pieces: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let (tokens, hidden) = (self.tokens(pieces), self.body.hidden as usize);
        tokens.start * hidden..tokens.end * hidden
    }

    /// Their tokens among those of the job.
    pub fn tokens(&self, pieces: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let tokens = |range: std::ops::Range<usize>| -> usize {
            self.pieces
                .get(range)
                .unwrap_or_default()
                .iter()
                .map(|p| p.tokens)
                .sum()
        };
        let start = tokens(0..pieces.start);
        start..start + tokens(pieces)
    }

    /// The deep prompts that fall on some pieces: `(values of the hidden states, values of the prompts)`, for the block at
    /// `position` of the job.
    pub fn prompt_parts(
        &self,
        position: usize,
        pieces: std::ops::Range<usize>,
    ) -> Vec<(std::ops::Range<usize>, std::ops::Range<usize>)> {
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
        self.pieces
            .get(pieces)
            .unwrap_or_default()
            .iter()
            .filter_map(part)
            .collect()
    }

    /// What gradients keep on the host, `gradient` being that of the output, and nothing where all gradients are parked.
    pub fn back_of(&self, gradient: Vec<f32>, kv_width: usize, parked: Option<&Parked>) -> Back {
        let is_here = parked.is_none();
        let tokens = self.body.batch as usize * self.body.tokens as usize;
        let elements = tokens * self.body.hidden as usize;
        let kv = if is_here { tokens * kv_width } else { 0 };
        let prompts = match (self.body.prompts, self.body.prompt_gradient) {
            (Some(p), Some(_)) if is_here => {
                self.body.blocks.len()
                    * self.body.batch as usize
                    * p.tokens as usize
                    * self.body.hidden as usize
            }
            _ => 0,
        };
        let bytes = elements * self.body.dtype.size_bytes();
        let input = |position| match parked.and_then(|parked| parked.input(position)) {
            Some(_) => Vec::new(),
            None => vec![0; bytes],
        };
        Back {
            inputs: (0..self.body.blocks.len()).map(input).collect(),
            gradient,
            keys: vec![0.0; kv],
            values: vec![0.0; kv],
            prompts: vec![0.0; prompts],
        }
    }

    fn prefix(&self, row: usize) -> usize {
        self.body.prefix_lengths.get(row).map_or(0, |&n| n as usize)
    }
}

fn is_decode(body: &JobBody) -> bool {
    u64::from(body.batch) * u64::from(body.tokens) <= DECODE_TOKENS as u64
}

/// Cuts the rows of a job at multiples of `piece_tokens` in absolute position, so that where a row is cut depends neither on
/// load nor on how its tokens came in steps. Decode steps are not cut.
fn cut(body: &JobBody, piece_tokens: usize) -> Vec<Piece> {
    let tokens = body.tokens as usize;
    let mut pieces = Vec::new();
    for row in 0..body.batch as usize {
        let prefix = body.prefix_lengths.get(row).map_or(0, |&n| n as usize);
        let mut start = 0;
        while start < tokens {
            let at = prefix + start;
            let end = match body.kind {
                JobKind::Step if is_decode(body) => tokens,
                _ => tokens.min((at / piece_tokens + 1) * piece_tokens - prefix),
            };
            pieces.push(Piece {
                row,
                start,
                tokens: end - start,
            });
            start = end;
        }
    }
    pieces
}

/// Page tables of a job without cache: each row has its own pages, one after the other.
fn scratch_tables(body: &JobBody) -> Vec<Vec<PageId>> {
    let pages = body.tokens.div_ceil(PAGE_TOKENS as u32);
    (0..body.batch)
        .map(|row| (row * pages..(row + 1) * pages).map(PageId).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use shared::block::BlockIndex;
    use shared::dtype::DType;
    use shared::job::{Prompts, SlotRef};

    use super::*;

    fn body(kind: JobKind, prefixes: &[u32], tokens: u32) -> JobBody {
        let slot = SlotRef { offset: 0, len: 0 };
        JobBody {
            kind,
            dtype: DType::F32,
            blocks: vec![BlockIndex(0), BlockIndex(1)],
            adapter: None,
            batch: prefixes.len() as u32,
            tokens,
            hidden: 4,
            prefix_lengths: prefixes.to_vec(),
            page_tables: prefixes.iter().map(|_| vec![PageId(7)]).collect(),
            copies: vec![],
            input: slot,
            output: slot,
            prompts: None,
            output_gradient: None,
            prompt_gradient: None,
        }
    }

    fn cuts(job: &JobBody) -> Vec<(usize, usize, usize)> {
        cut(job, 64)
            .iter()
            .map(|p| (p.row, p.start, p.tokens))
            .collect()
    }

    #[test]
    fn rows_are_cut_at_fixed_positions_whatever_their_prefix() {
        assert_eq!(
            cuts(&body(JobKind::Step, &[5, 64], 100)),
            [(0, 0, 59), (0, 59, 41), (1, 0, 64), (1, 64, 36)]
        );
        assert_eq!(
            cuts(&body(JobKind::Forward, &[0], 65)),
            [(0, 0, 64), (0, 64, 1)]
        );
    }

    #[test]
    fn a_decode_step_is_one_piece_per_row() {
        assert_eq!(
            cuts(&body(JobKind::Step, &[63, 10], 2)),
            [(0, 0, 2), (1, 0, 2)]
        );
    }

    #[test]
    fn pieces_of_one_row_join_and_cover_their_values() {
        let job =
            Running::<kernels::Cpu>::new(0, JobId(1), 0, body(JobKind::Step, &[5, 64], 100), 64);
        let rows: Vec<_> = job
            .rows(1..4)
            .iter()
            .map(|r| (r.prefix, r.tokens))
            .collect();
        assert_eq!(rows, [(64, 41), (64, 100)]);
        assert_eq!(job.row_lengths(1..4), [105, 164]);
        assert_eq!(job.values(1..4), 59 * 4..200 * 4);
    }

    #[test]
    fn gradients_go_through_the_blocks_and_pieces_there_and_back() {
        let job =
            Running::<kernels::Cpu>::new(0, JobId(1), 0, body(JobKind::Backward, &[0, 0], 100), 64);
        assert_eq!(job.shape().blocks, [0, 1, 1, 0]);
        assert_eq!(job.piece_count(), 4);
        assert_eq!(job.back(1, 0..4), None);
        assert_eq!(job.back(2, 0..1), Some((1, 3..4)));
        assert_eq!(job.back(3, 1..4), Some((0, 0..3)));
        assert_eq!(job.row_starts(1..4), [0, 100]);
        assert_eq!(job.touched(0..1), 0..64);
        assert_eq!(job.touched(1..4), 0..200);
        assert_eq!(job.touched(2..3), 100..164);
        assert_eq!(job.scratch_range(1, 10), 140..280);
    }

    #[test]
    fn prompts_fall_on_the_first_tokens_of_their_row() {
        let mut body = body(JobKind::Step, &[0, 0], 100);
        body.prompts = Some(Prompts {
            slot: SlotRef { offset: 0, len: 0 },
            batch: 2,
            tokens: 70,
        });
        let job = Running::<kernels::Cpu>::new(0, JobId(1), 0, body, 64);
        let parts = job.prompt_parts(1, 0..4);
        let at = |tokens: std::ops::Range<usize>| tokens.start * 4..tokens.end * 4;
        let expected = [
            (at(0..64), at(140..204)),
            (at(64..70), at(204..210)),
            (at(100..164), at(210..274)),
            (at(164..170), at(274..280)),
        ];
        assert_eq!(parts, expected);
    }
}
