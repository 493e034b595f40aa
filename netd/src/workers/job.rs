//! A job of the workers: what it computes, for whom, and what it occupies.

use std::ops::Range;
use std::sync::Arc;

use hivemind::p2p::PeerId;
use hivemind::wire::messages::Compression;
use shared::block::BlockIndex;
use shared::dtype::DType;
use shared::job::{JobBody, Prompts, SlotRef, WorkKind};

use super::arena::{SHORT_STEP_TOKENS, SlotClass, SlotLease};
use crate::sessions::admission::Lease;
use crate::sessions::table::StepPlan;

/// Who asks for a job, how urgent it is among what the same peer asks for, and how the answer shall
/// travel.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The authenticated peer.
    pub peer: PeerId,
    /// Its points.
    pub points: f64,
    /// Of the output.
    pub compression: Compression,
}

/// One job of the workers, from its admission to its answer. Its slots lie in the order of
/// [`Job::sizes`].
#[derive(Debug)]
pub struct Job {
    /// Who asks.
    pub caller: Caller,
    /// Step, forward or backward.
    pub kind: WorkKind,
    /// Block dtype.
    pub dtype: DType,
    /// Blocks in the order in which they run.
    pub blocks: Vec<BlockIndex>,
    /// Sequences, at least 1.
    pub batch: u32,
    /// Tokens per sequence, at least 1.
    pub tokens: u32,
    /// Width of the hidden states.
    pub hidden: u32,
    /// Pages, if it is a step.
    pub plan: StepPlan,
    /// The right to these pages. It moves to [`Holds`] with the slots.
    pub lease: Option<Arc<Lease>>,
    /// Sequences and tokens of the deep prompts, if there are any.
    pub prompts: Option<(u32, u32)>,
    /// Adapter, by its index among those of the model.
    pub adapter: Option<u32>,
}

/// Index of the slot that holds the input.
pub const INPUT: usize = 0;
/// Index of the slot for deep prompts.
pub const PROMPTS: usize = 3;
pub(super) const BODY: usize = 2;

/// Words of a body without its lists, with room to grow.
const BODY_HEADER_WORDS: usize = 48;

impl Job {
    /// Where its slots lie.
    pub fn slot_class(&self) -> SlotClass {
        match self.kind {
            WorkKind::Decode | WorkKind::Prefill if self.total_tokens() <= SHORT_STEP_TOKENS => {
                SlotClass::Short
            }
            _ => SlotClass::Bulk,
        }
    }

    /// Rows × tokens.
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.tokens)
    }

    /// Bytes of one tensor of hidden states.
    pub fn hidden_bytes(&self) -> u64 {
        self.total_tokens() * u64::from(self.hidden) * self.dtype.size_bytes() as u64
    }

    /// Bytes of the deep prompts of one block.
    fn block_prompt_bytes(&self) -> u64 {
        let (batch, tokens) = self.prompts.unwrap_or_default();
        let width = u64::from(self.hidden) * self.dtype.size_bytes() as u64;
        u64::from(batch) * u64::from(tokens) * width
    }

    /// The deep prompts of the blocks at these places of the request.
    pub(super) fn prompts_of(&self, blocks: &Range<usize>, holds: &Holds) -> Option<Prompts> {
        let (batch, tokens) = self.prompts?;
        let slot = piece(holds.slots.slot(PROMPTS), self.block_prompt_bytes(), blocks);
        Some(Prompts { slot, batch, tokens })
    }

    /// Slots to reserve: input, output (the two change places from hop to hop), body, and deep
    /// prompts if there are any.
    pub fn sizes(&self) -> Vec<u64> {
        let pages: usize = self.plan.tables.iter().map(Vec::len).sum();
        let rows = self.plan.tables.len();
        let words =
            BODY_HEADER_WORDS + self.blocks.len() + 2 * rows + pages + 3 * self.plan.copies.len();
        let mut sizes = vec![self.hidden_bytes(), self.hidden_bytes(), 4 * words as u64];
        if self.prompts.is_some() {
            sizes.push(self.block_prompt_bytes() * self.blocks.len() as u64);
        }
        sizes
    }

    /// The body of a job over none of the blocks yet.
    pub(super) fn body(&self, plan: StepPlan, input: SlotRef, output: SlotRef) -> JobBody {
        let rows = plan.tables.len();
        JobBody {
            kind: self.kind,
            dtype: self.dtype,
            blocks: Vec::new(),
            adapter: self.adapter,
            batch: self.batch,
            tokens: self.tokens,
            hidden: self.hidden,
            prefix_lengths: vec![plan.prefix; rows],
            page_tables: plan.tables,
            copies: plan.copies,
            input,
            output,
            prompts: None,
            output_gradient: None,
            prompt_gradient: None,
        }
    }
}

/// What a job in flight names, and what therefore must not be given to anyone else.
#[derive(Debug)]
pub struct Holds {
    /// Its slots.
    pub slots: SlotLease,
    /// Its pages, if it is a step.
    pub pages: Option<Arc<Lease>>,
}

/// The part of `all` that belongs to `blocks`, of `block_bytes` each.
pub(super) fn piece(all: SlotRef, block_bytes: u64, blocks: &Range<usize>) -> SlotRef {
    SlotRef {
        offset: all.offset + block_bytes * blocks.start as u64,
        len: block_bytes * blocks.len() as u64,
    }
}
