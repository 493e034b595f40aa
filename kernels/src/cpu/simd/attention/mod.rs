//! Attention over KV pages, forward and backward: the choice of kernel and the cut into pieces.
//!
//! | Pages | Machine | Kernel |
//! | --- | --- | --- |
//! | bfloat16, heads a multiple of 32 up to 256 | AVX-512 BF16 | [`pairs`], [`pairs_grad`] |
//! | any | any | [`float`], [`float_grad`] |
//!
//! A piece of the forward pass is a tile of query tokens of one batch row and one kv head; a piece
//! of the gradient is one kv head of one batch row. What one query computes depends on its own
//! position alone, so neither tiles nor threads change a bit.

mod float;
mod float_grad;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod pairs_grad;
mod shapes;
mod tiles;

use std::cell::RefCell;

#[cfg(target_arch = "x86_64")]
use shared::dtype::DType;

pub(super) use shapes::QueryTile;
use shapes::{Backward, Forward, Outputs};

use super::vector::Plain;
use super::{Isa, Scratch, Vectors};
use crate::cpu::pool::{Disjoint, ThreadPool};
#[cfg(target_arch = "x86_64")]
use crate::kv::PageLayout;
use crate::kv::{KvPages, StepRow};
use crate::ops::{Attention, AttentionGrad};
use crate::tuning;

/// Compiles the unsafe `$body::<VECTOR, FMA>(args)` once per instruction set and calls the one for `$isa`.
macro_rules! per_vector {
    ($isa:expr, $body:ident($($name:ident: $type:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m256, __m512};
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512($($name: $type),*) {
                // SAFETY: the function has the instructions.
                unsafe { $body::<__m512, true>($($name),*) }
            }
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($name: $type),*) {
                // SAFETY: as above.
                unsafe { $body::<__m256, true>($($name),*) }
            }
            match $isa.vectors() {
                // SAFETY: `Isa` values come from `Isa::available`, which saw these features.
                Vectors::Avx512 => unsafe { avx512($($name),*) },
                // SAFETY: as above.
                Vectors::Avx2 => unsafe { avx2($($name),*) },
                // SAFETY: plain code.
                Vectors::Plain => unsafe { $body::<Plain, false>($($name),*) },
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            fn neon($($name: $type),*) {
                // SAFETY: every 64-bit ARM has NEON.
                unsafe { $body::<crate::cpu::simd::neon::Neon, true>($($name),*) }
            }
            fn plain($($name: $type),*) {
                // SAFETY: plain code.
                unsafe { $body::<Plain, true>($($name),*) }
            }
            match $isa.vectors() {
                Vectors::Neon => neon($($name),*),
                Vectors::Plain => plain($($name),*),
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        match $isa.vectors() {
            // SAFETY: plain code.
            Vectors::Plain => unsafe { $body::<Plain, false>($($name),*) },
        }
    }};
}

/// Scratch memory of a thread.
#[derive(Default)]
struct AttentionScratch {
    float: float::FloatScratch,
    float_grad: float_grad::FloatGradScratch,
    #[cfg(target_arch = "x86_64")]
    pairs: pairs::PairScratch,
    #[cfg(target_arch = "x86_64")]
    pairs_grad: pairs_grad::PairGradScratch,
}

thread_local! {
    static LOCAL: RefCell<AttentionScratch> = RefCell::default();
}

/// Whether the kernels of bfloat16 pairs take these pages.
#[cfg(target_arch = "x86_64")]
fn has_pairs(isa: Isa, layout: PageLayout) -> bool {
    isa.has_pairs() && layout.dtype == DType::Bf16 && pairs::takes(layout.head_dim)
}

/// Attention of new tokens over the pages of their rows.
pub(in crate::cpu) fn attention(
    isa: Isa,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    args: Attention<'_, [f32], KvPages<'_>>,
) {
    let layout = args.pages.layout();
    let tiles = &mut scratch.tiles;
    let multiplications = cut(args.rows, args.group, tiles)
        .saturating_mul(2 * layout.head_dim * layout.kv_heads * args.group);
    let forward = Forward {
        q: args.q,
        pages: args.pages,
        rows: args.rows,
        group: args.group,
        divisor: args.divisor,
        alibi: args.alibi,
        window: args.window,
    };
    let out = Disjoint::new(args.out);
    let logsum = args.logsum.map(Disjoint::new);
    #[cfg(target_arch = "x86_64")]
    let has_pairs = has_pairs(isa, layout);
    let piece = |index: usize| {
        let (tile, head) = (tiles[index / layout.kv_heads], index % layout.kv_heads);
        LOCAL.with_borrow_mut(|local| {
            let (args, out) = (&forward, Outputs { out: &out, logsum: logsum.as_ref() });
            #[cfg(target_arch = "x86_64")]
            if has_pairs {
                // SAFETY: `Isa` values come from `Isa::available`, and `has_pairs` saw the pages.
                unsafe { pairs::attend(args, tile, head, &mut local.pairs, out) };
                return;
            }
            let local = &mut local.float;
            use float::attend;
            per_vector!(isa, attend(args: &Forward<'_>, tile: QueryTile, head: usize, local: &mut float::FloatScratch, out: Outputs<'_, '_>))
        });
    };
    let pieces = tiles.len() * layout.kv_heads;
    if tuning::attention_is_parallel(multiplications) {
        pool.run(pieces, piece)
    } else {
        (0..pieces).for_each(piece)
    }
}

/// Cuts the rows into tiles; returns the number of (query, key) pairs.
fn cut(rows: &[StepRow<'_>], group: usize, tiles: &mut Vec<QueryTile>) -> usize {
    tiles.clear();
    let (mut index, mut pairs) = (0, 0usize);
    let most = tuning::attention_tokens(group);
    for (row, step) in rows.iter().enumerate() {
        for first in (0..step.tokens).step_by(most) {
            let tokens = most.min(step.tokens - first);
            tiles.push(QueryTile { row, first, tokens, index: index + first });
            pairs = pairs.saturating_add(tokens.saturating_mul(step.prefix + first + tokens));
        }
        index += step.tokens;
    }
    pairs
}

/// Gradient of attention; a piece is one kv head of one row.
pub(in crate::cpu) fn attention_grad(
    isa: Isa,
    pool: &mut ThreadPool,
    args: AttentionGrad<'_, [f32], KvPages<'_>>,
) {
    let kv_heads = args.pages.layout().kv_heads;
    let backward = Backward {
        q: args.q,
        grad: args.grad,
        pages: args.pages,
        rows: args.rows,
        starts: args.starts,
        group: args.group,
        divisor: args.divisor,
        alibi: args.alibi,
        window: args.window,
        q_grad: Disjoint::new(args.q_grad),
        k_grad: Disjoint::new(args.k_grad),
        v_grad: Disjoint::new(args.v_grad),
    };
    #[cfg(target_arch = "x86_64")]
    let has_pairs = has_pairs(isa, args.pages.layout());
    pool.run(args.rows.len() * kv_heads, |index| {
        let (row, head) = (index / kv_heads, index % kv_heads);
        LOCAL.with_borrow_mut(|local| {
            let args = &backward;
            #[cfg(target_arch = "x86_64")]
            if has_pairs {
                // SAFETY: `Isa` values come from `Isa::available`, and `has_pairs` saw the pages.
                unsafe { pairs_grad::attend(args, row, head, &mut local.pairs_grad) };
                return;
            }
            let local = &mut local.float_grad;
            use float_grad::attend;
            per_vector!(isa, attend(args: &Backward<'_>, row: usize, head: usize, local: &mut float_grad::FloatGradScratch))
        });
    });
}
