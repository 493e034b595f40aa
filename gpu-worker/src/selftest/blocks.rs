//! Whole blocks, shaped as those of a Llama: what a decode step of some sessions and a prefill take from the first norm to the last sum, and
//! what that makes of a whole model.

use std::io::Write;

use kernels::{DType, QuantType, WeightView, quant};
use serde_json::json;
use shared::exit::ExitReason;
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;

use super::Ended;
use super::roofline::{Bench, FORMATS, HEAD_DIM, page, steps};
use crate::block::{BlockInput, BlockSpec, BlockWeights, TensorSpec, Workspace, forward};
use crate::device::Paged;

/// Type in which the block computes.
const DTYPE: DType = DType::Bf16;

impl<B: Paged, W: Write> Bench<'_, B, W> {
    /// Rows of whole blocks in every format.
    pub(super) fn blocks(&mut self) -> Result<(), Ended> {
        let spec = llama(self.sizes.hidden, self.sizes.middle, self.sizes.kv)?;
        for quant in FORMATS {
            let bytes = largest(quant, &spec);
            let tensors = spec.tensors(0);
            let weights = BlockWeights::new(self.backend, &spec, DTYPE, |name| {
                let tensor = tensors.iter().find(|tensor| tensor.name == name)?;
                tensor_view(quant, tensor, &bytes)
            })
            .map_err(|failure| Ended::new(ExitReason::Failed, &failure))?;
            for &sessions in self.sizes.sessions {
                let seconds = self.block_row(
                    &spec,
                    &weights,
                    quant,
                    (sessions, 1, self.sizes.context - 1),
                )?;
                if sessions == 1 {
                    let blocks = self.sizes.model_blocks;
                    let rate = 1.0 / (seconds * blocks as f64);
                    writeln!(
                        self.out,
                        "{:44} {rate:10.1} steps/s",
                        format!("{blocks} such blocks, one session")
                    )?;
                }
            }
            self.block_row(&spec, &weights, quant, (1, self.sizes.prefill, 0))?;
        }
        Ok(())
    }

    /// A step of `sessions` sessions with `tokens` new tokens after `prefix`.
    fn block_row(
        &mut self,
        spec: &BlockSpec,
        weights: &BlockWeights<'_, B>,
        quant: QuantType,
        (sessions, tokens, prefix): (usize, usize, usize),
    ) -> Result<f64, Ended> {
        let layout = spec.page_layout(DTYPE);
        let used = (prefix + tokens).div_ceil(PAGE_TOKENS);
        let tables: Vec<Vec<PageId>> = (0..sessions)
            .map(|s| (s * used..(s + 1) * used).map(page).collect())
            .collect();
        let rows = steps(&tables, tokens, prefix);
        let cached = sessions * used * layout.page_bytes();
        let count = sessions * tokens;
        let mut hidden = self.filled(count * spec.hidden)?;
        let mut work = Workspace::new(self.backend);
        let mut room = B::Room::default();
        let mut pages = self.backend.blank(&mut room, layout, cached)?;
        let seconds = self.time(|backend| {
            let input = BlockInput {
                rows: &rows,
                prompts: &[],
                adapters: &[],
                lengths: &[],
            };
            forward(
                backend,
                spec,
                weights,
                &mut work,
                input,
                &mut hidden,
                &mut pages,
            )
        })?;
        let (mut stored, mut weights) = (0, 0);
        for tensor in spec.tensors(0) {
            let (outputs, inputs) = sides(&tensor);
            stored += quant::stored_bytes(
                if outputs > 1 { quant } else { QuantType::None },
                DTYPE,
                outputs,
                inputs,
            )
            .unwrap_or(0);
            weights += outputs * inputs;
        }
        let pairs: usize = (prefix + 1..=prefix + tokens).sum::<usize>() * sessions;
        let flops = 2 * weights * count + 4 * pairs * spec.heads * HEAD_DIM;
        let name = match prefix {
            0 => format!("block {quant} prefill {tokens}"),
            _ => format!("block {quant} decode {} x {sessions}", prefix + 1),
        };
        self.print(&name, seconds, stored + cached, flops)?;
        Ok(seconds)
    }
}

fn llama(hidden: usize, middle: usize, kv: usize) -> Result<BlockSpec, Ended> {
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": middle, "num_attention_heads": hidden / HEAD_DIM,
        "num_key_value_heads": kv / HEAD_DIM, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    });
    BlockSpec::from_config(&config).map_err(|failure| Ended::new(ExitReason::Failed, &failure))
}

/// Rows and columns; a vector is a matrix of one row.
fn sides(tensor: &TensorSpec) -> (usize, usize) {
    match tensor.shape[..] {
        [outputs, inputs] => (outputs, inputs),
        _ => (1, tensor.shape.iter().product()),
    }
}

/// Bytes for the largest tensor of a block; every tensor begins with them. All alike: numbers of about 0.01.
fn largest(quant: QuantType, spec: &BlockSpec) -> Vec<u8> {
    let sizes = spec.tensors(0).into_iter().map(|tensor| {
        let (outputs, inputs) = sides(&tensor);
        let quantized = quant::stored_bytes(quant, DTYPE, outputs, inputs).unwrap_or(0);
        quantized.max(2 * outputs * inputs)
    });
    vec![0x3c; sizes.max().unwrap_or(0)]
}

fn tensor_view<'w>(
    quant: QuantType,
    tensor: &TensorSpec,
    bytes: &'w [u8],
) -> Option<WeightView<'w>> {
    let (outputs, inputs) = sides(tensor);
    let quant = if outputs > 1 { quant } else { QuantType::None };
    let len = quant::stored_bytes(quant, DTYPE, outputs, inputs)?;
    WeightView::quantized(quant, DTYPE, outputs, inputs, bytes.get(..len)?).ok()
}
