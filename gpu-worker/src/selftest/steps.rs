//! Whole blocks, shaped as those of a Llama and of a Mixtral: what a decode step of some sessions
//! and a prefill take from the first norm to the last sum, and what that makes of a whole model.

use std::io::Write;

use blocks::kv::page_layout;
use blocks::{BlockWeights, Workspace, forward};
use kernels::cases::{Row, Shapes, Work};
use kernels::{DType, QuantType, StepRow, WeightView, quant};
use model::{BlockSpec, Mlp, TensorSpec};
use serde_json::json;
use shared::exit::ExitReason;
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;

use super::Ended;
use super::measure::Table;
use crate::device::DeviceBackend;

/// Type in which the block computes.
const DTYPE: DType = DType::Bf16;

/// Elements of a head.
const HEAD_DIM: usize = 128;

/// The steps through whole blocks that are measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    /// Sessions of a decode step, and cached tokens of each.
    sessions: &'static [usize],
    context: usize,
    /// Tokens of a prefill.
    prefill: usize,
    /// Blocks of a model.
    blocks: usize,
}

impl Steps {
    /// A 70B Llama, for devices.
    pub(super) const LARGE: Steps =
        Steps { sessions: &[1, 8, 32], context: 2048, prefill: 1024, blocks: 80 };
    /// A 1B Llama, for processors.
    pub(super) const SMALL: Steps =
        Steps { sessions: &[1, 8], context: 512, prefill: 128, blocks: 22 };
    /// For the emulator, whose times mean nothing.
    pub(super) const TINY: Steps = Steps { sessions: &[1, 3], context: 40, prefill: 20, blocks: 2 };
}

/// One step: each of `sessions` sessions has `tokens` new tokens after `prefix` cached ones.
#[derive(Clone, Copy, Debug)]
struct TimedStep {
    sessions: usize,
    tokens: usize,
    prefix: usize,
}

/// Rows of whole blocks in every format.
pub(super) fn measure<B: DeviceBackend>(
    backend: &mut B,
    shapes: &Shapes,
    steps: Steps,
    table: &mut Table<'_, impl Write>,
) -> Result<(), Ended> {
    let Shapes { hidden, middle, kv, formats, .. } = *shapes;
    let kinds =
        [("block", llama(hidden, middle, kv)?), ("mixture", mixtral(hidden / 2, middle / 2, kv)?)];
    for (kind, spec) in &kinds {
        for &(quant, _) in formats {
            blocks_of(backend, kind, spec, quant, steps, table)?;
        }
    }
    Ok(())
}

fn blocks_of<B: DeviceBackend>(
    backend: &mut B,
    kind: &str,
    spec: &BlockSpec,
    quant: QuantType,
    steps: Steps,
    table: &mut Table<'_, impl Write>,
) -> Result<(), Ended> {
    let (bytes, routes) = (largest(quant, spec), scattering(spec));
    let tensors = spec.tensors(0);
    let weights = BlockWeights::new(backend, spec, DTYPE, |name| {
        let tensor = tensors.iter().find(|tensor| tensor.name == name)?;
        match is_router(spec, tensor) {
            true => tensor_view(QuantType::None, tensor, &routes),
            false => tensor_view(quant, tensor, &bytes),
        }
    })
    .map_err(|failure| Ended::new(ExitReason::Failed, &failure))?;
    let prefix = steps.context - 1;
    let decode = steps.sessions.iter().map(|&sessions| TimedStep { sessions, tokens: 1, prefix });
    for step in decode.chain([TimedStep { sessions: 1, tokens: steps.prefill, prefix: 0 }]) {
        let TimedStep { sessions, tokens, prefix } = step;
        let name = match prefix {
            0 => format!("{kind} {quant} prefill {tokens}"),
            _ => format!("{kind} {quant} decode {} x {sessions}", prefix + 1),
        };
        let seconds = block_row(backend, spec, &weights, quant, step, name, table)?;
        if (sessions, tokens) == (1, 1) {
            let rate = 1.0 / (seconds * steps.blocks as f64);
            let name = format!("{} such blocks, one session", steps.blocks);
            writeln!(table.out, "{name:60} {rate:10.1} steps/s")?;
        }
    }
    Ok(())
}

/// The row of a step; its seconds.
fn block_row<B: DeviceBackend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    quant: QuantType,
    step: TimedStep,
    name: String,
    table: &mut Table<'_, impl Write>,
) -> Result<f64, Ended> {
    let TimedStep { sessions, tokens, prefix } = step;
    let layout = page_layout(spec, DTYPE);
    let used = (prefix + tokens).div_ceil(PAGE_TOKENS);
    let page = |index: usize| PageId(u32::try_from(index).unwrap_or(u32::MAX));
    let tables: Vec<Vec<PageId>> =
        (0..sessions).map(|s| (s * used..(s + 1) * used).map(page).collect()).collect();
    let rows: Vec<_> = tables.iter().map(|pages| StepRow::new(tokens, prefix, pages)).collect();
    let cached = sessions * used * layout.page_bytes();
    let count = sessions * tokens;
    let values: Vec<f32> =
        (0..count * spec.hidden).map(|i| (i as f32 * 12.9898).sin() * 0.01).collect();
    let mut hidden = backend.buffer(values.len());
    backend.upload(&values, &mut hidden)?;
    let mut work = Workspace::new(backend);
    let mut memory = B::PageMemory::default();
    let mut pages = backend.pages_in(&mut memory, layout, cached)?;
    let seconds = table.time(&mut |count| {
        for _ in 0..count {
            forward(backend, spec, weights, &mut work, &rows, &mut hidden, &mut pages)?;
        }
        backend.download(&hidden, &mut [0.0])
    })?;
    let (stored, weights) = cost_of(spec, quant, count);
    let pairs: usize = (prefix + 1..=prefix + tokens).sum::<usize>() * sessions;
    let operations = 2 * weights + 4 * pairs * spec.heads * HEAD_DIM;
    let work = Work { bytes: stored + cached, operations };
    table.print(&Row { name, work }, seconds)?;
    Ok(seconds)
}

/// Bytes of the weights that `tokens` tokens read, and how many weights they are multiplied with.
/// Of experts those that are chosen: all tokens choosing as by lot, a share of them.
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

/// The matrix of a router that sends tokens to all experts: numbers without a pattern, bfloat16 of
/// 1 to 2 in size.
fn scattering(spec: &BlockSpec) -> Vec<u8> {
    let Mlp::Experts(mlp) = &spec.mlp else {
        return Vec::new();
    };
    let mut state = 1u32;
    (0..mlp.router.outputs * mlp.router.inputs)
        .flat_map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            [(state >> 16) as u8 & 0x7f, 0x3f | (state >> 24) as u8 & 0x80]
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

/// Bytes for the largest tensor of a block; every tensor begins with them. All alike: numbers of
/// about 0.01.
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
