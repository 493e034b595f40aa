//! The seam between a block and a device: the operations that blocks use, over the device's own
//! memory.
//!
//! The ranks of a group share blocks. Their backends exchange in [`Backend::all_reduce`] and
//! [`Backend::broadcast`], and inside of [`Backend::adapt`], [`Backend::mixture`] and
//! [`Backend::mixture_grad`]: all ranks call the same operations with the same sizes in the same
//! order.

use std::ops::Range;

use crate::ops::fused_ops::pair;
use crate::ops::{
    Adapt, AdaptGrad, Adapter, Add, AddNorm, AppendAttention, Attention, AttentionGrad, Expert,
    Gated, Gather, Gelu, GeluGrad, JoinQkv, KvAppend, Layernorm, Linear, LinearGrad, Mixture,
    MixtureGrad, NormGrad, NormedProducts, OpError, Products, PromptAdd, Rmsnorm, Rope, RopeAppend,
    RopeTable, SiluMul, SiluMulGrad, SplitQkv, SumPlace,
};
use crate::tensor::WeightView;

/// A device that can run blocks. A method is here because a block calls it.
///
/// Operations are enqueued in order; [`download`](Backend::download) is where the host waits for
/// results.
pub trait Backend {
    /// f32 values in device memory, borrowed (`[f32]` on the CPU).
    type Floats: ?Sized;
    /// f32 values in device memory, owned.
    type Buffer: std::ops::DerefMut<Target = Self::Floats>;
    /// A weight matrix where the device reads it; a handle, cheap to clone.
    type Matrix<'w>: Clone;
    /// The experts of one block.
    type Experts<'w>;
    /// The adapters of one matrix.
    type Adapters<'w>;
    /// KV pages of one block.
    type Pages<'k>;

    /// The matrix where the device reads it. On the CPU that is where it lies.
    fn matrix<'w>(&mut self, weight: WeightView<'w>) -> Result<Self::Matrix<'w>, OpError>;
    /// The experts of a block, to be computed together.
    fn experts<'w>(
        &mut self,
        experts: Vec<Expert<Self::Matrix<'w>>>,
    ) -> Result<Self::Experts<'w>, OpError>;
    /// The adapters of a matrix by their numbers, nothing where one leaves it alone.
    fn adapters<'w>(
        &mut self,
        adapters: Vec<Option<Adapter<Self::Matrix<'w>>>>,
    ) -> Result<Self::Adapters<'w>, OpError>;
    /// A buffer of `len` elements of unspecified content.
    fn buffer(&mut self, len: usize) -> Self::Buffer;
    /// Makes `buffer` at least `len` elements long; never shrinks it. The content is unspecified
    /// after growth.
    fn grow(&mut self, buffer: &mut Self::Buffer, len: usize);
    /// Copies host values to the start of `to`.
    fn upload(&mut self, from: &[f32], to: &mut Self::Floats) -> Result<(), OpError>;
    /// Copies the first values of `from` to the host, after all operations before it.
    fn download(&mut self, from: &Self::Floats, to: &mut [f32]) -> Result<(), OpError>;

    /// Some of the values; `None` when they are not all there.
    fn part(values: &Self::Floats, range: Range<usize>) -> Option<&Self::Floats>;
    /// The same, to be written.
    fn part_mut(values: &mut Self::Floats, range: Range<usize>) -> Option<&mut Self::Floats>;
    /// Copies the first `len` values of `from` to the start of `to`.
    fn copy(
        &mut self,
        from: &Self::Floats,
        to: &mut Self::Floats,
        len: usize,
    ) -> Result<(), OpError>;

    /// Replaces the first `len` values of each of `parts` by their sums over the ranks of the group,
    /// added in the order of ranks; all parts cross at once. Nothing at all in a group of one.
    fn all_reduce(&mut self, parts: &mut [&mut Self::Floats], len: usize) -> Result<(), OpError>;
    /// Replaces the first `len` values by those of rank 0. Nothing at all in a group of one.
    fn broadcast(&mut self, values: &mut Self::Floats, len: usize) -> Result<(), OpError>;

    /// Root-mean-square norm.
    fn rmsnorm(&mut self, args: Rmsnorm<'_, Self::Floats>) -> Result<(), OpError>;
    /// Layer norm.
    fn layernorm(&mut self, args: Layernorm<'_, Self::Floats>) -> Result<(), OpError>;
    /// Matrix product.
    fn linear(&mut self, args: Linear<'_, Self::Floats, Self::Matrix<'_>>) -> Result<(), OpError>;
    /// Matrix products of one input.
    fn products(
        &mut self,
        args: Products<'_, '_, Self::Floats, Self::Matrix<'_>>,
    ) -> Result<(), OpError>;
    /// Products of a gated MLP, and its middle.
    fn gated(&mut self, args: Gated<'_, Self::Floats, Self::Matrix<'_>>) -> Result<(), OpError>;
    /// Adapters beside a matrix product, each over its rows.
    fn adapt(&mut self, args: Adapt<'_, Self::Floats, Self::Adapters<'_>>) -> Result<(), OpError>;
    /// Queries, keys and values out of a fused projection.
    fn split_qkv(&mut self, args: SplitQkv<'_, Self::Floats>) -> Result<(), OpError>;
    /// Angles of one step.
    fn rope_table(&mut self, args: RopeTable<'_, Self::Floats>) -> Result<(), OpError>;
    /// Rotation of queries or keys.
    fn rope(&mut self, args: Rope<'_, Self::Floats>) -> Result<(), OpError>;
    /// New keys and values into pages.
    fn kv_append(
        &mut self,
        args: KvAppend<'_, Self::Floats, Self::Pages<'_>>,
    ) -> Result<(), OpError>;
    /// Rotation of queries and keys, and new keys and values into pages.
    fn rope_append(
        &mut self,
        args: RopeAppend<'_, Self::Floats, Self::Pages<'_>>,
    ) -> Result<(), OpError>;
    /// Attention over pages.
    fn attention(
        &mut self,
        args: Attention<'_, Self::Floats, Self::Pages<'_>>,
    ) -> Result<(), OpError>;
    /// Sum, norm, and products of what comes out. Says where the sum is.
    fn normed_products(
        &mut self,
        args: NormedProducts<'_, '_, Self::Floats, Self::Matrix<'_>>,
    ) -> Result<SumPlace, OpError> {
        norm_then_multiply(self, args)
    }
    /// Rotation, append and attention of new tokens.
    fn append_attention(
        &mut self,
        args: AppendAttention<'_, Self::Floats, Self::Pages<'_>>,
    ) -> Result<(), OpError> {
        append_then_attend(self, args)
    }
    /// Middle of a gated MLP.
    fn silu_mul(&mut self, args: SiluMul<'_, Self::Floats>) -> Result<(), OpError>;
    /// Middle of a plain MLP.
    fn gelu(&mut self, args: Gelu<'_, Self::Floats>) -> Result<(), OpError>;
    /// All of a mixture of experts behind the logits of its router.
    fn mixture(
        &mut self,
        args: Mixture<'_, Self::Floats, Self::Experts<'_>, Self::Adapters<'_>>,
    ) -> Result<(), OpError>;
    /// Some rows.
    fn gather(&mut self, args: Gather<'_, Self::Floats>) -> Result<(), OpError>;
    /// Residual.
    fn add(&mut self, args: Add<'_, Self::Floats>) -> Result<(), OpError>;
    /// Residual and the norm behind it.
    fn add_norm(&mut self, args: AddNorm<'_, Self::Floats>) -> Result<(), OpError>;
    /// Deep prompt.
    fn prompt_add(&mut self, args: PromptAdd<'_, Self::Floats>) -> Result<(), OpError>;

    /// Gradient of a matrix product.
    fn linear_grad(
        &mut self,
        args: LinearGrad<'_, Self::Floats, Self::Matrix<'_>>,
    ) -> Result<(), OpError>;
    /// Gradient through adapters.
    fn adapt_grad(
        &mut self,
        args: AdaptGrad<'_, Self::Floats, Self::Adapters<'_>>,
    ) -> Result<(), OpError>;
    /// Gradient of a norm.
    fn norm_grad(&mut self, args: NormGrad<'_, Self::Floats>) -> Result<(), OpError>;
    /// Gradient of attention.
    fn attention_grad(
        &mut self,
        args: AttentionGrad<'_, Self::Floats, Self::Pages<'_>>,
    ) -> Result<(), OpError>;
    /// Gradients into the layout of a fused projection.
    fn join_qkv(&mut self, args: JoinQkv<'_, Self::Floats>) -> Result<(), OpError>;
    /// Gradient of the middle of a gated MLP.
    fn silu_mul_grad(&mut self, args: SiluMulGrad<'_, Self::Floats>) -> Result<(), OpError>;
    /// Gradient of the middle of a plain MLP.
    fn gelu_grad(&mut self, args: GeluGrad<'_, Self::Floats>) -> Result<(), OpError>;
    /// Gradient of a mixture of experts, to the logits of its router.
    fn mixture_grad(
        &mut self,
        args: MixtureGrad<'_, Self::Floats, Self::Experts<'_>, Self::Adapters<'_>>,
    ) -> Result<(), OpError>;
}

/// [`Backend::normed_products`] as the operations that it stands for.
pub(crate) fn norm_then_multiply<B: Backend + ?Sized>(
    backend: &mut B,
    mut args: NormedProducts<'_, '_, B::Floats, B::Matrix<'_>>,
) -> Result<SumPlace, OpError> {
    let AddNorm { x, y, weight, bias, out, rows, width, eps, round } = &mut args.norm;
    let (rows, width, eps, round) = (*rows, *width, *eps, *round);
    let (x, y, weight, bias, out) = (&mut **x, *y, *weight, *bias, &mut **out);
    backend.add_norm(AddNorm { x, y, weight, bias, out, rows, width, eps, round })?;
    let is_gated = args.is_gated;
    let (x, mut parts) = args.products();
    match is_gated {
        true => backend.gated(Gated { x, rows, parts: pair(parts)?, round })?,
        false => backend.products(Products { x, rows, parts: &mut parts })?,
    }
    Ok(SumPlace::X)
}

/// [`Backend::append_attention`] as the operations that it stands for.
pub(crate) fn append_then_attend<B: Backend + ?Sized>(
    backend: &mut B,
    mut args: AppendAttention<'_, B::Floats, B::Pages<'_>>,
) -> Result<(), OpError> {
    let (rows, group) = (args.rows, args.group);
    let (q, k, v, pages) = (&mut *args.q, &mut *args.k, args.v, &mut *args.pages);
    match args.table {
        Some(table) => {
            backend.rope_append(RopeAppend { q, k, v, table, rows, group, pages })?;
        }
        None => backend.kv_append(KvAppend { keys: &*k, values: v, rows, pages })?,
    }
    backend.attention(args.attention())
}
