//! Tensors of jobs on the host: read from the arena and written to it, and the gradients of a job.

use kernels::DType;
use kernels::ops::convert;
use shared::job::SlotRef;
use shared::shm::arena::ArenaMap;
use shared::shm::segment::OutOfBounds;

use crate::job::Job;

/// The gradients of a job that are on the host.
#[derive(Debug, Default)]
pub struct HostGradients {
    /// Gradient of the hidden states that are at hand `[batch, tokens, hidden]`; in the end that of
    /// the input.
    pub gradient: Vec<f32>,
    /// Sums of the gradients of the keys of one block `[batch, tokens, kv_heads, head_dim]`.
    pub keys: Vec<f32>,
    /// Sums of the gradients of the values of one block, shaped alike.
    pub values: Vec<f32>,
}

impl HostGradients {
    /// The gradients of a job whose output has the gradient `gradient`; `kv_width` are the values
    /// of the keys of a token.
    pub(super) fn new(job: &Job, gradient: Vec<f32>, kv_width: usize) -> HostGradients {
        let len = job.token_count() * kv_width;
        HostGradients { gradient, keys: vec![0.0; len], values: vec![0.0; len] }
    }

    /// Begins with the next block.
    pub(super) fn clear_sums(&mut self) {
        self.keys.fill(0.0);
        self.values.fill(0.0);
    }

    /// Writes the gradient of the prompts of the block at `position` to the arena.
    pub(super) fn store_prompts(
        &self,
        arena: &ArenaMap,
        job: &Job,
        position: usize,
    ) -> Result<(), OutOfBounds> {
        for (values, slot) in job.prompt_gradient_parts(position) {
            let values = self.gradient.get(values).unwrap_or_default();
            write(arena, job.body.dtype, slot, values)?;
        }
        Ok(())
    }
}

/// The tensor in `slot`, stored in `dtype`.
pub(crate) fn read(arena: &ArenaMap, dtype: DType, slot: SlotRef) -> Result<Vec<f32>, OutOfBounds> {
    let mut bytes = vec![0u8; usize::try_from(slot.len).unwrap_or(usize::MAX)];
    arena.read(slot.offset, &mut bytes)?;
    Ok(convert::to_vec(dtype, &bytes))
}

/// Writes `values` to the start of `slot` in `dtype`.
pub(super) fn write(
    arena: &ArenaMap,
    dtype: DType,
    slot: SlotRef,
    values: &[f32],
) -> Result<(), OutOfBounds> {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    convert::from_f32(dtype, values, &mut bytes);
    arena.write(slot.offset, &bytes)
}
