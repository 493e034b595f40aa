use super::*;
use proptest::prelude::*;
use prost::Message;
use serde_json::Value;
use testkit::golden;

const LOSSY: [Compression; 5] = [
    Compression::MeanStd16Bit,
    Compression::Float16,
    Compression::Quantile8Bit,
    Compression::Uniform8Bit,
    Compression::Blockwise8Bit,
];

fn f32_bytes(values: &[f32]) -> Bytes {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn decode(message: &Tensor) -> Vec<f32> {
    let limits = ShapeLimits { max_rank: 4, max_elements: 1 << 20 };
    WireTensor::parse(message, limits).unwrap().to_f32_vec().unwrap()
}

fn round_trip(values: &[f32], row: usize, compression: Compression) -> Vec<f32> {
    let shape = [values.len() / row, row];
    decode(&encode(&shape, WireDtype::F32, f32_bytes(values), compression).unwrap())
}

/// The raw elements of a golden tensor, from its original values.
fn original(vector: &Value, dtype: WireDtype) -> Bytes {
    let values: Vec<f64> = serde_json::from_value(vector["original"].clone()).unwrap();
    let element = |v: &f64| match dtype {
        WireDtype::F32 => (*v as f32).to_le_bytes().to_vec(),
        WireDtype::F16 => f16::from_f64(*v).to_le_bytes().to_vec(),
        WireDtype::Bf16 => half::bf16::from_f64(*v).to_le_bytes().to_vec(),
        // Made from float32; the JSON parser may be off by an ulp of float64.
        WireDtype::F64 => f64::from(*v as f32).to_le_bytes().to_vec(),
        WireDtype::I64 => (*v as i64).to_le_bytes().to_vec(),
        _ => vec![*v as u8],
    };
    values.iter().flat_map(element).collect()
}

#[test]
fn golden_tensors_are_written_byte_for_byte() {
    let mut checked = 0;
    for vector in golden::vectors(golden::TENSORS) {
        let name = golden::text(&vector, "name");
        if name.starts_with("bf16_legacy") {
            continue;
        }
        let expected = Tensor::decode(&golden::bytes(&vector, "tensor_hex")[..]).unwrap();
        let compression = Compression::try_from(expected.compression).unwrap();
        let dtype = WireDtype::parse(&expected.dtype).unwrap();
        let shape: Vec<usize> = serde_json::from_value(vector["shape"].clone()).unwrap();
        let written = encode(&shape, dtype, original(&vector, dtype), compression)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let written = Tensor { requires_grad: expected.requires_grad, ..written };
        let differing = written.buffer.iter().zip(&expected.buffer).position(|(a, b)| a != b);
        assert_eq!(differing, None, "{name}");
        assert_eq!(written, expected, "{name}");
        checked += 1;
    }
    assert!(checked >= 24, "only {checked} golden tensors");
}

#[test]
fn code_is_the_one_that_bitsandbytes_sends() {
    let expected = golden::text(&golden::file(golden::TENSORS), "blockwise_code_float32_hex");
    let message =
        encode(&[1], WireDtype::F32, f32_bytes(&[1.0]), Compression::Blockwise8Bit).unwrap();
    assert_eq!(message.buffer.get(20..20 + 1024), Some(&golden::unhex(&expected)[..]));
}

#[test]
fn what_python_refuses_is_refused() {
    let refused = |dtype: WireDtype, compression: Compression| {
        let bytes = vec![0; 4 * dtype.size_bytes()].into();
        encode(&[2, 2], dtype, bytes, compression)
    };
    for compression in LOSSY {
        let floats_only = matches!(
            refused(WireDtype::I64, compression),
            Err(TensorError::BadCompression { dtype: "int64", .. })
        );
        assert!(floats_only, "{compression:?}");
    }
    for compression in [Compression::Float16, Compression::MeanStd16Bit] {
        assert_eq!(
            refused(WireDtype::Bf16, compression),
            Err(TensorError::BadCompression { compression: compression.into(), dtype: "bfloat16" })
        );
    }
    for compression in
        [Compression::Uniform8Bit, Compression::Quantile8Bit, Compression::Blockwise8Bit]
    {
        assert!(refused(WireDtype::Bf16, compression).is_ok(), "{compression:?}");
        let nothing = encode(&[0], WireDtype::F32, Bytes::new(), compression);
        assert!(matches!(nothing, Err(TensorError::BadShape { .. })), "{compression:?}");
    }
    let scalar = encode(&[], WireDtype::F32, f32_bytes(&[1.0]), Compression::MeanStd16Bit);
    assert!(matches!(scalar, Err(TensorError::BadShape { .. })));
    let nothing = encode(&[1, 0, 4], WireDtype::F32, Bytes::new(), Compression::Float16);
    assert!(decode(&nothing.unwrap()).is_empty());
    let short = encode(&[3], WireDtype::F32, f32_bytes(&[1.0]), Compression::Float16);
    assert!(matches!(short, Err(TensorError::BadBuffer { actual: 4, .. })));
}

#[test]
fn equal_elements_survive_every_compression() {
    for compression in LOSSY {
        let decoded = round_trip(&[2.5; 12], 4, compression);
        assert_eq!(decoded, [2.5; 12], "{compression:?}");
        assert_eq!(round_trip(&[0.0; 5000], 5000, compression), [0.0; 5000], "{compression:?}");
    }
}

#[test]
fn large_tensors_keep_every_compression_in_bounds() {
    let values: Vec<f32> = (0..250_007u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 16_777_216.0 - 0.5)
        .collect();
    for (compression, bound) in LOSSY.into_iter().zip([3e-4, 2e-4, 4e-3, 7e-3, 6e-3]) {
        let decoded = round_trip(&values, values.len(), compression);
        let worst = values.iter().zip(&decoded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= bound, "{compression:?}: {worst}");
    }
}

fn any_values() -> impl Strategy<Value = (Vec<f32>, usize)> {
    let magnitude = prop_oneof![Just(1.0f32), Just(1e-6), Just(1e6)];
    (1usize..24, 1usize..40, magnitude).prop_flat_map(|(rows, row, magnitude)| {
        let values =
            prop::collection::vec((-1.0f32..1.0).prop_map(move |v| v * magnitude), rows * row);
        (values, Just(row))
    })
}

fn deviation(values: &[f32]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
    let squares: f64 = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum();
    (mean, (squares / count).sqrt())
}

proptest! {
    /// Half an ulp of f16: 2^-11 of the value, or of the least normal number.
    #[test]
    fn float16_is_within_half_an_ulp((values, row) in any_values()) {
        for (value, decoded) in values.iter().zip(round_trip(&values, row, Compression::Float16)) {
            let expected = value.clamp(-65504.0, 65504.0);
            prop_assert!((expected - decoded).abs() <= (expected.abs() * 4.9e-4).max(3e-8), "{value} {decoded}");
        }
    }

    /// The same of the distance to the row's mean, and rounding in f32 of the rest.
    #[test]
    fn mean_and_deviation_keep_the_row((values, row) in any_values()) {
        let decoded = round_trip(&values, row, Compression::MeanStd16Bit);
        for (line, decoded) in values.chunks(row).zip(decoded.chunks(row)) {
            let (mean, std) = deviation(line);
            for (value, decoded) in line.iter().zip(decoded) {
                let distance = (f64::from(*value) - mean).abs();
                let bound = distance * 4.9e-4 + std * 1e-7 + mean.abs() * 1e-6 + 2e-13 + distance.max(std) * 1e-5;
                prop_assert!((f64::from(*value) - f64::from(*decoded)).abs() <= bound, "{value} {decoded}");
            }
        }
    }

    /// One bucket, 6/256 of the (sample) deviation, for what is less than 2.9 deviations away from the mean.
    #[test]
    fn uniform_is_within_a_bucket((values, row) in any_values()) {
        let decoded = round_trip(&values, row, Compression::Uniform8Bit);
        let (mean, std) = deviation(&values);
        let count = values.len() as f64;
        let sample = std * (count / (count - 1.0).max(1.0)).sqrt();
        for (value, decoded) in values.iter().zip(&decoded) {
            if (f64::from(*value) - mean).abs() < 2.9 * sample {
                let bound = sample * 6.0 / 256.0 * 1.01 + mean.abs() * 1e-5;
                prop_assert!((f64::from(*value) - f64::from(*decoded)).abs() <= bound, "{value} {decoded}");
            }
        }
    }

    /// Fewer elements than buckets: one each. Otherwise order is kept.
    #[test]
    fn quantiles_keep_the_order((values, row) in any_values()) {
        let decoded = round_trip(&values, row, Compression::Quantile8Bit);
        let mut pairs: Vec<(f32, f32)> = values.iter().copied().zip(decoded).collect();
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
        for pair in pairs.windows(2) {
            let slack = 1e-5 * pair[0].1.abs().max(pair[1].1.abs());
            prop_assert!(pair[0].1 <= pair[1].1 + slack);
        }
        if values.len() < 200 {
            for (value, decoded) in pairs {
                prop_assert!((value - decoded).abs() <= 1e-6 * value.abs(), "{value} {decoded}");
            }
        }
    }

    /// Half the widest gap of the code times the largest magnitude of the block.
    #[test]
    fn blockwise_is_within_half_a_gap((values, row) in any_values()) {
        let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        for (value, decoded) in values.iter().zip(round_trip(&values, row, Compression::Blockwise8Bit)) {
            prop_assert!((value - decoded).abs() <= 0.011 * most, "{value} {decoded}");
        }
    }

    #[test]
    fn no_values_panic(bits in prop::collection::vec(any::<u32>(), 0..300), compression in prop::sample::select(&LOSSY[..])) {
        let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        if let Ok(message) = encode(&[values.len()], WireDtype::F32, f32_bytes(&values), compression) {
            prop_assert_eq!(decode(&message).len(), values.len());
        }
    }
}
