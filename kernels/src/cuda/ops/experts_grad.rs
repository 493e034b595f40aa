//! Launches `experts_grad.cu` and `experts_grad_generic.cu`: the gradient of a mixture of experts
//! without the host.

use shared::config::QuantType;
use shared::dtype::DType;

use super::exchange;
use super::experts::{ExpertPlan, ExpertSource, GroupedTokens, found};
use super::linear::by_format;
use super::lora::AdapterOperands;
use crate::cuda::gpu::ctas;
use crate::cuda::{Adapters, Cuda, Experts, Floats, Gpu, Launch, Params};
use crate::ops::{
    ExpertAdapters, MatrixShape, MixtureGrad, MixtureGradWorkspace, OpError, RouteGrad,
};
use crate::sizes;
use crate::tuning;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: MixtureGrad<'_, Floats, Experts<G>, Adapters<G>>,
) -> Result<(), OpError> {
    let sizes = args.experts.sizes();
    args.check(sizes)?;
    let (tokens, chosen, round) = (args.tokens, args.chosen, args.round);
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, tokens, chosen, found)?;
    }
    let Some(like) = args.experts.like().filter(|_| tokens > 0) else {
        return Ok(());
    };
    let MixtureGradWorkspace { gate, up, grad, given: [given, part], weights, shares, lists } =
        args.workspace;
    let all_tiled = [&like.gate, &like.up, &like.down].iter().all(|m| m.is_tiled());
    let plan = ExpertPlan::new(args.experts, like, tokens, chosen, lists, all_tiled);
    // Of a group, the logits of rank 0 decide.
    exchange::broadcast(cuda, args.logits, tokens * sizes.experts)?;
    cuda.copy(args.logits, weights, tokens * sizes.experts)?;
    let group = GroupedTokens {
        logits: &mut *weights,
        of_tokens: args.adapters.as_ref().map(|a| (a.of_tokens, a.count)),
        round,
    };
    group.launch(cuda, &plan)?;
    let (from, mut adapters) = (ExpertSource::of_tokens(args.x), args.adapters);
    plan.product(cuda, from, [gate.address(), up.address()], 0)?;
    plan.adapt(cuda, &mut adapters, from, gate, 0, round)?;
    plan.adapt(cuda, &mut adapters, from, up, 1, round)?;
    plan.gradient(cuda, &mut adapters, ExpertSource::of_tokens(args.grad), grad, 2)?;
    plan.activation_gradient(cuda, [&mut *gate, &mut *up], grad, shares)?;
    plan.gradient(cuda, &mut adapters, ExpertSource::of_pairs(gate), given, 0)?;
    plan.gradient(cuda, &mut adapters, ExpertSource::of_pairs(up), part, 1)?;
    plan.combine_gradients(cuda, [given, part], args.out)?;
    exchange::all_reduce(cuda, &mut [&mut *shares], tokens * sizes.experts)?;
    let route = RouteGrad {
        logits: &mut *args.logits,
        grad: &*shares,
        tokens,
        experts: sizes.experts,
        chosen,
        round,
    };
    super::route::launch_grad(cuda, route)?;
    exchange::broadcast(cuda, args.logits, tokens * sizes.experts)
}

impl<G: Gpu> ExpertPlan<'_, G> {
    /// Replaces the gate and up projections of each pair by their gradients, and writes the
    /// gradients of the router's weights to `shares`. `grad` is that of the middle.
    fn activation_gradient(
        &self,
        cuda: &mut Cuda<G>,
        [gate, up]: [&mut Floats; 2],
        grad: &Floats,
        shares: &mut Floats,
    ) -> Result<(), OpError> {
        let middle = Launch {
            kernel: "experts_grad_middle",
            grid: [ctas(self.tokens), ctas(self.chosen), 1],
            cta: [256, 1, 1],
            shared_bytes: ctas(sizes::experts_grad::MIDDLE_SHARED),
            params: self
                .lists(Params::new())
                .write(gate)
                .write(up)
                .read(grad)
                .write(shares)
                .count(self.sizes.middle),
        };
        // SAFETY: `check` has made sure of the middle of all pairs and of the shares of all
        // tokens; the lists name no other pairs.
        unsafe { cuda.launch(middle) }
    }

    /// Adds up the input gradients of each token's pairs, those of the gate and of the up
    /// projection.
    fn combine_gradients(
        &self,
        cuda: &mut Cuda<G>,
        [gate, up]: [&Floats; 2],
        out: &mut Floats,
    ) -> Result<(), OpError> {
        let hidden = self.sizes.hidden;
        let combine = Launch {
            kernel: "experts_grad_combine",
            grid: [ctas(self.tokens), ctas(hidden.div_ceil(1024)), 1],
            cta: [256, 1, 1],
            shared_bytes: 0,
            params: self.lists(Params::new()).read(gate).read(up).write(out).count(hidden),
        };
        // SAFETY: `check` has made sure of the output, and the lists name pairs that both hold.
        unsafe { cuda.launch(combine) }
    }

    /// Of the gradient of the products with matrix `which` of each expert, that of the input of
    /// each pair, adapters included.
    fn gradient(
        &self,
        cuda: &mut Cuda<G>,
        adapters: &mut Option<ExpertAdapters<'_, Floats, Adapters<G>>>,
        from: ExpertSource<'_>,
        out: &mut Floats,
        which: usize,
    ) -> Result<(), OpError> {
        match self.like(which).is_tiled() {
            true => self.tiled_gradient(cuda, from, &mut *out, which)?,
            false => self.generic_gradient(cuda, from, &mut *out, which)?,
        }
        let Some(adapters) = adapters else {
            return Ok(());
        };
        let Some(table) = adapters.tables[which] else {
            return Ok(());
        };
        let rows = self.adapted(from.by_token);
        let operands = AdapterOperands { x: from.x, middle: &mut *adapters.middle, out };
        // SAFETY: `check` has made sure of both gradients and the middle of all pairs, and the
        // lists name tokens that the source holds.
        unsafe { rows.add_grad(cuda, table, operands) }
    }

    fn tiled_gradient(
        &self,
        cuda: &mut Cuda<G>,
        from: ExpertSource<'_>,
        out: &mut Floats,
        which: usize,
    ) -> Result<(), OpError> {
        let ExpertSource { x: grad, by_token } = from;
        let ((outputs, inputs), like) = (self.sides(which), self.like(which));
        let padded = outputs.next_multiple_of(sizes::experts_grad::STEP);
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
                .count(usize::from(like.quant() == QuantType::Int8))
                .count(outputs)
                .count(inputs)
                .count(padded),
        };
        // SAFETY: `rounded` holds `padded` 16-bit numbers of all pairs, and the lists name rows
        // that `grad` holds.
        unsafe { cuda.launch(round)? };
        let is_gemv = self.tile_rows == tuning::CUDA_EXPERT_ROWS.0;
        let (kernel, shared_bytes) = tiled_kernel(like.quant(), like.dtype(), is_gemv);
        let product = Launch {
            kernel,
            grid: [ctas(self.tiles), ctas(inputs.div_ceil(sizes::experts_grad::TILE_INPUTS)), 1],
            cta: [256, 1, 1],
            shared_bytes: ctas(shared_bytes),
            params: params()
                .address(rounded.address())
                .write(out)
                .count(which)
                .count(like.layout())
                .count(outputs)
                .count(inputs)
                .count(padded),
        };
        // SAFETY: as above, and `out` holds the inputs of all pairs; the matrices begin at
        // multiples of 256 and their rows are whole blocks of 64.
        unsafe { cuda.launch(product) }
    }

    fn generic_gradient(
        &self,
        cuda: &mut Cuda<G>,
        from: ExpertSource<'_>,
        out: &mut Floats,
        which: usize,
    ) -> Result<(), OpError> {
        let ExpertSource { x: grad, by_token } = from;
        let ((outputs, inputs), like) = (self.sides(which), self.like(which));
        let launch = Launch {
            kernel: by_format(GENERIC, like),
            grid: [
                ctas(inputs.div_ceil(sizes::experts_grad_generic::TILE_INPUTS)),
                ctas(self.tiles),
                1,
            ],
            cta: [256, 1, 1],
            shared_bytes: ctas(sizes::experts_grad_generic::SHARED),
            params: self
                .lists(Params::new().address(self.table))
                .read(grad)
                .write(out)
                .count(which)
                .count(like.layout())
                .count(usize::from(by_token))
                .count(outputs)
                .count(inputs),
        };
        // SAFETY: `check` has made sure that both gradients hold all pairs or tokens, the table
        // names the matrices of all experts, and tiles have no more rows than the kernel takes.
        unsafe { cuda.launch(launch) }
    }
}

/// The kernel of a format for tiles of few (GEMV) or many (GEMM) rows, and its shared memory.
fn tiled_kernel(quant: QuantType, dtype: DType, is_gemv: bool) -> (&'static str, usize) {
    use sizes::experts_grad as of;
    let kernels = match (quant, dtype) {
        (QuantType::None, DType::F16) => [
            ("experts_grad_gemm_plain_f16", of::GEMM_SHARED_PLAIN_F16),
            ("experts_grad_gemv_plain_f16", of::GEMV_SHARED_PLAIN_F16),
        ],
        (QuantType::None, _) => [
            ("experts_grad_gemm_plain_bf16", of::GEMM_SHARED_PLAIN_BF16),
            ("experts_grad_gemv_plain_bf16", of::GEMV_SHARED_PLAIN_BF16),
        ],
        (QuantType::Int8, _) => [
            ("experts_grad_gemm_int8_bf16", of::GEMM_SHARED_INT8),
            ("experts_grad_gemv_int8_bf16", of::GEMV_SHARED_INT8),
        ],
        (QuantType::Nf4, _) => [
            ("experts_grad_gemm_nf4_bf16", of::GEMM_SHARED_NF4),
            ("experts_grad_gemv_nf4_bf16", of::GEMV_SHARED_NF4),
        ],
    };
    kernels[usize::from(is_gemv)]
}

const GENERIC: [[&str; 3]; 3] = [
    [
        "experts_grad_generic_plain_f32",
        "experts_grad_generic_plain_bf16",
        "experts_grad_generic_plain_f16",
    ],
    [
        "experts_grad_generic_int8_f32",
        "experts_grad_generic_int8_bf16",
        "experts_grad_generic_int8_f16",
    ],
    [
        "experts_grad_generic_nf4_f32",
        "experts_grad_generic_nf4_bf16",
        "experts_grad_generic_nf4_f16",
    ],
];
