//! Fast paths of the CPU, one choice of instruction set per process.
//!
//! ```text
//! isa                     instruction sets
//! gemm/ attention/        dispatch, kernels, shapes          elementwise gradient   kernels
//! amx/                    tiles of matrices: their instructions, and a model of them
//! transposed_pairs/       gradient of products by bfloat16 pairs, in vectors and in AMX tiles
//! outer transposed_panels tiles of outer products in f32, gradient of products by them
//! vector neon bf16 lanes line   vectors of each instruction set, plain lanes, cache lines
//! ```
//! Products are register tiles over one abstraction of vectors ([`gemm`]); other operations are
//! plain loops over fixed groups of lanes, compiled once per instruction set. Every function has
//! one reduction order per row (see the crate's header).
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod elementwise;
mod gemm;
mod gradient;
mod isa;
mod lanes;
mod line;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod outer;
#[cfg(target_arch = "x86_64")]
mod transposed_pairs;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod transposed_panels;
mod vector;

pub(super) use attention::{attention, attention_grad};
pub(super) use elementwise::{add, gelu, kv_append, layernorm, rmsnorm, rope, silu_mul};
pub(super) use gemm::{linear, products};
pub(super) use gradient::{gelu_grad, linear_grad, norm_grad, silu_mul_grad};
pub use isa::Isa;
use isa::Vectors;

/// Memory that operations reuse from call to call.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Rounded gradients of a product with a transposed matrix.
    #[cfg(target_arch = "x86_64")]
    grads: Vec<u8>,
    /// Packed inputs of a matrix product.
    panels: Vec<line::CacheLine>,
    /// Tiles of the queries of an attention.
    tiles: Vec<attention::QueryTile>,
}

/// Compiles `$body::<FMA>(args)` once per instruction set and calls the one for `$isa`.
macro_rules! per_isa {
    ($isa:expr, $body:ident($($name:ident: $type:ty),* $(,)?) $(-> $ret:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512($($name: $type),*) $(-> $ret)? { $body::<true>($($name),*) }
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($name: $type),*) $(-> $ret)? { $body::<true>($($name),*) }
            match $isa.vectors() {
                // SAFETY: `Isa` values come from `Isa::available`, which saw these features.
                $crate::cpu::simd::Vectors::Avx512 => unsafe { avx512($($name),*) },
                // SAFETY: as above.
                $crate::cpu::simd::Vectors::Avx2 => unsafe { avx2($($name),*) },
                $crate::cpu::simd::Vectors::Plain => $body::<false>($($name),*),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        { let _ = $isa; $body::<{ cfg!(target_arch = "aarch64") }>($($name),*) }
    }};
}
use per_isa;
