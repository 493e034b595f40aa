//! Fast paths of the CPU, one choice of instruction set per process.
//!
//! ```text
//! mod.rs                  instruction sets, scratch memory
//! gemm/ attention/        dispatch, kernels, shapes          elementwise gradient   kernels
//! transposed              gradient of products by bfloat16 pairs
//! outer transposed_panels tiles of outer products in f32, gradient of products by them
//! vector bf16 lanes line  vectors of each instruction set, plain lanes, cache lines
//! ```
//! Products are register tiles over one abstraction of vectors ([`gemm`]); other operations are
//! plain loops over fixed groups of lanes, compiled once per instruction set. Every function has
//! one reduction order per row (see the crate's header).
#![allow(unsafe_code)]

mod attention;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod elementwise;
mod gemm;
mod gradient;
mod lanes;
mod line;
#[cfg(target_arch = "x86_64")]
mod outer;
#[cfg(target_arch = "x86_64")]
mod transposed;
#[cfg(target_arch = "x86_64")]
mod transposed_panels;
mod vector;

pub(super) use attention::{attention, attention_grad};
pub(super) use elementwise::{add, gelu, kv_append, layernorm, rmsnorm, rope, silu_mul};
pub(super) use gemm::{linear, products};
pub(super) use gradient::{gelu_grad, linear_grad, norm_grad, silu_mul_grad};

/// Instruction sets with their own paths. Results of different sets may differ in the last bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with products of bfloat16 pairs.
    Avx512Bf16,
    /// AVX-512 F, BW, DQ, VL; bfloat16 weights are widened.
    Avx512,
    /// AVX2, FMA, F16C.
    Avx2,
    /// Nothing beyond what the target guarantees.
    Portable,
}

impl Isa {
    /// The best set of this machine.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// All sets of this machine, best first.
    pub fn available() -> &'static [Isa] {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx512 && is_x86_feature_detected!("avx512bf16") {
                return &[Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Portable];
            }
            if avx512 {
                return &[Isa::Avx512, Isa::Avx2, Isa::Portable];
            }
            if avx2 {
                return &[Isa::Avx2, Isa::Portable];
            }
        }
        &[Isa::Portable]
    }
}

/// Memory that operations reuse from call to call.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Rounded gradients of a product with a transposed matrix.
    #[cfg(target_arch = "x86_64")]
    grads: Vec<u8>,
    /// Packed inputs of a matrix product.
    panels: Vec<line::Line>,
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
            match $isa {
                // SAFETY: `Isa` values come from `Isa::available`, which saw these features.
                Isa::Avx512Bf16 | Isa::Avx512 => unsafe { avx512($($name),*) },
                // SAFETY: as above.
                Isa::Avx2 => unsafe { avx2($($name),*) },
                Isa::Portable => $body::<false>($($name),*),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        { let _ = $isa; $body::<{ cfg!(target_arch = "aarch64") }>($($name),*) }
    }};
}
use per_isa;
