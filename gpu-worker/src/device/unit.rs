//! What a runner is given of a unit: its blocks, and the rows of its jobs.

use std::ops::Range;

use blocks::{BlockWeights, PromptPart};
use kernels::{DType, PageLayout, StepRow};
use model::BlockSpec;

use super::DeviceBackend;
use crate::job::Job;

/// Steps of one or several jobs through consecutive blocks.
pub struct StepUnit<'a, 'w, B: DeviceBackend> {
    /// The spec of all blocks.
    pub spec: &'a BlockSpec,
    /// Block dtype.
    pub dtype: DType,
    /// The blocks of the span.
    pub weights: &'a [BlockWeights<'w, B>],
    /// Those that the unit goes through, by their index in the span.
    pub blocks: Range<usize>,
    /// Rows of all jobs, one job after the other.
    pub rows: Vec<StepRow<'a>>,
    /// Deep prompts of each block of the unit.
    pub prompts: Vec<Vec<PromptPart<'a>>>,
    /// Hidden states of each job, and the values that the unit works on.
    pub hidden: Vec<(&'a mut B::Hidden, Range<usize>)>,
    /// Values of all jobs together.
    pub values: usize,
}

impl<'a, 'w, B: DeviceBackend> StepUnit<'a, 'w, B> {
    /// A unit of no jobs yet.
    pub fn new(
        spec: &'a BlockSpec,
        dtype: DType,
        weights: &'a [BlockWeights<'w, B>],
        blocks: Range<usize>,
    ) -> Self {
        let prompts = blocks.clone().map(|_| Vec::new()).collect();
        let (rows, hidden) = (vec![], vec![]);
        StepUnit { spec, dtype, weights, blocks, rows, prompts, hidden, values: 0 }
    }

    /// Adds `pieces` of a job whose first block of the unit is at `position`; `all_prompts` are the
    /// prompts of the job. `None`: the job has no such pieces or prompts.
    pub fn push(
        &mut self,
        job: &'a Job,
        position: usize,
        pieces: Range<usize>,
        all_prompts: &'a [f32],
        hidden: &'a mut B::Hidden,
    ) -> Option<()> {
        let values = job.values(pieces.clone());
        for (offset, prompts) in self.prompts.iter_mut().enumerate() {
            let at = position + offset;
            prompts.extend(prompt_parts(job, at, pieces.clone(), all_prompts, self.values)?);
        }
        self.values += values.len();
        self.rows.extend(job.rows(pieces));
        self.hidden.push((hidden, values));
        Some(())
    }
}

/// Some tokens of a job without cache, through one block.
pub struct PassUnit<'a, 'w, B: DeviceBackend> {
    /// The spec of the block.
    pub spec: &'a BlockSpec,
    pub weights: &'a BlockWeights<'w, B>,
    /// Shape of a KV page.
    pub layout: PageLayout,
    pub job: &'a Job,
    /// Position of the block in the body of the job.
    pub position: usize,
    /// The pieces of the job.
    pub pieces: Range<usize>,
    pub rows: Vec<StepRow<'a>>,
    /// The deep prompts of the block.
    pub prompts: Vec<PromptPart<'a>>,
}

impl<'a, 'w, B: DeviceBackend> PassUnit<'a, 'w, B> {
    /// `pieces` of a job, through its block at `position`; `all_prompts` are the prompts of the job.
    /// `None`: the job has no such prompts.
    pub fn new(
        spec: &'a BlockSpec,
        weights: &'a BlockWeights<'w, B>,
        layout: PageLayout,
        job: &'a Job,
        position: usize,
        pieces: Range<usize>,
        all_prompts: &'a [f32],
    ) -> Option<Self> {
        Some(PassUnit {
            spec,
            weights,
            layout,
            job,
            position,
            prompts: prompt_parts(job, position, pieces.clone(), all_prompts, 0)?,
            rows: job.rows(pieces.clone()),
            pieces,
        })
    }

    /// The values of the hidden states of the unit.
    pub(super) fn values(&self) -> Range<usize> {
        self.job.values(self.pieces.clone())
    }

    /// Bytes of those values, stored in the dtype of the job, within those of all.
    pub(super) fn stored(&self) -> Range<usize> {
        let (values, size) = (self.values(), self.job.body.dtype.size_bytes());
        values.start * size..values.end * size
    }

    /// Whether the backward pass of the block begins with this unit.
    pub(super) fn begins_backward(&self) -> bool {
        self.pieces.end == self.job.piece_count()
    }

    /// Whether the backward pass of the block ends with this unit.
    pub(super) fn ends_backward(&self) -> bool {
        self.pieces.start == 0
    }

    /// Bytes of the pages of the block within those of the job.
    pub(super) fn pages(&self) -> Range<usize> {
        self.job.scratch_range(self.position, self.layout.page_bytes())
    }
}

/// Deep prompts that fall on `pieces` of a job before its block at `position`, where the values of
/// the pieces begin at `start`. `None`: the job has no such prompts.
fn prompt_parts<'a>(
    job: &Job,
    position: usize,
    pieces: Range<usize>,
    all: &'a [f32],
    start: usize,
) -> Option<Vec<PromptPart<'a>>> {
    let values = job.values(pieces.clone());
    let parts = job.prompt_parts(position, pieces).into_iter();
    parts
        .map(|(to, from)| {
            Some(PromptPart { offset: start + to.start - values.start, values: all.get(from)? })
        })
        .collect()
}
