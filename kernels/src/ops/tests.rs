//! The definitions of gradients against differences of the definitions of the operations, and what
//! operations refuse. The fast paths are checked over the table in `crate::cases`.

use shared::dtype::DType;
use shared::ids::PageId;

use super::*;
use crate::backend::Backend;
use crate::cpu::Cpu;
use crate::kv::{KvPages, PAGE_TOKENS, PageLayout, StepRow};
use crate::tensor::WeightView;

/// Values in -1..1 without a pattern.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let value = |i: usize| (seed as f32 * 7.1 + i as f32 * 12.9898).sin() * 43_758.547;
    (0..len).map(|i| 2.0 * value(i).fract().abs() - 1.0).collect()
}

fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    convert::from_f32(dtype, values, &mut bytes);
    bytes
}

/// The difference quotient of `sum of weights f(x)` by element `i` of `x`.
fn slope(x: &[f32], i: usize, weights: &[f32], f: &mut dyn FnMut(&[f32]) -> Vec<f32>) -> f32 {
    let mut sum = |step: f32| {
        let mut x = x.to_vec();
        x[i] += step;
        let y = f(&x);
        y.iter().zip(weights).map(|(y, w)| f64::from(y * w)).sum::<f64>()
    };
    ((sum(1e-2) - sum(-1e-2)) / 2e-2) as f32
}

/// Where the gradient `actual` differs from the slopes of `f`.
fn assert_slopes(
    x: &[f32],
    weights: &[f32],
    actual: &[f32],
    tolerance: f32,
    f: &mut dyn FnMut(&[f32]) -> Vec<f32>,
) {
    for (i, actual) in actual.iter().enumerate() {
        let expected = slope(x, i, weights, f);
        assert!((actual - expected).abs() < tolerance, "{i}: {actual} {expected}");
    }
}

#[test]
fn gradients_of_norms_are_slopes() {
    let (width, eps, round) = (17, 1e-5, DType::F32);
    let (x, weight, given) = (&noise(1, width)[..], &noise(2, width)[..], noise(3, width));
    for centered in [false, true] {
        let mut grad = given.clone();
        gradient::reference_norm(NormGrad {
            x,
            weight,
            grad: &mut grad[..],
            rows: 1,
            width,
            eps,
            centered,
        })
        .unwrap();
        assert_slopes(x, &given, &grad, 2e-3, &mut |x| {
            let (rows, bias, mut all) = (1, &vec![0.0; width][..], vec![0.0; width]);
            let out = &mut all[..];
            match centered {
                true => layernorm::reference(Layernorm {
                    x,
                    weight,
                    bias,
                    out,
                    rows,
                    width,
                    eps,
                    round,
                }),
                false => rmsnorm::reference(Rmsnorm { x, weight, out, rows, width, eps, round }),
            }
            .unwrap();
            all
        });
    }
}

#[test]
fn gradients_of_activations_are_slopes_from_tail_to_tail() {
    let round = DType::F32;
    let x: Vec<f32> = (-1200..1200).step_by(31).map(|i| i as f32 * 0.01).collect();
    let (ups, grads, len) = (noise(5, x.len()), noise(6, x.len()), 1);
    for (i, x) in x.iter().enumerate() {
        let (x, grad) = (&[*x][..], &grads[i..=i]);
        for kind in [GeluKind::Tanh, GeluKind::Erf] {
            let mut actual = grad.to_vec();
            let args = GeluGrad { x, grad: &mut actual[..], len, kind };
            gradient::reference_gelu(args).unwrap();
            assert_slopes(x, grad, &actual, 1e-3, &mut |x| {
                let mut x = x.to_vec();
                gelu::reference(Gelu { x: &mut x[..], len, kind, round }).unwrap();
                x
            });
        }
        let (mut of_gate, mut of_up) = (x.to_vec(), ups[i..=i].to_vec());
        let (gate, up) = (&mut of_gate[..], &mut of_up[..]);
        gradient::reference_silu_mul(SiluMulGrad { gate, up, grad, len }).unwrap();
        let silu = |gate: &[f32], up: &[f32]| {
            let mut gate = gate.to_vec();
            silu_mul::reference(SiluMul { gate: &mut gate[..], up, len, round }).unwrap();
            gate
        };
        assert_slopes(x, grad, &of_gate, 1e-3, &mut |gate| silu(gate, &ups[i..=i]));
        assert_slopes(&ups[i..=i], grad, &of_up, 2e-3, &mut |up| silu(x, up));
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
    let of_chosen: Vec<f32> =
        grad.iter().zip(&weights).map(|(g, w)| if *w > 0.0 { *g } else { 0.0 }).collect();
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
    assert_eq!(out, [0.0, 0.0, 0.0, 0.0, silu(0.5) * 2.0 + silu(-1.0) * 3.0 * 0.5, 0.0]);
    assert!(dot(&[2], &mut out).is_err());
}

#[test]
fn gradients_of_attention_are_slopes() {
    let (tokens, group, width) = (5, 2, 3);
    let layout = PageLayout { dtype: DType::F32, kv_heads: 1, head_dim: width };
    let rows = [StepRow::new(tokens, 0, &[PageId(1)])];
    let (divisor, window) = ((width as f32).sqrt(), 4);
    let alibi = Some(Alibi { slopes: &[0.3, -0.2], scale: 0.5 });
    let inputs =
        [noise(11, tokens * width * group), noise(12, tokens * width), noise(13, tokens * width)];
    let pool_of = |keys: &[f32], values: &[f32]| {
        let mut pool = vec![0xff; 2 * layout.page_bytes()];
        let pages = &mut KvPages::new(layout, &mut pool);
        kv_append::reference(KvAppend { keys, values, rows: &rows, pages }).unwrap();
        pool
    };
    let attend = |[q, keys, values]: [&[f32]; 3]| {
        let (mut pool, mut all) = (pool_of(keys, values), vec![f32::NAN; q.len()]);
        let (pages, out, rows) = (&KvPages::new(layout, &mut pool), &mut all[..], &rows[..]);
        let logsum = None;
        attention::reference(Attention {
            q,
            pages,
            rows,
            group,
            divisor,
            alibi,
            window,
            out,
            logsum,
        })
        .unwrap();
        all
    };
    let weights = noise(31, inputs[0].len());
    let mut grads = inputs.each_ref().map(|input| vec![0.0; input.len()]);
    let [q_grad, k_grad, v_grad] = grads.each_mut().map(|grad| &mut grad[..]);
    let mut pool = pool_of(&inputs[1], &inputs[2]);
    attention_grad::reference(AttentionGrad {
        q: &inputs[0][..],
        grad: &weights,
        pages: &KvPages::new(layout, &mut pool),
        rows: &rows,
        starts: &[0],
        group,
        divisor,
        alibi,
        window,
        known: None,
        q_grad,
        k_grad,
        v_grad,
    })
    .unwrap();
    for (which, grad) in grads.iter().enumerate() {
        assert_slopes(&inputs[which], &weights, grad, 1e-3, &mut |x| {
            let mut with = inputs.each_ref().map(|input| &input[..]);
            with[which] = x;
            attend(with)
        });
    }
}

#[test]
fn short_buffers_and_unknown_pages_are_refused() {
    let mut cpu = Cpu::new(1);
    let bytes = stored(DType::F32, &noise(1, 6));
    let weight = WeightView::new(DType::F32, 2, 3, &bytes).unwrap();
    let mut out = [0.0; 3];
    let refused =
        cpu.linear(Linear { x: &[0.0f32; 6][..], weight, bias: None, out: &mut out[..], rows: 2 });
    assert!(matches!(refused, Err(OpError::Short { op: "linear", what: "out", has: 3, needs: 4 })));
    let refused = |up: WeightView<'_>, [gate_out, up_out]: [usize; 2]| {
        let (mut gate, mut other) = (vec![0.0; gate_out], vec![0.0; up_out]);
        let parts = [
            Product { weight, bias: None, out: &mut gate[..] },
            Product { weight: up, bias: None, out: &mut other[..] },
        ];
        let (x, round) = (&[0.0f32; 6][..], DType::F32);
        Cpu::new(1).gated(Gated { x, rows: 2, parts, round })
    };
    let narrow = WeightView::new(DType::F32, 1, 3, &bytes[..12]).unwrap();
    assert_eq!(refused(weight, [4, 4]), Ok(()));
    assert!(matches!(refused(narrow, [4, 4]), Err(OpError::Shape { op: "gated", .. })));
    for outs in [[3, 4], [4, 3]] {
        assert!(matches!(refused(weight, outs), Err(OpError::Short { what: "out", has: 3, .. })));
    }
    let layout = PageLayout { dtype: DType::F32, kv_heads: 1, head_dim: 2 };
    let mut pool = vec![0; layout.page_bytes()];
    let pages = KvPages::new(layout, &mut pool);
    let rows = [StepRow::new(1, PAGE_TOKENS, &[PageId(0), PageId(1)])];
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
    assert_eq!(refused, Err(OpError::NoSuchPage { page: PageId(1), pages: 1 }));
}

#[test]
fn adapters_whose_parts_overlap_or_do_not_fit_are_refused() {
    let bytes = [0; 256];
    let part = |first, rows, dtype, [inputs, rank, outputs]: [usize; 3]| {
        let view = |outputs, inputs| {
            let len = outputs * inputs * DType::size_bytes(dtype);
            WeightView::new(dtype, outputs, inputs, &bytes[..len]).unwrap()
        };
        LoraPart { first, rows, a: view(rank, inputs), b: view(outputs, rank), scale: 1.0 }
    };
    let plain = |first, rows| part(first, rows, DType::F32, [8, 2, 4]);
    let other = part(1, 1, DType::F32, [8, 3, 5]);
    let mixed = LoraPart { b: part(0, 1, DType::Bf16, [8, 2, 4]).b, ..plain(0, 1) };
    let broken = LoraPart { a: other.a, ..plain(0, 1) };
    let refused = |parts: &[LoraPart<WeightView<'_>>], middle: usize| {
        let (x, mut middle, mut out) = ([0.0f32; 32], vec![0.0; middle], [0.0f32; 16]);
        let (x, middle, out) = (&x[..], &mut middle[..], &mut out[..]);
        Cpu::new(1).lora(Lora {
            x,
            parts,
            middle,
            out,
            rows: 4,
            round: DType::F32,
            inputs: RankInputs::Whole,
        })
    };
    for parts in [
        vec![plain(0, 2), plain(1, 1)],
        vec![plain(2, 1), plain(0, 1)],
        vec![plain(4, 1)],
        vec![plain(usize::MAX, 1)],
        vec![plain(0, usize::MAX)],
        vec![plain(0, 1), other],
        vec![mixed],
        vec![broken],
    ] {
        assert!(refused(&parts, 8).is_err());
    }
    let short = refused(&[plain(0, 4)], 7);
    assert!(matches!(short, Err(OpError::Short { what: "middle", .. })));
}
