//! Adapters (LoRA) of one block: which of its matrices an adapter adds to, and which rows of a batch go through which adapter.
//!
//! Rows choose their adapters one by one: rows of different adapters and rows of none share a batch, and none changes the bits of
//! another.

use kernels::ops::LoraPart;
use kernels::{Backend, StepRow, WeightView};

use super::spec::BlockSpec;
use super::weights::{BlockWeights, Linear, WeightsError};

/// What an adapter adds to one matrix `[outputs, inputs]`: `scale B A`.
#[derive(Clone, Copy, Debug)]
pub struct AdapterView<'w> {
    /// `[rank, inputs]`.
    pub a: WeightView<'w>,
    /// `[outputs, rank]`.
    pub b: WeightView<'w>,
    /// Multiplies what it gives.
    pub scale: f32,
}

/// The same where the backend reads it.
pub(super) struct Adapter<'w, B: Backend> {
    a: B::Matrix<'w>,
    b: B::Matrix<'w>,
    scale: f32,
}

/// Consecutive tokens of a batch that go through one adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AdaptedTokens {
    pub(super) first: usize,
    pub(super) tokens: usize,
    pub(super) adapter: usize,
}

impl<'w, B: Backend> BlockWeights<'w, B> {
    /// Puts an adapter beside the matrices of the block; its index is the number of those before it. `find` gives its part for a
    /// matrix by the name of the matrix within the block, without `.weight`, where it has one.
    ///
    /// # Errors
    /// [`WeightsError`] for a part that does not fit its matrix.
    pub fn add_adapter(
        &mut self,
        backend: &mut B,
        spec: &BlockSpec,
        find: impl Fn(&str) -> Option<AdapterView<'w>>,
    ) -> Result<(), WeightsError> {
        let mut largest = self.largest_rank;
        for (linear, spec) in self.linears_mut().into_iter().zip(spec.linears()) {
            let Some(view) = find(&spec.name) else {
                linear.adapters.push(None);
                continue;
            };
            let rank = view.a.outputs();
            let wrong = |name: &str, found: WeightView<'_>, wanted| WeightsError::Shape {
                name: format!("{}.{name}", spec.name),
                found: [found.outputs(), found.inputs()],
                wanted,
            };
            if view.a.inputs() != spec.inputs {
                return Err(wrong("lora_A", view.a, [rank, spec.inputs]));
            }
            if [view.b.outputs(), view.b.inputs()] != [spec.outputs, rank] {
                return Err(wrong("lora_B", view.b, [spec.outputs, rank]));
            }
            if view.a.dtype() != view.b.dtype() {
                return Err(WeightsError::DType {
                    name: format!("{}.lora_B", spec.name),
                    found: view.b.dtype(),
                    wanted: view.a.dtype(),
                });
            }
            largest = largest.max(rank);
            let mut place = |view| {
                backend.matrix(view).map_err(|source| WeightsError::Place {
                    name: format!("adapter of {}", spec.name),
                    source,
                })
            };
            linear.adapters.push(Some(Adapter {
                a: place(view.a)?,
                b: place(view.b)?,
                scale: view.scale,
            }));
        }
        self.largest_rank = largest;
        Ok(())
    }
}

impl<'w, B: Backend> Linear<'w, B> {
    /// What the adapters of a batch add to this matrix.
    pub(super) fn parts(&self, adapted: &[AdaptedTokens]) -> Vec<LoraPart<B::Matrix<'w>>> {
        let part = |tokens: &AdaptedTokens| {
            let adapter = self.adapters.get(tokens.adapter)?.as_ref()?;
            Some(LoraPart {
                first: tokens.first,
                rows: tokens.tokens,
                a: adapter.a.clone(),
                b: adapter.b.clone(),
                scale: adapter.scale,
            })
        };
        adapted.iter().filter_map(part).collect()
    }
}

/// The tokens of a batch that go through adapters, `adapters` being those of its rows (or nothing, for none).
pub(super) fn adapted(rows: &[StepRow<'_>], adapters: &[Option<u32>]) -> Vec<AdaptedTokens> {
    let of_tokens = rows
        .iter()
        .zip(adapters)
        .flat_map(|(row, adapter)| std::iter::repeat_n(*adapter, row.tokens));
    joined(of_tokens)
}

/// The same for some tokens of that batch, in their order: those that go to an expert.
pub(super) fn taken(adapted: &[AdaptedTokens], index: &[u32]) -> Vec<AdaptedTokens> {
    let adapter_of = |token: &u32| {
        let token = *token as usize;
        let found = adapted
            .iter()
            .find(|part| (part.first..part.first + part.tokens).contains(&token))?;
        u32::try_from(found.adapter).ok()
    };
    joined(index.iter().map(adapter_of))
}

fn joined(of_tokens: impl Iterator<Item = Option<u32>>) -> Vec<AdaptedTokens> {
    let mut parts: Vec<AdaptedTokens> = Vec::new();
    for (first, adapter) in of_tokens.enumerate() {
        let Some(adapter) = adapter.map(|index| index as usize) else {
            continue;
        };
        match parts.last_mut() {
            Some(last) if last.adapter == adapter && last.first + last.tokens == first => {
                last.tokens += 1;
            }
            _ => parts.push(AdaptedTokens {
                first,
                tokens: 1,
                adapter,
            }),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(first: usize, tokens: usize, adapter: usize) -> AdaptedTokens {
        AdaptedTokens {
            first,
            tokens,
            adapter,
        }
    }

    #[test]
    fn tokens_of_neighbouring_rows_with_one_adapter_join() {
        let row = |tokens| StepRow {
            tokens,
            prefix: 7,
            pages: &[],
        };
        let rows = [row(2), row(3), row(1), row(4), row(1)];
        let adapters = [Some(1), Some(1), None, Some(1), Some(0)];
        let all = adapted(&rows, &adapters);
        assert_eq!(all, [part(0, 5, 1), part(6, 4, 1), part(10, 1, 0)]);
        assert_eq!(adapted(&rows, &[]), []);
        // Tokens 1, 5, 6, 9 and 10 go to an expert: the second has no adapter.
        let some = taken(&all, &[1, 5, 6, 9, 10]);
        assert_eq!(some, [part(0, 1, 1), part(2, 2, 1), part(4, 1, 0)]);
    }
}
