//! Units of forward: some rows through one block, decode steps through several. A job's hidden states stay on the device from its first block to its last; a unit of
//! one job works on them where they are, a unit of several gathers their rows and gives them back.

use std::collections::HashMap;
use std::ops::Range;

use kernels::StepRow;
use kernels::kv::total_tokens;
use shared::block::BlockIndex;
use shared::job::JobKind;

use super::decode::Step;
use super::{Engine, EngineError, parked};
use crate::block::{BlockInput, Kept, PromptPart, forward, forward_keeping, keys};
use crate::device::{MAX_STEP_TOKENS, Paged};
use crate::running::{Begun, Running, States};
use crate::schedule::{Member, TaskId, Unit};

/// Where a part of a job's hidden states may begin for kernels to work on it in place: device memory is read in pieces of so many bytes.
pub(super) const PART_BYTES: usize = 256;

impl<B: Paged> Engine<'_, B> {
    /// Runs one unit: its members' rows go through the block together, each row as if alone. A device is done after the next
    /// [`settle`](Self::settle).
    ///
    /// # Errors
    /// [`EngineError`] when the unit does not fit its jobs.
    pub fn unit(
        &mut self,
        unit: &Unit,
        running: &mut HashMap<TaskId, Running<B>>,
    ) -> Result<(), EngineError> {
        if self.decode.is_some() && self.recorded_unit(unit, running)? {
            return Ok(());
        }
        self.block_unit(unit, running)?;
        for offset in 1..unit.count {
            let mut next = unit.clone();
            next.block += offset;
            for member in &mut next.members {
                member.position += offset as usize;
            }
            self.block_unit(&next, running)?;
        }
        Ok(())
    }

    fn local(&self, block: u32) -> Result<usize, EngineError> {
        let local = self.shape.span.local(BlockIndex(block));
        local.ok_or(EngineError::Unit(block))
    }

    /// The first block of a unit.
    fn block_unit(
        &mut self,
        unit: &Unit,
        running: &mut HashMap<TaskId, Running<B>>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(unit.block);
        let local = self.local(unit.block)?;
        match unit.members.as_slice() {
            [one] => {
                let job = running.get_mut(&one.task).ok_or_else(missing)?;
                match job.back(one.position, one.pieces.clone()) {
                    Some((position, pieces)) => {
                        self.back_unit(unit.block, local, position, pieces, job)?;
                    }
                    None => self.lone_unit(unit.block, local, one, job)?,
                }
            }
            _ => self.shared_unit(unit, local, running)?,
        }
        Ok(())
    }

    /// A unit through recorded launches, if they cover it.
    fn recorded_unit(
        &mut self,
        unit: &Unit,
        running: &mut HashMap<TaskId, Running<B>>,
    ) -> Result<bool, EngineError> {
        let missing = || EngineError::Unit(unit.block);
        let first = self.local(unit.block)?;
        let last = self.local(unit.block + unit.count - 1)?;
        let takes_adapters = self.decode.as_ref().is_some_and(|decode| decode.adapted);
        let mut input = Input::default();
        for member in &unit.members {
            let job = running.get(&member.task).ok_or_else(missing)?;
            let begun = job.begun.as_ref().ok_or_else(missing)?;
            let is_recorded = job.body.kind == JobKind::Step
                && (job.body.adapter.is_none() || takes_adapters)
                && matches!(begun.hidden, States::Device(_));
            if !is_recorded {
                return Ok(false);
            }
            input
                .push(job, &begun.prompts, member)
                .ok_or_else(missing)?;
        }
        let tokens = total_tokens(&input.rows);
        if tokens > MAX_STEP_TOKENS || !self.set_step(&input.rows, &input.adapters)? {
            return Ok(false);
        }
        let prompts = prompts_of(unit, running).ok_or_else(missing)?;
        self.gather_step(unit, running)?;
        let step = Step {
            rows: &input.rows,
            lengths: &input.lengths,
            adapted: input.adapters.iter().any(Option::is_some),
            prompts: &prompts,
        };
        self.recorded_blocks(tokens, first..last + 1, step)?;
        drop((input, prompts));
        self.give_step(unit, running)?;
        Ok(true)
    }

    /// Takes the states of the members to the place of recorded steps.
    fn gather_step(
        &mut self,
        unit: &Unit,
        running: &HashMap<TaskId, Running<B>>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(unit.block);
        let decode = self.decode.as_mut().ok_or_else(missing)?;
        let mut start = 0;
        for member in &unit.members {
            let job = running.get(&member.task).ok_or_else(missing)?;
            let values = job.values(member.pieces.clone());
            let (len, place) = (values.len(), start..start + values.len());
            start += len;
            let to = B::part_mut(&mut decode.states, place).ok_or_else(missing)?;
            let from = job.begun.as_ref().and_then(|b| b.device_part(values));
            self.backend.copy(from.ok_or_else(missing)?, to, len)?;
        }
        Ok(())
    }

    /// And back.
    fn give_step(
        &mut self,
        unit: &Unit,
        running: &mut HashMap<TaskId, Running<B>>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(unit.block);
        let decode = self.decode.as_ref().ok_or_else(missing)?;
        let mut start = 0;
        for member in &unit.members {
            let job = running.get_mut(&member.task).ok_or_else(missing)?;
            let values = job.values(member.pieces.clone());
            let (len, place) = (values.len(), start..start + values.len());
            start += len;
            let from = B::part(&decode.states, place).ok_or_else(missing)?;
            let to = job.begun.as_mut().and_then(|b| b.device_part_mut(values));
            self.backend.copy(from, to.ok_or_else(missing)?, len)?;
        }
        Ok(())
    }

    /// A unit of one job.
    fn lone_unit(
        &mut self,
        block: u32,
        local: usize,
        member: &Member,
        job: &mut Running<B>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(block);
        let mut begun = job.begun.take().ok_or_else(missing)?;
        let values = job.values(member.pieces.clone());
        self.keep_input(job, member, &mut begun)
            .ok_or_else(missing)??;
        let own = job.scratch_range(member.position, self.page_bytes());
        let position = match job.body.kind {
            JobKind::Backward => member.position,
            JobKind::Step | JobKind::Forward => 0,
        };
        let parked = begun.parked.as_ref().and_then(|p| p.pages(position));
        let mut states = std::mem::replace(&mut self.states, self.backend.buffer(0));
        let Begun {
            hidden,
            prompts,
            scratch,
            kept,
            ..
        } = &mut begun;
        let mut input = Input::default();
        input.push(job, prompts, member).ok_or_else(missing)?;
        // A job without cache brings its pages; it is alone in its units.
        let is_turn = job.turns_at(member.position);
        let over = match (job.body.kind, parked) {
            (JobKind::Step, _) => Over::Cache,
            (kind, Some(pages)) => Over::Parked {
                kind,
                pages,
                is_turn,
            },
            (_, None) => Over::Host {
                pages: scratch.get_mut(own).ok_or_else(missing)?,
                kept: kept
                    .get_mut(member.position)
                    .map_or_else(Kept::default, |kept| {
                        kept.part(job.tokens(member.pieces.clone()))
                    }),
                is_turn,
            },
        };
        match hidden {
            States::Device(all) if (4 * values.start).is_multiple_of(PART_BYTES) => {
                let part = B::part_mut(all, values).ok_or_else(missing)?;
                self.run(local, &input, part, over)?;
            }
            States::Device(all) => {
                let part = B::part_mut(all, values.clone()).ok_or_else(missing)?;
                self.backend.grow(&mut states, values.len());
                self.backend.copy(part, &mut states, values.len())?;
                self.run(local, &input, &mut states, over)?;
                self.backend.copy(&states, part, values.len())?;
            }
            States::Host(all) => {
                let part = all.get_mut(values).ok_or_else(missing)?;
                self.backend.grow(&mut states, part.len());
                self.backend.upload(part, &mut states)?;
                self.run(local, &input, &mut states, over)?;
                self.backend.download(&states, part)?;
            }
        }
        self.states = states;
        drop(input);
        job.begun = Some(begun);
        Ok(())
    }

    /// A unit of several decode steps.
    fn shared_unit(
        &mut self,
        unit: &Unit,
        local: usize,
        running: &mut HashMap<TaskId, Running<B>>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(unit.block);
        let mut states = std::mem::replace(&mut self.states, self.backend.buffer(0));
        let mut input = Input::default();
        for member in &unit.members {
            let job = running.get(&member.task).ok_or_else(missing)?;
            let begun = job.begun.as_ref().ok_or_else(missing)?;
            input
                .push(job, &begun.prompts, member)
                .ok_or_else(missing)?;
        }
        self.backend.grow(&mut states, input.values);
        let mut start = 0;
        for member in &unit.members {
            let job = running.get(&member.task).ok_or_else(missing)?;
            let values = job.values(member.pieces.clone());
            let to = start..start + values.len();
            let to = B::part_mut(&mut states, to).ok_or_else(missing)?;
            let begun = job.begun.as_ref().ok_or_else(missing)?;
            start += values.len();
            match &begun.hidden {
                States::Device(all) => {
                    let from = B::part(all, values.clone()).ok_or_else(missing)?;
                    self.backend.copy(from, to, values.len())?;
                }
                States::Host(all) => {
                    let from = all.get(values).ok_or_else(missing)?;
                    self.backend.upload(from, to)?;
                }
            }
        }
        self.run(local, &input, &mut states, Over::Cache)?;
        drop(input);
        let mut start = 0;
        for member in &unit.members {
            let job = running.get_mut(&member.task).ok_or_else(missing)?;
            let values = job.values(member.pieces.clone());
            let from = start..start + values.len();
            let from = B::part(&states, from).ok_or_else(missing)?;
            let begun = job.begun.as_mut().ok_or_else(missing)?;
            start += values.len();
            match &mut begun.hidden {
                States::Device(all) => {
                    let to = B::part_mut(all, values.clone()).ok_or_else(missing)?;
                    self.backend.copy(from, to, values.len())?;
                }
                States::Host(all) => {
                    let to = all.get_mut(values).ok_or_else(missing)?;
                    self.backend.download(from, to)?;
                }
            }
        }
        self.states = states;
        Ok(())
    }

    /// Sends rows through a block.
    fn run(
        &mut self,
        local: usize,
        input: &Input<'_>,
        states: &mut B::Floats,
        over: Over<'_, B>,
    ) -> Result<(), EngineError> {
        let block = u32::try_from(local).unwrap_or(u32::MAX);
        let weights = self.blocks.get(local).ok_or(EngineError::Unit(block))?;
        let (backend, spec, work) = (&mut self.backend, self.spec, &mut self.work);
        let (layout, input) = (self.kv_shape.layout, input.block_input());
        match over {
            Over::Cache => {
                let mut pages = backend.cached(&mut self.cache, local, input.rows)?;
                forward(backend, spec, weights, work, input, states, &mut pages)?;
            }
            Over::Parked {
                kind,
                pages,
                is_turn,
            } => {
                let region = parked::of_kind(&mut self.regions, kind);
                let room = &mut region.ok_or(EngineError::Unit(block))?.room;
                let mut pages = backend.parked_pages(room, layout, pages)?;
                let kept = Kept::default();
                if is_turn {
                    keys(
                        backend, spec, weights, work, input, states, &mut pages, kept,
                    )?;
                } else {
                    forward(backend, spec, weights, work, input, states, &mut pages)?;
                }
            }
            Over::Host {
                pages: own,
                kept,
                is_turn,
            } => {
                let mut pages = backend.lend(&mut self.room, layout, own)?;
                if is_turn {
                    keys(
                        backend, spec, weights, work, input, states, &mut pages, kept,
                    )?;
                } else {
                    forward_keeping(
                        backend, spec, weights, work, input, states, &mut pages, kept,
                    )?;
                }
                drop(pages);
                backend.give_back(&mut self.room, own)?;
            }
        }
        Ok(())
    }

    /// Keeps the input of a block for the way back, if there will be one. `None`: there is no such block or piece.
    fn keep_input(
        &mut self,
        job: &Running<B>,
        member: &Member,
        begun: &mut Begun<B>,
    ) -> Option<Result<(), EngineError>> {
        let (values, dtype) = (job.values(member.pieces.clone()), job.body.dtype);
        let Some(back) = &mut begun.back else {
            return Some(Ok(()));
        };
        let size = dtype.size_bytes();
        let parked = begun.parked.as_ref();
        if let (Some(input), States::Device(all)) =
            (parked.and_then(|p| p.input(member.position)), &begun.hidden)
        {
            let (part, at) = (
                B::part(all, values.clone())?,
                input.start + values.start * size,
            );
            let [_, region] = &mut self.regions;
            let (len, room) = (values.len(), &mut region.room);
            return Some(self.backend.park(part, len, dtype, room, at));
        }
        let input = back.inputs.get_mut(member.position)?;
        let bytes = input.get_mut(values.start * size..values.end * size)?;
        match &begun.hidden {
            States::Device(all) => {
                let part = B::part(all, values)?;
                Some(self.backend.narrow(part, dtype, bytes))
            }
            States::Host(all) => {
                kernels::ops::convert::from_f32(dtype, all.get(values)?, bytes);
                Some(Ok(()))
            }
        }
    }
}

/// The pages that rows go over.
enum Over<'a, B: Paged> {
    /// Those of sessions.
    Cache,
    /// Those of a job on the host.
    Host {
        /// Of one block.
        pages: &'a mut [u8],
        /// What is left for gradients.
        kept: Kept<'a, B::Floats>,
        /// Whether the block needs no more than its keys and values.
        is_turn: bool,
    },
    /// Those of a job in a region of the device.
    Parked {
        /// Of the job.
        kind: JobKind,
        /// Their bytes in the region.
        pages: Range<usize>,
        /// Whether the block needs no more than its keys and values.
        is_turn: bool,
    },
}

/// Deep prompts of each block of a unit, empty when it has none. `None`: a job has no such prompts.
fn prompts_of<'a, B: Paged>(
    unit: &Unit,
    running: &'a HashMap<TaskId, Running<B>>,
) -> Option<Vec<Vec<PromptPart<'a>>>> {
    let jobs = unit.members.iter().map(|member| running.get(&member.task));
    let jobs: Vec<&Running<B>> = jobs.collect::<Option<_>>()?;
    if jobs.iter().all(|job| job.body.prompts.is_none()) {
        return Some(Vec::new());
    }
    let of_block = |offset: u32| {
        let (mut parts, mut start) = (Vec::new(), 0);
        for (member, job) in unit.members.iter().zip(&jobs) {
            let prompts = &job.begun.as_ref()?.prompts;
            let position = member.position + offset as usize;
            parts.extend(prompts_at(job, prompts, member, (position, start))?);
            start += job.values(member.pieces.clone()).len();
        }
        Some(parts)
    };
    (0..unit.count).map(of_block).collect()
}

/// Deep prompts of a member before its block at `position`, where its values begin at `start`.
fn prompts_at<'a, B: Paged>(
    job: &Running<B>,
    prompts: &'a [f32],
    member: &Member,
    (position, start): (usize, usize),
) -> Option<Vec<PromptPart<'a>>> {
    let values = job.values(member.pieces.clone());
    job.prompt_parts(position, member.pieces.clone())
        .into_iter()
        .map(|(to, from)| {
            Some(PromptPart {
                offset: start + to.start - values.start,
                values: prompts.get(from)?,
            })
        })
        .collect()
}

/// What goes through a block besides the hidden states, of all members of a unit.
#[derive(Default)]
struct Input<'a> {
    rows: Vec<StepRow<'a>>,
    prompts: Vec<PromptPart<'a>>,
    adapters: Vec<Option<u32>>,
    lengths: Vec<usize>,
    /// Values of the hidden states.
    values: usize,
}

impl<'a> Input<'a> {
    /// Adds a member. `None`: its job has no such pieces or prompts.
    fn push<B: Paged>(
        &mut self,
        job: &'a Running<B>,
        prompts: &'a [f32],
        member: &Member,
    ) -> Option<()> {
        let values = job.values(member.pieces.clone());
        let parts = prompts_at(job, prompts, member, (member.position, self.values));
        self.prompts.extend(parts?);
        self.values += values.len();
        self.rows.extend(job.rows(member.pieces.clone()));
        self.adapters.resize(self.rows.len(), job.body.adapter);
        self.lengths.extend(job.row_lengths(member.pieces.clone()));
        Some(())
    }

    fn block_input(&self) -> BlockInput<'_> {
        BlockInput {
            rows: &self.rows,
            prompts: &self.prompts,
            adapters: &self.adapters,
            lengths: &self.lengths,
        }
    }
}
