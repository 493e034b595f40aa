//! Units of gradients: some pieces of a job on their way back through one block. What they sum lies on the host between two units.

use std::ops::Range;

use shared::job::JobBody;

use super::{Engine, EngineError};
use crate::block::{BlockInput, PromptPart, Sums, backward};
use crate::device::Paged;
use crate::running::{Back, Begun, Running};

impl<B: Paged> Engine<'_, B> {
    /// A unit on the way back: the gradient of some pieces through the block at `position` of the job.
    pub(super) fn back_unit(
        &mut self,
        block: u32,
        local: usize,
        position: usize,
        pieces: Range<usize>,
        job: &mut Running<B>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(block);
        let (page_bytes, layout) = (self.page_bytes(), self.kv_shape.layout);
        let mut begun = job.begun.take().ok_or_else(missing)?;
        let Begun {
            prompts: all_prompts,
            scratch,
            back,
            ..
        } = &mut begun;
        let back = back.as_mut().ok_or_else(missing)?;
        if pieces.end == job.piece_count() {
            back.keys.fill(0.0);
            back.values.fill(0.0);
        }
        let values = job.values(pieces.clone());
        let size = self.shape.dtype.size_bytes();
        let input = back.inputs.get(position).ok_or_else(missing)?;
        let input = input
            .get(values.start * size..values.end * size)
            .ok_or_else(missing)?;
        self.backend.grow(&mut self.before, values.len());
        self.backend
            .widen(input, self.shape.dtype, &mut self.before)?;
        let mut prompts = Vec::new();
        for (to, from) in job.prompt_parts(position, pieces.clone()) {
            prompts.push(PromptPart {
                offset: to.start - values.start,
                values: all_prompts.get(from).ok_or_else(missing)?,
            });
        }
        let rows = job.rows(pieces.clone());
        let own = job.scratch_range(position, page_bytes);
        let own = scratch.get_mut(own).ok_or_else(missing)?;
        let gradient = back.gradient.get_mut(values).ok_or_else(missing)?;
        let kv = self.spec.kv_heads * self.spec.head_dim;
        let touched = job.touched(pieces.clone());
        let part = touched.start * kv..touched.end * kv;
        let own_keys = back.keys.get_mut(part.clone()).ok_or_else(missing)?;
        let own_values = back.values.get_mut(part).ok_or_else(missing)?;
        let mut starts = job.row_starts(pieces.clone());
        starts.iter_mut().for_each(|start| *start -= touched.start);
        let [keys, key_values] = &mut self.sums;
        for (host, device) in [
            (&*gradient, &mut self.states),
            (&*own_keys, &mut *keys),
            (&*own_values, &mut *key_values),
        ] {
            self.backend.grow(device, host.len());
            self.backend.upload(host, device)?;
        }
        let mut pages = self.backend.lend(&mut self.room, layout, own)?;
        backward(
            &mut self.backend,
            self.spec,
            self.blocks.get(local).ok_or_else(missing)?,
            &mut self.gradients,
            BlockInput {
                rows: &rows,
                prompts: &prompts,
                adapters: &vec![job.body.adapter; rows.len()],
                lengths: &job.row_lengths(pieces.clone()),
            },
            &self.before,
            &mut self.states,
            Sums {
                keys: &mut *keys,
                values: &mut *key_values,
                starts: &starts,
            },
            &mut pages,
        )?;
        drop(pages);
        self.backend.give_back(&mut self.room, own)?;
        self.backend.download(&self.states, gradient)?;
        self.backend.download(keys, own_keys)?;
        self.backend.download(key_values, own_values)?;
        if pieces.start == 0 {
            keep_prompt_gradient(&job.body, position, back).ok_or_else(missing)?;
        }
        job.begun = Some(begun);
        Ok(())
    }
}

/// Takes the gradient of the prompts of a block: that of the hidden states they were added to.
fn keep_prompt_gradient(body: &JobBody, position: usize, back: &mut Back) -> Option<()> {
    let Some(prompts) = body.prompts.filter(|_| body.prompt_gradient.is_some()) else {
        return Some(());
    };
    let hidden = body.hidden as usize;
    let (batch, row) = (body.batch as usize, body.tokens as usize * hidden);
    let part = prompts.tokens as usize * hidden;
    for index in 0..batch {
        let to = (position * batch + index) * part;
        let from = back.gradient.get(index * row..index * row + part)?;
        back.prompts.get_mut(to..to + part)?.copy_from_slice(from);
    }
    Some(())
}
