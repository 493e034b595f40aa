//! Steps that are computed block by block, each operation launched on its own.

use std::ops::Range;

use blocks::{Workspace, add_prompts, forward};
use kernels::ops::OpError;

use super::{DeviceBackend, HiddenStates, NOT_THERE, StepRunner, StepUnit};

/// Runs steps block by block.
pub struct DirectSteps<B: DeviceBackend> {
    /// Hidden states of all jobs of a unit, one after the other.
    states: B::Buffer,
}

impl<B: DeviceBackend> DirectSteps<B> {
    /// Takes memory for units of several jobs with `values` values together.
    pub fn reserve(&mut self, backend: &mut B, values: usize) {
        backend.grow(&mut self.states, values);
    }
}

impl<B: DeviceBackend> StepRunner<B> for DirectSteps<B> {
    fn new(backend: &mut B) -> Self {
        DirectSteps { states: backend.buffer(0) }
    }

    fn run(
        &mut self,
        backend: &mut B,
        work: &mut Workspace<B>,
        cache: &mut B::Cache,
        unit: StepUnit<'_, '_, B>,
    ) -> Result<(), OpError> {
        let StepUnit { spec, dtype, weights, blocks, rows, prompts, .. } = unit;
        let mut hidden = unit.hidden;
        let through = |backend: &mut B, states: &mut B::Floats| -> Result<(), OpError> {
            for (local, prompts) in blocks.zip(&prompts) {
                let weights = weights.get(local).ok_or(NOT_THERE)?;
                let mut pages = backend.cached(cache, local, &rows)?;
                add_prompts(backend, prompts, states, dtype)?;
                forward(backend, spec, weights, work, &rows, states, &mut pages)?;
            }
            Ok(())
        };
        if let [(one, values)] = hidden.as_mut_slice() {
            return one.work_on(backend, values.clone(), through);
        }
        backend.grow(&mut self.states, unit.values);
        gather(backend, &hidden, &mut self.states)?;
        through(backend, &mut self.states)?;
        scatter(backend, &mut hidden, &self.states)
    }
}

/// Copies the values of each job to `states`, one job after the other.
pub(super) fn gather<B: DeviceBackend>(
    backend: &mut B,
    hidden: &[(&mut B::Hidden, Range<usize>)],
    states: &mut B::Floats,
) -> Result<(), OpError> {
    let mut start = 0;
    for (job, values) in hidden {
        let end = start + values.len();
        let to = B::part_mut(states, start..end).ok_or(NOT_THERE)?;
        job.gather(backend, values.clone(), to)?;
        start = end;
    }
    Ok(())
}

/// Copies them back.
pub(super) fn scatter<B: DeviceBackend>(
    backend: &mut B,
    hidden: &mut [(&mut B::Hidden, Range<usize>)],
    states: &B::Floats,
) -> Result<(), OpError> {
    let mut start = 0;
    for (job, values) in hidden {
        let end = start + values.len();
        let from = B::part(states, start..end).ok_or(NOT_THERE)?;
        job.scatter(backend, values.clone(), from)?;
        start = end;
    }
    Ok(())
}
