//! One table of cases per operation: every instruction set of this machine against the reference, and the rule of same
//! bits (a row alone = in a batch = cut anywhere = on any number of threads).

use shared::config::QuantType;
mod gradients;
mod lora;

use shared::dtype::DType;
use shared::ids::PageId;

use super::*;
use crate::backend::Backend;
use crate::cpu::{Cpu, Isa};
use crate::kv::{KvPages, PAGE_TOKENS, PageLayout, StepRow};
use crate::quant::{int8, nf4};
use crate::tensor::WeightView;

const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Reproducible values in -1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    convert::from_f32(dtype, values, &mut bytes);
    bytes
}

/// Every instruction set of this machine with few and with many threads.
fn backends() -> impl Iterator<Item = Cpu> {
    Isa::available()
        .iter()
        .flat_map(|isa| [1, 2, 5].map(|threads| Cpu::with_isa(threads, *isa)))
}

fn assert_close(got: &[f32], wanted: &[f32], tolerance: f32, what: &str) {
    let size = wanted.iter().fold(1.0f32, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(wanted).enumerate() {
        assert!(
            (g - w).abs() <= tolerance * size,
            "{what}: element {i} is {g}, not {w}"
        );
    }
    assert_eq!(got.len(), wanted.len(), "{what}");
}

/// (inputs, outputs): one, odd, off a tile, on it, and enough for several pieces.
const LINEAR: [(usize, usize); 7] = [
    (1, 1),
    (3, 5),
    (31, 9),
    (64, 16),
    (100, 37),
    (352, 128),
    (1000, 203),
];

fn linear_with(
    cpu: &mut Cpu,
    x: &[f32],
    weight: WeightView<'_>,
    bias: Option<&[f32]>,
    rows: usize,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * weight.outputs()];
    cpu.linear(Linear {
        x,
        weight,
        bias,
        out: &mut out[..],
        rows,
    })
    .unwrap();
    out
}

#[test]
fn linear_equals_its_reference() {
    for (inputs, outputs) in LINEAR {
        for dtype in DTYPES {
            let bytes = stored(dtype, &noise(1, inputs * outputs));
            let weight = WeightView::new(dtype, outputs, inputs, &bytes).unwrap();
            let (rows, bias) = (7, noise(2, outputs));
            let x = noise(3, rows * inputs);
            let mut wanted = vec![f32::NAN; rows * outputs];
            let args = Linear {
                x: &x[..],
                weight,
                bias: Some(&bias[..]),
                out: &mut wanted[..],
                rows,
            };
            linear::reference(args).unwrap();
            for mut cpu in backends() {
                let got = linear_with(&mut cpu, &x, weight, Some(&bias), rows);
                assert_close(
                    &got,
                    &wanted,
                    3e-6,
                    &format!("{:?} {dtype} {inputs}->{outputs}", cpu.isa()),
                );
            }
        }
    }
}

#[test]
fn a_row_of_linear_has_the_same_bits_alone_and_in_any_batch_and_unaligned() {
    for (inputs, outputs) in LINEAR {
        for dtype in DTYPES {
            let mut bytes = vec![0];
            bytes.extend(stored(dtype, &noise(1, inputs * outputs)));
            let weight = WeightView::new(dtype, outputs, inputs, &bytes[1..]).unwrap();
            let x = noise(3, 40 * inputs);
            for &isa in Isa::available() {
                let mut single = Cpu::with_isa(1, isa);
                let alone: Vec<f32> = x
                    .chunks(inputs)
                    .flat_map(|row| linear_with(&mut single, row, weight, None, 1))
                    .collect();
                for (threads, batch) in [(1, 2), (2, 7), (3, 16), (5, 40)] {
                    let mut cpu = Cpu::with_isa(threads, isa);
                    let batched: Vec<f32> = x
                        .chunks(batch * inputs)
                        .flat_map(|x| linear_with(&mut cpu, x, weight, None, x.len() / inputs))
                        .collect();
                    assert_eq!(
                        bits(&alone),
                        bits(&batched),
                        "{isa:?} {dtype} {inputs}->{outputs} by {batch}"
                    );
                }
            }
        }
    }
}

/// (inputs, outputs) of quantized matrices: one, off a group, on it, several chunks, enough for several pieces.
const QUANTIZED: [(usize, usize); 6] =
    [(1, 1), (50, 9), (64, 13), (128, 37), (1408, 40), (2112, 70)];

#[test]
fn quantized_linear_equals_its_reference_and_its_rows_do_not_matter() {
    for (inputs, outputs) in QUANTIZED {
        for quant in [QuantType::None, QuantType::Int8, QuantType::Nf4] {
            for dtype in DTYPES {
                let values = noise(1, inputs * outputs);
                let bytes = match quant {
                    QuantType::None => stored(dtype, &values),
                    QuantType::Int8 => int8::encode(&values, inputs),
                    QuantType::Nf4 => nf4::encode(&values),
                };
                let weight = WeightView::quantized(quant, dtype, outputs, inputs, &bytes).unwrap();
                let what = format!("{quant} {dtype} {inputs}->{outputs}");
                quantized_case(weight, &what);
            }
        }
    }
}

fn quantized_case(weight: WeightView<'_>, what: &str) {
    let (inputs, outputs) = (weight.inputs(), weight.outputs());
    let (rows, bias) = (19, noise(2, outputs));
    let x = noise(3, rows * inputs);
    let mut wanted = vec![f32::NAN; rows * outputs];
    let args = Linear {
        x: &x[..],
        weight,
        bias: Some(&bias[..]),
        out: &mut wanted[..],
        rows,
    };
    linear::reference(args).unwrap();
    for &isa in Isa::available() {
        let mut single = Cpu::with_isa(1, isa);
        let alone: Vec<f32> = x
            .chunks(inputs)
            .flat_map(|row| linear_with(&mut single, row, weight, Some(&bias), 1))
            .collect();
        assert_close(&alone, &wanted, 1e-5, &format!("{isa:?} {what}"));
        for (threads, batch) in [(1, 2), (2, 7), (3, 19)] {
            let mut cpu = Cpu::with_isa(threads, isa);
            let batched: Vec<f32> = x
                .chunks(batch * inputs)
                .flat_map(|x| linear_with(&mut cpu, x, weight, Some(&bias), x.len() / inputs))
                .collect();
            assert_eq!(bits(&alone), bits(&batched), "{isa:?} {what} by {batch}");
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn rmsnorm_and_silu_equal_their_references_and_rows_do_not_matter() {
    for (rows, width) in [(1, 1), (3, 17), (5, 64), (7, 100), (40, 4096)] {
        let (x, weight) = (noise(1, rows * width), noise(2, width));
        for round in DTYPES {
            let norm = |x: &[f32], run: &mut dyn FnMut(Rmsnorm<'_, [f32]>)| {
                let mut out = vec![f32::NAN; x.len()];
                run(Rmsnorm {
                    x,
                    weight: &weight,
                    out: &mut out[..],
                    rows: x.len() / width,
                    width,
                    eps: 1e-5,
                    round,
                });
                out
            };
            let wanted = norm(&x, &mut |args| rmsnorm::reference(args).unwrap());
            // A rounding that falls the other way costs one unit of the dtype.
            let tolerance = [2e-6, 8e-3, 1e-3][DTYPES.iter().position(|d| *d == round).unwrap()];
            for mut cpu in backends() {
                let got = norm(&x, &mut |args| cpu.rmsnorm(args).unwrap());
                assert_close(
                    &got,
                    &wanted,
                    tolerance,
                    &format!("rmsnorm {rows}x{width} {round}"),
                );
                let alone: Vec<f32> = x
                    .chunks(width)
                    .flat_map(|x| norm(x, &mut |args| cpu.rmsnorm(args).unwrap()))
                    .collect();
                assert_eq!(bits(&alone), bits(&got));
            }
        }
        let up = noise(4, rows * width);
        let scaled: Vec<f32> = x.iter().map(|v| v * 30.0).collect();
        for (round, tolerance) in DTYPES.into_iter().zip([1e-6, 8e-3, 1e-3]) {
            let mut wanted = scaled.clone();
            silu_mul::reference(SiluMul {
                gate: &mut wanted[..],
                up: &up,
                len: up.len(),
                round,
            })
            .unwrap();
            for mut cpu in backends() {
                let mut got = scaled.clone();
                cpu.silu_mul(SiluMul {
                    gate: &mut got[..],
                    up: &up,
                    len: up.len(),
                    round,
                })
                .unwrap();
                assert_close(&got, &wanted, tolerance, "silu");
                let mut first = scaled[..width].to_vec();
                cpu.silu_mul(SiluMul {
                    gate: &mut first[..],
                    up: &up,
                    len: width,
                    round,
                })
                .unwrap();
                assert_eq!(bits(&first), bits(&got[..width]));
            }
        }
    }
}

#[test]
fn layernorm_equals_its_reference_and_rows_do_not_matter() {
    for (rows, width) in [(1, 1), (3, 17), (5, 64), (7, 100), (40, 4544)] {
        let (weight, bias) = (noise(2, width), noise(3, width));
        let x: Vec<f32> = noise(1, rows * width).iter().map(|v| 3.0 + v).collect();
        for (round, tolerance) in DTYPES.into_iter().zip([2e-5, 8e-3, 1e-3]) {
            let norm = |x: &[f32], run: &mut dyn FnMut(Layernorm<'_, [f32]>)| {
                let mut out = vec![f32::NAN; x.len()];
                run(Layernorm {
                    x,
                    weight: &weight,
                    bias: &bias,
                    out: &mut out[..],
                    rows: x.len() / width,
                    width,
                    eps: 1e-5,
                    round,
                });
                out
            };
            let wanted = norm(&x, &mut |args| layernorm::reference(args).unwrap());
            for mut cpu in backends() {
                let got = norm(&x, &mut |args| cpu.layernorm(args).unwrap());
                let what = format!("layernorm {rows}x{width} {round}");
                assert_close(&got, &wanted, tolerance, &what);
                let alone: Vec<f32> = x
                    .chunks(width)
                    .flat_map(|x| norm(x, &mut |args| cpu.layernorm(args).unwrap()))
                    .collect();
                assert_eq!(bits(&alone), bits(&got));
            }
        }
    }
}

#[test]
fn gelu_equals_its_reference_from_tail_to_tail() {
    let mut x: Vec<f32> = (-1500..1500).map(|i| i as f32 * 0.01).collect();
    x.extend([1e4, -1e4, 1e-9, 0.0]);
    for kind in [GeluKind::Tanh, GeluKind::Erf] {
        for (round, tolerance) in DTYPES.into_iter().zip([1e-6, 1e-6, 1e-6]) {
            let mut wanted = x.clone();
            let gelu = |x: &mut [f32], run: &mut dyn FnMut(Gelu<'_, [f32]>)| {
                run(Gelu {
                    len: x.len(),
                    x,
                    kind,
                    round,
                })
            };
            gelu(&mut wanted, &mut |args| gelu::reference(args).unwrap());
            for mut cpu in backends() {
                let mut got = x.clone();
                gelu(&mut got, &mut |args| cpu.gelu(args).unwrap());
                for ((x, got), wanted) in x.iter().zip(&got).zip(&wanted) {
                    let limit = tolerance * x.abs().max(1.0);
                    assert!(
                        (got - wanted).abs() <= limit,
                        "{kind:?} {x}: {got} {wanted}"
                    );
                }
                let mut part = x[..1001].to_vec();
                gelu(&mut part, &mut |args| cpu.gelu(args).unwrap());
                assert_eq!(bits(&part), bits(&got[..1001]));
            }
        }
    }
}

/// A sequence of `tokens` over shuffled pages of a pool whose every byte is NaN, computed in the cuts given.
struct Sequence {
    layout: PageLayout,
    group: usize,
    slopes: Option<Vec<f32>>,
    window: usize,
    pool: Vec<u8>,
    table: Vec<PageId>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Sequence {
    fn new(layout: PageLayout, group: usize, tokens: usize, table: &[u32]) -> Sequence {
        let width = layout.kv_heads * layout.head_dim;
        let pages = 1 + table.iter().max().map_or(0, |p| *p as usize);
        Sequence {
            layout,
            group,
            slopes: None,
            window: usize::MAX,
            pool: vec![0xff; pages * layout.page_bytes()],
            table: table.iter().map(|p| PageId(*p)).collect(),
            q: noise(11, tokens * width * group),
            k: noise(12, tokens * width),
            v: noise(13, tokens * width),
        }
    }

    /// Attention of tokens `from..to`, whose keys and values are appended first, and the logarithms of their sums.
    fn step(&mut self, run: &mut Runner<'_>, from: usize, to: usize) -> [Vec<f32>; 2] {
        let width = self.layout.kv_heads * self.layout.head_dim;
        let rows = [StepRow {
            tokens: to - from,
            prefix: from,
            pages: &self.table,
        }];
        let mut pages = KvPages::new(self.layout, &mut self.pool);
        let (keys, values) = (
            &self.k[from * width..to * width],
            &self.v[from * width..to * width],
        );
        kv_append::reference(KvAppend {
            keys,
            values,
            rows: &rows,
            pages: &mut pages,
        })
        .unwrap();
        let q = &self.q[from * width * self.group..to * width * self.group];
        let mut out = vec![f32::NAN; q.len()];
        let mut logsum = vec![f32::NAN; (to - from) * self.layout.kv_heads * self.group];
        let divisor = (self.layout.head_dim as f32).sqrt();
        run(Attention {
            q,
            pages: &pages,
            rows: &rows,
            group: self.group,
            divisor,
            alibi: self
                .slopes
                .as_deref()
                .map(|slopes| Alibi { slopes, scale: 0.5 }),
            window: self.window,
            out: &mut out[..],
            logsum: Some(&mut logsum[..]),
        });
        [out, logsum]
    }
}

type Runner<'a> = dyn FnMut(Attention<'_, [f32], KvPages<'_>>) + 'a;

#[test]
fn attention_equals_its_reference_wherever_the_prefill_is_cut_and_never_reads_free_slots() {
    let all = usize::MAX;
    // kv heads, group, head dimension, window, slopes
    let shapes = [
        (1, 1, 4, all, false),
        (2, 3, 20, all, false),
        (2, 2, 64, 5, false),
        (1, 8, 16, all, true),
        (3, 1, 12, 40, true),
        (4, 1, 128, 16, false),
    ];
    let table = [5, 0, 3, 7, 1];
    let tokens = 67;
    for (kv_heads, group, head_dim, window, has_slopes) in shapes {
        for dtype in DTYPES {
            let layout = PageLayout {
                dtype,
                kv_heads,
                head_dim,
            };
            let slopes = has_slopes.then(|| noise(21, kv_heads * group));
            let sequence = || Sequence {
                slopes: slopes.clone(),
                window,
                ..Sequence::new(layout, group, tokens, &table)
            };
            // Where a rounding falls the other way, a weight moves by half a unit.
            let tolerance = match (dtype, has_slopes) {
                (DType::F32, false) => 2e-6,
                (DType::F32, true) => 1e-5,
                (_, false) => 4e-3,
                // Scores reach 30: half a unit of bfloat16 there is 0.06.
                (_, true) => 6e-2,
            };
            let wanted =
                sequence().step(&mut |args| attention::reference(args).unwrap(), 0, tokens);
            for &isa in Isa::available() {
                let whole = sequence().step(
                    &mut |args| Cpu::with_isa(1, isa).attention(args).unwrap(),
                    0,
                    tokens,
                );
                for (whole, wanted) in whole.iter().zip(&wanted) {
                    let what = format!("{isa:?} {dtype} {kv_heads}x{group}x{head_dim}");
                    assert_close(whole, wanted, tolerance, &what);
                }
                for (threads, cut) in [(1, 1), (2, 5), (3, 16), (2, 31), (4, 67)] {
                    let (mut cut_up, mut cpu) = (sequence(), Cpu::with_isa(threads, isa));
                    let mut got = [Vec::new(), Vec::new()];
                    for from in (0..tokens).step_by(cut) {
                        let to = tokens.min(from + cut);
                        let part = cut_up.step(&mut |args| cpu.attention(args).unwrap(), from, to);
                        got.iter_mut()
                            .zip(part)
                            .for_each(|(got, part)| got.extend(part));
                    }
                    let what = format!("{isa:?} {dtype} cut every {cut}");
                    assert_eq!(
                        whole.each_ref().map(|v| bits(v)),
                        got.each_ref().map(|v| bits(v)),
                        "{what}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_of_a_batch_do_not_see_each_other() {
    let layout = PageLayout {
        dtype: DType::Bf16,
        kv_heads: 2,
        head_dim: 32,
    };
    let (group, width) = (2, 64);
    let prefixes = [0usize, 15, 16, 40, 3, 31, 47];
    for mut cpu in backends() {
        let mut pool = stored(
            DType::Bf16,
            &noise(5, prefixes.len() * 3 * layout.page_bytes() / 2),
        );
        let tables: Vec<Vec<PageId>> = (0..prefixes.len())
            .map(|r| {
                (0..3)
                    .map(|p| PageId((p * prefixes.len() + r) as u32))
                    .collect()
            })
            .collect();
        let rows: Vec<StepRow<'_>> = prefixes
            .iter()
            .zip(&tables)
            .map(|(prefix, pages)| StepRow {
                tokens: 1,
                prefix: *prefix,
                pages,
            })
            .collect();
        let q = noise(6, rows.len() * group * width);
        let pages = KvPages::new(layout, &mut pool);
        let mut together = vec![f32::NAN; q.len()];
        cpu.attention(Attention {
            q: &q[..],
            pages: &pages,
            rows: &rows,
            group,
            divisor: 5.0,
            alibi: None,
            window: usize::MAX,
            out: &mut together[..],
            logsum: None,
        })
        .unwrap();
        for ((row, q), together) in rows
            .iter()
            .zip(q.chunks(group * width))
            .zip(together.chunks(group * width))
        {
            let mut alone = vec![f32::NAN; q.len()];
            let rows = std::slice::from_ref(row);
            cpu.attention(Attention {
                q,
                pages: &pages,
                rows,
                group,
                divisor: 5.0,
                alibi: None,
                window: usize::MAX,
                out: &mut alone[..],
                logsum: None,
            })
            .unwrap();
            assert_eq!(bits(&alone), bits(together));
        }
    }
}

#[test]
fn short_buffers_and_unknown_pages_are_refused() {
    let mut cpu = Cpu::new(1);
    let bytes = stored(DType::F32, &noise(1, 6));
    let weight = WeightView::new(DType::F32, 2, 3, &bytes).unwrap();
    let mut out = [0.0; 3];
    let refused = cpu.linear(Linear {
        x: &[0.0f32; 6][..],
        weight,
        bias: None,
        out: &mut out[..],
        rows: 2,
    });
    assert!(matches!(
        refused,
        Err(OpError::Short {
            op: "linear",
            what: "out",
            has: 3,
            needs: 4
        })
    ));
    let layout = PageLayout {
        dtype: DType::F32,
        kv_heads: 1,
        head_dim: 2,
    };
    let mut pool = vec![0; layout.page_bytes()];
    let pages = KvPages::new(layout, &mut pool);
    let rows = [StepRow {
        tokens: 1,
        prefix: PAGE_TOKENS,
        pages: &[PageId(0), PageId(1)],
    }];
    let mut out = [0.0; 2];
    let refused = cpu.attention(Attention {
        q: &[0.0f32; 2][..],
        pages: &pages,
        rows: &rows,
        group: 1,
        divisor: 1.0,
        alibi: None,
        window: usize::MAX,
        out: &mut out[..],
        logsum: None,
    });
    assert_eq!(
        refused,
        Err(OpError::NoSuchPage {
            page: PageId(1),
            pages: 1
        })
    );
}
