//! The operations of a transformer block: one file per operation with its arguments, their checks
//! and the plain CPU reference that defines it. The fast CPU paths live in `cpu::simd` and are
//! tested against the references here.
//!
//! Activations are f32 and row-major; `F` is the backend's float memory
//! ([`crate::Backend::Floats`]; `[f32]` on the CPU).

pub mod add;
pub mod attention;
pub mod attention_grad;
pub mod convert;
pub mod experts;
pub mod fused_ops;
pub mod gelu;
pub mod gradient;
pub mod kv_append;
pub mod layernorm;
pub mod linear;
pub mod lora;
pub mod mixture_grad;
pub mod qkv;
pub mod rmsnorm;
pub mod rope;
pub mod route;
pub mod silu_mul;
#[cfg(test)]
mod tests;

pub use add::{Add, PromptAdd};
pub use attention::{Alibi, Attention};
pub use attention_grad::{AttentionGrad, Known};
pub use experts::{Expert, ExpertAdapters, Mixture, MixtureWorkspace};
pub use fused_ops::{
    AddNorm, AppendAttention, Gated, NormedProducts, Product, Products, RopeAppend, SumPlace,
};
pub use gelu::{Gelu, GeluKind};
pub use gradient::{GeluGrad, LinearGrad, NormGrad, SiluMulGrad};
pub use kv_append::KvAppend;
pub use layernorm::Layernorm;
pub use linear::Linear;
pub use lora::{Adapt, AdaptGrad, Adapter, Lora, LoraGrad, LoraPart, RankInputs};
pub use mixture_grad::{MixtureGrad, MixtureGradWorkspace};
pub use qkv::{JoinQkv, SplitQkv};
pub use rmsnorm::Rmsnorm;
pub use rope::{Rope, RopeTable};
pub use route::{GateDot, Gather, Route, RouteGrad, ScatterAdd};
pub use silu_mul::SiluMul;

use shared::dtype::DType;

pub use crate::error::{DeviceFailure, GroupFailure, OpError};
use crate::kv::{self, KvPages, PageLayout, StepRow};
use crate::tensor::WeightView;

/// What checks must know of memory that holds elements, whatever device it belongs to.
pub trait Elements {
    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Elements for [f32] {
    fn len(&self) -> usize {
        self.len()
    }
}

/// What checks must know of a matrix, whatever device it belongs to.
pub trait MatrixShape {
    /// Stored dtype; that of the arithmetic when the matrix is quantized.
    fn dtype(&self) -> DType;

    /// Features that come out.
    fn outputs(&self) -> usize;

    /// Features that go in.
    fn inputs(&self) -> usize;
}

impl MatrixShape for WeightView<'_> {
    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn outputs(&self) -> usize {
        self.outputs()
    }

    fn inputs(&self) -> usize {
        self.inputs()
    }
}

/// What checks must know of KV pages, whatever device they belong to.
pub trait PagePool {
    /// Shape of a page.
    fn layout(&self) -> PageLayout;

    /// Number of pages.
    fn pages(&self) -> usize;

    /// Refuses rows that have too few pages, or name one that does not exist.
    ///
    /// # Errors
    /// [`OpError`] naming the first.
    fn check_rows(&self, rows: &[StepRow<'_>]) -> Result<(), OpError> {
        kv::check_rows(self.pages(), rows)
    }
}

impl PagePool for KvPages<'_> {
    fn layout(&self) -> PageLayout {
        self.layout()
    }

    fn pages(&self) -> usize {
        self.pages()
    }
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
        needs => Err(OpError::Short { op, what, has, needs: needs.unwrap_or(usize::MAX) }),
    }
}
