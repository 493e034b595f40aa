//! The plain definitions of all operations as a backend.

use super::*;
use crate::ops::{
    Lora, LoraGrad, add, attention, attention_grad, experts, gelu, gradient, layernorm, linear,
    lora, mixture_grad, qkv, rmsnorm, route, silu_mul,
};

/// A backend that computes every operation by its definition, slowly.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

type Adapters<'w> = Vec<Option<Adapter<WeightView<'w>>>>;
type Experts<'w> = Vec<Expert<WeightView<'w>>>;

/// Operations that are one definition.
macro_rules! defined {
    ($($name:ident($args:ident) = $definition:path;)*) => {
        $(fn $name(&mut self, args: $args<'_, [f32]>) -> Result<(), OpError> {
            $definition(args)
        })*
    };
}

impl Backend for Reference {
    type Floats = [f32];
    type Buffer = Vec<f32>;
    type Matrix<'w> = WeightView<'w>;
    type Experts<'w> = Experts<'w>;
    type Adapters<'w> = Adapters<'w>;
    type Pages<'k> = KvPages<'k>;

    defined! {
        rmsnorm(Rmsnorm) = rmsnorm::reference;
        layernorm(Layernorm) = layernorm::reference;
        split_qkv(SplitQkv) = qkv::reference;
        rope_table(RopeTable) = rope::reference_table;
        rope(Rope) = rope::reference;
        silu_mul(SiluMul) = silu_mul::reference;
        gelu(Gelu) = gelu::reference;
        gather(Gather) = route::reference_gather;
        add(Add) = add::reference;
        prompt_add(PromptAdd) = add::reference_prompt;
        norm_grad(NormGrad) = gradient::reference_norm;
        join_qkv(JoinQkv) = qkv::reference_join;
        silu_mul_grad(SiluMulGrad) = gradient::reference_silu_mul;
        gelu_grad(GeluGrad) = gradient::reference_gelu;
    }

    fn matrix<'w>(&mut self, weight: WeightView<'w>) -> Result<WeightView<'w>, OpError> {
        Ok(weight)
    }

    fn experts<'w: 'w>(&mut self, experts: Experts<'w>) -> Result<Experts<'w>, OpError> {
        Ok(experts)
    }

    fn adapters<'w: 'w>(&mut self, adapters: Adapters<'w>) -> Result<Adapters<'w>, OpError> {
        Ok(adapters)
    }

    fn buffer(&mut self, len: usize) -> Vec<f32> {
        vec![0.0; len]
    }

    fn grow(&mut self, buffer: &mut Vec<f32>, len: usize) {
        buffer.resize(len.max(buffer.len()), 0.0);
    }

    fn upload(&mut self, from: &[f32], to: &mut [f32]) -> Result<(), OpError> {
        to[..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn download(&mut self, from: &[f32], to: &mut [f32]) -> Result<(), OpError> {
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
        self.upload(&from[..len], to)
    }

    fn all_reduce(&mut self, _parts: &mut [&mut [f32]], _len: usize) -> Result<(), OpError> {
        // The definitions know no other ranks.
        Ok(())
    }

    fn broadcast(&mut self, _values: &mut [f32], _len: usize) -> Result<(), OpError> {
        Ok(())
    }

    fn linear(&mut self, args: Linear<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        linear::reference(args)
    }

    fn products(&mut self, args: Products<'_, '_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        let (x, rows) = (args.x, args.rows);
        args.parts.iter_mut().try_for_each(|part| {
            let (weight, bias) = (part.weight, part.bias);
            linear::reference(Linear { x, weight, bias, out: &mut *part.out, rows })
        })
    }

    fn gated(&mut self, mut args: Gated<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        let (x, rows) = (args.x, args.rows);
        self.products(Products { x, rows, parts: &mut args.parts })?;
        silu_mul::reference(args.activation())
    }

    fn adapt(&mut self, args: Adapt<'_, [f32], Adapters<'_>>) -> Result<(), OpError> {
        lora::reference(Lora {
            x: args.x,
            parts: &lora::parts_of(args.adapters, args.of_rows),
            middle: args.middle,
            out: args.out,
            rows: args.of_rows.len(),
            round: args.round,
            inputs: args.inputs,
        })
    }

    fn adapt_grad(&mut self, args: AdaptGrad<'_, [f32], Adapters<'_>>) -> Result<(), OpError> {
        lora::reference_grad(LoraGrad {
            grad: args.grad,
            parts: &lora::parts_of(args.adapters, args.of_rows),
            middle: args.middle,
            out: args.out,
            rows: args.of_rows.len(),
        })
    }

    fn kv_append(&mut self, args: KvAppend<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
        kv_append::reference(args)
    }

    fn rope_append(&mut self, args: RopeAppend<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
        let (layout, tokens) = (args.pages.layout(), total_tokens(args.rows));
        let heads = [layout.kv_heads * args.group, layout.kv_heads];
        for (x, heads) in [&mut *args.q, &mut *args.k].into_iter().zip(heads) {
            let (table, head_dim, round) = (args.table, layout.head_dim, layout.dtype);
            rope::reference(Rope { x, table, tokens, heads, head_dim, round, inverse: false })?;
        }
        let (keys, values) = (&*args.k, args.v);
        kv_append::reference(KvAppend { keys, values, rows: args.rows, pages: args.pages })
    }

    fn attention(&mut self, args: Attention<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
        attention::reference(args)
    }

    fn attention_grad(
        &mut self,
        args: AttentionGrad<'_, [f32], KvPages<'_>>,
    ) -> Result<(), OpError> {
        attention_grad::reference(args)
    }

    fn add_norm(&mut self, args: AddNorm<'_, [f32]>) -> Result<(), OpError> {
        let (rows, width, eps, round) = (args.rows, args.width, args.eps, args.round);
        add::reference(Add { x: &mut *args.x, y: args.y, len: rows * width, round })?;
        let (x, weight, out) = (&*args.x, args.weight, args.out);
        match args.bias {
            None => rmsnorm::reference(Rmsnorm { x, weight, out, rows, width, eps, round }),
            Some(bias) => {
                layernorm::reference(Layernorm { x, weight, bias, out, rows, width, eps, round })
            }
        }
    }

    fn linear_grad(&mut self, args: LinearGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        gradient::reference_linear(args)
    }

    fn mixture(
        &mut self,
        args: Mixture<'_, [f32], Experts<'_>, Adapters<'_>>,
    ) -> Result<(), OpError> {
        experts::reference(Mixture {
            x: args.x,
            logits: args.logits,
            experts: &args.experts[..],
            adapters: args.adapters.map(views),
            tokens: args.tokens,
            chosen: args.chosen,
            workspace: args.workspace,
            out: args.out,
            round: args.round,
        })
    }

    fn mixture_grad(
        &mut self,
        args: MixtureGrad<'_, [f32], Experts<'_>, Adapters<'_>>,
    ) -> Result<(), OpError> {
        mixture_grad::reference(MixtureGrad {
            x: args.x,
            grad: args.grad,
            logits: args.logits,
            experts: &args.experts[..],
            adapters: args.adapters.map(views),
            tokens: args.tokens,
            chosen: args.chosen,
            workspace: args.workspace,
            out: args.out,
            round: args.round,
        })
    }
}

/// The tables of adapters as the definitions take them.
fn views<'a, 'w>(
    of: ExpertAdapters<'a, [f32], Adapters<'w>>,
) -> ExpertAdapters<'a, [f32], experts::AdapterViews<'w>> {
    ExpertAdapters {
        tables: of.tables.map(|table| table.map(|table| &table[..])),
        count: of.count,
        of_tokens: of.of_tokens,
        middle: of.middle,
    }
}
