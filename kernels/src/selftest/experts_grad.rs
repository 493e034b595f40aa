//! The gradient of a mixture of experts, on the cases of `experts.rs`.

use shared::config::QuantType;
use shared::dtype::DType;

use super::experts::{OfTokens, RANK, RANKS, Shape};
use super::{Bench, Failure, noise};
use crate::cuda::ops::experts_grad as device;
use crate::cuda::{Experts, Gpu};
use crate::ops::experts::list_words;
use crate::ops::mixture_grad::reference;
use crate::ops::{Adapter, Expert, ExpertAdapters, ExpertsGradRoom, MixtureGrad};
use crate::tensor::WeightView;

/// Experts of the host, and adapters if there are.
pub(super) type Host<'a, 'w> = (
    &'a [Expert<WeightView<'w>>],
    Option<&'a [Vec<Option<Adapter<WeightView<'w>>>>; 3]>,
);

/// Gradients of the input and of the logits, against their definition for the first `rows` tokens, and of some tokens alone.
pub(super) fn case<G: Gpu>(
    bench: &mut Bench<'_, G>,
    (shape, rows): (Shape, usize),
    (views, tables): Host<'_, '_>,
    (experts, adapters): (&Experts<G>, OfTokens<'_, G>),
    (x, logits): (&[f32], &[f32]),
    (quant, dtype): (QuantType, DType),
) -> Result<(), Failure> {
    let Shape {
        tokens,
        experts: count,
        hidden,
        ..
    } = shape;
    let grad = noise(6, tokens * hidden);
    let (mut wanted, mut slopes) = (
        vec![f32::NAN; rows * hidden],
        logits[..rows * count].to_vec(),
    );
    let mut room = Room::new(Shape {
        tokens: rows,
        ..shape
    });
    let mut between = vec![0.0; rows * shape.chosen * RANK];
    let of_tokens = adapters.map_or(&[][..], |(_, of_tokens)| of_tokens);
    let done = reference(MixtureGrad {
        x,
        grad: &grad[..],
        logits: &mut slopes[..],
        experts: views,
        adapters: tables.map(|tables| ExpertAdapters {
            tables: tables.each_ref().map(|table| Some(&table[..])),
            count: RANKS.len(),
            of_tokens,
            middle: &mut between[..],
        }),
        tokens: rows,
        chosen: shape.chosen,
        room: room.lent(),
        out: &mut wanted[..],
        round: dtype,
    });
    bench.op(done)?;
    let set = (experts, adapters);
    let (all, all_slopes) = run(bench, shape, set, (x, &grad, logits), dtype)?;
    // What tensor cores multiply is rounded to bfloat16, twice one after the other.
    let tolerance = match (quant, dtype) {
        (QuantType::None, DType::F32) => 2e-5,
        (_, DType::F32) => 1e-4,
        _ => 2e-2,
    };
    bench.close(&all[..rows * hidden], &wanted, tolerance)?;
    bench.close(&all_slopes[..rows * count], &slopes, tolerance)?;
    for few in [1, 2, 9, 20, 33] {
        if few >= tokens {
            break;
        }
        let first = tokens - few;
        let part = Shape {
            tokens: few,
            ..shape
        };
        let inputs = (
            &x[first * hidden..],
            &grad[first * hidden..],
            &logits[first * count..],
        );
        let set = (
            experts,
            adapters.map(|(tables, of_tokens)| (tables, &of_tokens[first..])),
        );
        let (got, slopes) = run(bench, part, set, inputs, dtype)?;
        bench.same(&got, &all[first * hidden..])?;
        bench.same(&slopes, &all_slopes[first * count..])?;
    }
    Ok(())
}

/// Memory of the definition.
struct Room {
    middle: [Vec<f32>; 3],
    given: [Vec<f32>; 2],
    small: [Vec<f32>; 2],
    lists: Vec<f32>,
}

impl Room {
    fn new(shape: Shape) -> Room {
        let pairs = shape.tokens * shape.chosen;
        let of = |len: usize| vec![0.0; len];
        Room {
            middle: [(); 3].map(|()| of(pairs * shape.middle)),
            given: [(); 2].map(|()| of(pairs * shape.hidden)),
            small: [(); 2].map(|()| of(shape.tokens * shape.experts)),
            lists: of(list_words(shape.tokens, shape.chosen, shape.experts)),
        }
    }

    fn lent(&mut self) -> ExpertsGradRoom<'_, [f32]> {
        let [gate, up, grad] = &mut self.middle;
        let [weights, shares] = &mut self.small;
        ExpertsGradRoom {
            gate,
            up,
            grad,
            given: self.given.each_mut().map(|given| &mut given[..]),
            weights,
            shares,
            lists: &mut self.lists,
        }
    }
}

fn run<G: Gpu>(
    bench: &mut Bench<'_, G>,
    shape: Shape,
    (experts, adapters): (&Experts<G>, OfTokens<'_, G>),
    (x, grad, logits): (&[f32], &[f32], &[f32]),
    round: DType,
) -> Result<(Vec<f32>, Vec<f32>), Failure> {
    let (tokens, chosen) = (shape.tokens, shape.chosen);
    let pairs = tokens * chosen;
    let weights = tokens * shape.experts;
    let (x, grad) = (bench.input(x)?, bench.input(grad)?);
    let mut logits = bench.in_place(&logits[..weights])?;
    let lens = [
        pairs * shape.middle,
        pairs * shape.middle,
        pairs * shape.middle,
        pairs * shape.hidden,
        pairs * shape.hidden,
        weights,
        weights,
        list_words(tokens, chosen, shape.experts),
        pairs * RANK,
    ];
    let mut rooms = Vec::new();
    for len in lens {
        rooms.push(bench.output(len)?);
    }
    let mut out = bench.output(tokens * shape.hidden)?;
    let [gate, up, middle, first, second, own, shares, lists, between] = &mut rooms[..] else {
        unreachable!("as many as their lengths")
    };
    let done = device::launch(
        bench.cuda,
        MixtureGrad {
            x: &*x,
            grad: &*grad,
            logits: &mut *logits,
            experts,
            adapters: adapters.map(|(tables, of_tokens)| ExpertAdapters {
                tables: tables.each_ref().map(Some),
                count: RANKS.len(),
                of_tokens,
                middle: &mut **between,
            }),
            tokens,
            chosen,
            room: ExpertsGradRoom {
                gate: &mut **gate,
                up: &mut **up,
                grad: &mut **middle,
                given: [&mut **first, &mut **second],
                weights: &mut **own,
                shares: &mut **shares,
                lists: &mut **lists,
            },
            out: &mut *out,
            round,
        },
    );
    bench.op(done)?;
    for (buffer, len) in rooms.iter().zip(lens) {
        bench.take(buffer, len)?;
    }
    Ok((
        bench.take(&out, tokens * shape.hidden)?,
        bench.take(&logits, weights)?,
    ))
}
