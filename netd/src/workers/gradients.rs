//! Gradients over the spans of several workers: forward through all but the last of them, each keeping its input, then
//! backward from the last to the first.
//!
//! ```text
//!   inputs ──> worker 0 ──> input 1 ──> worker 1 ──> input 2        (forward; not through the last worker)
//!   result <── worker 0 <── gradient <── worker 1 <── gradient <── worker 2 <── output gradient
//! ```
//!
//! A worker keeps the input, the keys and the values of each block of a job. Where that is more than one job may take, its blocks
//! are several hops as well: less is kept, and all but the last hop are computed forward twice (Chen et al. 2016, Training
//! Deep Nets with Sublinear Memory Cost).

use std::ops::Range;
use std::sync::Arc;

use shared::block::BlockIndex;
use shared::job::{JobBody, JobKind, SlotRef};

use super::link::{Holds, Job, JobFailure, Link};
use super::{BODY, Computation, INPUT, PROMPTS, Workers, body};
use crate::sessions::table::StepPlan;

/// Index of the slot that holds the gradient of the output.
pub const OUTPUT_GRADIENT: usize = 1;
/// Index of the slot for the gradient of deep prompts, `[blocks, batch, prompt tokens, hidden]`.
const PROMPT_GRADIENT: usize = PROMPTS + 1;

/// A request for gradients with its way through the workers. Its slots are in `holds`, in the order of
/// [`Gradients::sizes`].
#[derive(Debug)]
pub struct Gradients {
    work: Computation,
    hops: Vec<Hop>,
}

/// Blocks, by their places in the request, that one worker computes in one job.
#[derive(Debug)]
struct Hop {
    link: Arc<Link>,
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
    /// The way of `work` through the workers, with at most `most_blocks` in a hop as long as the arena holds the inputs of so many
    /// hops, and another such request beside it. Its kind and plan do not matter.
    ///
    /// # Errors
    /// [`JobFailure::WorkerGone`] when a block has no worker.
    pub fn gradients(
        &self,
        work: Computation,
        most_blocks: usize,
    ) -> Result<Gradients, JobFailure> {
        let mut spans = Vec::new();
        let mut done = 0;
        while done < work.blocks.len() {
            let (link, end) = self.hop(&work.blocks, done).ok_or(JobFailure::WorkerGone)?;
            spans.push(Hop {
                link,
                blocks: done..end,
            });
            done = end;
        }
        if spans.is_empty() {
            return Err(JobFailure::WorkerGone);
        }
        let mut most = most_blocks.max(1);
        let hops = cut(&spans, most);
        let mut gradients = Gradients { work, hops };
        while gradients.hops.len() > spans.len() {
            if self.arena.could_hold(&gradients.sizes().repeat(2)) {
                break;
            }
            most = most.saturating_mul(2);
            gradients.hops = cut(&spans, most);
        }
        Ok(gradients)
    }
}

/// The same way in hops of at most `most` blocks, those of a worker of nearly the same length.
fn cut(spans: &[Hop], most: usize) -> Vec<Hop> {
    let parts = spans.iter().flat_map(|span| {
        let (start, end, count) = (span.blocks.start, span.blocks.end, span.blocks.len());
        let length = count.div_ceil(count.div_ceil(most)).max(1);
        (start..end).step_by(length).map(move |from| Hop {
            link: span.link.clone(),
            blocks: from..end.min(from + length),
        })
    });
    parts.collect()
}

impl Gradients {
    /// Slots to reserve: input, output gradient, body, deep prompts and their gradient if there are any, one more gradient,
    /// and the input of each hop but the first.
    pub fn sizes(&self) -> Vec<u64> {
        // As for a computation, with a gradient for the output.
        let mut sizes = self.work.sizes();
        if self.work.prompts.is_some() {
            sizes.push(self.prompt_gradient_bytes() * self.work.blocks.len() as u64);
        }
        sizes.resize(sizes.len() + self.hops.len(), self.work.hidden_bytes());
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
        let spare = if self.work.prompts.is_some() {
            PROMPT_GRADIENT + 1
        } else {
            BODY + 1
        };
        let mut inputs = vec![slot(INPUT)];
        inputs.extend((1..self.hops.len()).map(|hop| slot(spare + hop)));
        for (hop, ends) in self.hops.iter().zip(inputs.windows(2)) {
            if let &[input, output] = ends {
                let body = self.body(hop, JobKind::Forward, input, output, holds);
                run_one(workers, hop, &body, holds).await?;
            }
        }
        let (mut gradient, mut result) = (slot(OUTPUT_GRADIENT), slot(spare));
        for (hop, input) in self.hops.iter().zip(inputs).rev() {
            let mut body = self.body(hop, JobKind::Backward, input, result, holds);
            body.output_gradient = Some(gradient);
            body.prompt_gradient = self.work.prompts.map(|_| {
                piece(
                    slot(PROMPT_GRADIENT),
                    self.prompt_gradient_bytes(),
                    &hop.blocks,
                )
            });
            run_one(workers, hop, &body, holds).await?;
            (gradient, result) = (result, gradient);
        }
        Ok(GradientSlots {
            input: gradient,
            prompts: self.work.prompts.map(|_| slot(PROMPT_GRADIENT)),
        })
    }

    fn body(
        &self,
        hop: &Hop,
        kind: JobKind,
        input: SlotRef,
        output: SlotRef,
        holds: &Holds,
    ) -> JobBody {
        let mut body = body(&self.work, StepPlan::default(), input, output);
        body.kind = kind;
        let blocks: &[BlockIndex] = &self.work.blocks;
        body.blocks = blocks.get(hop.blocks.clone()).unwrap_or_default().to_vec();
        body.prompts = self.work.prompts_of(&hop.blocks, holds);
        body
    }

    /// Bytes of the gradient of the prompts of one block; it has all rows, also where all rows share the prompts.
    fn prompt_gradient_bytes(&self) -> u64 {
        let (_, tokens) = self.work.prompts.unwrap_or_default();
        let width = u64::from(self.work.hidden) * self.work.dtype.size_bytes() as u64;
        u64::from(self.work.batch) * u64::from(tokens) * width
    }
}

async fn run_one(
    workers: &Workers,
    hop: &Hop,
    body: &JobBody,
    holds: &Arc<Holds>,
) -> Result<(), JobFailure> {
    let job = Job {
        kind: body.kind,
        body: workers.write_body(body, holds.slots.slot(BODY))?,
        holds: holds.clone(),
    };
    let times = hop.link.run(job).await?;
    workers
        .tally()
        .count(body.kind, body.batch, times.compute_ns);
    Ok(())
}

/// The part of `all` that belongs to `blocks`, of `block_bytes` each.
pub(super) fn piece(all: SlotRef, block_bytes: u64, blocks: &Range<usize>) -> SlotRef {
    SlotRef {
        offset: all.offset + block_bytes * blocks.start as u64,
        len: block_bytes * blocks.len() as u64,
    }
}
