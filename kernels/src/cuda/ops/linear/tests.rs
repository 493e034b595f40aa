//! How many launches gated products take, and their bits for other numbers of clusters.

use shared::dtype::DType;

use super::*;
use crate::backend::Backend;
use crate::cuda::emu::Emu;
use crate::ops::{AddNorm, SiluMul, convert};
use crate::tensor::WeightView;

/// As few inputs as clusters take; 20 pairs of strips, the last of them not whole.
const SIZE: (usize, usize) = (7 * 256 + 64, 19 * 16 + 3);

fn matrix(factor: f32) -> Vec<u8> {
    let values: Vec<f32> = (0..SIZE.0 * SIZE.1).map(|i| (i as f32 * factor).sin()).collect();
    let mut bytes = vec![0; values.len() * 2];
    convert::from_f32(DType::Bf16, &values, &mut bytes);
    bytes
}

/// What a gated MLP makes of `rows` rows, in one operation or in two, and how many launches that
/// takes.
fn middle(device: Emu, rows: usize, is_joint: bool) -> (u64, Vec<u32>) {
    let mut cuda = Cuda::new(device);
    let (inputs, outputs) = SIZE;
    let (of_gate, of_up) = (matrix(0.37), matrix(0.73));
    let mut device_matrix = |bytes| {
        let view = WeightView::new(DType::Bf16, outputs, inputs, bytes).expect("a matrix");
        cuda.matrix(view).expect("memory for a matrix")
    };
    let (of_gate, of_up) = (device_matrix(&of_gate), device_matrix(&of_up));
    let mut buffer = |len| cuda.buffer(len);
    let len = rows * outputs;
    let (mut x, mut gate, mut up) = (buffer(rows * inputs), buffer(len), buffer(len));
    let values: Vec<f32> = (0..rows * inputs).map(|i| (i as f32 * 0.11).cos()).collect();
    cuda.upload(&values, &mut x).expect("an upload");
    let before = cuda.launches();
    let mut parts = [
        Product { weight: of_gate, bias: None, out: &mut *gate },
        Product { weight: of_up, bias: None, out: &mut *up },
    ];
    let (x, round) = (&*x, DType::Bf16);
    if is_joint {
        cuda.gated(Gated { x, rows, parts, round }).expect("gated products");
    } else {
        cuda.products(Products { x, rows, parts: &mut parts }).expect("products");
        let [gate, up] = parts;
        cuda.silu_mul(SiluMul { gate: gate.out, up: up.out, len, round }).expect("an activation");
    }
    let launches = cuda.launches() - before;
    let mut values = vec![0.0; len];
    cuda.download(&gate, &mut values).expect("a download");
    (launches, values.into_iter().map(f32::to_bits).collect())
}

#[test]
fn gated_products_of_few_rows_are_one_launch_with_the_bits_of_two() {
    // One cluster, and 8 with 2 or 3 pairs of strips each.
    for multiprocessors in [4, 33] {
        let device = || Emu::new(2).with_multiprocessors(multiprocessors);
        for (rows, launches) in [(0, 0), (1, 1), (5, 1), (16, 1), (17, 2), (32, 2)] {
            let (together, apart) = (middle(device(), rows, true), middle(device(), rows, false));
            assert!(apart.1.iter().all(|bits| f32::from_bits(*bits).is_finite()));
            assert_eq!(together.0, launches, "{rows} rows");
            assert_eq!(apart.0, 2 * u64::from(rows > 0), "{rows} rows");
            assert!(together.1 == apart.1, "{rows} rows on {multiprocessors} multiprocessors");
        }
    }
    let (launches, bits) = middle(Emu::new(2).with_architecture(80), 16, true);
    assert_eq!(launches, 3, "there are no clusters, and rows are packed");
    assert!(bits == middle(Emu::new(2), 16, true).1);
}

/// Products of the norm of a sum in one operation or in two: launches, what came out, and the sum.
fn normed(
    device: Emu,
    inputs: usize,
    rows: usize,
    is_gated: bool,
    is_joint: bool,
) -> (u64, Vec<u32>, Vec<u32>) {
    const OUTPUTS: [usize; 2] = [35, 35];
    let mut cuda = Cuda::new(device);
    let matrices = OUTPUTS.map(|outputs| {
        let values = (0..inputs * outputs).map(|i| (i as f32 * 0.37 + outputs as f32).sin() * 0.1);
        let mut bytes = vec![0; inputs * outputs * 2];
        convert::from_f32(DType::Bf16, &values.collect::<Vec<_>>(), &mut bytes);
        let view = WeightView::new(DType::Bf16, outputs, inputs, &bytes).expect("a matrix");
        cuda.matrix(view).expect("memory for a matrix")
    });
    let mut uploaded = |len: usize, factor: f32| {
        let values: Vec<f32> = (0..len).map(|i| (i as f32 * factor).cos() * 3.0).collect();
        let mut buffer = cuda.buffer(len);
        cuda.upload(&values, &mut buffer).expect("an upload");
        buffer
    };
    let len = rows * inputs;
    let (mut x, y, weight) = (uploaded(len, 0.11), uploaded(len, 0.07), uploaded(inputs, 0.3));
    let mut outs = OUTPUTS.map(|outputs| uploaded(rows * outputs, 1.0));
    let (mut sum, mut out) = (uploaded(len, 1.0), uploaded(len, 1.0));
    let before = cuda.launches();
    let place = {
        let [first, second] = &mut outs;
        let [of_first, of_second] = matrices;
        let mut parts = [
            Product { weight: of_first, bias: None, out: &mut **first },
            Product { weight: of_second, bias: None, out: &mut **second },
        ];
        let norm = AddNorm {
            x: &mut *x,
            y: &*y,
            weight: &*weight,
            bias: None,
            out: &mut *out,
            rows,
            width: inputs,
            eps: 1e-5,
            round: DType::Bf16,
        };
        let args = NormedProducts { norm, sum: &mut *sum, parts: &mut parts, is_gated };
        match is_joint {
            true => cuda.normed_products(args),
            false => norm_then_multiply(&mut cuda, args),
        }
    };
    let place = place.expect("normed products");
    let launches = cuda.launches() - before;
    let mut bits = |from: &Floats, len: usize| {
        let mut values = vec![0.0; len];
        cuda.download(from, &mut values).expect("a download");
        values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let mut products = bits(&outs[0], rows * OUTPUTS[0]);
    if !is_gated {
        products.extend(bits(&outs[1], rows * OUTPUTS[1]));
    }
    let at = if place == SumPlace::X { &x } else { &sum };
    (launches, products, bits(at, len))
}

#[test]
fn products_of_a_norm_of_few_rows_are_one_launch_with_the_bits_of_two() {
    for multiprocessors in [4, 64] {
        let device = || Emu::new(2).with_multiprocessors(multiprocessors);
        for (inputs, rows) in [(1856, 1), (1856, 5), (2048, 8), (4160, 9), (8192, 1), (8192, 16)] {
            for is_gated in [false, true] {
                let joint = normed(device(), inputs, rows, is_gated, true);
                let apart = normed(device(), inputs, rows, is_gated, false);
                let case = format!("{rows} x {inputs} on {multiprocessors}, gated: {is_gated}");
                assert!(apart.1.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{case}");
                assert_eq!((joint.0, apart.0), (1, 2), "{case}");
                assert!(joint.1 == apart.1 && joint.2 == apart.2, "{case}");
            }
        }
    }
    // Too many rows, too wide rows, and no clusters.
    for (device, inputs, rows, launches) in [
        (Emu::new(2), 2048, 17, 2),
        (Emu::new(2), 8256, 1, 2),
        (Emu::new(2).with_architecture(80), 2048, 1, 2),
        (Emu::new(2), 2048, 0, 0),
    ] {
        assert_eq!(normed(device, inputs, rows, false, true).0, launches, "{rows} x {inputs}");
    }
}
