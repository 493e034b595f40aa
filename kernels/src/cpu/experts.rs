//! A mixture of experts on the fast paths of its parts: expert by expert, over the rows that go to it.

use super::Cpu;
use crate::backend::Backend;
use crate::ops::experts::{adapters_at, listed, sizes_of, tokens_of};
use crate::ops::lora::parts_of;
use crate::ops::{
    Adapter, Expert, ExpertAdapters, Gather, Linear, Lora, Mixture, OpError, Product, Products,
    Route, ScatterAdd, SiluMul,
};
use crate::tensor::WeightView;
use shared::dtype::DType;

/// Adapters as the processor has them.
type Adapters<'w> = Vec<Option<Adapter<WeightView<'w>>>>;

pub(super) fn mixture(
    cpu: &mut Cpu,
    mut args: Mixture<'_, [f32], Vec<Expert<WeightView<'_>>>, Adapters<'_>>,
) -> Result<(), OpError> {
    let sizes = sizes_of(args.experts)?;
    args.check(sizes)?;
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, (args.tokens, args.chosen), |table| listed(table))?;
    }
    let (tokens, width, round) = (args.tokens, sizes.hidden, args.round);
    cpu.route(Route {
        logits: &mut *args.logits,
        tokens,
        experts: sizes.experts,
        chosen: args.chosen,
        round,
    })?;
    args.out[..tokens * width].fill(0.0);
    let mut taken = std::mem::take(&mut cpu.moved);
    cpu.grow(&mut taken, tokens * width);
    let (room, out) = (args.room, args.out);
    for (number, expert) in args.experts.iter().enumerate() {
        let (index, weights) = tokens_of(
            &args.logits[..tokens * sizes.experts],
            number,
            sizes.experts,
        );
        let rows = index.len();
        if rows == 0 {
            continue;
        }
        cpu.gather(Gather {
            x: args.x,
            index: &index,
            width,
            out: &mut taken[..],
        })?;
        let both = [(expert.gate, &mut *room.gate), (expert.up, &mut *room.up)];
        let mut parts = both.map(|(weight, out)| Product {
            weight,
            bias: None,
            out,
        });
        cpu.products(Products {
            x: &taken[..],
            rows,
            parts: &mut parts,
        })?;
        let own = Own {
            number,
            index: &index,
            round,
        };
        own.adapt(cpu, &mut args.adapters, 0, (&taken, &mut *room.gate))?;
        own.adapt(cpu, &mut args.adapters, 1, (&taken, &mut *room.up))?;
        cpu.silu_mul(SiluMul {
            gate: &mut *room.gate,
            up: &*room.up,
            len: rows * sizes.middle,
            round,
        })?;
        cpu.linear(Linear {
            x: &*room.gate,
            weight: expert.down,
            bias: None,
            out: &mut *room.given,
            rows,
        })?;
        let last = (&*room.gate, &mut *room.given);
        own.adapt(cpu, &mut args.adapters, 2, last)?;
        cpu.scatter_add(ScatterAdd {
            x: &*room.given,
            index: &index,
            weights: &weights,
            width,
            out: &mut *out,
            round,
        })?;
    }
    cpu.moved = taken;
    Ok(())
}

/// The expert at hand, and the tokens that go to it.
struct Own<'a> {
    number: usize,
    index: &'a [u32],
    round: DType,
}

impl Own<'_> {
    /// Adds what adapters make of `x` to its product with matrix `which`.
    fn adapt(
        &self,
        cpu: &mut Cpu,
        adapters: &mut Option<ExpertAdapters<'_, [f32], Adapters<'_>>>,
        which: usize,
        (x, out): (&[f32], &mut [f32]),
    ) -> Result<(), OpError> {
        let Some(adapters) = adapters else {
            return Ok(());
        };
        let Some(table) = adapters.tables[which] else {
            return Ok(());
        };
        let own = &table[self.number * adapters.count..(self.number + 1) * adapters.count];
        cpu.lora(Lora {
            x,
            parts: &parts_of(own, &adapters_at(adapters.of_tokens, self.index)),
            middle: &mut *adapters.middle,
            out,
            rows: self.index.len(),
            round: self.round,
        })
    }
}
