//! A job on its way: block by block, piece by piece. Who plans units and who follows a plan count
//! the steps of a job alike.

use shared::job::WorkKind;

use super::{Advance, Unit, UnitMember};

/// Where a job is: at one of its blocks, before one of its pieces.
#[derive(Debug)]
pub struct Walk {
    pub(super) kind: WorkKind,
    /// Its blocks in order; for gradients, twice: there and back.
    pub(crate) blocks: Vec<u32>,
    /// Tokens of each of its pieces.
    pub(super) pieces: Vec<usize>,
    pub(super) position: usize,
    pub(super) piece: usize,
}

impl Walk {
    /// A job at the first of its `blocks`, which for gradients come twice: there and back. Each of its
    /// `pieces` has so many tokens.
    ///
    /// # Panics
    /// When it has no block or no piece.
    pub fn new(kind: WorkKind, blocks: Vec<u32>, pieces: Vec<usize>) -> Walk {
        assert!(!blocks.is_empty() && !pieces.is_empty(), "a job has blocks and pieces");
        Walk { kind, blocks, pieces, position: 0, piece: 0 }
    }

    /// The block that is next, by index in the model.
    pub(super) fn block(&self) -> u32 {
        self.blocks.get(self.position).copied().unwrap_or(u32::MAX)
    }

    /// Tokens of all pieces.
    pub(super) fn tokens(&self) -> usize {
        self.pieces.iter().sum()
    }

    /// Whether it is a decode step.
    pub(super) fn is_decode(&self) -> bool {
        self.kind == WorkKind::Decode
    }

    /// Whether the block at `position` is taken on the way back, which costs several times as much.
    pub(super) fn is_back(&self, position: usize) -> bool {
        self.kind == WorkKind::Backward && position >= self.blocks.len() / 2
    }

    /// Whether the block at `position` is the last before the way back, of which only keys and
    /// values are computed.
    pub(super) fn is_last_forward(&self, position: usize) -> bool {
        self.kind == WorkKind::Backward && position + 1 == self.blocks.len() / 2
    }

    /// Whether `member` is the part of this job in `unit`, and what the job does next. Nothing of
    /// either is believed.
    pub fn is_next(&self, unit: &Unit, member: &UnitMember) -> bool {
        let UnitMember { position, pieces, .. } = member;
        let count = unit.count as usize;
        let end = position.checked_add(count).unwrap_or(usize::MAX);
        let Some(blocks) = self.blocks.get(*position..end).filter(|b| !b.is_empty()) else {
            return false;
        };
        let is_there = blocks.iter().zip(0..).all(|(&b, i)| b.checked_sub(unit.block) == Some(i));
        let is_whole = *pieces == (0..self.pieces.len());
        let fits_kind = match self.kind {
            WorkKind::Decode => is_whole,
            _ => count == 1 && unit.members.len() == 1,
        };
        is_there
            && fits_kind
            && (*position, pieces.start) == (self.position, self.piece)
            && pieces.start < pieces.end
            && pieces.end <= self.pieces.len()
    }

    /// Goes on behind the pieces of `member` in a unit of `blocks` blocks.
    pub fn advance(&mut self, member: &UnitMember, blocks: usize) -> Advance {
        self.piece = member.pieces.end;
        let block_done = self.piece >= self.pieces.len();
        if block_done {
            self.piece = 0;
            self.position += blocks;
        }
        Advance {
            job: member.job,
            positions: member.position..member.position + blocks,
            block_done,
            finished: self.position >= self.blocks.len(),
        }
    }
}
