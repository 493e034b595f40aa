//! Gradients: every instruction set against the references, the references against differences of the operations themselves, and
//! the same bits for a row alone and for a sequence taken in pieces.

use super::*;
use crate::quant::{int8, nf4};
use shared::config::QuantType;

fn linear_grad_with(cpu: &mut Cpu, grad: &[f32], weight: WeightView<'_>, rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * weight.inputs()];
    cpu.linear_grad(LinearGrad {
        grad,
        weight,
        out: &mut out[..],
        rows,
    })
    .unwrap();
    out
}

/// What the rounding of gradients to bfloat16 costs.
fn grad_tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => 4e-3,
        DType::F32 | DType::F16 => 3e-6,
    }
}

#[test]
fn linear_grad_equals_its_reference_and_rows_do_not_matter() {
    for (inputs, outputs) in LINEAR {
        for dtype in DTYPES {
            let bytes = stored(dtype, &noise(1, inputs * outputs));
            let weight = WeightView::new(dtype, outputs, inputs, &bytes).unwrap();
            let (rows, grad) = (7, noise(2, 7 * outputs));
            let mut wanted = vec![f32::NAN; rows * inputs];
            gradient::reference_linear(LinearGrad {
                grad: &grad[..],
                weight,
                out: &mut wanted[..],
                rows,
            })
            .unwrap();
            for mut cpu in backends() {
                let got = linear_grad_with(&mut cpu, &grad, weight, rows);
                let what = format!("{:?} {dtype} {inputs}->{outputs}", cpu.isa());
                assert_close(&got, &wanted, grad_tolerance(dtype), &what);
                let alone: Vec<f32> = grad
                    .chunks(outputs)
                    .flat_map(|grad| linear_grad_with(&mut cpu, grad, weight, 1))
                    .collect();
                assert_eq!(bits(&alone), bits(&got), "{what}");
            }
        }
    }
}

#[test]
fn linear_grad_of_a_quantized_matrix_is_that_of_what_it_stands_for() {
    for (inputs, outputs) in [(64, 16), (100, 37), (352, 128), (128, 601)] {
        let values = noise(1, inputs * outputs);
        let (rows, grad) = (19, noise(2, 19 * outputs));
        for (quant, bytes) in [
            (QuantType::Int8, int8::encode(&values, inputs)),
            (QuantType::Nf4, nf4::encode(&values)),
        ] {
            for dtype in DTYPES {
                let weight = WeightView::quantized(quant, dtype, outputs, inputs, &bytes).unwrap();
                let mut plain = vec![0.0; inputs * outputs];
                for (index, row) in plain.chunks_mut(inputs).enumerate() {
                    assert!(weight.row_to_f32(index, row));
                }
                let plain = stored(DType::F32, &plain);
                let plain = WeightView::new(DType::F32, outputs, inputs, &plain).unwrap();
                for mut cpu in backends() {
                    let got = linear_grad_with(&mut cpu, &grad, weight, rows);
                    let wanted = linear_grad_with(&mut cpu, &grad, plain, rows);
                    let what = format!("{:?} {quant:?} {dtype}", cpu.isa());
                    if (cpu.isa(), dtype) == (Isa::Avx512Bf16, DType::Bf16) {
                        assert_close(&got, &wanted, grad_tolerance(dtype), &what);
                    } else {
                        assert_eq!(bits(&got), bits(&wanted), "{what}");
                    }
                    let alone: Vec<f32> = grad
                        .chunks(outputs)
                        .flat_map(|grad| linear_grad_with(&mut cpu, grad, weight, 1))
                        .collect();
                    assert_eq!(bits(&alone), bits(&got), "{what}");
                }
            }
        }
    }
}

/// The difference quotient of `sum of weights f(x)` by element `i` of `x`.
fn slope(x: &[f32], i: usize, weights: &[f32], f: &mut dyn FnMut(&[f32]) -> Vec<f32>) -> f32 {
    let mut sum = |step: f32| {
        let mut x = x.to_vec();
        x[i] += step;
        let y = f(&x);
        y.iter()
            .zip(weights)
            .map(|(y, w)| f64::from(y * w))
            .sum::<f64>()
    };
    ((sum(1e-2) - sum(-1e-2)) / 2e-2) as f32
}

#[test]
fn norm_grad_is_the_slope_of_the_norms_and_rows_do_not_matter() {
    for (rows, width) in [(1, 1), (3, 17), (5, 64), (40, 4544)] {
        for centered in [false, true] {
            let (x, weight, grad) = (
                noise(1, rows * width),
                noise(2, width),
                noise(3, rows * width),
            );
            let run = |x: &[f32], grad: &[f32], run: &mut dyn FnMut(NormGrad<'_, [f32]>)| {
                let mut grad = grad.to_vec();
                run(NormGrad {
                    x,
                    weight: &weight,
                    rows: grad.len() / width,
                    grad: &mut grad[..],
                    width,
                    eps: 1e-5,
                    centered,
                });
                grad
            };
            let wanted = run(&x, &grad, &mut |args| {
                gradient::reference_norm(args).unwrap()
            });
            for mut cpu in backends() {
                let got = run(&x, &grad, &mut |args| cpu.norm_grad(args).unwrap());
                assert_close(&got, &wanted, 1e-5, &format!("norm grad {rows}x{width}"));
                let alone: Vec<f32> = x
                    .chunks(width)
                    .zip(grad.chunks(width))
                    .flat_map(|(x, grad)| run(x, grad, &mut |args| cpu.norm_grad(args).unwrap()))
                    .collect();
                assert_eq!(bits(&alone), bits(&got));
            }
            if width == 17 {
                let mut norm = |x: &[f32]| {
                    let mut out = vec![0.0; width];
                    let (rows, eps, round) = (1, 1e-5, DType::F32);
                    let (weight, bias) = (&weight[..], &vec![0.0; width][..]);
                    let out_values = &mut out[..];
                    match centered {
                        true => layernorm::reference(Layernorm {
                            x,
                            weight,
                            bias,
                            out: out_values,
                            rows,
                            width,
                            eps,
                            round,
                        }),
                        false => rmsnorm::reference(Rmsnorm {
                            x,
                            weight,
                            out: out_values,
                            rows,
                            width,
                            eps,
                            round,
                        }),
                    }
                    .unwrap();
                    out
                };
                for (i, wanted) in wanted[..width].iter().enumerate() {
                    let got = slope(&x[..width], i, &grad[..width], &mut norm);
                    assert!(
                        (got - wanted).abs() < 2e-3,
                        "{centered} {i}: {got} {wanted}"
                    );
                }
            }
        }
    }
}

#[test]
fn activation_gradients_are_slopes_from_tail_to_tail() {
    let x: Vec<f32> = (-1200..1200).map(|i| i as f32 * 0.01).collect();
    let (up, grad) = (noise(5, x.len()), noise(6, x.len()));
    for kind in [GeluKind::Tanh, GeluKind::Erf] {
        let mut wanted = grad.clone();
        let run = |grad: &mut [f32], run: &mut dyn FnMut(GeluGrad<'_, [f32]>)| {
            run(GeluGrad {
                x: &x,
                len: grad.len(),
                grad,
                kind,
            })
        };
        run(&mut wanted, &mut |args| {
            gradient::reference_gelu(args).unwrap()
        });
        for (i, wanted) in wanted.iter().enumerate().step_by(97) {
            let mut gelu = |x: &[f32]| {
                let mut x = x.to_vec();
                gelu::reference(Gelu {
                    len: 1,
                    x: &mut x[..],
                    kind,
                    round: DType::F32,
                })
                .unwrap();
                x
            };
            let got = slope(&x[i..=i], 0, &grad[i..=i], &mut gelu);
            assert!(
                (got - wanted).abs() < 1e-3,
                "{kind:?} {}: {got} {wanted}",
                x[i]
            );
        }
        for mut cpu in backends() {
            let mut got = grad.clone();
            run(&mut got, &mut |args| cpu.gelu_grad(args).unwrap());
            assert_close(&got, &wanted, 2e-6, "gelu grad");
        }
    }
    let run = |run: &mut dyn FnMut(SiluMulGrad<'_, [f32]>)| {
        let (mut gate, mut up) = (x.clone(), up.clone());
        run(SiluMulGrad {
            gate: &mut gate[..],
            up: &mut up[..],
            grad: &grad,
            len: x.len(),
        });
        (gate, up)
    };
    let wanted = run(&mut |args| gradient::reference_silu_mul(args).unwrap());
    for i in (0..x.len()).step_by(89) {
        let mut silu = |gate: &[f32]| {
            let mut gate = gate.to_vec();
            silu_mul::reference(SiluMul {
                gate: &mut gate[..],
                up: &up[i..=i],
                len: 1,
                round: DType::F32,
            })
            .unwrap();
            gate
        };
        let got = slope(&x[i..=i], 0, &grad[i..=i], &mut silu);
        assert!(
            (got - wanted.0[i]).abs() < 1e-3,
            "{}: {got} {}",
            x[i],
            wanted.0[i]
        );
    }
    for mut cpu in backends() {
        let got = run(&mut |args| cpu.silu_mul_grad(args).unwrap());
        assert_close(&got.0, &wanted.0, 2e-6, "gate");
        assert_close(&got.1, &wanted.1, 2e-6, "up");
    }
}

type GradRunner<'a> = dyn FnMut(AttentionGrad<'_, [f32], KvPages<'_>>) + 'a;

/// Gradients of queries, keys and values of a sequence, taken in pieces that begin at multiples of `cut`.
fn attention_gradients(
    sequence: &mut Sequence,
    tokens: usize,
    cut: usize,
    run: &mut GradRunner<'_>,
) -> [Vec<f32>; 3] {
    let (layout, group) = (sequence.layout, sequence.group);
    let width = layout.kv_heads * layout.head_dim;
    let all_grads = noise(31, tokens * width * group);
    // The sequence lies behind another one in the sums.
    let mut k_grad = vec![0.0; (tokens + 2) * width];
    let mut v_grad = k_grad.clone();
    let mut q_grad = vec![f32::NAN; tokens * width * group];
    for from in (0..tokens).step_by(cut).rev() {
        let to = tokens.min(from + cut);
        let range = from * width * group..to * width * group;
        run(AttentionGrad {
            q: &sequence.q[range.clone()],
            grad: &all_grads[range.clone()],
            pages: &KvPages::new(layout, &mut sequence.pool),
            rows: &[StepRow {
                tokens: to - from,
                prefix: from,
                pages: &sequence.table,
            }],
            starts: &[2],
            group,
            divisor: (layout.head_dim as f32).sqrt(),
            alibi: sequence
                .slopes
                .as_deref()
                .map(|slopes| Alibi { slopes, scale: 0.5 }),
            window: sequence.window,
            known: None,
            q_grad: &mut q_grad[range],
            k_grad: &mut k_grad[..],
            v_grad: &mut v_grad[..],
        });
    }
    assert!(
        k_grad[..2 * width]
            .iter()
            .chain(&v_grad[..2 * width])
            .all(|&v| v == 0.0)
    );
    [
        q_grad,
        k_grad.split_off(2 * width),
        v_grad.split_off(2 * width),
    ]
}

#[test]
fn attention_gradients_equal_their_reference_and_do_not_depend_on_cuts() {
    let (tokens, table) = (35, [5, 0, 3]);
    let all = usize::MAX;
    for (kv_heads, group, head_dim, window, has_slopes) in [
        (1, 1, 4, all, false),
        (2, 3, 20, all, true),
        (2, 2, 64, 5, false),
        (1, 3, 32, all, true),
        (2, 1, 96, 20, false),
        (3, 1, 12, 20, true),
    ] {
        for dtype in DTYPES {
            let layout = PageLayout {
                dtype,
                kv_heads,
                head_dim,
            };
            let slopes = has_slopes.then(|| noise(21, kv_heads * group));
            let mut sequence = Sequence {
                slopes,
                window,
                ..Sequence::new(layout, group, tokens, &table)
            };
            sequence.step(&mut |args| attention::reference(args).unwrap(), 0, tokens);
            let reference: &mut GradRunner<'_> =
                &mut |args| attention_grad::reference(args).unwrap();
            let wanted = attention_gradients(&mut sequence, tokens, tokens, reference);
            for mut cpu in backends() {
                let has_pairs = (cpu.isa(), dtype) == (Isa::Avx512Bf16, DType::Bf16)
                    && head_dim.is_multiple_of(32);
                let tolerance = if has_pairs { 1e-2 } else { 2e-5 };
                let run: &mut GradRunner<'_> = &mut |args| cpu.attention_grad(args).unwrap();
                let whole = attention_gradients(&mut sequence, tokens, tokens, run);
                for (whole, wanted) in whole.iter().zip(&wanted) {
                    assert_close(
                        whole,
                        wanted,
                        tolerance,
                        &format!("{dtype} {kv_heads}x{group}x{head_dim}"),
                    );
                }
                // Products of pairs sum the queries of a page by themselves.
                let cuts = [1, 20, PAGE_TOKENS, 2 * PAGE_TOKENS];
                for cut in &cuts[if has_pairs { 2 } else { 0 }..] {
                    let cut_up = attention_gradients(&mut sequence, tokens, *cut, run);
                    let same = cut_up.iter().zip(&whole).all(|(a, b)| bits(a) == bits(b));
                    assert!(same, "{dtype} cut every {cut}");
                }
            }
        }
    }
}

#[test]
fn attention_gradients_are_slopes_of_attention() {
    let (tokens, width) = (5, 6);
    let layout = PageLayout {
        dtype: DType::F32,
        kv_heads: 1,
        head_dim: 3,
    };
    let sequence = || Sequence {
        slopes: Some(vec![0.3, -0.2]),
        window: 4,
        ..Sequence::new(layout, 2, tokens, &[1])
    };
    let attend = |sequence: &mut Sequence| {
        sequence.step(&mut |args| attention::reference(args).unwrap(), 0, tokens)
    };
    let mut filled = sequence();
    attend(&mut filled);
    let reference: &mut GradRunner<'_> = &mut |args| attention_grad::reference(args).unwrap();
    let [q, k, v] = attention_gradients(&mut filled, tokens, tokens, reference);
    let weights = noise(31, tokens * width);
    type Part = fn(&mut Sequence) -> &mut Vec<f32>;
    let parts: [(Part, Vec<f32>); 3] = [(|s| &mut s.q, q), (|s| &mut s.k, k), (|s| &mut s.v, v)];
    for (part, gradient) in parts {
        let values = part(&mut sequence()).clone();
        for (i, wanted) in gradient.iter().enumerate() {
            let mut f = |values: &[f32]| {
                let mut sequence = sequence();
                *part(&mut sequence) = values.to_vec();
                let [out, _] = attend(&mut sequence);
                out
            };
            let got = slope(&values, i, &weights, &mut f);
            assert!((got - wanted).abs() < 1e-3, "{i}: {got} {wanted}");
        }
    }
}

#[test]
fn the_gradient_of_the_router_is_its_slope() {
    let (tokens, experts, chosen) = (4, 5, 2);
    let (logits, grad) = (noise(3, tokens * experts), noise(4, tokens * experts));
    let route = |logits: &[f32]| {
        let mut weights = logits.to_vec();
        route::reference(Route {
            logits: &mut weights[..],
            tokens,
            experts,
            chosen,
            round: DType::F32,
        })
        .unwrap();
        weights
    };
    let weights = route(&logits);
    let of_chosen: Vec<f32> = grad
        .iter()
        .zip(&weights)
        .map(|(g, w)| if *w > 0.0 { *g } else { 0.0 })
        .collect();
    let mut got = logits.clone();
    route::reference_grad(RouteGrad {
        logits: &mut got[..],
        grad: &of_chosen,
        tokens,
        experts,
        chosen,
        round: DType::F32,
    })
    .unwrap();
    for (i, got) in got.iter().enumerate() {
        let wanted = slope(&logits, i, &grad, &mut |logits| route(logits));
        assert!((got - wanted).abs() < 1e-3, "{i}: {got} {wanted}");
    }
    let (gate, up, dy) = ([0.5f32, -1.0], [2.0f32, 3.0], [1.0f32, 0.5]);
    let mut out = [0.0; 6];
    let dot = |index: &[u32], out: &mut [f32]| {
        route::reference_gate_dot(GateDot {
            gate: &gate[..],
            up: &up,
            grad: &dy,
            index,
            width: 2,
            expert: 1,
            experts: 3,
            out,
        })
    };
    dot(&[1], &mut out).unwrap();
    let silu = |x: f32| x / (1.0 + (-x).exp());
    assert_eq!(
        out,
        [
            0.0,
            0.0,
            0.0,
            0.0,
            silu(0.5) * 2.0 + silu(-1.0) * 3.0 * 0.5,
            0.0
        ]
    );
    assert!(dot(&[2], &mut out).is_err());
}
