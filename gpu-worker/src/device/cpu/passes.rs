//! Jobs without cache on the processor: all memory of a job is the host's, units work on it in
//! place, and the forward pass saves activations for the gradient as far as their memory goes.

use blocks::{
    ActivationStore, GradientWork, SaveLevel, SavedActivations, Sums, Workspace, add_prompts,
    backward, forward_saving, keys, levels,
};
use kernels::ops::{OpError, convert};
use kernels::{Backend, Cpu, DType, KvPages, PageLayout};
use model::BlockSpec;
use shared::job::{JobBody, SlotRef};

use super::HostArena;
use crate::device::host::{read, write};
use crate::device::{HostGradients, NOT_THERE, PassRunner, PassUnit, TransferError};
use crate::job::Job;

/// Runs jobs without cache.
pub struct HostPasses {
    work: GradientWork<Cpu>,
    /// The input of the block at hand, for the tokens of a unit of a backward pass.
    input: Vec<f32>,
    /// Bytes that a job for gradients may keep.
    saved_bytes: u64,
}

/// What a job keeps between its units.
pub struct HostMemory {
    /// KV pages of one block, or of every block for gradients.
    pages: Vec<u8>,
    /// Input of each block before its prompts, in the block dtype; none without gradients.
    inputs: Vec<Vec<u8>>,
    gradients: HostGradients,
    /// Activations that the forward pass saves in each block; none without gradients.
    saved: Vec<ActivationStore<Cpu>>,
}

impl HostMemory {
    fn saved(&mut self, unit: &PassUnit<'_, '_, Cpu>) -> SavedActivations<'_, [f32]> {
        let store = self.saved.get_mut(unit.position);
        let tokens = unit.job.tokens(unit.pieces.clone());
        store.map_or_else(SavedActivations::default, |store| store.part(tokens))
    }
}

impl PassRunner<Cpu> for HostPasses {
    type Memory = HostMemory;

    fn new(cpu: &mut Cpu, _spec: &BlockSpec, saved_bytes: u64) -> HostPasses {
        HostPasses { work: GradientWork::new(cpu), input: Vec::new(), saved_bytes }
    }

    fn begin(
        &mut self,
        cpu: &mut Cpu,
        arena: &mut HostArena,
        spec: &BlockSpec,
        layout: PageLayout,
        job: &Job,
    ) -> Result<HostMemory, TransferError> {
        let body = &job.body;
        let pages = vec![0; job.scratch_bytes(layout.page_bytes())];
        let Some(slot) = body.output_gradient else {
            let (inputs, gradients, saved) = (vec![], HostGradients::default(), vec![]);
            return Ok(HostMemory { pages, inputs, gradients, saved });
        };
        let gradient = read(&arena.map, body.dtype, slot)?;
        let inputs = vec![vec![0; gradient.len() * body.dtype.size_bytes()]; body.blocks.len()];
        let bytes = pages.len() + inputs.iter().map(Vec::len).sum::<usize>() + prompt_bytes(body);
        let most = self.saved_bytes.saturating_sub(bytes as u64);
        let mut levels = levels(spec, body.blocks.len(), job.token_count(), most);
        agree(cpu, &mut levels)?;
        let store = |level| ActivationStore::new(cpu, spec, level, job.token_count());
        Ok(HostMemory {
            pages,
            inputs,
            gradients: HostGradients::new(job, gradient, spec.kv_heads * spec.head_dim),
            saved: levels.into_iter().map(store).collect(),
        })
    }

    fn forward(
        &mut self,
        cpu: &mut Cpu,
        work: &mut Workspace<Cpu>,
        unit: &PassUnit<'_, '_, Cpu>,
        hidden: &mut Vec<f32>,
        memory: &mut HostMemory,
    ) -> Result<(), OpError> {
        let (spec, weights) = (unit.spec, unit.weights);
        let hidden = hidden.get_mut(unit.values()).ok_or(NOT_THERE)?;
        if let Some(input) = memory.inputs.get_mut(unit.position) {
            let input = input.get_mut(unit.stored()).ok_or(NOT_THERE)?;
            convert::from_f32(unit.job.body.dtype, hidden, input);
        }
        let mut pages = std::mem::take(&mut memory.pages);
        let own = pages.get_mut(unit.pages()).ok_or(NOT_THERE)?;
        let mut own = KvPages::new(unit.layout, own);
        add_prompts(cpu, &unit.prompts, hidden, unit.job.body.dtype)?;
        let (rows, saved) = (&unit.rows, memory.saved(unit));
        match unit.job.needs_keys_only(unit.position) {
            true => keys(cpu, spec, weights, work, rows, hidden, &mut own, saved)?,
            false => forward_saving(cpu, spec, weights, work, rows, hidden, &mut own, saved)?,
        }
        memory.pages = pages;
        Ok(())
    }

    fn backward(
        &mut self,
        cpu: &mut Cpu,
        arena: &mut HostArena,
        unit: &PassUnit<'_, '_, Cpu>,
        memory: &mut HostMemory,
    ) -> Result<(), TransferError> {
        let job = unit.job;
        if unit.begins_backward() {
            memory.gradients.clear_sums();
        }
        let input = memory.inputs.get(unit.position).and_then(|all| all.get(unit.stored()));
        self.input.resize(unit.values().len(), 0.0);
        convert::to_f32(job.body.dtype, input.ok_or(NOT_THERE)?, &mut self.input);
        let mut pages = std::mem::take(&mut memory.pages);
        let mut gradients = std::mem::take(&mut memory.gradients);
        let own = pages.get_mut(unit.pages()).ok_or(NOT_THERE)?;
        let HostGradients { gradient, keys, values } = &mut gradients;
        backward(
            cpu,
            unit.spec,
            unit.weights,
            &mut self.work,
            &unit.rows,
            &unit.prompts,
            &self.input,
            gradient.get_mut(unit.values()).ok_or(NOT_THERE)?,
            Sums { keys, values, starts: &job.row_starts(unit.pieces.clone()) },
            memory.saved(unit),
            &mut KvPages::new(unit.layout, own),
        )?;
        if unit.ends_backward() {
            gradients.store_prompts(&arena.map, job, unit.position)?;
        }
        (memory.pages, memory.gradients) = (pages, gradients);
        Ok(())
    }

    fn store(
        &self,
        _cpu: &mut Cpu,
        arena: &mut HostArena,
        memory: &HostMemory,
        slot: SlotRef,
        dtype: DType,
    ) -> Result<(), TransferError> {
        Ok(write(&arena.map, dtype, slot, &memory.gradients.gradient)?)
    }
}

/// Has all ranks of a group save what rank 0 does: they exchange where they compute again.
fn agree(cpu: &mut Cpu, levels: &mut [SaveLevel]) -> Result<(), OpError> {
    let mut codes: Vec<f32> = levels.iter().map(|level| f32::from(*level as u8)).collect();
    cpu.broadcast(&mut codes, levels.len())?;
    let all = [SaveLevel::Nothing, SaveLevel::Queries, SaveLevel::Attention, SaveLevel::Middle];
    for (level, code) in levels.iter_mut().zip(codes) {
        // No other rank is believed: what names no level is the lowest.
        let is_named = |named: &&SaveLevel| f32::from(**named as u8) == code;
        *level = all.iter().find(is_named).copied().unwrap_or_default();
    }
    Ok(())
}

/// Bytes of the prompts of a job as f32.
fn prompt_bytes(body: &JobBody) -> usize {
    let stored = body.prompts.map_or(0, |prompts| prompts.slot.len);
    let values = usize::try_from(stored).unwrap_or(usize::MAX) / body.dtype.size_bytes();
    values.saturating_mul(size_of::<f32>())
}
