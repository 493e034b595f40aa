//! Cases of the operations that take elements one by one: additions, activations and their gradients, and the moves of heads.

use shared::dtype::DType;

use super::{Bench, Extent, Failure, noise, test_on_devices};
use crate::cuda::ops::{
    add as device_add, gelu as device_gelu, qkv as device_qkv, silu_mul as device_silu,
};
use crate::cuda::{Cuda, Gpu};
use crate::ops::{
    Add, Gelu, GeluGrad, GeluKind, JoinQkv, PromptAdd, SiluMul, SiluMulGrad, SplitQkv, add, gelu,
    gradient, qkv, silu_mul,
};

const LENS: [(usize, Extent); 5] = [
    (1, Extent::Small),
    (7, Extent::Small),
    (1027, Extent::Small),
    (28672, Extent::Middle),
    (10_000_003, Extent::Full),
];
/// Dtypes, and what a rounding that falls the other way costs.
const ROUNDINGS: [(DType, f32); 3] = [(DType::F32, 2e-6), (DType::Bf16, 8e-3), (DType::F16, 1e-3)];

pub(super) fn check<G: Gpu>(cuda: &mut Cuda<G>, extent: Extent) -> Result<usize, Failure> {
    let mut bench = Bench::new(cuda);
    for (len, _) in LENS.into_iter().filter(|(_, at)| extent.takes(*at)) {
        for (round, tolerance) in ROUNDINGS {
            bench.begin(format!("additions {round} [{len}]"));
            additions(&mut bench, len, round)?;
            bench.begin(format!("activations {round} [{len}]"));
            activations(&mut bench, len, round, tolerance)?;
        }
        bench.begin(format!("gradients [{len}]"));
        gradients(&mut bench, len)?;
    }
    for (tokens, kv_heads, group, head_dim) in [(1, 1, 1, 1), (3, 2, 3, 20), (2, 1, 71, 64)] {
        bench.begin(format!(
            "heads {tokens} x {kv_heads} x {group} x {head_dim}"
        ));
        heads(&mut bench, [tokens, kv_heads, group, head_dim])?;
    }
    Ok(bench.cases)
}

/// From tail to tail.
fn wide(seed: u64, len: usize) -> Vec<f32> {
    noise(seed, len).into_iter().map(|v| v * 16.0).collect()
}

fn additions<G: Gpu>(bench: &mut Bench<'_, G>, len: usize, round: DType) -> Result<(), Failure> {
    let (x, y) = (noise(1, len), noise(2, len));
    let mut wanted = x.clone();
    let (xs, ys) = (&mut wanted[..], &y[..]);
    bench.op(add::reference(Add {
        x: xs,
        y: ys,
        len,
        round,
    }))?;
    let (mut on_device, from) = (bench.in_place(&x)?, bench.input(&y)?);
    let args = Add {
        x: &mut *on_device,
        y: &*from,
        len,
        round,
    };
    let done = device_add::launch(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&on_device, len)?;
    bench.same(&got, &wanted)?;
    // A prompt of half the length behind a third, which is aligned to nothing.
    let (offset, prompt) = (len / 3, &y[..len / 2]);
    let x = &mut wanted[..];
    bench.op(add::reference_prompt(PromptAdd {
        x,
        offset,
        prompt,
        round,
    }))?;
    let x = &mut *on_device;
    let done = device_add::launch_prompt(
        bench.cuda,
        PromptAdd {
            x,
            offset,
            prompt,
            round,
        },
    );
    bench.op(done)?;
    let got = bench.take(&on_device, len)?;
    bench.same(&got, &wanted)
}

fn activations<G: Gpu>(
    bench: &mut Bench<'_, G>,
    len: usize,
    round: DType,
    tolerance: f32,
) -> Result<(), Failure> {
    let (gate, up) = (wide(1, len), noise(2, len));
    let mut wanted = gate.clone();
    let reference = silu_mul::reference(SiluMul {
        gate: &mut wanted[..],
        up: &up[..],
        len,
        round,
    });
    bench.op(reference)?;
    let (mut on_device, up) = (bench.in_place(&gate)?, bench.input(&up)?);
    let args = SiluMul {
        gate: &mut *on_device,
        up: &*up,
        len,
        round,
    };
    let done = device_silu::launch(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&on_device, len)?;
    bench.close(&got, &wanted, tolerance)?;
    for kind in [GeluKind::Tanh, GeluKind::Erf] {
        let mut wanted = gate.clone();
        let x = &mut wanted[..];
        bench.op(gelu::reference(Gelu {
            x,
            len,
            kind,
            round,
        }))?;
        let mut on_device = bench.in_place(&gate)?;
        let x = &mut *on_device;
        let done = device_gelu::launch(
            bench.cuda,
            Gelu {
                x,
                len,
                kind,
                round,
            },
        );
        bench.op(done)?;
        let got = bench.take(&on_device, len)?;
        bench.close(&got, &wanted, 1e-6)?;
    }
    Ok(())
}

fn gradients<G: Gpu>(bench: &mut Bench<'_, G>, len: usize) -> Result<(), Failure> {
    let (x, up, grad) = (wide(1, len), noise(2, len), noise(3, len));
    let (mut wanted_gate, mut wanted_up) = (x.clone(), up.clone());
    let reference = gradient::reference_silu_mul(SiluMulGrad {
        gate: &mut wanted_gate[..],
        up: &mut wanted_up[..],
        grad: &grad[..],
        len,
    });
    bench.op(reference)?;
    let (mut gate, mut up, given) = (
        bench.in_place(&x)?,
        bench.in_place(&up)?,
        bench.input(&grad)?,
    );
    let args = SiluMulGrad {
        gate: &mut *gate,
        up: &mut *up,
        grad: &*given,
        len,
    };
    let done = device_silu::launch_grad(bench.cuda, args);
    bench.op(done)?;
    for (got, wanted) in [(&gate, &wanted_gate), (&up, &wanted_up)] {
        let got = bench.take(got, len)?;
        bench.close(&got, wanted, 2e-6)?;
    }
    for kind in [GeluKind::Tanh, GeluKind::Erf] {
        let mut wanted = grad.clone();
        let reference = gradient::reference_gelu(GeluGrad {
            x: &x[..],
            grad: &mut wanted[..],
            len,
            kind,
        });
        bench.op(reference)?;
        let (from, mut on_device) = (bench.input(&x)?, bench.in_place(&grad)?);
        let args = GeluGrad {
            x: &*from,
            grad: &mut *on_device,
            len,
            kind,
        };
        let done = device_gelu::launch_grad(bench.cuda, args);
        bench.op(done)?;
        let got = bench.take(&on_device, len)?;
        bench.close(&got, &wanted, 4e-6)?;
    }
    Ok(())
}

fn heads<G: Gpu>(
    bench: &mut Bench<'_, G>,
    [tokens, kv_heads, group, head_dim]: [usize; 4],
) -> Result<(), Failure> {
    let kv = tokens * kv_heads * head_dim;
    let fused = noise(1, kv * (group + 2));
    let mut wanted = [vec![0.0; kv * group], vec![0.0; kv], vec![0.0; kv]];
    let [q, k, v] = &mut wanted;
    let reference = qkv::reference(SplitQkv {
        fused: &fused[..],
        q: &mut q[..],
        k: &mut k[..],
        v: &mut v[..],
        tokens,
        kv_heads,
        group,
        head_dim,
    });
    bench.op(reference)?;
    let on_device = bench.input(&fused)?;
    let (mut q, mut k, mut v) = (
        bench.output(kv * group)?,
        bench.output(kv)?,
        bench.output(kv)?,
    );
    let args = SplitQkv {
        fused: &*on_device,
        q: &mut *q,
        k: &mut *k,
        v: &mut *v,
        tokens,
        kv_heads,
        group,
        head_dim,
    };
    let done = device_qkv::launch_split(bench.cuda, args);
    bench.op(done)?;
    for (got, wanted) in [&q, &k, &v].into_iter().zip(&wanted) {
        let got = bench.take(got, wanted.len())?;
        bench.same(&got, wanted)?;
    }
    let mut joined = bench.output(fused.len())?;
    let args = JoinQkv {
        fused: &mut *joined,
        q: &*q,
        k: &*k,
        v: &*v,
        tokens,
        kv_heads,
        group,
        head_dim,
    };
    let done = device_qkv::launch_join(bench.cuda, args);
    bench.op(done)?;
    let got = bench.take(&joined, fused.len())?;
    bench.same(&got, &fused)
}

test_on_devices!(super::check);
