//! A job of the workers: what it computes, for whom, and what it occupies.

use std::ops::Range;
use std::sync::Arc;

use p2p::PeerId;
use shared::job::{JobBody, Prompts, SlotRef, StepPages, WorkKind};
use swarm::wire::messages::Compression;

use super::arena::{SHORT_STEP_TOKENS, SlotClass, SlotLease};
use crate::sessions::admission::Lease;

/// Who asks for a job, how urgent it is among what the same peer asks for, and how the answer shall
/// travel.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub peer: PeerId,
    pub points: f64,
    /// Of the output.
    pub compression: Compression,
}

/// One job of the workers, from its admission to its answer. Its slots lie in the order of
/// [`Job::sizes`].
#[derive(Debug)]
pub struct Job {
    pub caller: Caller,
    /// What is asked for, over all blocks of the request. Its slots are [`NO_SLOT`] until some are
    /// reserved; those of a part are in its own body.
    pub body: JobBody,
    /// The right to its pages. It moves to [`Holds`] with the slots.
    pub lease: Option<Arc<Lease>>,
}

/// Index of the slot that holds the input.
pub const INPUT: usize = 0;
/// Index of the slot for deep prompts.
pub const PROMPTS: usize = 3;
pub(super) const BODY: usize = 2;

/// In place of a slot that is not reserved yet.
pub const NO_SLOT: SlotRef = SlotRef { offset: 0, len: 0 };

/// Words of a body without its lists, with room to grow.
const BODY_HEADER_WORDS: usize = 48;

impl Job {
    /// Where its slots lie.
    pub fn slot_class(&self) -> SlotClass {
        match self.body.kind {
            WorkKind::Decode | WorkKind::Prefill
                if self.body.total_tokens() <= SHORT_STEP_TOKENS =>
            {
                SlotClass::Short
            }
            _ => SlotClass::Bulk,
        }
    }

    /// Bytes of the deep prompts of one block, `batch` times `tokens` of them.
    pub(super) fn prompt_bytes(&self, batch: u32, tokens: u32) -> u64 {
        let width = u64::from(self.body.hidden) * self.body.dtype.size_bytes() as u64;
        u64::from(batch) * u64::from(tokens) * width
    }

    fn block_prompt_bytes(&self) -> u64 {
        self.body.prompts.map_or(0, |prompts| self.prompt_bytes(prompts.batch, prompts.tokens))
    }

    /// The body of the part over the blocks at these places of the request, from `input` to `output`.
    pub(super) fn part(
        &self,
        places: &Range<usize>,
        input: SlotRef,
        output: SlotRef,
        holds: &Holds,
    ) -> JobBody {
        let blocks = self.body.blocks.get(places.clone()).unwrap_or_default().to_vec();
        let of_part = |prompts: Prompts| Prompts {
            slot: piece(holds.slots.slot(PROMPTS), self.block_prompt_bytes(), places),
            ..prompts
        };
        let prompts = self.body.prompts.map(of_part);
        JobBody { blocks, input, output, prompts, ..self.body.clone() }
    }

    /// Slots to reserve: input, output (the two change places from hop to hop), body, and deep
    /// prompts if there are any.
    pub fn sizes(&self) -> Vec<u64> {
        let JobBody { blocks, pages: StepPages { tables, copies, .. }, .. } = &self.body;
        let pages: usize = tables.iter().map(Vec::len).sum();
        let words = BODY_HEADER_WORDS + blocks.len() + 2 * tables.len() + pages + 3 * copies.len();
        let hidden_bytes = self.body.hidden_bytes();
        let mut sizes = vec![hidden_bytes, hidden_bytes, 4 * words as u64];
        if self.body.prompts.is_some() {
            sizes.push(self.block_prompt_bytes() * blocks.len() as u64);
        }
        sizes
    }
}

/// What a job in flight names, and what therefore must not be given to anyone else.
#[derive(Debug)]
pub struct Holds {
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
