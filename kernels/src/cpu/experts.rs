//! A mixture of experts on the fast paths of its parts: expert by expert, over the rows that go to it.

use super::Cpu;
use crate::backend::Backend;
use crate::ops::experts::{adapters_at, listed, sizes_of, tokens_of};
use crate::ops::lora::parts_of;
use crate::ops::route;
use crate::ops::{
    Adapter, Expert, ExpertAdapters, ExpertsGradRoom, GateDot, Gather, Linear, LinearGrad, Lora,
    LoraGrad, LoraPart, Mixture, MixtureGrad, OpError, Product, Products, Route, RouteGrad,
    ScatterAdd, SiluMul, SiluMulGrad,
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
    route::reference(Route {
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
        route::reference_scatter_add(ScatterAdd {
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

pub(super) fn mixture_grad(
    cpu: &mut Cpu,
    mut args: MixtureGrad<'_, [f32], Vec<Expert<WeightView<'_>>>, Adapters<'_>>,
) -> Result<(), OpError> {
    let sizes = sizes_of(args.experts)?;
    args.check(sizes)?;
    if let Some(adapters) = &args.adapters {
        adapters.check(sizes, (args.tokens, args.chosen), |table| listed(table))?;
    }
    let (tokens, count, width) = (args.tokens, sizes.experts, sizes.hidden);
    let (round, wide) = (args.round, sizes.middle);
    let ExpertsGradRoom {
        gate,
        up,
        grad,
        given: [given, part],
        weights,
        shares,
        ..
    } = args.room;
    weights[..tokens * count].copy_from_slice(&args.logits[..tokens * count]);
    route::reference(Route {
        logits: &mut *weights,
        tokens,
        experts: count,
        chosen: args.chosen,
        round,
    })?;
    shares[..tokens * count].fill(0.0);
    args.out[..tokens * width].fill(0.0);
    let mut taken = std::mem::take(&mut cpu.moved);
    cpu.grow(&mut taken, tokens * width);
    for (number, expert) in args.experts.iter().enumerate() {
        let (index, weights) = tokens_of(&weights[..tokens * count], number, count);
        let rows = index.len();
        if rows == 0 {
            continue;
        }
        for (x, out) in [(args.x, &mut taken[..]), (args.grad, &mut *given)] {
            let index = &index;
            cpu.gather(Gather {
                x,
                index,
                width,
                out,
            })?;
        }
        let both = [(expert.gate, &mut *gate), (expert.up, &mut *up)];
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
        let adapters = &mut args.adapters;
        own.adapt(cpu, adapters, 0, (&taken, &mut *gate))?;
        own.adapt(cpu, adapters, 1, (&taken, &mut *up))?;
        own.gradient(cpu, adapters, (2, expert.down), (given, &mut *grad))?;
        route::reference_gate_dot(GateDot {
            gate: &*gate,
            up: &*up,
            grad: &*grad,
            index: &index,
            width: wide,
            expert: number,
            experts: count,
            out: &mut *shares,
        })?;
        cpu.silu_mul_grad(SiluMulGrad {
            gate: &mut *gate,
            up: &mut *up,
            grad: &*grad,
            len: rows * wide,
        })?;
        own.gradient(cpu, adapters, (0, expert.gate), (gate, &mut *given))?;
        own.gradient(cpu, adapters, (1, expert.up), (up, &mut *part))?;
        for x in [&*given, &*part] {
            route::reference_scatter_add(ScatterAdd {
                x,
                index: &index,
                weights: &weights,
                width,
                out: &mut *args.out,
                round: DType::F32,
            })?;
        }
    }
    cpu.moved = taken;
    route::reference_grad(RouteGrad {
        logits: args.logits,
        grad: &*shares,
        tokens,
        experts: count,
        chosen: args.chosen,
        round,
    })
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
        cpu.lora(Lora {
            x,
            parts: &self.parts(adapters, which),
            middle: &mut *adapters.middle,
            out,
            rows: self.index.len(),
            round: self.round,
        })
    }

    /// The gradient of the input of the product with matrix `which`, adapters included.
    fn gradient(
        &self,
        cpu: &mut Cpu,
        adapters: &mut Option<ExpertAdapters<'_, [f32], Adapters<'_>>>,
        (which, weight): (usize, WeightView<'_>),
        (grad, out): (&[f32], &mut [f32]),
    ) -> Result<(), OpError> {
        let rows = self.index.len();
        cpu.linear_grad(LinearGrad {
            grad,
            weight,
            out: &mut *out,
            rows,
        })?;
        let Some(adapters) = adapters else {
            return Ok(());
        };
        cpu.lora_grad(LoraGrad {
            grad,
            parts: &self.parts(adapters, which),
            middle: &mut *adapters.middle,
            out,
            rows,
        })
    }

    /// What adapters add to matrix `which`, by the rows that go through them.
    fn parts<'w>(
        &self,
        adapters: &ExpertAdapters<'_, [f32], Adapters<'w>>,
        which: usize,
    ) -> Vec<LoraPart<WeightView<'w>>> {
        let own = self.number * adapters.count..(self.number + 1) * adapters.count;
        let own = adapters.tables[which].map_or(&[][..], |table| &table[own]);
        parts_of(own, &adapters_at(adapters.of_tokens, self.index))
    }
}
