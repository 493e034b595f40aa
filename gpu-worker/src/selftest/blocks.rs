//! Whole blocks, shaped as those of a Llama and of a Mixtral: what a decode step of some sessions and a prefill take from the first norm to the last sum, and
//! what that makes of a whole model.

use std::io::Write;

use kernels::{DType, QuantType, WeightView, quant};
use serde_json::json;
use shared::exit::ExitReason;
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;

use super::Ended;
use super::roofline::{Bench, FORMATS, HEAD_DIM, page, steps};
use crate::block::{BlockInput, BlockSpec, BlockWeights, Mlp, TensorSpec, Workspace, forward};
use crate::device::Paged;

/// Type in which the block computes.
const DTYPE: DType = DType::Bf16;

impl<B: Paged, W: Write> Bench<'_, B, W> {
    /// Rows of whole blocks in every format.
    pub(super) fn blocks(&mut self) -> Result<(), Ended> {
        let (hidden, middle, kv) = (self.sizes.hidden, self.sizes.middle, self.sizes.kv);
        self.blocks_of("block", &llama(hidden, middle, kv)?)?;
        self.blocks_of("mixture", &mixtral(hidden / 2, middle / 2, kv)?)
    }

    fn blocks_of(&mut self, kind: &str, spec: &BlockSpec) -> Result<(), Ended> {
        for quant in FORMATS {
            let bytes = largest(quant, spec);
            let routes = scattering(spec);
            let tensors = spec.tensors(0);
            let weights = BlockWeights::new(self.backend, spec, DTYPE, |name| {
                let tensor = tensors.iter().find(|tensor| tensor.name == name)?;
                if is_router(spec, tensor) {
                    return tensor_view(QuantType::None, tensor, &routes);
                }
                tensor_view(quant, tensor, &bytes)
            })
            .map_err(|failure| Ended::new(ExitReason::Failed, &failure))?;
            for &sessions in self.sizes.sessions {
                let step = (sessions, 1, self.sizes.context - 1);
                let seconds = self.block_row(kind, spec, (&weights, quant), step)?;
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
            self.block_row(kind, spec, (&weights, quant), (1, self.sizes.prefill, 0))?;
        }
        Ok(())
    }

    /// A step of `sessions` sessions with `tokens` new tokens after `prefix`.
    fn block_row(
        &mut self,
        kind: &str,
        spec: &BlockSpec,
        (weights, quant): (&BlockWeights<'_, B>, QuantType),
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
        let (stored, weights) = cost_of(spec, quant, count);
        let pairs: usize = (prefix + 1..=prefix + tokens).sum::<usize>() * sessions;
        let flops = 2 * weights + 4 * pairs * spec.heads * HEAD_DIM;
        let name = match prefix {
            0 => format!("{kind} {quant} prefill {tokens}"),
            _ => format!("{kind} {quant} decode {} x {sessions}", prefix + 1),
        };
        self.print(&name, seconds, stored + cached, flops)?;
        Ok(seconds)
    }
}

/// Bytes of the weights that `tokens` tokens read, and how many weights they are multiplied with. Of experts those that are chosen: all tokens
/// choosing as by lot, a share of them.
fn cost_of(spec: &BlockSpec, quant: QuantType, tokens: usize) -> (usize, usize) {
    let (mut stored, mut weights) = (0, 0);
    for tensor in spec.tensors(0) {
        let (outputs, inputs) = sides(&tensor);
        let own = if outputs > 1 { quant } else { QuantType::None };
        let bytes = quant::stored_bytes(own, DTYPE, outputs, inputs).unwrap_or(0);
        let (read, used) = match &spec.mlp {
            Mlp::Experts(mlp) if tensor.name.contains(".experts.") => {
                let share = mlp.chosen as f64 / mlp.experts.len() as f64;
                let read = 1.0 - (1.0 - share).powi(i32::try_from(tokens).unwrap_or(i32::MAX));
                (read, share)
            }
            _ => (1.0, 1.0),
        };
        stored += (bytes as f64 * read) as usize;
        weights += ((outputs * inputs * tokens) as f64 * used) as usize;
    }
    (stored, weights)
}

fn is_router(spec: &BlockSpec, tensor: &TensorSpec) -> bool {
    matches!(&spec.mlp, Mlp::Experts(mlp) if mlp.router.weight_name() == tensor.name)
}

/// The matrix of a router that sends tokens to all experts: numbers without a pattern, bfloat16 of 1 to 2 in size.
fn scattering(spec: &BlockSpec) -> Vec<u8> {
    let Mlp::Experts(mlp) = &spec.mlp else {
        return Vec::new();
    };
    let mut state = 1u32;
    (0..mlp.router.outputs * mlp.router.inputs)
        .flat_map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            [
                (state >> 16) as u8 & 0x7f,
                0x3f | (state >> 24) as u8 & 0x80,
            ]
        })
        .collect()
}

fn mixtral(hidden: usize, middle: usize, kv: usize) -> Result<BlockSpec, Ended> {
    let config = json!({
        "model_type": "mixtral", "hidden_size": hidden, "intermediate_size": middle,
        "num_attention_heads": (hidden / HEAD_DIM).max(1), "num_key_value_heads": (kv / HEAD_DIM).min((hidden / HEAD_DIM).max(1)),
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    });
    BlockSpec::from_config(&config).map_err(|failure| Ended::new(ExitReason::Failed, &failure))
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
