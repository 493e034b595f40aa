//! Cases of a mixture of experts behind the logits of its router, and of its gradient.

use shared::config::QuantType;
use shared::dtype::DType;

use super::linear::view;
use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::experts as device;
use crate::cuda::{Adapters, Cuda, Experts, Gpu};
use crate::ops::experts::{list_words, reference};
use crate::ops::{Adapter, Expert, ExpertAdapters, ExpertsRoom, Mixture, convert};
use crate::quant::{int8, nf4};
use crate::tensor::WeightView;

/// A case: tokens, experts, those of a token, hidden and middle width.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) tokens: usize,
    pub(super) experts: usize,
    pub(super) chosen: usize,
    pub(super) hidden: usize,
    pub(super) middle: usize,
}

const fn shape([tokens, experts, chosen, hidden, middle]: [usize; 5]) -> Shape {
    Shape {
        tokens,
        experts,
        chosen,
        hidden,
        middle,
    }
}

/// Few rows; rows past a tile of few, and past one of many; widths that tiles do not take, one of them, or neither.
const SHAPES: [(Shape, Extent); 8] = [
    (shape([3, 3, 2, 64, 64]), Extent::Least),
    (shape([33, 1, 1, 64, 64]), Extent::Least),
    (shape([35, 2, 1, 64, 128]), Extent::Small),
    (shape([5, 4, 3, 50, 64]), Extent::Least),
    (shape([140, 2, 2, 64, 64]), Extent::Small),
    (shape([33, 40, 5, 128, 320]), Extent::Middle),
    (shape([300, 3, 2, 256, 128]), Extent::Middle),
    (shape([64, 8, 2, 4096, 14336]), Extent::Full),
];
const FORMATS: [(QuantType, &str); 3] = [
    (QuantType::None, "plain"),
    (QuantType::Int8, "int8"),
    (QuantType::Nf4, "nf4"),
];

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (shape, _) in SHAPES.into_iter().filter(|(_, at)| includes(extent, *at)) {
        for (quant, name) in FORMATS {
            let dtypes: &[DType] = match extent {
                Extent::Least => &[DType::Bf16],
                _ => &[DType::F32, DType::Bf16, DType::F16],
            };
            for &dtype in dtypes {
                let Shape {
                    tokens,
                    experts,
                    chosen,
                    hidden,
                    middle,
                } = shape;
                // Adapters go beside any format in the same way.
                let with: &[bool] = match quant {
                    QuantType::Nf4 => &[false, true],
                    QuantType::None if dtype == DType::F32 => &[false, true],
                    QuantType::None | QuantType::Int8 => &[false],
                };
                for &adapted in with {
                    let adapters = if adapted { " with adapters" } else { "" };
                    bench.begin(format!(
                        "{name} {dtype} {tokens} x {chosen} of {experts} [{hidden}, {middle}]{adapters}"
                    ));
                    case(&mut bench, shape, (quant, dtype), adapted)?;
                }
            }
        }
    }
    Ok(bench.cases)
}

/// Whether an extent has the cases of another; the least has its own alone.
fn includes(extent: Extent, at: Extent) -> bool {
    match extent {
        Extent::Least => at == Extent::Least,
        _ => extent.takes(at),
    }
}

fn case<G: Gpu>(
    bench: &mut Bench<'_, G>,
    shape: Shape,
    (quant, dtype): (QuantType, DType),
    adapted: bool,
) -> Result<(), Failure> {
    let Shape {
        tokens,
        experts,
        chosen,
        hidden,
        middle,
    } = shape;
    let sides = [(hidden, middle), (hidden, middle), (middle, hidden)];
    // Two sets of matrices, taken in turns and in different places, so that an expert is not its neighbour.
    let bytes = sides
        .map(|(inputs, outputs)| [1, 2].map(|seed| encoded(seed, quant, dtype, (inputs, outputs))));
    let views: Vec<Expert<WeightView<'_>>> = (0..experts)
        .map(|number| {
            let of = |which: usize| {
                let turn = (number >> which) % 2;
                view(quant, dtype, sides[which], &bytes[which][turn])
            };
            Expert {
                gate: of(0),
                up: of(1),
                down: of(2),
            }
        })
        .collect();
    let adapter_bytes = adapter_bytes(shape, dtype);
    let host = adapter_tables(experts, |which, number| {
        let (inputs, outputs) = sides[which];
        let [a, b] = &adapter_bytes[which][number];
        let rank = RANKS[number];
        (
            view(QuantType::None, dtype, (inputs, rank), a),
            view(QuantType::None, dtype, (rank, outputs), b),
        )
    });
    let of_tokens = of_tokens(tokens);
    let (x, logits) = (noise(5, tokens * hidden), logits(shape));
    let mut wanted = vec![f32::NAN; tokens * hidden];
    let mut weights = logits.clone();
    // What is large is compared by some of its rows.
    let rows = if hidden * middle > 1_000_000 {
        2
    } else {
        tokens
    };
    let pairs = rows * chosen;
    let mut room = [pairs * middle, pairs * middle, pairs * hidden].map(|len| vec![0.0; len]);
    let mut lists = vec![0.0; list_words(rows, chosen, experts)];
    let [gate, up, given] = &mut room;
    let mut between = vec![0.0; pairs * RANK];
    let done = reference(Mixture {
        x: &x[..],
        logits: &mut weights[..],
        experts: &views[..],
        adapters: adapted.then(|| ExpertAdapters {
            tables: [0, 1, 2].map(|which| Some(&host[which][..])),
            count: RANKS.len(),
            of_tokens: &of_tokens,
            middle: &mut between[..],
        }),
        tokens: rows,
        chosen,
        room: ExpertsRoom {
            gate: &mut gate[..],
            up: &mut up[..],
            given: &mut given[..],
            lists: &mut lists[..],
        },
        out: &mut wanted[..],
        round: dtype,
    });
    bench.op(done)?;
    let mut moved = Vec::new();
    for view in &views {
        let mut matrix = |weight| {
            let matrix = bench.cuda.matrix(weight);
            bench.op(matrix)
        };
        moved.push(Expert {
            gate: matrix(view.gate)?,
            up: matrix(view.up)?,
            down: matrix(view.down)?,
        });
    }
    let together = bench.cuda.experts(moved);
    let together = bench.op(together)?;
    let tables = match adapted {
        true => Some(on_device(bench, &host)?),
        false => None,
    };
    let adapters = |first: usize| tables.as_ref().map(|tables| (tables, &of_tokens[first..]));
    let set = (&together, adapters(0));
    let all = run(bench, shape, set, (&x, &logits), dtype)?;
    // Half of the types round what lies between, so that a bit of a sum may become one of theirs; NF4 goes another way.
    let tolerance = match (quant, dtype) {
        // Adapters round once more, and are scaled.
        (_, DType::Bf16) if adapted => 3e-2,
        (_, DType::Bf16) => 1.6e-2,
        (_, DType::F16) => 2e-3,
        _ => 2e-5,
    };
    bench.close(&all[..rows * hidden], &wanted[..rows * hidden], tolerance)?;
    // Some tokens alone, and with others: the same bits.
    for few in [1, 2, 9, 20, 33] {
        if few >= tokens {
            break;
        }
        let first = tokens - few;
        let part = Shape {
            tokens: few,
            ..shape
        };
        let inputs = (&x[first * hidden..], &logits[first * experts..]);
        let set = (&together, adapters(first));
        let got = run(bench, part, set, inputs, dtype)?;
        bench.same(&got, &all[first * hidden..])?;
    }
    super::experts_grad::case(
        bench,
        (shape, rows),
        (&views, adapted.then_some(&host)),
        (&together, adapters(0)),
        (&x, &logits),
        (quant, dtype),
    )
}

/// Ranks of the adapters.
pub(super) const RANKS: [usize; 3] = [8, 5, 3];
pub(super) const RANK: usize = 8;

/// The adapter of each token; one token has a number that no adapter has.
fn of_tokens(tokens: usize) -> Vec<Option<u32>> {
    let numbers = [Some(1), Some(1), None, Some(0), Some(2), Some(7)];
    numbers.into_iter().cycle().take(tokens).collect()
}

/// The two matrices of each adapter beside each of the three of an expert.
fn adapter_bytes(shape: Shape, dtype: DType) -> [[[Vec<u8>; 2]; 3]; 3] {
    let (hidden, middle) = (shape.hidden, shape.middle);
    [(hidden, middle), (hidden, middle), (middle, hidden)].map(|(inputs, outputs)| {
        RANKS.map(|rank| {
            let seed = (inputs + rank) as u64;
            let a = encoded(seed, QuantType::None, dtype, (inputs, rank));
            [
                a,
                encoded(seed + 1, QuantType::None, dtype, (rank, outputs)),
            ]
        })
    })
}

/// The adapters of all experts, each scaled in its own way and some not there.
fn adapter_tables<W>(
    experts: usize,
    matrices: impl Fn(usize, usize) -> (W, W),
) -> [Vec<Option<Adapter<W>>>; 3] {
    [0, 1, 2].map(|which| {
        (0..experts * RANKS.len())
            .map(|at| {
                let (expert, number) = (at / RANKS.len(), at % RANKS.len());
                let (a, b) = matrices(which, number);
                let scale = 0.25 + 0.125 * (expert % 5) as f32;
                ((expert + number + which) % 4 != 3).then_some(Adapter { a, b, scale })
            })
            .collect()
    })
}

fn on_device<G: Gpu>(
    bench: &mut Bench<'_, G>,
    host: &[Vec<Option<Adapter<WeightView<'_>>>>; 3],
) -> Result<[Adapters<G>; 3], Failure> {
    let mut table = |adapters: &[Option<Adapter<WeightView<'_>>>]| {
        let mut moved = Vec::new();
        for adapter in adapters {
            let Some(adapter) = adapter else {
                moved.push(None);
                continue;
            };
            let (a, b) = (bench.cuda.matrix(adapter.a), bench.cuda.matrix(adapter.b));
            moved.push(Some(Adapter {
                a: bench.op(a)?,
                b: bench.op(b)?,
                scale: adapter.scale,
            }));
        }
        let table = bench.cuda.adapters(moved);
        bench.op(table)
    };
    let [gate, up, down] = host;
    Ok([table(gate)?, table(up)?, table(down)?])
}

/// A matrix of values that keep the size of what they are multiplied with.
fn encoded(
    seed: u64,
    quant: QuantType,
    dtype: DType,
    (inputs, outputs): (usize, usize),
) -> Vec<u8> {
    let size = (3.0 / inputs as f32).sqrt();
    let values: Vec<f32> = noise(seed, inputs * outputs)
        .iter()
        .map(|v| v * size)
        .collect();
    match quant {
        QuantType::Int8 => int8::encode(&values, inputs),
        QuantType::Nf4 => nf4::encode(&values),
        QuantType::None => {
            let mut bytes = vec![0; values.len() * dtype.size_bytes()];
            convert::from_f32(dtype, &values, &mut bytes);
            bytes
        }
    }
}

/// Distinct for the chosen of every token, so that rounding changes no choice; the first expert goes to most, some to none.
fn logits(shape: Shape) -> Vec<f32> {
    let Shape {
        tokens, experts, ..
    } = shape;
    (0..tokens * experts)
        .map(|i| {
            let (token, expert) = (i / experts, i % experts);
            let rank = (expert + (token % 3) * (token % 2)) % experts;
            -0.25 * rank as f32
        })
        .collect()
}

/// Adapters, and which of them each token goes through.
pub(super) type OfTokens<'a, G> = Option<(&'a [Adapters<G>; 3], &'a [Option<u32>])>;

fn run<G: Gpu>(
    bench: &mut Bench<'_, G>,
    shape: Shape,
    (experts, adapters): (&Experts<G>, OfTokens<'_, G>),
    (x, logits): (&[f32], &[f32]),
    round: DType,
) -> Result<Vec<f32>, Failure> {
    let (tokens, chosen) = (shape.tokens, shape.chosen);
    let (pairs, words) = (tokens * chosen, list_words(tokens, chosen, shape.experts));
    let (x, mut logits) = (bench.input(x)?, bench.in_place(logits)?);
    let mut gate = bench.output(pairs * shape.middle)?;
    let mut up = bench.output(pairs * shape.middle)?;
    let mut given = bench.output(pairs * shape.hidden)?;
    let mut between = bench.output(pairs * RANK)?;
    let (mut lists, mut out) = (bench.output(words)?, bench.output(tokens * shape.hidden)?);
    let done = device::launch(
        bench.cuda,
        Mixture {
            x: &*x,
            logits: &mut *logits,
            experts,
            adapters: adapters.map(|(tables, of_tokens)| ExpertAdapters {
                tables: tables.each_ref().map(Some),
                count: RANKS.len(),
                of_tokens,
                middle: &mut *between,
            }),
            tokens,
            chosen,
            room: ExpertsRoom {
                gate: &mut *gate,
                up: &mut *up,
                given: &mut *given,
                lists: &mut *lists,
            },
            out: &mut *out,
            round,
        },
    );
    bench.op(done)?;
    for (buffer, len) in [
        (&gate, pairs * shape.middle),
        (&up, pairs * shape.middle),
        (&given, pairs * shape.hidden),
        (&lists, words),
        (&between, pairs * RANK),
    ] {
        bench.take(buffer, len)?;
    }
    bench.take(&out, tokens * shape.hidden)
}

test_on_devices!(super::check);
