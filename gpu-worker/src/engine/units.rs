//! Units: some rows through one block, or decode steps through several. The rows of a unit go
//! through its blocks together, each row as if alone.

use std::collections::HashMap;

use shared::block::BlockIndex;
use shared::job::WorkKind;

use super::{Begun, Engine, EngineError};
use crate::device::{DeviceBackend, PassRunner, PassUnit, StepRunner, StepUnit, TransferError};
use crate::job::Job;
use crate::schedule::{JobKey, Unit, UnitMember};

impl<B: DeviceBackend> Engine<'_, B> {
    /// Runs one unit. A device is done after the next [`synchronize`](Self::synchronize).
    ///
    /// # Errors
    /// [`EngineError`] when the unit does not fit its jobs.
    pub fn unit(
        &mut self,
        unit: &Unit,
        jobs: &HashMap<JobKey, Job>,
        begun: &mut HashMap<JobKey, Begun<B>>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(unit.block);
        let member = unit.members.first().ok_or_else(missing)?;
        let job = jobs.get(&member.job).ok_or_else(missing)?;
        match job.body.kind {
            WorkKind::Decode | WorkKind::Prefill => self.step_unit(unit, jobs, begun),
            WorkKind::Forward | WorkKind::Backward => {
                let begun = begun.get_mut(&member.job).ok_or_else(missing)?;
                self.pass_unit(unit.block, member, job, begun)
            }
        }
    }

    /// A unit of steps.
    fn step_unit(
        &mut self,
        unit: &Unit,
        jobs: &HashMap<JobKey, Job>,
        begun: &mut HashMap<JobKey, Begun<B>>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(unit.block);
        let first = self.local(unit.block)?;
        let last = self.local(unit.block + unit.count - 1)?;
        let taken = unit.members.iter().map(|member| begun.remove(&member.job));
        let mut taken: Vec<Begun<B>> = taken.collect::<Option<_>>().ok_or_else(missing)?;
        let mut steps = StepUnit::new(self.spec, self.shape.dtype, &self.blocks, first..last + 1);
        for (member, begun) in unit.members.iter().zip(&mut taken) {
            let job = jobs.get(&member.job).ok_or_else(missing)?;
            let (position, pieces) = (member.position, member.pieces.clone());
            let (prompts, hidden) = (&begun.prompts, &mut begun.hidden);
            steps.push(job, position, pieces, prompts, hidden).ok_or_else(missing)?;
        }
        self.steps.run(&mut self.backend, &mut self.work, &mut self.cache, steps)?;
        begun.extend(unit.members.iter().map(|member| member.job).zip(taken));
        Ok(())
    }

    /// A unit of a job without cache, which is alone in its units.
    fn pass_unit(
        &mut self,
        block: u32,
        member: &UnitMember,
        job: &Job,
        begun: &mut Begun<B>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(block);
        let local = self.local(block)?;
        let Begun { hidden, prompts, memory, .. } = begun;
        let memory = memory.as_mut().ok_or_else(missing)?;
        let back = job.backward_at(member.position, member.pieces.clone());
        let is_back = back.is_some();
        let (position, pieces) = back.unwrap_or((member.position, member.pieces.clone()));
        let (spec, layout) = (self.spec, self.kv_shape.layout);
        let weights = self.blocks.get(local).ok_or_else(missing)?;
        let unit = PassUnit::new(spec, weights, layout, job, position, pieces, prompts);
        let unit = unit.ok_or_else(missing)?;
        let (backend, passes) = (&mut self.backend, &mut self.passes);
        if !is_back {
            return Ok(passes.forward(backend, &mut self.work, &unit, hidden, memory)?);
        }
        let (_, arena) = self.link.as_mut().ok_or_else(missing)?;
        passes.backward(backend, arena, &unit, memory).map_err(|failure| match failure {
            TransferError::Op(failure) => failure.into(),
            // The slots were checked with the body.
            TransferError::Outside(_) => missing(),
        })
    }

    fn local(&self, block: u32) -> Result<usize, EngineError> {
        let local = self.shape.span.local(BlockIndex(block));
        local.ok_or(EngineError::Unit(block))
    }
}
