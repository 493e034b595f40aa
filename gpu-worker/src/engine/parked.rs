//! What a job without cache keeps in memory of the device between its units: its pages, and for gradients the inputs of its blocks, the
//! gradients and their sums. A class of jobs (forward, gradients) has one region, taken once, of a size that is a function of the model:
//! one job of a class is begun at a time. What does not fit stays on the host, as on a device without a region: block by block, and
//! all of a job for gradients whose gradients do not fit.

use std::ops::Range;
use std::sync::{Arc, Weak};

use shared::job::JobKind;

use super::{Engine, EngineError};
use crate::block::BlockSpec;
use crate::device::Paged;
use crate::running::Running;
use crate::sizing::{parked_bytes, parked_tokens};

/// Where parts of a room begin: a multiple of this.
const ALIGNMENT: usize = 256;

/// Memory for the jobs of a class.
pub(super) struct Region<B: Paged> {
    /// Pages and inputs.
    pub room: B::Room,
    /// Gradient of the hidden states that are at hand.
    pub gradient: B::Buffer,
    /// Sums of the gradients of the keys of one block, and of the values.
    pub sums: [B::Buffer; 2],
    /// Bytes of the room, and tokens whose gradients there is room for.
    bytes: usize,
    tokens: usize,
    is_there: bool,
    job: Weak<()>,
}

/// Where in its region a job keeps what. Gradients and sums begin where their buffers do.
#[derive(Debug)]
pub struct Parked {
    /// While it lives, the region is this job's.
    _lease: Arc<()>,
    /// Pages of the blocks at their positions in the job; of one block for a job without gradients.
    pages: Vec<Option<Range<usize>>>,
    /// Inputs of the blocks, in the block dtype; empty for a job without gradients.
    inputs: Vec<Option<Range<usize>>>,
}

impl Parked {
    /// The pages of the block at `position`, if they are here.
    pub fn pages(&self, position: usize) -> Option<Range<usize>> {
        self.pages.get(position).cloned().flatten()
    }

    /// The input of the block at `position`, if it is here.
    pub fn input(&self, position: usize) -> Option<Range<usize>> {
        self.inputs.get(position).cloned().flatten()
    }

    /// Whether no pages are on the host.
    pub fn has_all_pages(&self) -> bool {
        self.pages.iter().all(Option::is_some)
    }
}

impl<B: Paged> Region<B> {
    fn new(backend: &mut B, spec: &BlockSpec, kind: JobKind) -> Region<B> {
        let (bytes, tokens) = match (backend.parks(), kind) {
            (false, _) => (0, 0),
            (true, JobKind::Backward) => (parked_bytes(spec, kind), parked_tokens(spec)),
            (true, _) => (parked_bytes(spec, kind), 0),
        };
        let mut empty = || backend.buffer(0);
        Region {
            room: B::Room::default(),
            gradient: empty(),
            sums: [empty(), empty()],
            bytes,
            tokens,
            is_there: false,
            job: Weak::new(),
        }
    }

    /// Takes its memory, once.
    fn open(&mut self, backend: &mut B, spec: &BlockSpec) -> Result<(), EngineError> {
        if self.is_there || self.bytes == 0 {
            return Ok(());
        }
        self.room = backend.reserve_room(self.bytes)?;
        backend.grow(&mut self.gradient, self.tokens * spec.hidden);
        for sums in &mut self.sums {
            backend.grow(sums, self.tokens * spec.kv_heads * spec.head_dim);
        }
        self.is_there = true;
        Ok(())
    }
}

impl<B: Paged> Engine<'_, B> {
    /// Regions for a device that parks, of the sizes that are planned for: of forward and of gradients.
    pub(super) fn regions(backend: &mut B, spec: &BlockSpec) -> [Region<B>; 2] {
        [JobKind::Forward, JobKind::Backward].map(|kind| Region::new(backend, spec, kind))
    }

    /// Takes the memory of all regions.
    pub(super) fn open_regions(&mut self) -> Result<(), EngineError> {
        for region in &mut self.regions {
            region.open(&mut self.backend, self.spec)?;
        }
        Ok(())
    }

    /// Regions with rooms of `bytes` bytes.
    #[cfg(all(test, feature = "emu"))]
    pub(super) fn park_at_most(&mut self, bytes: usize) {
        for region in &mut self.regions {
            region.bytes = bytes;
        }
    }

    /// Places of a job in its region; `None` when nothing of it is parked.
    pub(super) fn park_job(&mut self, job: &Running<B>) -> Result<Option<Parked>, EngineError> {
        let (page_bytes, size) = (self.page_bytes(), self.shape.dtype.size_bytes());
        let body = &job.body;
        let Some(region) = of_kind(&mut self.regions, body.kind) else {
            return Ok(None);
        };
        let tokens = body.batch as usize * body.tokens as usize;
        let (blocks, input_bytes) = match body.kind {
            JobKind::Backward if tokens > region.tokens => return Ok(None),
            JobKind::Backward => (body.blocks.len(), tokens * body.hidden as usize * size),
            JobKind::Step | JobKind::Forward => (1, 0),
        };
        if region.bytes == 0 || region.job.strong_count() > 0 {
            return Ok(None);
        }
        let (mut next, end) = (0usize, region.bytes);
        let mut part = |bytes: usize| {
            let part = next..next.checked_add(bytes).filter(|&part| part <= end)?;
            next = part.end.checked_next_multiple_of(ALIGNMENT)?;
            Some(part)
        };
        let (mut pages, mut inputs) = (Vec::new(), Vec::new());
        for _ in 0..blocks {
            pages.push(part(job.scratch_pages() * page_bytes));
            if input_bytes > 0 {
                inputs.push(part(input_bytes));
            }
        }
        let lease = Arc::new(());
        region.job = Arc::downgrade(&lease);
        region.open(&mut self.backend, self.spec)?;
        Ok(Some(Parked {
            _lease: lease,
            pages,
            inputs,
        }))
    }
}

/// Region of the jobs of a kind; `None` for those that need none.
pub(super) fn of_kind<B: Paged>(
    regions: &mut [Region<B>; 2],
    kind: JobKind,
) -> Option<&mut Region<B>> {
    let [forward, back] = regions;
    match kind {
        JobKind::Step => None,
        JobKind::Forward => Some(forward),
        JobKind::Backward => Some(back),
    }
}
