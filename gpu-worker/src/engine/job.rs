//! A job from its acceptance to its answer, and the way of its tensors: read from the arena when
//! the job begins, written to it when the job is done.

use std::time::Instant;

use kernels::ops::OpError;
use shared::job::WorkKind;

use super::Engine;
use crate::device::{DeviceBackend, HiddenStates, PassRunner, TransferError, read};
use crate::job::Job;

/// No link was opened: [`Engine::link`].
const NO_LINK: OpError = OpError::Shape { op: "job", what: "no arena is open" };

/// What a job needs while it runs.
pub struct Begun<B: DeviceBackend> {
    /// Since when.
    pub at: Instant,
    /// From submission to then, in nanoseconds.
    pub queue_ns: u64,
    /// Hidden states `[batch, tokens, hidden]`.
    pub hidden: B::Hidden,
    /// Deep prompts `[blocks, batch or 1, prompt tokens, hidden]`; empty without.
    pub prompts: Vec<f32>,
    /// What a job without cache keeps between its units; `None` for a step.
    pub memory: Option<PassMemory<B>>,
}

impl<B: DeviceBackend> std::fmt::Debug for Begun<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Begun").field("queue_ns", &self.queue_ns).finish_non_exhaustive()
    }
}

/// What a job without cache keeps between its units.
pub type PassMemory<B> = <<B as DeviceBackend>::Passes as PassRunner<B>>::Memory;

impl<B: DeviceBackend> Engine<'_, B> {
    /// Reads the input and the prompts of a job out of the arena, and takes its memory.
    ///
    /// # Errors
    /// [`TransferError::Outside`] when a slot lies outside it, which the check of the body
    /// excludes, or the device's.
    pub fn begin(&mut self, job: &Job, now_ns: u64) -> Result<Begun<B>, TransferError> {
        let (map, arena) = self.link.as_mut().ok_or(NO_LINK)?;
        let (body, backend) = (&job.body, &mut self.backend);
        let memory = match body.kind {
            WorkKind::Decode | WorkKind::Prefill => None,
            WorkKind::Forward | WorkKind::Backward => {
                let layout = self.kv_shape.layout;
                Some(self.passes.begin(backend, arena, self.spec, layout, job)?)
            }
        };
        let hidden = B::Hidden::load(backend, arena, body.input, body.dtype)?;
        let prompts = match body.prompts {
            Some(prompts) => read(map, body.dtype, prompts.slot)?,
            None => Vec::new(),
        };
        let queue_ns = now_ns.saturating_sub(job.submitted_ns);
        Ok(Begun { at: Instant::now(), queue_ns, hidden, prompts, memory })
    }

    /// Writes the results of a job into its output slot. They are there after the next
    /// [`synchronize`](Self::synchronize).
    ///
    /// # Errors
    /// [`TransferError::Outside`] when a slot lies outside the arena, which the check of the body
    /// excludes, or the device's.
    pub fn output(&mut self, job: &Job, begun: &Begun<B>) -> Result<(), TransferError> {
        let (_, arena) = self.link.as_mut().ok_or(NO_LINK)?;
        let (body, backend) = (&job.body, &mut self.backend);
        match (&begun.memory, body.kind) {
            (Some(memory), WorkKind::Backward) => {
                self.passes.store(backend, arena, memory, body.output, body.dtype)
            }
            _ => begun.hidden.store(backend, arena, body.output, body.dtype),
        }
    }
}
