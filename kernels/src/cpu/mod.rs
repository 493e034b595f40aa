//! The CPU as a device: dispatch to the instruction set found at start, over a pool of threads.

mod experts;
mod group;
mod lora;
pub mod pool;
mod simd;

use std::ops::Range;

use crate::backend::Backend;
use crate::kv::{KvPages, total_tokens};
use crate::ops::experts as ops_experts;
use crate::ops::lora as ops_lora;
use crate::ops::{
    Adapt, AdaptGrad, Adapter, Add, AddNorm, Attention, AttentionGrad, Expert, Gated, Gather, Gelu,
    GeluGrad, JoinQkv, KvAppend, Layernorm, Linear, LinearGrad, Lora, LoraGrad, Mixture,
    MixtureGrad, NormGrad, OpError, Products, PromptAdd, Rmsnorm, Rope, RopeAppend, RopeTable,
    SiluMul, SiluMulGrad, SplitQkv, add, check_len, qkv, rope, route,
};
use crate::tensor::WeightView;
use group::CpuGroup;
use pool::ThreadPool;
use shared::shm::group::GroupMember;
pub use simd::Isa;

/// The CPU backend: threads and scratch memory. One caller at a time.
#[derive(Debug)]
pub struct Cpu {
    isa: Isa,
    pool: ThreadPool,
    scratch: simd::Scratch,
    /// What adapters add to a part of the rows.
    delta: Vec<f32>,
    /// Rows of the tokens that go to an expert.
    gathered: Vec<f32>,
    group: CpuGroup,
}

impl Cpu {
    /// A backend on `threads` threads, the caller included (1 to 256), with the best instruction
    /// set of this machine. Neither the number of threads nor what else runs changes any
    /// result.
    pub fn new(threads: usize) -> Cpu {
        Cpu::with_isa(threads, Isa::detect())
    }

    /// [`new`](Self::new); each helping thread calls `start` with its number, from 1, before it computes.
    pub fn started(threads: usize, start: impl Fn(usize) + Clone + Send + 'static) -> Cpu {
        Cpu { pool: ThreadPool::started(threads, start), ..Cpu::new(1) }
    }

    /// A backend with a chosen instruction set, if this machine can compute with it; else the best that it
    /// has.
    pub fn with_isa(threads: usize, isa: Isa) -> Cpu {
        let isa = if Isa::computable().contains(&isa) { isa } else { Isa::detect() };
        Cpu {
            isa,
            pool: ThreadPool::new(threads),
            scratch: simd::Scratch::default(),
            delta: Vec::new(),
            gathered: Vec::new(),
            group: CpuGroup::default(),
        }
    }

    /// Computes as a rank of a group from now on: it has its shards of all weights, and what the
    /// ranks share crosses through `member`. All ranks call the same operations with the same
    /// sizes in the same order.
    pub fn join(&mut self, member: GroupMember) {
        self.group.join(member);
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Adapters beside a matrix product, each over its part of the rows.
    ///
    /// # Errors
    /// When buffers are too short for the rows, or the parts do not go together;
    /// [`OpError::Group`] when an exchange fails.
    pub fn lora(&mut self, args: Lora<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        args.check()?;
        ops_lora::check_dtypes("lora", args.parts)?;
        let (pool, scratch) = (&mut self.pool, &mut self.scratch);
        lora::lora(self.isa, pool, scratch, &mut self.delta, &mut self.group, args)
    }

    /// Gradient of [`lora`](Self::lora).
    ///
    /// # Errors
    /// As there.
    pub fn lora_grad(&mut self, args: LoraGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        args.check()?;
        lora::lora_grad(self.isa, &mut self.pool, &mut self.scratch, &mut self.delta, args);
        Ok(())
    }

    /// Threads that compute, the caller included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl Backend for Cpu {
    type Floats = [f32];
    type Buffer = Vec<f32>;
    type Matrix<'w> = WeightView<'w>;
    type Experts<'w> = Vec<Expert<WeightView<'w>>>;
    type Adapters<'w> = Vec<Option<Adapter<WeightView<'w>>>>;
    type Pages<'k> = KvPages<'k>;

    fn matrix<'w>(&mut self, weight: WeightView<'w>) -> Result<WeightView<'w>, OpError> {
        Ok(weight)
    }

    fn experts<'w: 'w>(
        &mut self,
        experts: Vec<Expert<WeightView<'w>>>,
    ) -> Result<Vec<Expert<WeightView<'w>>>, OpError> {
        ops_experts::sizes_of(&experts).map(|_| experts)
    }

    fn adapters<'w: 'w>(
        &mut self,
        adapters: Vec<Option<Adapter<WeightView<'w>>>>,
    ) -> Result<Vec<Option<Adapter<WeightView<'w>>>>, OpError> {
        ops_lora::sizes_of(&adapters).map(|_| adapters)
    }

    fn buffer(&mut self, len: usize) -> Vec<f32> {
        vec![0.0; len]
    }

    fn grow(&mut self, buffer: &mut Vec<f32>, len: usize) {
        if buffer.len() < len {
            buffer.resize(len, 0.0);
        }
    }

    fn upload(&mut self, from: &[f32], to: &mut [f32]) -> Result<(), OpError> {
        check_len("upload", "to", to.len(), 1, from.len())?;
        to[..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn download(&mut self, from: &[f32], to: &mut [f32]) -> Result<(), OpError> {
        check_len("download", "from", from.len(), 1, to.len())?;
        to.copy_from_slice(&from[..to.len()]);
        Ok(())
    }

    fn part(values: &[f32], range: Range<usize>) -> Option<&[f32]> {
        values.get(range)
    }

    fn part_mut(values: &mut [f32], range: Range<usize>) -> Option<&mut [f32]> {
        values.get_mut(range)
    }

    fn copy(&mut self, from: &[f32], to: &mut [f32], len: usize) -> Result<(), OpError> {
        check_len("copy", "from", from.len(), 1, len)?;
        check_len("copy", "to", to.len(), 1, len)?;
        to[..len].copy_from_slice(&from[..len]);
        Ok(())
    }

    fn all_reduce(&mut self, parts: &mut [&mut [f32]], len: usize) -> Result<(), OpError> {
        self.group.all_reduce(parts, len)
    }

    fn broadcast(&mut self, values: &mut [f32], len: usize) -> Result<(), OpError> {
        self.group.broadcast(values, len)
    }

    fn rmsnorm(&mut self, args: Rmsnorm<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::rmsnorm(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn layernorm(&mut self, args: Layernorm<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::layernorm(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn linear(&mut self, args: Linear<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        args.check()?;
        simd::linear(self.isa, &mut self.pool, &mut self.scratch, args);
        Ok(())
    }

    fn products(&mut self, args: Products<'_, '_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        args.check()?;
        simd::products(self.isa, &mut self.pool, &mut self.scratch, args);
        Ok(())
    }

    fn gated(&mut self, mut args: Gated<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        args.check()?;
        let (x, rows) = (args.x, args.rows);
        self.products(Products { x, rows, parts: &mut args.parts })?;
        Backend::silu_mul(self, args.activation())
    }

    fn adapt(
        &mut self,
        args: Adapt<'_, [f32], Vec<Option<Adapter<WeightView<'_>>>>>,
    ) -> Result<(), OpError> {
        args.check(ops_lora::sizes_of(args.adapters)?)?;
        self.lora(Lora {
            x: args.x,
            parts: &ops_lora::parts_of(args.adapters, args.of_rows),
            middle: args.middle,
            out: args.out,
            rows: args.of_rows.len(),
            round: args.round,
            inputs: args.inputs,
        })
    }

    fn split_qkv(&mut self, args: SplitQkv<'_, [f32]>) -> Result<(), OpError> {
        qkv::reference(args)
    }

    fn rope_table(&mut self, args: RopeTable<'_, [f32]>) -> Result<(), OpError> {
        rope::reference_table(args)
    }

    fn rope(&mut self, args: Rope<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::rope(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn kv_append(&mut self, args: KvAppend<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
        args.check()?;
        simd::kv_append(self.isa, args);
        Ok(())
    }

    fn rope_append(&mut self, mut args: RopeAppend<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
        args.check()?;
        let layout = args.pages.layout();
        let tokens = total_tokens(args.rows);
        for (x, heads) in
            [(&mut *args.q, layout.kv_heads * args.group), (&mut *args.k, layout.kv_heads)]
        {
            self.rope(Rope {
                x,
                table: args.table,
                tokens,
                heads,
                head_dim: layout.head_dim,
                round: layout.dtype,
                inverse: false,
            })?;
        }
        self.kv_append(KvAppend {
            keys: &*args.k,
            values: args.v,
            rows: args.rows,
            pages: args.pages,
        })
    }

    fn attention(&mut self, args: Attention<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
        args.check()?;
        simd::attention(self.isa, &mut self.pool, &mut self.scratch, args);
        Ok(())
    }

    fn silu_mul(&mut self, args: SiluMul<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::silu_mul(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn gelu(&mut self, args: Gelu<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::gelu(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn mixture(
        &mut self,
        args: Mixture<'_, [f32], Vec<Expert<WeightView<'_>>>, Vec<Option<Adapter<WeightView<'_>>>>>,
    ) -> Result<(), OpError> {
        experts::mixture(self, args)
    }

    fn gather(&mut self, args: Gather<'_, [f32]>) -> Result<(), OpError> {
        route::reference_gather(args)
    }

    fn add(&mut self, args: Add<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::add(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn add_norm(&mut self, mut args: AddNorm<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        let (rows, width, round) = (args.rows, args.width, args.round);
        self.add(Add { x: &mut *args.x, y: args.y, len: rows * width, round })?;
        let (x, weight, out, eps) = (&*args.x, args.weight, args.out, args.eps);
        match args.bias {
            None => self.rmsnorm(Rmsnorm { x, weight, out, rows, width, eps, round }),
            Some(bias) => {
                self.layernorm(Layernorm { x, weight, bias, out, rows, width, eps, round })
            }
        }
    }

    fn prompt_add(&mut self, args: PromptAdd<'_, [f32]>) -> Result<(), OpError> {
        add::reference_prompt(args)
    }

    fn linear_grad(&mut self, args: LinearGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        args.check()?;
        simd::linear_grad(self.isa, &mut self.pool, &mut self.scratch, args);
        Ok(())
    }

    fn adapt_grad(
        &mut self,
        args: AdaptGrad<'_, [f32], Vec<Option<Adapter<WeightView<'_>>>>>,
    ) -> Result<(), OpError> {
        args.check(ops_lora::sizes_of(args.adapters)?)?;
        self.lora_grad(LoraGrad {
            grad: args.grad,
            parts: &ops_lora::parts_of(args.adapters, args.of_rows),
            middle: args.middle,
            out: args.out,
            rows: args.of_rows.len(),
        })
    }

    fn norm_grad(&mut self, args: NormGrad<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::norm_grad(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn attention_grad(
        &mut self,
        args: AttentionGrad<'_, [f32], KvPages<'_>>,
    ) -> Result<(), OpError> {
        args.check()?;
        simd::attention_grad(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn join_qkv(&mut self, args: JoinQkv<'_, [f32]>) -> Result<(), OpError> {
        qkv::reference_join(args)
    }

    fn silu_mul_grad(&mut self, args: SiluMulGrad<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::silu_mul_grad(self.isa, args);
        Ok(())
    }

    fn gelu_grad(&mut self, args: GeluGrad<'_, [f32]>) -> Result<(), OpError> {
        args.check()?;
        simd::gelu_grad(self.isa, &mut self.pool, args);
        Ok(())
    }

    fn mixture_grad(
        &mut self,
        args: MixtureGrad<
            '_,
            [f32],
            Vec<Expert<WeightView<'_>>>,
            Vec<Option<Adapter<WeightView<'_>>>>,
        >,
    ) -> Result<(), OpError> {
        experts::mixture_grad(self, args)
    }
}
