//! Formats against golden data of bitsandbytes (`tests/golden/quant/generate.py`), and the
//! arithmetic over them.

use shared::config::QuantType;
use shared::dtype::DType;

use super::*;
use crate::ops::convert;
use crate::tensor::WeightView;

macro_rules! golden {
    ($name:literal) => {
        &include_bytes!(concat!("../../tests/golden/quant/", $name))[..]
    };
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    convert::to_vec(DType::F32, bytes)
}

#[test]
fn the_dynamic_map_is_that_of_bitsandbytes() {
    assert_eq!(nf4::DYNAMIC.to_vec(), floats(golden!("map.f32")));
}

#[test]
fn nf4_is_byte_for_byte_that_of_bitsandbytes() {
    let weights = convert::to_vec(DType::Bf16, golden!("nf4.weights.bf16"));
    let stored = nf4::encode(&weights);
    let parts = nf4::Nf4Parts::new(1, weights.len(), &stored).unwrap();
    assert_eq!(parts.codes, golden!("nf4.codes.u8"));
    // PyTorch sums the mean in another order.
    let offset = floats(golden!("nf4.offset.f32"))[0];
    assert!((parts.offset - offset).abs() <= 1e-6 * offset);
    let off_by_one = parts.absmax.iter().zip(golden!("nf4.absmax.u8")).filter(|(a, b)| a != b);
    assert_eq!(off_by_one.count(), 0);
    for (got, wanted) in floats(parts.absmax2).iter().zip(floats(golden!("nf4.absmax2.f32"))) {
        assert!((got - wanted).abs() <= 1e-6 * wanted, "{got} {wanted}");
    }
}

#[test]
fn nf4_decodes_what_bitsandbytes_wrote() {
    let wanted = floats(golden!("nf4.decoded.f32"));
    let mut stored = golden!("nf4.codes.u8").to_vec();
    pad(&mut stored);
    stored.extend(golden!("nf4.absmax.u8"));
    pad(&mut stored);
    stored.extend(golden!("nf4.absmax2.f32"));
    stored.extend(golden!("nf4.offset.f32"));
    pad(&mut stored);
    let view = WeightView::quantized(QuantType::Nf4, DType::F32, 1, wanted.len(), &stored).unwrap();
    let mut got = vec![f32::NAN; wanted.len()];
    assert!(view.row_to_f32(0, &mut got));
    let wrong = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
    assert_eq!(wrong, 0);
}

#[test]
fn nf4_packs_the_first_weight_of_a_pair_into_the_upper_half() {
    // Petals' reference: three groups of the same codes with largest magnitudes 1, 2, 3.
    let weights: Vec<f32> =
        (0..192).map(|i| ((37 * i % 64) - 31) as f32 / 32.0 * (1 + i / 64) as f32).collect();
    let stored = nf4::encode(&weights);
    let parts = nf4::Nf4Parts::new(3, 64, &stored).unwrap();
    let first = [
        0x09, 0x1c, 0x3e, 0x70, 0xa2, 0xd4, 0xf8, 0x1b, 0x2e, 0x5f, 0x91, 0xc3, 0xe6, 0x0a, 0x2d,
        0x4f,
    ];
    for group in parts.codes.chunks(32) {
        assert_eq!(&group[..16], &first);
    }
    assert_eq!(parts.absmax, [0, 127, 255]);
    assert_eq!((f32_at(parts.absmax2, 0), parts.offset), (1.0, 2.0));
    let scales = [0, 1, 2].map(|row| parts.scale(row, 0));
    assert!((scales[0] - 1.007_031_2).abs() < 1e-6 && scales[1..] == [2.0, 3.0]);
}

#[test]
fn int8_is_byte_for_byte_that_of_bitsandbytes() {
    let weights = convert::to_vec(DType::Bf16, golden!("int8.weights.bf16"));
    let stored = int8::encode(&weights, 100);
    let parts = int8::Int8Parts::new(24, 100, &stored).unwrap();
    assert_eq!(parts.codes, golden!("int8.codes.i8"));
    assert_eq!(parts.absmax, golden!("int8.absmax.f32"));
}

#[test]
fn zeros_stay_zeros_and_sizes_are_checked() {
    for quant in [QuantType::Int8, QuantType::Nf4] {
        let stored = match quant {
            QuantType::Int8 => int8::encode(&[0.0; 6 * 70], 70),
            _ => nf4::encode(&[0.0; 6 * 70]),
        };
        assert_eq!(stored_bytes(quant, DType::F32, 6, 70), Some(stored.len()));
        let view = WeightView::quantized(quant, DType::F32, 6, 70, &stored).unwrap();
        let mut row = [f32::NAN; 70];
        assert!(view.row_to_f32(5, &mut row) && !view.row_to_f32(6, &mut [0.0; 70]));
        assert_eq!(row, [0.0; 70]);
        let short = &stored[1..];
        assert!(WeightView::quantized(quant, DType::F32, 6, 70, short).is_err());
        assert!(WeightView::quantized(quant, DType::F32, 0, 70, &[]).is_err());
        assert!(WeightView::quantized(quant, DType::F32, usize::MAX, 70, &stored).is_err());
    }
}

#[test]
fn nf4_takes_4_127_bits_a_weight_and_int8_little_more_than_8() {
    let bits = |quant| {
        let bytes = stored_bytes(quant, DType::Bf16, 4096, 4096).unwrap();
        bytes as f64 * 8.0 / f64::from(4096 * 4096)
    };
    assert!(bits(QuantType::Nf4) < 4.128, "{}", bits(QuantType::Nf4));
    assert!(bits(QuantType::Int8) < 8.01, "{}", bits(QuantType::Int8));
}

#[test]
fn plans_count_the_padding_of_tiles() {
    let held = |quant, inputs: usize, columns: std::ops::Range<usize>| {
        held_bytes(quant, DType::Bf16, [37, inputs], 37, columns).unwrap()
    };
    // 3 strips; 5 blocks in 2 chunks of scales; one second scale and the offset.
    assert_eq!(held(QuantType::Nf4, 320, 0..320), 3 * 5 * 512 + 3 * 2 * 64 + 64);
    // A slice of 2 blocks of 10: its 74 groups have 37 second scales.
    assert_eq!(held(QuantType::Nf4, 640, 128..256), 3 * 2 * 512 + 3 * 64 + 192);
    for (quant, columns) in [(QuantType::Nf4, 1..320), (QuantType::Int8, 0..320)] {
        let stored = slice_bytes(quant, DType::Bf16, [37, 320], 37, columns.clone());
        assert_eq!(Some(held(quant, 320, columns)), stored, "what is not tiled is as stored");
    }
}
