//! The operations of a transformer block: one file per operation with its arguments, their checks and the plain CPU
//! reference that defines it. The fast CPU paths live in `cpu::simd` and are tested against the references here.
//!
//! Activations are f32 and row-major; `F` is the backend's float memory ([`crate::Backend::Floats`]; `[f32]` on the CPU).

pub mod add;
pub mod attention;
pub mod attention_grad;
pub mod convert;
pub mod gelu;
pub mod gradient;
pub mod kv_append;
pub mod layernorm;
pub mod linear;
pub mod lora;
pub mod qkv;
pub mod rmsnorm;
pub mod rope;
pub mod route;
pub mod silu_mul;
#[cfg(test)]
mod tests;

pub use add::{Add, PromptAdd};
pub use attention::{Alibi, Attention};
pub use attention_grad::AttentionGrad;
pub use gelu::{Gelu, GeluKind};
pub use gradient::{GeluGrad, LinearGrad, NormGrad, SiluMulGrad};
pub use kv_append::KvAppend;
pub use layernorm::Layernorm;
pub use linear::Linear;
pub use lora::{Lora, LoraGrad, LoraPart};
pub use qkv::{JoinQkv, SplitQkv};
pub use rmsnorm::Rmsnorm;
pub use rope::{Rope, RopeTable};
pub use route::{GateDot, Gather, Route, RouteGrad, ScatterAdd};
pub use silu_mul::SiluMul;

use shared::ids::PageId;

/// Why an operation refused its arguments. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// A buffer is shorter than its shape.
    #[error("{op}: {what} has {has} elements, its shape needs {needs}")]
    Short {
        /// The operation.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Its elements.
        has: usize,
        /// The elements that the shape needs.
        needs: usize,
    },
    /// Sizes that do not go together.
    #[error("{op}: {what}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What does not fit.
        what: &'static str,
    },
    /// A page id outside the pool.
    #[error("page {} does not exist, the pool has {pages}", page.0)]
    NoSuchPage {
        /// The id.
        page: PageId,
        /// Pages of the pool.
        pages: usize,
    },
    /// A row has more positions than pages for them.
    #[error("{pages} pages do not hold {tokens} tokens")]
    ShortPageTable {
        /// Positions of the row, prefix and new tokens.
        tokens: usize,
        /// Pages in its table.
        pages: usize,
    },
    /// More tokens than fit.
    #[error("{tokens} tokens, at most {limit} fit")]
    TooManyTokens {
        /// Tokens asked for.
        tokens: usize,
        /// The limit.
        limit: usize,
    },
}

/// Refuses a buffer of less than `rows * width` elements.
pub(crate) fn check_len(
    op: &'static str,
    what: &'static str,
    has: usize,
    rows: usize,
    width: usize,
) -> Result<(), OpError> {
    match rows.checked_mul(width) {
        Some(needs) if has >= needs => Ok(()),
        needs => Err(OpError::Short {
            op,
            what,
            has,
            needs: needs.unwrap_or(usize::MAX),
        }),
    }
}
