//! How many launches gated products take, and their bits for other numbers of clusters.

use shared::dtype::DType;

use super::*;
use crate::backend::Backend;
use crate::cuda::emu::Emu;
use crate::ops::{SiluMul, convert};
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
    assert_eq!(launches, 2, "there are no clusters");
    assert!(bits == middle(Emu::new(2), 16, true).1);
}
