//! Jobs without cache on a CUDA device. What a job keeps between its units is resident in a region
//! of device memory as far as it fits ([`Resident`]); the rest is on the host, and each unit copies
//! its part to the device and back.

use blocks::{
    GradientWork, SavedActivations, Sums, Workspace, add_prompts, backward, forward, keys,
};
use kernels::cuda::{self, Buffer, Cuda, Floats, Gpu, PooledMemory};
use kernels::ops::{OpError, convert};
use kernels::{Backend, DType, PageLayout};
use model::BlockSpec;
use model::sizing::RESIDENT_VALUES;
use shared::job::{SlotRef, WorkKind};

use super::residency::{Region, Resident};
use super::states::is_aligned;
use super::{CudaArena, CudaStates, NOT_THERE};
use crate::device::host::{read, write};
use crate::device::{HiddenStates, HostGradients, PassRunner, PassUnit, TransferError};
use crate::job::Job;

/// Runs jobs without cache.
pub struct CudaPasses<G: Gpu> {
    work: GradientWork<Cuda<G>>,
    /// Of jobs of forward, and of jobs for gradients.
    regions: [Region<G>; 2],
    /// Input of the block of a unit of a backward pass.
    input: Buffer<G>,
    /// Sums of such a unit of a job that is on the host.
    sums: [Buffer<G>; 2],
}

/// What a job keeps between its units.
#[derive(Debug)]
pub struct CudaMemory {
    /// What of it is in a region.
    resident: Option<Resident>,
    /// KV pages on the host, unless all of them are resident: of one block, or of every block for
    /// gradients.
    pages: Vec<u8>,
    /// Input of each block before its prompts, in the block dtype, where it is not resident; none
    /// without gradients.
    inputs: Vec<Vec<u8>>,
    /// Gradients of a job that is not resident.
    gradients: HostGradients,
}

impl CudaMemory {
    /// Whether KV pages are on the host.
    #[cfg(all(test, feature = "emu"))]
    pub(crate) fn has_host_pages(&self) -> bool {
        !self.pages.is_empty()
    }

    /// Whether a part of the job is in a region.
    #[cfg(all(test, feature = "emu"))]
    pub(crate) fn is_resident(&self) -> bool {
        self.resident.is_some()
    }
}

impl<G: Gpu> CudaPasses<G> {
    /// Takes the memory of the largest units and of all regions.
    ///
    /// # Errors
    /// [`OpError`] when the device does not have it.
    pub fn reserve(
        &mut self,
        cuda: &mut Cuda<G>,
        spec: &BlockSpec,
        tokens: usize,
        largest_rank: usize,
    ) -> Result<(), OpError> {
        for region in &mut self.regions {
            region.open(cuda, spec)?;
        }
        self.work.grow(cuda, spec, tokens, largest_rank);
        cuda.grow(&mut self.input, tokens * spec.hidden);
        Ok(())
    }

    /// Gives regions `bytes` bytes.
    #[cfg(all(test, feature = "emu"))]
    pub(crate) fn limit_regions(&mut self, bytes: usize) {
        self.regions.iter_mut().for_each(|region| region.limit(bytes));
    }

    fn region(&mut self, kind: WorkKind) -> &mut Region<G> {
        let [forward, back] = &mut self.regions;
        match kind {
            WorkKind::Backward => back,
            WorkKind::Decode | WorkKind::Prefill | WorkKind::Forward => forward,
        }
    }

    /// Saves the input of a block for the backward pass of a job for gradients.
    fn save_input(
        &mut self,
        cuda: &mut Cuda<G>,
        unit: &PassUnit<'_, '_, Cuda<G>>,
        hidden: &CudaStates<G>,
        memory: &mut CudaMemory,
    ) -> Result<(), OpError> {
        let (values, dtype) = (unit.values(), unit.job.body.dtype);
        let resident = memory.resident.as_ref().and_then(|all| all.input(unit.position));
        if let (Some(input), CudaStates::Device(all)) = (resident, hidden) {
            let (len, from) = (values.len(), all.part(values).ok_or(NOT_THERE)?);
            let [_, region] = &mut self.regions;
            let at = input.start + unit.stored().start;
            return cuda.narrow_into(from, len, dtype, region.memory_mut()?, at);
        }
        let Some(input) = memory.inputs.get_mut(unit.position) else {
            return Ok(());
        };
        let input = input.get_mut(unit.stored()).ok_or(NOT_THERE)?;
        match hidden {
            CudaStates::Device(all) => {
                cuda.narrow(all.part(values).ok_or(NOT_THERE)?, dtype, input)
            }
            CudaStates::Host(all) => {
                convert::from_f32(dtype, all.get(values).ok_or(NOT_THERE)?, input);
                Ok(())
            }
        }
    }

    /// Copies the input of a block to the device.
    fn load_input(
        &mut self,
        cuda: &mut Cuda<G>,
        unit: &PassUnit<'_, '_, Cuda<G>>,
        memory: &CudaMemory,
    ) -> Result<(), OpError> {
        let (len, dtype) = (unit.values().len(), unit.job.body.dtype);
        cuda.grow(&mut self.input, len);
        let [_, region] = &mut self.regions;
        if let Some(input) = memory.resident.as_ref().and_then(|all| all.input(unit.position)) {
            let at = input.start + unit.stored().start;
            return cuda.widen_out_of(region.memory_mut()?, at, len, dtype, &mut self.input);
        }
        let input = memory.inputs.get(unit.position).and_then(|all| all.get(unit.stored()));
        cuda.widen(input.ok_or(NOT_THERE)?, dtype, &mut self.input)
    }

    /// A unit of a backward pass whose gradients are resident.
    fn backward_resident(
        &mut self,
        cuda: &mut Cuda<G>,
        unit: &PassUnit<'_, '_, Cuda<G>>,
        resident: &Resident,
        host: &mut [u8],
    ) -> Result<(), OpError> {
        let values = unit.values();
        let [_, region] = &mut self.regions;
        let Region { memory, gradient, sums, .. } = region;
        if unit.begins_backward() {
            sums.iter_mut().try_for_each(|sums| cuda.zero(sums))?;
        }
        let starts = unit.job.row_starts(unit.pieces.clone());
        let own = gradient.part_mut(values.clone()).ok_or(NOT_THERE)?;
        let pages = BlockPages { resident: resident.pages(unit.position), memory, host };
        let (work, input) = (&mut self.work, &self.input);
        let [of_keys, of_values] = sums;
        let sums: Sums<'_, Cuda<G>> = Sums { keys: of_keys, values: of_values, starts: &starts };
        if is_aligned(values.start) {
            return pages.back(cuda, unit, work, input, own, sums);
        }
        let mut staging = cuda.buffer(values.len());
        cuda.copy(own, &mut staging, values.len())?;
        pages.back(cuda, unit, work, input, &mut staging, sums)?;
        cuda.copy(&staging, own, values.len())
    }

    /// A unit of a backward pass whose gradients are on the host. Only the positions that it
    /// touches are copied.
    fn backward_on_host(
        &mut self,
        cuda: &mut Cuda<G>,
        unit: &PassUnit<'_, '_, Cuda<G>>,
        host: &mut [u8],
        gradients: &mut HostGradients,
    ) -> Result<(), OpError> {
        if unit.begins_backward() {
            gradients.clear_sums();
        }
        let (values, job) = (unit.values(), unit.job);
        let width = unit.spec.kv_heads * unit.spec.head_dim;
        let touched = job.touched(unit.pieces.clone());
        let part = touched.start * width..touched.end * width;
        let mut starts = job.row_starts(unit.pieces.clone());
        starts.iter_mut().for_each(|start| *start -= touched.start);
        let HostGradients { gradient, keys, values: key_values } = gradients;
        let gradient = gradient.get_mut(values).ok_or(NOT_THERE)?;
        let mut own = cuda.buffer(gradient.len());
        cuda.upload(gradient, &mut own)?;
        for (host, sums) in [&*keys, &*key_values].into_iter().zip(&mut self.sums) {
            let host = host.get(part.clone()).ok_or(NOT_THERE)?;
            cuda.grow(sums, host.len());
            cuda.upload(host, sums)?;
        }
        let pages = BlockPages { resident: None, memory: &mut None, host };
        let (work, input) = (&mut self.work, &self.input);
        let [of_keys, of_values] = &mut self.sums;
        let sums: Sums<'_, Cuda<G>> = Sums { keys: of_keys, values: of_values, starts: &starts };
        pages.back(cuda, unit, work, input, &mut own, sums)?;
        cuda.download(&own, gradient)?;
        for (host, sums) in [keys, key_values].into_iter().zip(&self.sums) {
            cuda.download(sums, host.get_mut(part.clone()).ok_or(NOT_THERE)?)?;
        }
        Ok(())
    }
}

/// The KV pages of a block of a job: resident in a region, or on the host.
struct BlockPages<'a, G: Gpu> {
    resident: Option<std::ops::Range<usize>>,
    memory: &'a mut Option<PooledMemory<G>>,
    host: &'a mut [u8],
}

impl<G: Gpu> BlockPages<'_, G> {
    /// Has `work` read and write the pages on the device.
    fn work_on(
        self,
        cuda: &mut Cuda<G>,
        layout: PageLayout,
        work: impl FnOnce(&mut Cuda<G>, &mut cuda::Pages<'_>) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        if let Some(bytes) = self.resident {
            let memory = self.memory.as_mut().filter(|memory| bytes.end <= memory.bytes());
            let memory = memory.ok_or(NOT_THERE)?;
            return work(cuda, &mut cuda::Pages::new(layout, memory, bytes.start, bytes.len()));
        }
        let mut staging = cuda.scratch(self.host.len())?;
        cuda.upload_bytes(self.host, &mut staging, 0)?;
        work(cuda, &mut cuda::Pages::new(layout, &mut staging, 0, self.host.len()))?;
        cuda.download_bytes(&staging, 0, self.host)
    }

    /// The backward pass of a unit.
    fn back(
        self,
        cuda: &mut Cuda<G>,
        unit: &PassUnit<'_, '_, Cuda<G>>,
        work: &mut GradientWork<Cuda<G>>,
        x: &Floats,
        gradient: &mut Floats,
        sums: Sums<'_, Cuda<G>>,
    ) -> Result<(), OpError> {
        let PassUnit { spec, weights, rows, prompts, .. } = unit;
        self.work_on(cuda, unit.layout, |cuda, pages| {
            let saved = SavedActivations::default();
            backward(cuda, spec, weights, work, rows, prompts, x, gradient, sums, saved, pages)
        })
    }
}

impl<G: Gpu> PassRunner<Cuda<G>> for CudaPasses<G> {
    type Memory = CudaMemory;

    fn new(cuda: &mut Cuda<G>, spec: &BlockSpec, _saved_bytes: u64) -> CudaPasses<G> {
        // Activations are recomputed: saving them would take memory that is not planned for.
        CudaPasses {
            work: GradientWork::new(cuda),
            regions: [WorkKind::Forward, WorkKind::Backward]
                .map(|kind| Region::new(cuda, spec, kind)),
            input: cuda.buffer(0),
            sums: [cuda.buffer(0), cuda.buffer(0)],
        }
    }

    fn begin(
        &mut self,
        cuda: &mut Cuda<G>,
        arena: &mut CudaArena<G>,
        spec: &BlockSpec,
        layout: PageLayout,
        job: &Job,
    ) -> Result<CudaMemory, TransferError> {
        let body = &job.body;
        let page_bytes = layout.page_bytes();
        let region = self.region(body.kind);
        let resident = match job.token_count() * body.hidden as usize <= RESIDENT_VALUES {
            true => region.lease(cuda, spec, page_bytes, job)?,
            false => None,
        };
        let pages = match &resident {
            Some(resident) if resident.has_all_pages() => Vec::new(),
            _ => vec![0; job.scratch_bytes(page_bytes)],
        };
        let Some(slot) = body.output_gradient else {
            let (inputs, gradients) = (Vec::new(), HostGradients::default());
            return Ok(CudaMemory { resident, pages, inputs, gradients });
        };
        let values = job.token_count() * body.hidden as usize;
        let gradients = match &resident {
            Some(_) => {
                let to = &mut region.gradient;
                cuda.load(&arena.mapped, slot.offset, values, body.dtype, to)?;
                HostGradients::default()
            }
            None => {
                let gradient = read(&arena.map, body.dtype, slot)?;
                HostGradients::new(job, gradient, spec.kv_heads * spec.head_dim)
            }
        };
        let input = |position| match resident.as_ref().and_then(|all| all.input(position)) {
            Some(_) => Vec::new(),
            None => vec![0; values * body.dtype.size_bytes()],
        };
        let inputs = (0..body.blocks.len()).map(input).collect();
        Ok(CudaMemory { resident, pages, inputs, gradients })
    }

    fn forward(
        &mut self,
        cuda: &mut Cuda<G>,
        work: &mut Workspace<Cuda<G>>,
        unit: &PassUnit<'_, '_, Cuda<G>>,
        hidden: &mut CudaStates<G>,
        memory: &mut CudaMemory,
    ) -> Result<(), OpError> {
        self.save_input(cuda, unit, hidden, memory)?;
        let (job, position) = (unit.job, unit.position);
        let resident = memory.resident.as_ref().and_then(|all| all.pages(position));
        let host = match resident {
            Some(_) => &mut [][..],
            None => memory.pages.get_mut(unit.pages()).ok_or(NOT_THERE)?,
        };
        let region = self.region(job.body.kind);
        let pages = BlockPages { resident, memory: &mut region.memory, host };
        let PassUnit { spec, weights, rows, prompts, .. } = unit;
        hidden.work_on(cuda, unit.values(), |cuda, states| {
            add_prompts(cuda, prompts, states, job.body.dtype)?;
            pages.work_on(cuda, unit.layout, |cuda, pages| {
                let saved = SavedActivations::default();
                match job.needs_keys_only(position) {
                    true => keys(cuda, spec, weights, work, rows, states, pages, saved),
                    false => forward(cuda, spec, weights, work, rows, states, pages),
                }
            })
        })
    }

    fn backward(
        &mut self,
        cuda: &mut Cuda<G>,
        arena: &mut CudaArena<G>,
        unit: &PassUnit<'_, '_, Cuda<G>>,
        memory: &mut CudaMemory,
    ) -> Result<(), TransferError> {
        self.load_input(cuda, unit, memory)?;
        let CudaMemory { resident, pages, gradients, .. } = memory;
        let in_region = resident.as_ref().and_then(|all| all.pages(unit.position));
        let host = match in_region {
            Some(_) => &mut [][..],
            None => pages.get_mut(unit.pages()).ok_or(NOT_THERE)?,
        };
        match resident {
            Some(resident) => self.backward_resident(cuda, unit, resident, host)?,
            None => self.backward_on_host(cuda, unit, host, gradients)?,
        }
        if !unit.ends_backward() {
            return Ok(());
        }
        if resident.is_none() {
            return Ok(gradients.store_prompts(&arena.map, unit.job, unit.position)?);
        }
        let [_, region] = &self.regions;
        for (values, slot) in unit.job.prompt_gradient_parts(unit.position) {
            let (len, dtype) = (values.len(), unit.job.body.dtype);
            let from = region.gradient.part(values).ok_or(NOT_THERE)?;
            cuda.store(from, len, dtype, &arena.mapped, slot.offset)?;
        }
        Ok(())
    }

    fn store(
        &self,
        cuda: &mut Cuda<G>,
        arena: &mut CudaArena<G>,
        memory: &CudaMemory,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<(), TransferError> {
        if memory.resident.is_none() {
            return Ok(write(&arena.map, dtype, slot, &memory.gradients.gradient)?);
        }
        let [_, region] = &self.regions;
        let values = usize::try_from(slot.len).unwrap_or(usize::MAX) / dtype.size_bytes();
        Ok(cuda.store(&region.gradient, values, dtype, &arena.mapped, slot.offset)?)
    }
}
