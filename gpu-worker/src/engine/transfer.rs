//! Tensors of jobs between the arena and the device: read when a job begins, written when it is done.

use std::sync::Arc;
use std::time::Instant;

use kernels::ops::convert;
use shared::job::{JobBody, JobKind, SlotRef};
use shared::shm::arena::ArenaMap;
use shared::shm::segment::OutOfBounds;

use super::{Engine, EngineError};
use crate::device::{Paged, TransferError};
use crate::running::{Begun, Running, States};

impl<B: Paged> Engine<'_, B> {
    /// Serves jobs whose tensors lie in `arena`, and no others.
    pub fn link(&mut self, arena: &Arc<ArenaMap>) {
        // The old one first: both at once would be pinned.
        self.link = None;
        let reach = self.backend.reach(arena);
        self.link = Some((Arc::clone(arena), reach));
    }

    /// Reads the input and the prompts of a job out of the arena.
    ///
    /// # Errors
    /// [`TransferError::Outside`] when a slot lies outside it, which the check of the body excludes, or the device's.
    pub fn begin(&mut self, job: &mut Running<B>, now_ns: u64) -> Result<(), TransferError> {
        let (dtype, input) = (job.body.dtype, job.body.input);
        let values = usize::try_from(input.len).unwrap_or(usize::MAX) / dtype.size_bytes();
        let is_kept = self.backend.keeps(values);
        let parked = match is_kept {
            true => self.park_job(job)?,
            false => None,
        };
        let (arena, reach) = self.link.as_mut().ok_or(EngineError::Unit(u32::MAX))?;
        let read = |slot: SlotRef| read(arena, &job.body, slot);
        let hidden = match is_kept {
            true => {
                let mut buffer = self.backend.buffer(values);
                self.backend.load(arena, reach, input, dtype, &mut buffer)?;
                States::Device(buffer)
            }
            false => States::Host(read(input)?),
        };
        let prompts = match job.body.prompts {
            Some(prompts) => read(prompts.slot)?,
            None => Vec::new(),
        };
        let back = match job.body.output_gradient {
            Some(slot) => {
                let kv_width = self.spec.kv_heads * self.spec.head_dim;
                let gradient = match &parked {
                    Some(_) => {
                        let [_, region] = &mut self.regions;
                        let to = &mut region.gradient;
                        self.backend.load(arena, reach, slot, dtype, to)?;
                        Vec::new()
                    }
                    None => read(slot)?,
                };
                Some(job.back_of(gradient, kv_width, parked.as_ref()))
            }
            None => None,
        };
        let last = match job.body.kind {
            JobKind::Backward => job.body.blocks.len().saturating_sub(1),
            JobKind::Step | JobKind::Forward => 0,
        };
        let scratch = match &parked {
            Some(parked) if parked.has_all_pages() => Vec::new(),
            _ => vec![0; job.scratch_range(last, self.page_bytes()).end],
        };
        let kept = match &back {
            Some(back) => {
                let inputs: usize = back.inputs.iter().map(Vec::len).sum();
                let floats = prompts.len() + back.prompts.len();
                let bytes = scratch.len() + inputs + size_of::<f32>() * floats;
                self.stores(&job.body, bytes as u64)
            }
            None => Vec::new(),
        };
        job.begun = Some(Begun {
            at: Instant::now(),
            queue_ns: now_ns.saturating_sub(job.submitted_ns),
            hidden,
            prompts,
            scratch,
            back,
            parked,
            kept,
        });
        Ok(())
    }

    /// Writes the results of a job into its output slots. They are there after the next [`settle`](Self::settle).
    ///
    /// # Errors
    /// [`TransferError::Outside`] when a slot lies outside the arena, which the check of the body excludes, or the device's.
    pub fn output(&mut self, body: &JobBody, begun: &Begun<B>) -> Result<(), TransferError> {
        let (arena, reach) = self.link.as_mut().ok_or(EngineError::Unit(u32::MAX))?;
        match (&begun.back, &begun.hidden) {
            (Some(_), _) if begun.parked.is_some() => {
                // The gradients of prompts are there already, block by block.
                let [_, region] = &self.regions;
                let (values, slot) = (&region.gradient, body.output);
                self.backend.store(values, body.dtype, arena, reach, slot)
            }
            (Some(back), _) => {
                write(arena, body, body.output, &back.gradient)?;
                match body.prompt_gradient {
                    Some(slot) => write(arena, body, slot, &back.prompts),
                    None => Ok(()),
                }
            }
            (None, States::Device(values)) => {
                let slot = body.output;
                self.backend.store(values, body.dtype, arena, reach, slot)
            }
            (None, States::Host(values)) => write(arena, body, body.output, values),
        }
    }

    /// Returns when the device has done all that it was given.
    ///
    /// # Errors
    /// The device's.
    pub fn settle(&mut self) -> Result<(), EngineError> {
        self.backend.settle()
    }
}

fn read(arena: &ArenaMap, body: &JobBody, slot: SlotRef) -> Result<Vec<f32>, OutOfBounds> {
    let mut bytes = vec![0u8; usize::try_from(slot.len).unwrap_or(usize::MAX)];
    arena.read(slot.offset, &mut bytes)?;
    Ok(convert::to_vec(body.dtype, &bytes))
}

fn write(
    arena: &ArenaMap,
    body: &JobBody,
    slot: SlotRef,
    values: &[f32],
) -> Result<(), TransferError> {
    let mut bytes = vec![0; values.len() * body.dtype.size_bytes()];
    convert::from_f32(body.dtype, values, &mut bytes);
    Ok(arena.write(slot.offset, &bytes)?)
}
