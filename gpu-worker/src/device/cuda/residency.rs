//! What of a job without cache is resident in device memory between its units: its pages, and for
//! gradients the inputs of its blocks, the gradients and their sums. Each kind of job (forward,
//! gradients) has one region, taken once, of a size that is a function of the model; one job of a
//! kind leases it at a time. The rest stays on the host: block by block, and all of a job for
//! gradients whose gradients do not fit.

use std::ops::Range;
use std::sync::{Arc, Weak};

use kernels::Backend;
use kernels::cuda::{Buffer, Cuda, Gpu, PooledMemory};
use kernels::ops::OpError;
use model::BlockSpec;
use model::sizing::{resident_bytes, resident_tokens};
use shared::job::WorkKind;

use super::NOT_THERE;
use crate::job::Job;

/// Where pages and inputs begin: a multiple of this.
const ALIGNMENT: usize = 256;

/// Memory for the jobs of a kind.
#[derive(Debug)]
pub(super) struct Region<G: Gpu> {
    /// Pages and inputs; `None` until the region is opened.
    pub(super) memory: Option<PooledMemory<G>>,
    /// Gradient of the hidden states that are at hand.
    pub(super) gradient: Buffer<G>,
    /// Sums of the gradients of the keys of one block, and of the values.
    pub(super) sums: [Buffer<G>; 2],
    /// Bytes of the memory.
    bytes: usize,
    /// Tokens for whose gradients there is memory.
    tokens: usize,
    lease: Weak<()>,
}

/// Which bytes of its region a job has. Gradients and sums begin where their buffers do.
#[derive(Debug)]
pub(super) struct Resident {
    /// While it lives, the region is this job's.
    _lease: Arc<()>,
    /// Pages of the blocks at their positions in the job; of one block for a job without
    /// gradients.
    pages: Vec<Option<Range<usize>>>,
    /// Inputs of the blocks, in the block dtype; empty for a job without gradients.
    inputs: Vec<Option<Range<usize>>>,
}

impl Resident {
    /// The pages of the block at `position`, if they are resident. A job without gradients has
    /// pages for one block at a time.
    pub(super) fn pages(&self, position: usize) -> Option<Range<usize>> {
        let index = if self.inputs.is_empty() { 0 } else { position };
        self.pages.get(index).cloned().flatten()
    }

    /// The input of the block at `position`, if it is resident.
    pub(super) fn input(&self, position: usize) -> Option<Range<usize>> {
        self.inputs.get(position).cloned().flatten()
    }

    /// Whether no pages are on the host.
    pub(super) fn has_all_pages(&self) -> bool {
        self.pages.iter().all(Option::is_some)
    }
}

impl<G: Gpu> Region<G> {
    /// A region of the size that is planned for jobs of this kind. It takes no memory yet.
    pub(super) fn new(cuda: &mut Cuda<G>, spec: &BlockSpec, kind: WorkKind) -> Region<G> {
        let tokens = match kind {
            WorkKind::Backward => resident_tokens(spec),
            WorkKind::Decode | WorkKind::Prefill | WorkKind::Forward => 0,
        };
        Region {
            memory: None,
            gradient: cuda.buffer(0),
            sums: [cuda.buffer(0), cuda.buffer(0)],
            bytes: resident_bytes(spec, kind),
            tokens,
            lease: Weak::new(),
        }
    }

    /// Takes its memory, once.
    pub(super) fn open(&mut self, cuda: &mut Cuda<G>, spec: &BlockSpec) -> Result<(), OpError> {
        if self.memory.is_some() || self.bytes == 0 {
            return Ok(());
        }
        self.memory = Some(cuda.reserve(self.bytes)?);
        cuda.grow(&mut self.gradient, self.tokens * spec.hidden);
        for sums in &mut self.sums {
            cuda.grow(sums, self.tokens * spec.kv_heads * spec.head_dim);
        }
        Ok(())
    }

    /// The memory of an open region.
    pub(super) fn memory_mut(&mut self) -> Result<&mut PooledMemory<G>, OpError> {
        self.memory.as_mut().ok_or(NOT_THERE)
    }

    /// Gives the region `bytes` bytes.
    #[cfg(all(test, feature = "emu"))]
    pub(super) fn limit(&mut self, bytes: usize) {
        self.bytes = bytes;
    }

    /// Leases the region to a job; `None` when nothing of the job is resident.
    pub(super) fn lease(
        &mut self,
        cuda: &mut Cuda<G>,
        spec: &BlockSpec,
        page_bytes: usize,
        job: &Job,
    ) -> Result<Option<Resident>, OpError> {
        let body = &job.body;
        let tokens = job.token_count();
        let (blocks, input_bytes) = match body.kind {
            WorkKind::Backward if tokens > self.tokens => return Ok(None),
            WorkKind::Backward => {
                (body.blocks.len(), tokens * body.hidden as usize * body.dtype.size_bytes())
            }
            WorkKind::Decode | WorkKind::Prefill | WorkKind::Forward => (1, 0),
        };
        if self.bytes == 0 || self.lease.strong_count() > 0 {
            return Ok(None);
        }
        let (mut next, end) = (0usize, self.bytes);
        let mut take = |bytes: usize| {
            let taken = next..next.checked_add(bytes).filter(|&taken| taken <= end)?;
            next = taken.end.checked_next_multiple_of(ALIGNMENT)?;
            Some(taken)
        };
        let (mut pages, mut inputs) = (Vec::new(), Vec::new());
        for _ in 0..blocks {
            pages.push(take(job.scratch_pages() * page_bytes));
            if input_bytes > 0 {
                inputs.push(take(input_bytes));
            }
        }
        let lease = Arc::new(());
        self.lease = Arc::downgrade(&lease);
        self.open(cuda, spec)?;
        Ok(Some(Resident { _lease: lease, pages, inputs }))
    }
}
