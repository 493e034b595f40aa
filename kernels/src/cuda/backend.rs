//! [`Backend`] over a CUDA device: each operation is launched by its file in `ops/`.

use std::ops::Range;

use shared::config::QuantType;

use super::address::Floats;
use super::gpu::Gpu;
use super::memory::Buffer;
use super::{Adapters, Cuda, Experts, Matrix, Pages, ops};
use crate::backend::Backend;
use crate::ops::{
    Adapt, AdaptGrad, Adapter, Add, AddNorm, AppendAttention, Attention, AttentionGrad, Expert,
    Gated, Gather, Gelu, GeluGrad, JoinQkv, KvAppend, Layernorm, Linear, LinearGrad, Mixture,
    MixtureGrad, NormGrad, NormedProducts, OpError, Products, PromptAdd, Rmsnorm, Rope, RopeAppend,
    RopeTable, SiluMul, SiluMulGrad, SplitQkv, SumPlace,
};
use crate::tensor::WeightView;

impl<G: Gpu> Cuda<G> {
    /// Makes the bytes that `quant` stores of a matrix of numbers, in `to`.
    ///
    /// # Errors
    /// When the matrix is quantized already, `to` is too short, or the device fails.
    pub fn quantize(
        &mut self,
        from: &Matrix<G>,
        quant: QuantType,
        to: &mut Floats,
    ) -> Result<(), OpError> {
        ops::quantize::launch(self, from, quant, to)
    }
}

impl<G: Gpu> Backend for Cuda<G> {
    type Floats = Floats;
    type Buffer = Buffer<G>;
    type Matrix<'w> = Matrix<G>;
    type Experts<'w> = Experts<G>;
    type Adapters<'w> = Adapters<G>;
    type Pages<'k> = Pages<'k>;

    fn matrix<'w>(&mut self, weight: WeightView<'w>) -> Result<Matrix<G>, OpError> {
        Cuda::matrix(self, weight)
    }

    fn experts<'w: 'w>(&mut self, experts: Vec<Expert<Matrix<G>>>) -> Result<Experts<G>, OpError> {
        Cuda::experts(self, experts)
    }

    fn adapters<'w: 'w>(
        &mut self,
        adapters: Vec<Option<Adapter<Matrix<G>>>>,
    ) -> Result<Adapters<G>, OpError> {
        Cuda::adapters(self, adapters)
    }

    fn buffer(&mut self, len: usize) -> Buffer<G> {
        Cuda::buffer(self, len)
    }

    fn grow(&mut self, buffer: &mut Buffer<G>, len: usize) {
        if buffer.len() < len {
            // The old one goes back to the pool first: growth must not need both.
            *buffer = Cuda::buffer(self, 0);
            *buffer = Cuda::buffer(self, len);
        }
    }

    fn upload(&mut self, from: &[f32], to: &mut Floats) -> Result<(), OpError> {
        Cuda::upload(self, from, to)
    }

    fn download(&mut self, from: &Floats, to: &mut [f32]) -> Result<(), OpError> {
        Cuda::download(self, from, to)
    }

    fn part(values: &Floats, range: Range<usize>) -> Option<&Floats> {
        values.part(range)
    }

    fn part_mut(values: &mut Floats, range: Range<usize>) -> Option<&mut Floats> {
        values.part_mut(range)
    }

    fn copy(&mut self, from: &Floats, to: &mut Floats, len: usize) -> Result<(), OpError> {
        Cuda::copy(self, from, to, len)
    }

    fn all_reduce(&mut self, parts: &mut [&mut Floats], len: usize) -> Result<(), OpError> {
        ops::exchange::all_reduce(self, parts, len)
    }

    fn broadcast(&mut self, values: &mut Floats, len: usize) -> Result<(), OpError> {
        ops::exchange::broadcast(self, values, len)
    }

    fn rmsnorm(&mut self, args: Rmsnorm<'_, Floats>) -> Result<(), OpError> {
        ops::rmsnorm::launch(self, args)
    }

    fn layernorm(&mut self, args: Layernorm<'_, Floats>) -> Result<(), OpError> {
        ops::layernorm::launch(self, args)
    }

    fn linear(&mut self, args: Linear<'_, Floats, Matrix<G>>) -> Result<(), OpError> {
        ops::linear::launch(self, args)
    }

    fn products(&mut self, args: Products<'_, '_, Floats, Matrix<G>>) -> Result<(), OpError> {
        ops::linear::launch_products(self, args)
    }

    fn gated(&mut self, args: Gated<'_, Floats, Matrix<G>>) -> Result<(), OpError> {
        ops::linear::launch_gated(self, args)
    }

    fn adapt(&mut self, args: Adapt<'_, Floats, Adapters<G>>) -> Result<(), OpError> {
        ops::lora::launch(self, args)
    }

    fn split_qkv(&mut self, args: SplitQkv<'_, Floats>) -> Result<(), OpError> {
        ops::qkv::launch_split(self, args)
    }

    fn rope_table(&mut self, args: RopeTable<'_, Floats>) -> Result<(), OpError> {
        ops::rope::launch_table(self, args)
    }

    fn rope(&mut self, args: Rope<'_, Floats>) -> Result<(), OpError> {
        ops::rope::launch(self, args)
    }

    fn kv_append(&mut self, args: KvAppend<'_, Floats, Pages<'_>>) -> Result<(), OpError> {
        ops::kv_append::launch(self, args)
    }

    fn rope_append(&mut self, args: RopeAppend<'_, Floats, Pages<'_>>) -> Result<(), OpError> {
        ops::fused_launches::rope_append(self, args)
    }

    fn attention(&mut self, args: Attention<'_, Floats, Pages<'_>>) -> Result<(), OpError> {
        ops::attention::launch(self, args)
    }

    fn normed_products(
        &mut self,
        args: NormedProducts<'_, '_, Floats, Matrix<G>>,
    ) -> Result<SumPlace, OpError> {
        ops::linear::launch_normed(self, args)
    }

    fn append_attention(
        &mut self,
        args: AppendAttention<'_, Floats, Pages<'_>>,
    ) -> Result<(), OpError> {
        ops::attention::launch_append(self, args)
    }

    fn silu_mul(&mut self, args: SiluMul<'_, Floats>) -> Result<(), OpError> {
        ops::silu_mul::launch(self, args)
    }

    fn gelu(&mut self, args: Gelu<'_, Floats>) -> Result<(), OpError> {
        ops::gelu::launch(self, args)
    }

    fn mixture(
        &mut self,
        args: Mixture<'_, Floats, Experts<G>, Adapters<G>>,
    ) -> Result<(), OpError> {
        ops::experts::launch(self, args)
    }

    fn gather(&mut self, args: Gather<'_, Floats>) -> Result<(), OpError> {
        ops::route::launch_gather(self, args)
    }

    fn add(&mut self, args: Add<'_, Floats>) -> Result<(), OpError> {
        ops::add::launch(self, args)
    }

    fn add_norm(&mut self, args: AddNorm<'_, Floats>) -> Result<(), OpError> {
        ops::fused_launches::add_norm(self, args)
    }

    fn prompt_add(&mut self, args: PromptAdd<'_, Floats>) -> Result<(), OpError> {
        ops::add::launch_prompt(self, args)
    }

    fn linear_grad(&mut self, args: LinearGrad<'_, Floats, Matrix<G>>) -> Result<(), OpError> {
        ops::linear_grad::launch(self, args)
    }

    fn adapt_grad(&mut self, args: AdaptGrad<'_, Floats, Adapters<G>>) -> Result<(), OpError> {
        ops::lora::launch_grad(self, args)
    }

    fn norm_grad(&mut self, args: NormGrad<'_, Floats>) -> Result<(), OpError> {
        ops::norm_grad::launch(self, args)
    }

    fn attention_grad(
        &mut self,
        args: AttentionGrad<'_, Floats, Pages<'_>>,
    ) -> Result<(), OpError> {
        ops::attention_grad::launch(self, args)
    }

    fn join_qkv(&mut self, args: JoinQkv<'_, Floats>) -> Result<(), OpError> {
        ops::qkv::launch_join(self, args)
    }

    fn silu_mul_grad(&mut self, args: SiluMulGrad<'_, Floats>) -> Result<(), OpError> {
        ops::silu_mul::launch_grad(self, args)
    }

    fn gelu_grad(&mut self, args: GeluGrad<'_, Floats>) -> Result<(), OpError> {
        ops::gelu::launch_grad(self, args)
    }

    fn mixture_grad(
        &mut self,
        args: MixtureGrad<'_, Floats, Experts<G>, Adapters<G>>,
    ) -> Result<(), OpError> {
        ops::experts_grad::launch(self, args)
    }
}
