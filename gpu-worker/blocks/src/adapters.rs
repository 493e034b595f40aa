//! Adapters (LoRA) of one block: which of its matrices an adapter adds to, and which rows of a
//! batch go through which adapter.
//!
//! Rows choose their adapters one by one: rows of different adapters and rows of none share a
//! batch, and none changes the bits of another.

use kernels::ops::Adapter;
use kernels::{Backend, StepRow, WeightView};
use model::BlockSpec;

use super::weights::{BlockWeights, GatedWeights, Linear, MlpWeights, WeightsError};

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

impl<'w, B: Backend> BlockWeights<'w, B> {
    /// Puts an adapter beside the matrices of the block; its index is the number of those before
    /// it. `find` gives its part for a matrix by the name of the matrix within the block,
    /// without `.weight`, where it has one.
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
                backend.matrix(view).map_err(|source| WeightsError::Upload {
                    name: format!("adapter of {}", spec.name),
                    source,
                })
            };
            linear.adapters.push(Some(Adapter {
                a: place(view.a)?,
                b: place(view.b)?,
                scale: view.scale,
            }));
            let all = linear.adapters.clone();
            let together = backend.adapters(all).map_err(|source| WeightsError::Upload {
                name: format!("adapter of {}", spec.name),
                source,
            })?;
            linear.together = Some(together);
        }
        self.largest_rank = largest;
        self.list_expert_adapters(backend)
    }

    /// Lists the adapters of all experts together, if there are experts.
    fn list_expert_adapters(&mut self, backend: &mut B) -> Result<(), WeightsError> {
        let MlpWeights::Experts { experts, adapters, .. } = &mut self.mlp else {
            return Ok(());
        };
        for (which, table) in adapters.iter_mut().enumerate() {
            let of_expert = |expert: &GatedWeights<'w, B>| {
                let linear = [&expert.gate, &expert.up, &expert.down][which];
                linear.adapters.clone()
            };
            let all: Vec<_> = experts.iter().flat_map(of_expert).collect();
            if all.iter().all(Option::is_none) {
                continue;
            }
            let together = backend.adapters(all);
            *table = Some(together.map_err(|source| WeightsError::Upload {
                name: "adapters of experts".to_owned(),
                source,
            })?);
        }
        Ok(())
    }
}

impl<'w, B: Backend> Linear<'w, B> {
    /// Its adapters, if one of these tokens may go through one.
    pub(super) fn adapters_for(&self, of_tokens: &[Option<u32>]) -> Option<&B::Adapters<'w>> {
        self.together.as_ref().filter(|_| !of_tokens.is_empty())
    }
}

/// The adapter of each token of a batch; empty when no token has one.
pub(super) fn adapted(rows: &[StepRow<'_>]) -> Vec<Option<u32>> {
    if rows.iter().all(|row| row.adapter.is_none()) {
        return Vec::new();
    }
    rows.iter().flat_map(|row| std::iter::repeat_n(row.adapter, row.tokens)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_the_adapters_of_their_rows() {
        let row = |tokens, adapter| StepRow { adapter, ..StepRow::new(tokens, 7, &[]) };
        let all = adapted(&[row(2, Some(1)), row(1, None), row(3, Some(0))]);
        assert_eq!(all, [Some(1), Some(1), None, Some(0), Some(0), Some(0)]);
        assert!(adapted(&[row(2, None), row(1, None)]).is_empty());
    }
}
