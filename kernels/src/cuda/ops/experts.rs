//! Launches `experts.cu`, `experts_gemv.cu` and `experts_gemm.cu`. The host takes no part in a
//! mixture of experts.

use shared::config::QuantType;
use shared::dtype::DType;

use super::linear::by_format;
use super::lora::{AdaptedRows, AdapterOperands};
use super::{by_dtype, convert, elementwise, exchange};
use crate::cuda::adapters::OfRows;
use crate::cuda::gpu::ctas;
use crate::cuda::{Adapters, Address, Cuda, Experts, Floats, Gpu, Launch, Matrix, Params};
use crate::ops::experts::{DOWN, Expert, ExpertSizes};
use crate::ops::lora::AdapterSizes;
use crate::ops::{ExpertAdapters, MatrixShape, Mixture, OpError, RankInputs, Route};
use crate::sizes;
use crate::tuning;

/// Tokens that are routed where they are grouped; more are routed before, each by its own warp.
const ROUTED_TOGETHER: usize = 32;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    mut args: Mixture<'_, Floats, Experts<G>, Adapters<G>>,
) -> Result<(), OpError> {
    let sizes = args.experts.sizes();
    args.check(sizes)?;
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, args.tokens, args.chosen, found)?;
    }
    let Some(like) = args.experts.like().filter(|_| args.tokens > 0) else {
        return Ok(());
    };
    let plan =
        ExpertPlan::new(args.experts, like, args.tokens, args.chosen, args.workspace.lists, true);
    // Ranks of a group on different devices may have other bits: the logits of rank 0 decide.
    exchange::broadcast(cuda, args.logits, args.tokens * sizes.experts)?;
    let group = GroupedTokens {
        logits: &mut *args.logits,
        of_tokens: args.adapters.as_ref().map(|a| (a.of_tokens, a.count)),
        round: args.round,
    };
    group.launch(cuda, &plan)?;
    let (from, workspace, round) = (ExpertSource::of_tokens(args.x), args.workspace, args.round);
    let outs = [&mut *workspace.gate, &mut *workspace.up];
    plan.product(cuda, from, outs.map(|out| out.address()), 0)?;
    let adapters = &mut args.adapters;
    plan.adapt(cuda, adapters, from, workspace.gate, 0, round)?;
    plan.adapt(cuda, adapters, from, workspace.up, 1, round)?;
    let names = ["silu_mul_f32", "silu_mul_bf16", "silu_mul_f16"];
    let len = plan.pairs() * sizes.middle;
    let params = Params::new().write(workspace.gate).read(workspace.up).wide(len);
    // SAFETY: `check` has made sure that both hold the middle of all pairs.
    unsafe { elementwise(cuda, by_dtype(names, args.round), len, params)? };
    let from = ExpertSource::of_pairs(workspace.gate);
    plan.product(cuda, from, [workspace.given.address()], 2)?;
    exchange::all_reduce(cuda, &mut [&mut *workspace.given], plan.pairs() * sizes.hidden)?;
    plan.adapt(cuda, adapters, from, workspace.given, 2, round)?;
    let names = ["experts_combine_f32", "experts_combine_bf16", "experts_combine_f16"];
    let combine = Launch {
        kernel: by_dtype(names, args.round),
        grid: [ctas(plan.tokens), ctas(sizes.hidden.div_ceil(1024)), 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: plan.lists(Params::new()).read(workspace.given).write(args.out).count(sizes.hidden),
    };
    // SAFETY: `check` has made sure of the output, and the lists name pairs that `given` holds.
    unsafe { cuda.launch(combine) }
}

/// Sizes and number of adapters.
pub(super) fn found<G: Gpu>(table: &Adapters<G>) -> Result<(AdapterSizes, usize), OpError> {
    Ok((table.sizes(), table.count()))
}

/// What is grouped: the weights of the experts of each token take the place of the logits, and the
/// lists are made.
pub(super) struct GroupedTokens<'a> {
    pub(super) logits: &'a mut Floats,
    /// Which adapter each token goes through, and how many an expert has.
    pub(super) of_tokens: Option<(&'a [Option<u32>], usize)>,
    pub(super) round: DType,
}

impl GroupedTokens<'_> {
    pub(super) fn launch<G: Gpu>(
        self,
        cuda: &mut Cuda<G>,
        plan: &ExpertPlan<'_, G>,
    ) -> Result<(), OpError> {
        let is_routed = plan.tokens > ROUTED_TOGETHER;
        if is_routed {
            let route = Route {
                logits: &mut *self.logits,
                tokens: plan.tokens,
                experts: plan.sizes.experts,
                chosen: plan.chosen,
                round: self.round,
            };
            super::route::launch(cuda, route)?;
        }
        let (token_adapter, adapters) = match self.of_tokens {
            Some((of_tokens, count)) => {
                (cuda.adapters_of(&of_tokens[..plan.tokens])?.numbers, count)
            }
            None => (Address(0), 0),
        };
        // Of a recorded step the number of tokens lies in fixed memory.
        let batch = cuda.fixed().map_or(Address(0), |fixed| fixed.batch());
        let names = ["experts_group_f32", "experts_group_bf16", "experts_group_f16"];
        let launch = Launch {
            kernel: by_dtype(names, self.round),
            grid: [1, 1, 1],
            cta: [ctas(sizes::experts::GROUP_THREADS), 1, 1],
            shared_bytes: ctas(sizes::experts::GROUP_SHARED_PER_START * (plan.sizes.experts + 1)),
            params: Params::new()
                .write(self.logits)
                .address(plan.lists)
                .address(batch)
                .address(token_adapter)
                .count(plan.tokens)
                .count(plan.chosen)
                .count(plan.sizes.experts)
                .count(adapters)
                .count(plan.tile_rows)
                .count(usize::from(is_routed)),
        };
        // SAFETY: `check` has made sure of the logits, and that the lists hold all pairs.
        unsafe { cuda.launch(launch) }
    }
}

/// The lists of `experts.cuh` that are used elsewhere, by the number of those before them.
const PAIR_TOKEN: usize = 0;
const PAIR_ADAPTER: usize = 3;

/// What products of experts are computed from, or their gradients.
#[derive(Clone, Copy)]
pub(super) struct ExpertSource<'a> {
    pub(super) x: &'a Floats,
    /// Whether the rows of `x` are those of tokens, which all pairs of a token share; else every
    /// pair has its own.
    pub(super) by_token: bool,
}

impl<'a> ExpertSource<'a> {
    pub(super) fn of_tokens(x: &'a Floats) -> ExpertSource<'a> {
        ExpertSource { x, by_token: true }
    }

    pub(super) fn of_pairs(x: &'a Floats) -> ExpertSource<'a> {
        ExpertSource { x, by_token: false }
    }
}

/// What all products of a step share.
pub(super) struct ExpertPlan<'a, G: Gpu> {
    /// One that all others are like.
    like: &'a Expert<Matrix<G>>,
    pub(super) sizes: ExpertSizes,
    pub(super) tokens: usize,
    pub(super) chosen: usize,
    /// Most rows of a tile, and most tiles.
    pub(super) tile_rows: usize,
    pub(super) tiles: usize,
    /// Where the addresses of the matrices lie.
    pub(super) table: Address,
    lists: Address,
}

impl<'a, G: Gpu> ExpertPlan<'a, G> {
    /// The plan of a step of so many tokens and experts of each, with its lists in `lists`. Without
    /// `has_gemm`, tiles are those of the GEMV kernels.
    pub(super) fn new(
        experts: &Experts<G>,
        like: &'a Expert<Matrix<G>>,
        tokens: usize,
        chosen: usize,
        lists: &Floats,
        has_gemm: bool,
    ) -> ExpertPlan<'a, G> {
        let sizes = experts.sizes();
        let (gemv, gemm) = tuning::CUDA_EXPERT_ROWS;
        let uses_gemv = tuning::cuda_experts_use_gemv(tokens * chosen, sizes.experts) || !has_gemm;
        let tile_rows = if uses_gemv { gemv } else { gemm };
        ExpertPlan {
            like,
            sizes,
            tokens,
            chosen,
            tile_rows,
            tiles: tuning::cuda_expert_tiles(tokens, chosen, sizes.experts, tile_rows),
            table: experts.table().address(),
            lists: lists.address(),
        }
    }

    /// Matrix `which` of an expert that all others are like: 0 gate, 1 up, 2 down.
    pub(super) fn like(&self, which: usize) -> &'a Matrix<G> {
        [&self.like.gate, &self.like.up, &self.like.down][which.min(2)]
    }

    /// Outputs and inputs of matrix `which`: 0 gate, 1 up, 2 down.
    pub(super) fn sides(&self, which: usize) -> (usize, usize) {
        match which {
            2 => (self.sizes.hidden, self.sizes.middle),
            _ => (self.sizes.middle, self.sizes.hidden),
        }
    }

    pub(super) fn pairs(&self) -> usize {
        self.tokens * self.chosen
    }

    /// The parameters that say how to read the lists.
    pub(super) fn lists(&self, params: Params) -> Params {
        params.address(self.lists).count(self.tokens).count(self.chosen).count(self.sizes.experts)
    }

    /// Where the list behind `lists` others begins.
    fn list(&self, lists: usize) -> Address {
        let head = 2 + self.sizes.experts + 1;
        self.lists.offset(4 * (head + lists * self.pairs()))
    }

    /// Adds what adapters make of a source to its products with matrix `which` of each expert.
    pub(super) fn adapt(
        &self,
        cuda: &mut Cuda<G>,
        adapters: &mut Option<ExpertAdapters<'_, Floats, Adapters<G>>>,
        from: ExpertSource<'_>,
        out: &mut Floats,
        which: usize,
        round: DType,
    ) -> Result<(), OpError> {
        let Some(adapters) = adapters else {
            return Ok(());
        };
        let Some(table) = adapters.tables[which] else {
            return Ok(());
        };
        let rows = self.adapted(from.by_token);
        let operands = AdapterOperands { x: from.x, middle: &mut *adapters.middle, out };
        let inputs = if which == DOWN { RankInputs::Cut } else { RankInputs::Whole };
        // SAFETY: `check` has made sure of inputs, outputs and middle of all pairs, and the lists
        // name tokens that the source holds.
        unsafe { rows.add(cuda, table, operands, inputs, round) }
    }

    /// The pairs as rows of adapters, their input being of tokens or of pairs.
    pub(super) fn adapted(&self, by_token: bool) -> AdaptedRows {
        AdaptedRows {
            own: OfRows { numbers: self.list(PAIR_ADAPTER), there: self.lists },
            sources: match by_token {
                true => self.list(PAIR_TOKEN),
                false => Address(0),
            },
            count: self.pairs(),
        }
    }

    /// A source times the matrices of its experts from `which` on, one per output: 0 gate, 1 up,
    /// 2 down.
    pub(super) fn product<const N: usize>(
        &self,
        cuda: &mut Cuda<G>,
        from: ExpertSource<'_>,
        outs: [Address; N],
        which: usize,
    ) -> Result<(), OpError> {
        let (ExpertSource { x, by_token }, (outputs, inputs)) = (from, self.sides(which));
        let params = self.lists(Params::new().address(self.table));
        let like = self.like(which);
        if !like.is_tiled() {
            return outs.into_iter().zip(which..).try_for_each(|(out, which)| {
                let launch = Launch {
                    kernel: by_format(GENERIC, like),
                    grid: [ctas(self.pairs()), ctas(outputs.div_ceil(sizes::experts::OUTPUTS)), 1],
                    cta: [256, 1, 1],
                    shared_bytes: 0,
                    params: params
                        .read(x)
                        .address(out)
                        .count(which)
                        .count(like.layout())
                        .count(usize::from(by_token))
                        .count(outputs)
                        .count(inputs),
                };
                // SAFETY: `check` has made sure of inputs and outputs of all pairs, and the table
                // names the matrices of all experts.
                unsafe { cuda.launch(launch) }
            });
        }
        let [first, second] = [0, 1].map(|i| outs.get(i).copied().unwrap_or(Address(0)));
        if self.tile_rows == tuning::CUDA_EXPERT_ROWS.1 {
            return self.gemm(cuda, from, [first, second], N, which);
        }
        let device = cuda.gpu().properties();
        // Two tiles of outputs whatever their number, for all experts together have many.
        let sizes = tuning::cuda_gemv(
            usize::MAX,
            self.tokens.min(self.tile_rows),
            like.quant() == QuantType::Nf4,
            device.multiprocessors as usize,
            device.shared_bytes as usize,
        );
        let launch = Launch {
            kernel: by_kind(GEMV, like)[usize::from(sizes.n > 1)],
            grid: [ctas(N * outputs.div_ceil(32)), ctas(self.tiles), 1],
            cta: [ctas(sizes::experts_gemv::CTA_THREADS), 1, 1],
            shared_bytes: ctas(sizes.shared_bytes),
            params: params
                .read(x)
                .address(first)
                .address(second)
                .count(which)
                .count(like.layout())
                .count(usize::from(by_token))
                .count(outputs)
                .count(inputs)
                .count(sizes.stages),
        };
        // SAFETY: as above; the matrices begin at multiples of 256 and their rows are whole blocks.
        unsafe { cuda.launch(launch) }
    }

    /// The same for so many products (the second output of one is nowhere) by `experts_gemm.cu`,
    /// after the rows of all pairs were rounded and put in order.
    fn gemm(
        &self,
        cuda: &mut Cuda<G>,
        from: ExpertSource<'_>,
        [first, second]: [Address; 2],
        products: usize,
        which: usize,
    ) -> Result<(), OpError> {
        let ExpertSource { x, by_token } = from;
        let ((outputs, inputs), like) = (self.sides(which), self.like(which));
        let is_f16 = like.dtype() == DType::F16;
        let len = self.pairs().saturating_mul(inputs);
        let rounded = cuda.scratch(len.saturating_mul(2))?;
        if by_token {
            let gather = Launch {
                kernel: ["experts_gather_bf16", "experts_gather_f16"][usize::from(is_f16)],
                grid: [ctas(self.pairs()), 1, 1],
                cta: [256, 1, 1],
                shared_bytes: 0,
                params: self.lists(Params::new()).read(x).address(rounded.address()).count(inputs),
            };
            // SAFETY: `rounded` holds the inputs of all pairs, and the lists name tokens that `x`
            // holds.
            unsafe { cuda.launch(gather)? };
        } else {
            let convert = ["convert_f32_bf16", "convert_f32_f16"][usize::from(is_f16)];
            convert::launch(cuda, convert, x.address(), rounded.address(), len)?;
        }
        let shared_bytes = match like.quant() {
            QuantType::None => sizes::experts_gemm::SHARED_PLAIN,
            QuantType::Int8 => sizes::experts_gemm::SHARED_INT8,
            QuantType::Nf4 => sizes::experts_gemm::SHARED_NF4,
        };
        let output_tiles = products * outputs.div_ceil(sizes::experts_gemm::TILE_OUTPUTS);
        let launch = Launch {
            kernel: by_kind(GEMM, like),
            grid: [ctas(self.tiles), ctas(output_tiles), 1],
            cta: [256, 1, 1],
            shared_bytes: ctas(shared_bytes),
            params: self
                .lists(Params::new().address(self.table))
                .address(rounded.address())
                .address(first)
                .address(second)
                .count(which)
                .count(like.layout())
                .count(outputs)
                .count(inputs),
        };
        // SAFETY: as in `product`; `rounded` holds the inputs of all pairs as 16-bit numbers.
        unsafe { cuda.launch(launch) }
    }
}

/// The variant for a format and a 16-bit dtype: `[plain, int8, nf4]` of `[bf16, f16]`.
fn by_kind<G: Gpu, T: Copy>(names: [[T; 2]; 3], matrix: &Matrix<G>) -> T {
    let names = match matrix.quant() {
        QuantType::None => names[0],
        QuantType::Int8 => names[1],
        QuantType::Nf4 => names[2],
    };
    names[usize::from(matrix.dtype() == DType::F16)]
}

const GENERIC: [[&str; 3]; 3] = [
    ["experts_generic_plain_f32", "experts_generic_plain_bf16", "experts_generic_plain_f16"],
    ["experts_generic_int8_f32", "experts_generic_int8_bf16", "experts_generic_int8_f16"],
    ["experts_generic_nf4_f32", "experts_generic_nf4_bf16", "experts_generic_nf4_f16"],
];

/// By format, dtype, and for up to 8 or up to 32 rows.
const GEMV: [[[&str; 2]; 2]; 3] = [
    [
        ["experts_gemv_plain_bf16_n1", "experts_gemv_plain_bf16_n4"],
        ["experts_gemv_plain_f16_n1", "experts_gemv_plain_f16_n4"],
    ],
    [
        ["experts_gemv_int8_bf16_n1", "experts_gemv_int8_bf16_n4"],
        ["experts_gemv_int8_f16_n1", "experts_gemv_int8_f16_n4"],
    ],
    [
        ["experts_gemv_nf4_bf16_n1", "experts_gemv_nf4_bf16_n4"],
        ["experts_gemv_nf4_f16_n1", "experts_gemv_nf4_f16_n4"],
    ],
];

const GEMM: [[&str; 2]; 3] = [
    ["experts_gemm_plain_bf16", "experts_gemm_plain_f16"],
    ["experts_gemm_int8_bf16", "experts_gemm_int8_f16"],
    ["experts_gemm_nf4_bf16", "experts_gemm_nf4_f16"],
];
