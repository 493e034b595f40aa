//! Units of gradients: some pieces of a job on their way back through one block. What they sum lies in a region of the device between two
//! units, or on the host. What the way there leaves for them is kept where units find it, as far as memory goes.

use std::ops::Range;

use shared::job::{JobBody, SlotRef};

use super::units::PART_BYTES;
use super::{Engine, EngineError};
use crate::block::{BlockInput, PromptPart, Store, Sums, backward, levels};
use crate::device::{Paged, TransferError};
use crate::running::{Back, Begun, Running};

impl<B: Paged> Engine<'_, B> {
    /// Room for what forward leaves for the gradients of a job that keeps `bytes` bytes besides.
    pub(super) fn stores(&mut self, body: &JobBody, bytes: u64) -> Vec<Store<B>> {
        let tokens = body.batch as usize * body.tokens as usize;
        let most = self.kept_bytes.saturating_sub(bytes);
        let levels = levels(self.spec, body.blocks.len(), tokens, most);
        let (backend, spec) = (&mut self.backend, self.spec);
        let store = |level| Store::new(backend, spec, level, tokens);
        levels.into_iter().map(store).collect()
    }

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
            parked,
            kept,
            ..
        } = &mut begun;
        let back = back.as_mut().ok_or_else(missing)?;
        let parked = parked.as_ref();
        let [_, region] = &mut self.regions;
        if pieces.end == job.piece_count() {
            back.keys.fill(0.0);
            back.values.fill(0.0);
            if parked.is_some() {
                for sums in &mut region.sums {
                    self.backend.zero(sums)?;
                }
            }
        }
        let values = job.values(pieces.clone());
        let (dtype, size) = (self.shape.dtype, self.shape.dtype.size_bytes());
        self.backend.grow(&mut self.before, values.len());
        let before = &mut self.before;
        match parked.and_then(|parked| parked.input(position)) {
            Some(input) => {
                let (len, at) = (values.len(), input.start + values.start * size);
                self.backend.recall(&region.room, at, len, dtype, before)?;
            }
            None => {
                let input = back.inputs.get(position).ok_or_else(missing)?;
                let input = input.get(values.start * size..values.end * size);
                self.backend
                    .widen(input.ok_or_else(missing)?, dtype, before)?;
            }
        }
        let mut prompts = Vec::new();
        for (to, from) in job.prompt_parts(position, pieces.clone()) {
            prompts.push(PromptPart {
                offset: to.start - values.start,
                values: all_prompts.get(from).ok_or_else(missing)?,
            });
        }
        let rows = job.rows(pieces.clone());
        // Gradients and sums, where they are or as copies of those on the host.
        let kv = self.spec.kv_heads * self.spec.head_dim;
        let touched = job.touched(pieces.clone());
        let part = touched.start * kv..touched.end * kv;
        let mut starts = job.row_starts(pieces.clone());
        let is_in_place = parked.is_some() && (4 * values.start).is_multiple_of(PART_BYTES);
        self.backend.grow(&mut self.states, values.len());
        if parked.is_none() {
            starts.iter_mut().for_each(|start| *start -= touched.start);
            let (keys, key_values) = (back.keys.get(part.clone()), back.values.get(part.clone()));
            let gradient = back.gradient.get(values.clone());
            self.backend
                .upload(gradient.ok_or_else(missing)?, &mut self.states)?;
            for (host, sums) in [keys, key_values].into_iter().zip(&mut self.sums) {
                let host = host.ok_or_else(missing)?;
                self.backend.grow(sums, host.len());
                self.backend.upload(host, sums)?;
            }
        } else if !is_in_place {
            let gradient = B::part(&region.gradient, values.clone()).ok_or_else(missing)?;
            self.backend
                .copy(gradient, &mut self.states, values.len())?;
        }
        let kept = kept.get_mut(position);
        let kept = kept.map(|kept| kept.part(job.tokens(pieces.clone())));
        let [keys, key_values] = match parked {
            Some(_) => &mut region.sums,
            None => &mut self.sums,
        };
        let gradient = match is_in_place {
            true => B::part_mut(&mut region.gradient, values.clone()).ok_or_else(missing)?,
            false => &mut self.states,
        };
        let own = job.scratch_range(position, page_bytes);
        let parked_pages = parked.and_then(|parked| parked.pages(position));
        let mut pages = match &parked_pages {
            Some(bytes) => {
                let (room, bytes) = (&mut region.room, bytes.clone());
                self.backend.parked_pages(room, layout, bytes)?
            }
            None => {
                let own = scratch.get_mut(own.clone()).ok_or_else(missing)?;
                self.backend.lend(&mut self.room, layout, own)?
            }
        };
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
            gradient,
            Sums {
                keys: &mut *keys,
                values: &mut *key_values,
                starts: &starts,
            },
            kept.unwrap_or_default(),
            &mut pages,
        )?;
        drop(pages);
        if parked_pages.is_none() {
            let own = scratch.get_mut(own).ok_or_else(missing)?;
            self.backend.give_back(&mut self.room, own)?;
        }
        if parked.is_none() {
            let gradient = back.gradient.get_mut(values).ok_or_else(missing)?;
            self.backend.download(&self.states, gradient)?;
            for (host, sums) in [&mut back.keys, &mut back.values]
                .into_iter()
                .zip(&self.sums)
            {
                let host = host.get_mut(part.clone()).ok_or_else(missing)?;
                self.backend.download(sums, host)?;
            }
        } else if !is_in_place {
            let part = B::part_mut(&mut region.gradient, values.clone()).ok_or_else(missing)?;
            self.backend.copy(&self.states, part, values.len())?;
        }
        if pieces.start == 0 && parked.is_some() {
            self.store_prompt_gradient(&job.body, position)
                .map_err(|failure| match failure {
                    TransferError::Engine(failure) => failure,
                    // Checked with the body.
                    TransferError::Outside(_) => missing(),
                })?;
        } else if pieces.start == 0 {
            keep_prompt_gradient(&job.body, position, back).ok_or_else(missing)?;
        }
        job.begun = Some(begun);
        Ok(())
    }

    /// Sends the gradient of the prompts of a block, that of the hidden states they were added to, to where the job wants it.
    fn store_prompt_gradient(
        &mut self,
        body: &JobBody,
        position: usize,
    ) -> Result<(), TransferError> {
        let (Some(prompts), Some(slot)) = (body.prompts, body.prompt_gradient) else {
            return Ok(());
        };
        let missing = || EngineError::Unit(u32::MAX);
        let (arena, reach) = self.link.as_mut().ok_or_else(missing)?;
        let [_, region] = &self.regions;
        let (hidden, size) = (body.hidden as usize, body.dtype.size_bytes());
        let (batch, row) = (body.batch as usize, body.tokens as usize * hidden);
        let part = prompts.tokens as usize * hidden;
        for index in 0..batch {
            let from = B::part(&region.gradient, index * row..index * row + part);
            let to = SlotRef {
                offset: slot.offset + ((position * batch + index) * part * size) as u64,
                len: (part * size) as u64,
            };
            let from = from.ok_or_else(missing)?;
            self.backend.store(from, body.dtype, arena, reach, to)?;
        }
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
