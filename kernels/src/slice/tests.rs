//! Slices hold the values of the whole matrix, and products with them are its products.

use std::slice::from_ref;

use proptest::prelude::*;

use super::*;
use crate::Backend;
use crate::cpu::Cpu;
use crate::ops::convert::{self, to_vec};
use crate::ops::{Linear, LinearGrad};
use crate::quant::{int8, nf4, slice_bytes};

const QUANTS: [QuantType; 3] = [QuantType::None, QuantType::Int8, QuantType::Nf4];
const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

fn noise(seed: u32, len: usize) -> Vec<f32> {
    let value = |i: u32| {
        let hash = (i ^ seed).wrapping_mul(0x9e37_79b9).rotate_left(15).wrapping_mul(0x85eb_ca6b);
        ((hash >> 8) as f32 / 8_388_608.0 - 1.0) * if hash.is_multiple_of(31) { 4.0 } else { 1.0 }
    };
    (0..len as u32).map(value).collect()
}

fn stored(quant: QuantType, dtype: DType, outputs: usize, inputs: usize) -> Vec<u8> {
    let values = noise(7, outputs * inputs);
    match quant {
        QuantType::None => {
            let mut bytes = vec![0; values.len() * dtype.size_bytes()];
            convert::from_f32(dtype, &values, &mut bytes);
            bytes
        }
        QuantType::Int8 => int8::encode(&values, inputs),
        QuantType::Nf4 => nf4::encode(&values),
    }
}

fn values(view: &WeightView<'_>) -> Vec<f32> {
    let mut all = vec![f32::NAN; view.outputs() * view.inputs()];
    for (row, out) in all.chunks_exact_mut(view.inputs()).enumerate() {
        assert!(view.row_to_f32(row, out));
    }
    all
}

/// `columns` of `rows` of a matrix of `width` columns.
fn part(all: &[f32], width: usize, rows: &[Range<usize>], columns: &Range<usize>) -> Vec<f32> {
    let rows = rows.iter().cloned().flatten();
    rows.flat_map(|row| all[row * width..][columns.clone()].to_vec()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A range within `0..end` made of two numbers.
fn range(end: usize, (a, b): (usize, usize)) -> Range<usize> {
    let start = a % end;
    start..start + 1 + b % (end - start)
}

proptest! {
    #[test]
    fn every_slice_has_exactly_the_values_of_its_part(
        outputs in 1usize..40,
        inputs in 1usize..300,
        by_group: bool,
        rows in prop::collection::vec((0usize..100, 0usize..100), 1..4),
        columns in (0usize..1000, 0usize..1000),
        dtype in prop::sample::select(&DTYPES[..]),
    ) {
        let unit = if by_group { nf4::GROUP } else { 1 };
        let inputs = inputs.div_ceil(unit) * unit;
        let columns = range(inputs / unit, columns);
        let columns = columns.start * unit..columns.end * unit;
        let rows: Vec<_> = rows.into_iter().map(|ends| range(outputs, ends)).collect();
        for quant in QUANTS {
            let bytes = stored(quant, dtype, outputs, inputs);
            let whole = WeightView::quantized(quant, dtype, outputs, inputs, &bytes).unwrap();
            let all = values(&whole);
            // Some columns of several ranges of rows, copied.
            let slice = WeightSlice::new(whole, &rows, columns.clone()).unwrap();
            let view = slice.view().unwrap();
            let wanted = part(&all, inputs, &rows, &columns);
            prop_assert_eq!(bits(&values(&view)), bits(&wanted), "{} copied", quant);
            let count = rows.iter().map(Range::len).sum();
            let is_whole = count == outputs && columns == (0..inputs);
            let planned = slice_bytes(quant, dtype, [outputs, inputs], count, columns.clone());
            prop_assert!(is_whole || planned == Some(slice.len()), "{} bytes", quant);
            if let Format::Nf4(parts) = view.format() {
                prop_assert_eq!(parts.is_grouped(), by_group);
            }
            // Rows that follow each other, where they lie.
            let view = whole.rows(rows[0].clone()).unwrap();
            let wanted = part(&all, inputs, &rows[..1], &(0..inputs));
            prop_assert_eq!(bits(&values(&view)), bits(&wanted), "{} in place", quant);
        }
    }
}

#[test]
fn what_is_not_there_is_no_slice() {
    for quant in QUANTS {
        let bytes = stored(quant, DType::Bf16, 4, 70);
        let whole = WeightView::quantized(quant, DType::Bf16, 4, 70, &bytes).unwrap();
        let rows = |range: Range<usize>| WeightSlice::new(whole, &[range], 0..70).is_none();
        assert!(rows(2..5) && rows(2..2) && rows(0..usize::MAX));
        let columns = |range| WeightSlice::new(whole, from_ref(&(0..4)), range).is_none();
        assert!(columns(3..71) && columns(7..7));
        assert!(WeightSlice::new(whole, &[], 0..70).is_none());
        assert!(whole.rows(2..5).is_none() && whole.rows(3..3).is_none());
        let slice = whole.rows(1..3).unwrap();
        assert_eq!(slice.is_slice(), quant != QuantType::None);
        assert!(!slice.is_slice() || WeightSlice::new(slice, from_ref(&(0..1)), 0..70).is_none());
    }
}

#[test]
fn elements_of_a_vector_follow_each_other() {
    let bytes = stored(QuantType::None, DType::F32, 1, 10);
    let vector = WeightView::new(DType::F32, 1, 10, &bytes).unwrap();
    let slice = WeightSlice::elements(vector, &[1..3, 7..10]).unwrap();
    let all = to_vec(DType::F32, &bytes);
    let view = slice.view().unwrap();
    assert_eq!(
        (view.outputs(), to_vec(DType::F32, view.bytes())),
        (1, [&all[1..3], &all[7..]].concat())
    );
    assert!(WeightSlice::elements(vector, &[1..3, 7..11]).is_none());
}

fn product(weight: WeightView<'_>, x: &[f32], rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * weight.outputs()];
    let args = Linear { x, weight, bias: None, out: &mut out[..], rows };
    Cpu::new(2).linear(args).unwrap();
    out
}

fn gradient(weight: WeightView<'_>, grad: &[f32], rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * weight.inputs()];
    let args = LinearGrad { grad, weight, out: &mut out[..], rows };
    Cpu::new(2).linear_grad(args).unwrap();
    out
}

/// What a rank plans for a slice is what the slice takes of a device.
#[cfg(feature = "emu")]
#[test]
fn a_slice_takes_the_planned_bytes_of_a_device() {
    use crate::quant::held_bytes;
    let mut cuda = crate::cuda::Cuda::new(crate::cuda::emu::Emu::new(1));
    for (quant, inputs) in QUANTS.iter().flat_map(|quant| [320, 202].map(|inputs| (*quant, inputs)))
    {
        let bytes = stored(quant, DType::Bf16, 90, inputs);
        let whole = WeightView::quantized(quant, DType::Bf16, 90, inputs, &bytes).unwrap();
        let copies = [([7..80, 82..90], 0..inputs), ([0..40, 40..90], 64..192)];
        for (rows, columns) in copies {
            let slice = WeightSlice::new(whole, &rows, columns.clone()).unwrap();
            let count = slice.view().unwrap().outputs();
            let planned = held_bytes(quant, DType::Bf16, [90, inputs], count, columns);
            let taken = cuda.matrix(slice.view().unwrap()).unwrap().bytes();
            assert_eq!(Some(taken), planned, "{quant} {inputs} copied");
        }
        for rows in [0..31, 31..90, 0..90] {
            let planned = held_bytes(quant, DType::Bf16, [90, inputs], rows.len(), 0..inputs);
            let taken = cuda.matrix(whole.rows(rows).unwrap()).unwrap().bytes();
            assert_eq!(Some(taken), planned, "{quant} {inputs} in place");
        }
    }
}

/// Outputs of a product, and inputs of its gradient, depend on their own row or column alone: they
/// keep their bits wherever the matrix is cut for others. Sums over what is cut are near.
#[test]
fn products_with_slices_are_those_of_the_whole() {
    let (outputs, inputs, rows) = (96, 320, 3);
    let (own, columns) = (16..80, 64..256);
    let (x, grad) = (noise(1, rows * inputs), noise(2, rows * outputs));
    for (quant, dtype) in QUANTS.iter().flat_map(|q| DTYPES.map(|dtype| (*q, dtype))) {
        let bytes = stored(quant, dtype, outputs, inputs);
        let whole = WeightView::quantized(quant, dtype, outputs, inputs, &bytes).unwrap();
        let all = product(whole, &x, rows);
        let every_row = std::array::from_ref(&(0..rows)).clone();
        let view = whole.rows(own.clone()).unwrap();
        let copy = WeightSlice::new(whole, &[16..40, 40..80], 0..inputs).unwrap();
        for view in [view, copy.view().unwrap()] {
            let wanted = part(&all, outputs, &every_row, &own);
            assert_eq!(bits(&product(view, &x, rows)), bits(&wanted), "{quant} {dtype} rows");
        }
        let slice = |columns| WeightSlice::new(whole, from_ref(&(0..outputs)), columns).unwrap();
        let slices = [0..64, columns.clone(), 256..inputs].map(slice);
        let back = part(&gradient(whole, &grad, rows), inputs, &every_row, &columns);
        let view = slices[1].view().unwrap();
        assert_eq!(bits(&gradient(view, &grad, rows)), bits(&back), "{quant} {dtype} columns");
        let mut first = 0;
        let mut sums = vec![0.0; rows * outputs];
        for slice in &slices {
            let view = slice.view().unwrap();
            let own = part(&x, inputs, &every_row, &(first..first + view.inputs()));
            first += view.inputs();
            sums.iter_mut().zip(product(view, &own, rows)).for_each(|(sum, v)| *sum += v);
        }
        let largest = all.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for (sum, wanted) in sums.iter().zip(&all) {
            assert!((sum - wanted).abs() <= 1e-6 * largest, "{quant} {dtype}: {sum}, not {wanted}");
        }
    }
}
