//! Gradients over the spans of several workers: forward through all but the last of them, each
//! keeping its input, then backward from the last to the first.
//!
//! ```text
//!   inputs ──> worker 0 ──> input 1 ──> worker 1 ──> input 2        (forward; not through the last worker)
//!   result <── worker 0 <── gradient <── worker 1 <── gradient <── worker 2 <── output gradient
//! ```
//!
//! A worker keeps the input, the keys and the values of each block of a job. Where that is more
//! than one job may take, its blocks are several hops as well: less is kept, and all but the last
//! hop are computed forward twice (Chen et al. 2016, Training Deep Nets with Sublinear Memory
//! Cost). Where the arena does not hold the inputs of all hops, it holds some of them, and the
//! others are computed from these again, each when its turn comes.

use std::ops::Range;
use std::sync::Arc;

use shared::job::{SlotRef, WorkKind};

use super::Workers;
use super::job::{BODY, Holds, INPUT, Job, PROMPTS, piece};
use super::link::{JobFailure, WorkerLink};

/// Index of the slot that holds the gradient of the output.
pub const OUTPUT_GRADIENT: usize = 1;
/// Index of the slot for the gradient of deep prompts, `[blocks, batch, prompt tokens, hidden]`.
const PROMPT_GRADIENT: usize = PROMPTS + 1;

/// A request for gradients with its route through the workers. Its slots are in `holds`, in the order
/// of [`GradientJob::sizes`].
#[derive(Debug)]
pub struct GradientJob {
    job: Job,
    hops: Vec<Hop>,
    /// Inputs of hops that the arena holds at a time, besides the first.
    inputs: usize,
}

/// What a worker may keep for one job.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Bytes that it needs per block.
    pub block_bytes: u64,
    /// Bytes that it may keep at most, unless one block needs more.
    pub most_bytes: u64,
}

/// A request for gradients that has no route through the workers.
#[derive(Debug, thiserror::Error)]
pub enum NoRoute {
    /// A worker is gone.
    #[error(transparent)]
    Job(#[from] JobFailure),
    /// It keeps too much in one job, and the arena has no room to take it in several.
    #[error(
        "gradients over {blocks} blocks keep {} in a worker, which keeps at most {} at once; the {} of \
         shared memory (--arena_size) cannot hold the {} that computing them in parts takes; ask for fewer tokens or fewer \
         blocks at a time",
        mib(*.bytes), mib(*.most_bytes), mib(*.arena_bytes), mib(*.parts_bytes)
    )]
    TooLarge {
        /// Blocks of the request that one worker serves.
        blocks: usize,
        /// Bytes that they keep.
        bytes: u64,
        /// Bytes that they may keep.
        most_bytes: u64,
        /// Bytes of the arena.
        arena_bytes: u64,
        /// Bytes of its slots, were the request taken in parts.
        parts_bytes: u64,
    },
}

/// A size as a person would write it.
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// One thing to do on the way, with the places of inputs: 0 is that of the request, the others are
/// kept in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    /// Forward from the hop `from`, whose input is at `input`, to the input of the hop `to`, which
    /// goes to `output`.
    Ahead { from: usize, to: usize, input: usize, output: usize },
    /// The gradient through a hop whose input is at `input`.
    Back { hop: usize, input: usize },
}

/// The moves back through `hops`, the input of the first of them being at `input`, with the places
/// `free` for those of others: at least one if there are several hops. With a place for each, no
/// hop is computed ahead twice.
fn moves(hops: Range<usize>, input: usize, free: Range<usize>, out: &mut Vec<Move>) {
    let (from, count, places) = (hops.start, hops.len(), free.len());
    if count <= 1 || places == 0 {
        out.extend(hops.map(|hop| Move::Back { hop, input }));
        return;
    }
    let output = free.start;
    let ahead = |to, out: &mut Vec<Move>| {
        out.push(Move::Ahead { from, to, input, output });
    };
    if places == 1 {
        for hop in (from + 1..hops.end).rev() {
            ahead(hop, out);
            out.push(Move::Back { hop, input: output });
        }
        out.push(Move::Back { hop: from, input });
        return;
    }
    let middle = from + count.div_ceil(places + 1);
    ahead(middle, out);
    moves(middle..hops.end, output, output + 1..free.end, out);
    moves(from..middle, input, free, out);
}

/// Blocks, by their places in the request, that one worker computes in one job.
#[derive(Debug)]
struct Hop {
    link: Arc<WorkerLink>,
    blocks: Range<usize>,
}

/// Where the result lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientSlots {
    /// Gradient of the input `[batch, tokens, hidden]`.
    pub input: SlotRef,
    /// Gradient of the deep prompts `[blocks, batch, prompt tokens, hidden]`, if there are any.
    pub prompts: Option<SlotRef>,
}

impl Workers {
    /// The route of `job` through the workers, in hops that keep no more than `bound`. The arena
    /// holds as many of their inputs as leaves room for another such request beside it, and at
    /// least one.
    ///
    /// # Errors
    /// [`NoRoute`] when a block has no worker, or the arena cannot hold the input of a hop where
    /// several are needed.
    pub fn gradients(&self, job: Job, bound: Bound) -> Result<GradientJob, NoRoute> {
        let mut spans = Vec::new();
        let mut done = 0;
        while done < job.body.blocks.len() {
            let (link, end) = self.hop(&job.body.blocks, done).ok_or(JobFailure::WorkerGone)?;
            spans.push(Hop { link, blocks: done..end });
            done = end;
        }
        if spans.is_empty() {
            return Err(JobFailure::WorkerGone.into());
        }
        let most = bound.most_bytes / bound.block_bytes.max(1);
        let hops = cut(&spans, usize::try_from(most).unwrap_or(usize::MAX).max(1));
        let inputs = hops.len() - 1;
        let mut gradients = GradientJob { job, hops, inputs };
        let holds = |gradients: &GradientJob, times| {
            let sizes = gradients.sizes().repeat(times);
            self.arena.could_hold(&sizes)
        };
        while gradients.inputs > 1 && !holds(&gradients, 2) {
            gradients.inputs -= 1;
        }
        if gradients.hops.len() > spans.len() && !holds(&gradients, 1) {
            let blocks = spans.iter().map(|span| span.blocks.len()).max();
            let blocks = blocks.unwrap_or_default();
            return Err(NoRoute::TooLarge {
                blocks,
                bytes: bound.block_bytes.saturating_mul(blocks as u64),
                most_bytes: bound.most_bytes,
                arena_bytes: self.arena.map().len(),
                parts_bytes: gradients.sizes().iter().sum(),
            });
        }
        Ok(gradients)
    }
}

/// The same way in hops of at most `most` blocks, those of a worker of nearly the same length.
fn cut(spans: &[Hop], most: usize) -> Vec<Hop> {
    let parts = spans.iter().flat_map(|span| {
        let (start, end, count) = (span.blocks.start, span.blocks.end, span.blocks.len());
        let length = count.div_ceil(count.div_ceil(most)).max(1);
        (start..end)
            .step_by(length)
            .map(move |from| Hop { link: span.link.clone(), blocks: from..end.min(from + length) })
    });
    parts.collect()
}

impl GradientJob {
    /// Slots to reserve: input, output gradient, body, deep prompts and their gradient if there are
    /// any, one more gradient, and the inputs of hops that are held at a time.
    pub fn sizes(&self) -> Vec<u64> {
        // As for a computation, with a gradient for the output.
        let mut sizes = self.job.sizes();
        if self.job.body.prompts.is_some() {
            sizes.push(self.prompt_gradient_bytes() * self.job.body.blocks.len() as u64);
        }
        sizes.resize(sizes.len() + 1 + self.inputs, self.job.body.hidden_bytes());
        sizes
    }

    /// Runs all jobs. Input, output gradient and prompts are written.
    ///
    /// # Errors
    /// [`JobFailure`] of the first job that fails.
    pub async fn run(
        &self,
        workers: &Workers,
        holds: &Arc<Holds>,
    ) -> Result<GradientSlots, JobFailure> {
        let slot = |index| holds.slots.slot(index);
        let spare = match self.job.body.prompts {
            Some(_) => PROMPT_GRADIENT + 1,
            None => BODY + 1,
        };
        let place = |input: usize| match input {
            0 => slot(INPUT),
            kept => slot(spare + kept),
        };
        let mut way = Vec::new();
        moves(0..self.hops.len(), 0, 1..self.inputs + 1, &mut way);
        let (mut gradient, mut result) = (slot(OUTPUT_GRADIENT), slot(spare));
        for next in way {
            match next {
                Move::Ahead { from, to, input, output } => {
                    let (input, output) = (place(input), place(output));
                    self.ahead(workers, holds, from..to, input, output, result).await?;
                }
                Move::Back { hop, input } => {
                    let Some(hop) = self.hops.get(hop) else {
                        continue;
                    };
                    let mut body = self.job.part(&hop.blocks, place(input), result, holds);
                    body.output_gradient = Some(gradient);
                    body.prompt_gradient = self.job.body.prompts.map(|_| {
                        piece(slot(PROMPT_GRADIENT), self.prompt_gradient_bytes(), &hop.blocks)
                    });
                    workers.run_on(&hop.link, &body, holds).await?;
                    (gradient, result) = (result, gradient);
                }
            }
        }
        Ok(GradientSlots {
            input: gradient,
            prompts: self.job.body.prompts.map(|_| slot(PROMPT_GRADIENT)),
        })
    }

    /// Forward through the hops `hops` from `input` to `output`, by way of `spare` where workers
    /// follow each other.
    async fn ahead(
        &self,
        workers: &Workers,
        holds: &Arc<Holds>,
        hops: Range<usize>,
        mut input: SlotRef,
        output: SlotRef,
        spare: SlotRef,
    ) -> Result<(), JobFailure> {
        let hops = self.hops.get(hops).unwrap_or_default();
        // A forward job keeps nothing of its blocks: those of one worker are one job.
        let parts: Vec<_> = hops
            .chunk_by(|one, next| Arc::ptr_eq(&one.link, &next.link))
            .filter_map(|part| {
                let (first, last) = (part.first()?, part.last()?);
                Some((&first.link, first.blocks.start..last.blocks.end))
            })
            .collect();
        for (index, (link, blocks)) in parts.iter().enumerate() {
            // The last of them writes to `output`.
            let to = match (parts.len() - index) % 2 {
                1 => output,
                _ => spare,
            };
            let mut body = self.job.part(blocks, input, to, holds);
            body.kind = WorkKind::Forward;
            workers.run_on(link, &body, holds).await?;
            input = to;
        }
        Ok(())
    }

    /// Bytes of the gradient of the prompts of one block; it has all rows, also where all rows
    /// share the prompts.
    fn prompt_gradient_bytes(&self) -> u64 {
        let prompts = self.job.body.prompts;
        prompts.map_or(0, |prompts| self.job.prompt_bytes(self.job.body.batch, prompts.tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hops in the order in which they are gone through, ahead and back; every move finds what it
    /// needs.
    fn play(hops: usize, places: usize) -> (usize, Vec<usize>) {
        let mut way = Vec::new();
        moves(0..hops, 0, 1..places + 1, &mut way);
        let mut inputs = vec![None; places + 1];
        inputs[0] = Some(0);
        let (mut ahead, mut back) = (0, Vec::new());
        for next in way {
            match next {
                Move::Ahead { from, to, input, output } => {
                    assert!(inputs[input] == Some(from) && from < to && output > 0);
                    assert_ne!(input, output);
                    inputs[output] = Some(to);
                    ahead += to - from;
                }
                Move::Back { hop, input } => {
                    assert_eq!(inputs[input], Some(hop));
                    back.push(hop);
                }
            }
        }
        (ahead, back)
    }

    #[test]
    fn hops_are_taken_back_in_order_with_any_number_of_places() {
        for hops in 1..40 {
            let mut before = usize::MAX;
            for places in 1..=hops {
                let (ahead, back) = play(hops, places);
                assert!(back.iter().copied().eq((0..hops).rev()), "{hops} {places}");
                assert!(ahead <= before, "{hops} {places}: {ahead} > {before}");
                before = ahead;
            }
        }
        assert_eq!(play(1, 0), (0, vec![0]));
        // With a place for each of the others none is gone through twice; with one place each goes
        // from the start.
        assert_eq!(play(14, 13).0, 13);
        assert_eq!(play(14, 1).0, 13 * 14 / 2);
    }
}
