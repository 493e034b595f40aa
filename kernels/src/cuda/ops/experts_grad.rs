//! Launches `experts_grad.cu` and `experts_grad_any.cu`: the gradient of a mixture of experts without the host.

use shared::config::QuantType;
use shared::dtype::DType;

use super::experts::{Group, Plan, found};
use super::linear::by_format;
use crate::cuda::gpu::ctas;
use crate::cuda::{Adapters, Cuda, Experts, Floats, Gpu, Launch, Params};
use crate::ops::{ExpertAdapters, ExpertsGradRoom, MatrixShape, MixtureGrad, OpError, RouteGrad};
use crate::tuning;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: MixtureGrad<'_, Floats, Experts<G>, Adapters<G>>,
) -> Result<(), OpError> {
    let sizes = args.experts.sizes();
    args.check(sizes)?;
    let (tokens, chosen, round) = (args.tokens, args.chosen, args.round);
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, (tokens, chosen), found)?;
    }
    let Some(like) = args.experts.like().filter(|_| tokens > 0) else {
        return Ok(());
    };
    let ExpertsGradRoom {
        gate,
        up,
        grad,
        given: [given, part],
        weights,
        shares,
        lists,
    } = args.room;
    let is_tiled = |inputs| tuning::cuda_linear_is_tiled(like.gate.dtype(), inputs);
    let all_tiled = is_tiled(sizes.hidden) && is_tiled(sizes.middle);
    let plan = Plan::new(args.experts, &like.gate, (tokens, chosen), lists, all_tiled);
    cuda.copy(args.logits, weights, tokens * sizes.experts)?;
    let group = Group {
        logits: &mut *weights,
        of_tokens: args.adapters.as_ref().map(|a| (a.of_tokens, a.count)),
        round,
    };
    group.launch(cuda, &plan)?;
    let (x, mut adapters) = ((args.x, true), args.adapters);
    plan.product(cuda, x, [gate.address(), up.address()], 0)?;
    plan.adapt(cuda, &mut adapters, x, (&mut *gate, 0), round)?;
    plan.adapt(cuda, &mut adapters, x, (&mut *up, 1), round)?;
    plan.gradient(cuda, &mut adapters, (args.grad, true), (&mut *grad, 2))?;
    let middle = Launch {
        kernel: "experts_grad_middle",
        grid: [ctas(tokens), ctas(chosen), 1],
        cta: [256, 1, 1],
        shared_bytes: 32 * 4,
        params: plan
            .lists(Params::new())
            .write(gate)
            .write(up)
            .read(grad)
            .write(shares)
            .count(sizes.middle),
    };
    // SAFETY: `check` has made sure of the middle of all pairs and of the shares of all tokens; the lists name no other pairs.
    unsafe { cuda.launch(middle)? };
    plan.gradient(cuda, &mut adapters, (gate, false), (&mut *given, 0))?;
    plan.gradient(cuda, &mut adapters, (up, false), (&mut *part, 1))?;
    let combine = Launch {
        kernel: "experts_grad_combine",
        grid: [ctas(tokens), ctas(sizes.hidden.div_ceil(1024)), 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: plan
            .lists(Params::new())
            .read(given)
            .read(part)
            .write(args.out)
            .count(sizes.hidden),
    };
    // SAFETY: `check` has made sure of the output, and the lists name pairs that both hold.
    unsafe { cuda.launch(combine)? };
    let route = RouteGrad {
        logits: args.logits,
        grad: &*shares,
        tokens,
        experts: sizes.experts,
        chosen,
        round,
    };
    super::route::launch_grad(cuda, route)
}

impl<G: Gpu> Plan<'_, G> {
    /// Of `grad` (of tokens or of pairs), the gradient of the products with matrix `which` of each expert, that of the input of each pair, adapters
    /// included.
    fn gradient(
        &self,
        cuda: &mut Cuda<G>,
        adapters: &mut Option<ExpertAdapters<'_, Floats, Adapters<G>>>,
        (grad, by_token): (&Floats, bool),
        (out, which): (&mut Floats, usize),
    ) -> Result<(), OpError> {
        let (_, inputs) = self.sides(which);
        match tuning::cuda_linear_is_tiled(self.like.dtype(), inputs) {
            true => self.tiled_gradient(cuda, (grad, by_token), &mut *out, which)?,
            false => self.any_gradient(cuda, (grad, by_token), &mut *out, which)?,
        }
        let Some(adapters) = adapters else {
            return Ok(());
        };
        let Some(table) = adapters.tables[which] else {
            return Ok(());
        };
        let rows = self.adapted(by_token);
        // SAFETY: `check` has made sure of both gradients and the middle of all pairs, and the lists name tokens that `grad` holds.
        unsafe { rows.add_grad(cuda, table, (grad, out), adapters.middle) }
    }

    fn tiled_gradient(
        &self,
        cuda: &mut Cuda<G>,
        (grad, by_token): (&Floats, bool),
        out: &mut Floats,
        which: usize,
    ) -> Result<(), OpError> {
        let (outputs, inputs) = self.sides(which);
        let padded = outputs.next_multiple_of(STEP);
        let bytes = tuning::cuda_linear_grad_workspace(outputs, self.pairs());
        let rounded = cuda.scratch(bytes)?;
        let params = || self.lists(Params::new().address(self.table));
        let round = Launch {
            kernel: "experts_grad_round",
            grid: [ctas(self.pairs()), ctas(padded.div_ceil(2048)), 1],
            cta: [256, 1, 1],
            shared_bytes: 0,
            params: params()
                .read(grad)
                .address(rounded.address())
                .count(which)
                .count(usize::from(by_token))
                .count(usize::from(self.like.quant() == QuantType::Int8))
                .count(outputs)
                .count(inputs)
                .count(padded),
        };
        // SAFETY: `rounded` holds `padded` 16-bit numbers of all pairs, and the lists name rows that `grad` holds.
        unsafe { cuda.launch(round)? };
        let few = self.tile_rows == tuning::CUDA_EXPERT_ROWS.0;
        let (kernels, shared_bytes) = tiled_kernels(self.like.quant(), self.like.dtype(), few);
        let product = Launch {
            kernel: kernels[usize::from(few)],
            grid: [ctas(self.tiles), ctas(inputs.div_ceil(128)), 1],
            cta: [256, 1, 1],
            shared_bytes,
            params: params()
                .address(rounded.address())
                .write(out)
                .count(which)
                .count(outputs)
                .count(inputs)
                .count(padded),
        };
        // SAFETY: as above, and `out` holds the inputs of all pairs; the matrices begin at multiples of 256 and their rows are whole blocks of 64.
        unsafe { cuda.launch(product) }
    }

    fn any_gradient(
        &self,
        cuda: &mut Cuda<G>,
        (grad, by_token): (&Floats, bool),
        out: &mut Floats,
        which: usize,
    ) -> Result<(), OpError> {
        let (outputs, inputs) = self.sides(which);
        let launch = Launch {
            kernel: by_format(ANY, self.like),
            grid: [ctas(inputs.div_ceil(128)), ctas(self.tiles), 1],
            cta: [256, 1, 1],
            shared_bytes: (16 * 128 + 32 * 17) * 4,
            params: self
                .lists(Params::new().address(self.table))
                .read(grad)
                .write(out)
                .count(which)
                .count(usize::from(by_token))
                .count(outputs)
                .count(inputs),
        };
        // SAFETY: `check` has made sure that both gradients hold all pairs or tokens, the table names the matrices of all experts, and tiles have at
        // most 32 rows.
        unsafe { cuda.launch(launch) }
    }
}

/// Outputs that a step walks.
const STEP: usize = 32;

/// The kernels for tiles of many and of few rows, and the shared memory of the one that is used.
fn tiled_kernels(quant: QuantType, dtype: DType, few: bool) -> ([&'static str; 2], u32) {
    let (kernels, stage_bytes, made_bytes, stages) = match (quant, dtype) {
        (QuantType::None, DType::F16) => (
            ["experts_grad_many_plain_f16", "experts_grad_few_plain_f16"],
            8 << 10,
            16 << 10,
            8,
        ),
        (QuantType::None, _) => (
            [
                "experts_grad_many_plain_bf16",
                "experts_grad_few_plain_bf16",
            ],
            8 << 10,
            0,
            8,
        ),
        (QuantType::Int8, _) => (
            ["experts_grad_many_int8_bf16", "experts_grad_few_int8_bf16"],
            4 << 10,
            16 << 10,
            10,
        ),
        (QuantType::Nf4, _) => (
            ["experts_grad_many_nf4_bf16", "experts_grad_few_nf4_bf16"],
            2 << 10,
            (16 << 10) + (32 << 10) + 1024,
            10,
        ),
    };
    let (tile_rows, stages) = if few { (32, stages) } else { (128, 4) };
    (
        kernels,
        ctas(made_bytes + stages * (stage_bytes + tile_rows * STEP * 2)),
    )
}

const ANY: [[&str; 3]; 3] = [
    [
        "experts_grad_any_plain_f32",
        "experts_grad_any_plain_bf16",
        "experts_grad_any_plain_f16",
    ],
    [
        "experts_grad_any_int8_f32",
        "experts_grad_any_int8_bf16",
        "experts_grad_any_int8_f16",
    ],
    [
        "experts_grad_any_nf4_f32",
        "experts_grad_any_nf4_bf16",
        "experts_grad_any_nf4_f16",
    ],
];
