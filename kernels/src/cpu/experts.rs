//! A mixture of experts on the fast paths of its parts: expert by expert, over the rows that go to it.

use super::Cpu;
use crate::backend::Backend;
use crate::ops::experts::{sizes_of, tokens_of};
use crate::ops::{
    Expert, Gather, Linear, Mixture, OpError, Product, Products, Route, ScatterAdd, SiluMul,
};
use crate::tensor::WeightView;

pub(super) fn mixture(
    cpu: &mut Cpu,
    args: Mixture<'_, [f32], Vec<Expert<WeightView<'_>>>>,
) -> Result<(), OpError> {
    let sizes = sizes_of(args.experts)?;
    args.check(sizes)?;
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
