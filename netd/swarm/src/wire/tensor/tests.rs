use super::*;
use proptest::prelude::*;
use prost::Message;
use testkit::golden;

const LIMITS: ShapeLimits = ShapeLimits { max_rank: 4, max_elements: 1 << 20 };

fn raw_f32(shape: &[usize], values: &[f32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    raw_tensor(shape, WireDtype::F32, bytes.into()).unwrap()
}

fn parse(message: &Tensor) -> Result<WireTensor, TensorError> {
    WireTensor::parse(message, LIMITS)
}

#[test]
fn golden_tensors_decode_to_the_values_python_got() {
    let mut checked = 0;
    for vector in golden::vectors(golden::TENSORS) {
        let name = golden::text(&vector, "name");
        let bytes = golden::bytes(&vector, "tensor_hex");
        let message = Tensor::decode(&bytes[..]).unwrap();
        assert_eq!(message.encode_to_vec(), bytes, "{name}");
        let tensor = parse(&message).unwrap_or_else(|e| panic!("{name}: {e}"));
        let shape: Vec<usize> = serde_json::from_value(vector["shape"].clone()).unwrap();
        assert_eq!(tensor.shape(), shape, "{name}");
        assert_eq!(tensor.dtype().name(), golden::text(&vector, "dtype"), "{name}");
        let expected: Vec<f64> = serde_json::from_value(vector["decoded"].clone()).unwrap();
        match tensor.dtype() {
            WireDtype::I64 => {
                let values = tensor.to_i64_vec().unwrap();
                assert_eq!(
                    values.iter().map(|v| *v as f64).collect::<Vec<_>>(),
                    expected,
                    "{name}"
                );
            }
            dtype if dtype.is_float() => {
                let values = tensor.to_f32_vec().unwrap();
                assert_eq!(values.len(), expected.len(), "{name}");
                for (value, expected) in values.iter().zip(&expected) {
                    // Some golden values are printed with ten digits only.
                    let tolerance = 1e-6 * expected.abs().max(1e-3);
                    assert!(
                        (f64::from(*value) - expected).abs() <= tolerance,
                        "{name}: {value} {expected}"
                    );
                }
            }
            _ => assert!(tensor.to_f32_vec().is_err(), "{name}"),
        }
        checked += 1;
    }
    assert!(checked >= 20, "only {checked} golden tensors");
}

#[test]
fn golden_raw_tensors_are_rebuilt_byte_for_byte() {
    let vectors = golden::vectors(golden::TENSORS);
    for name in ["f32", "bf16_16bit_payload_petals_default", "zero_tokens", "scalar_shape"] {
        let bytes = golden::bytes(golden::named(&vectors, name), "tensor_hex");
        let message = Tensor::decode(&bytes[..]).unwrap();
        let tensor = parse(&message).unwrap();
        let again = raw_tensor(tensor.shape(), tensor.dtype(), message.buffer).unwrap();
        assert_eq!(again.encode_to_vec(), bytes, "{name}");
    }
    for (name, dtype) in [("dummy_f32", WireDtype::F32), ("dummy_i64", WireDtype::I64)] {
        let bytes = golden::bytes(golden::named(&vectors, name), "tensor_hex");
        assert_eq!(dummy_tensor(dtype).encode_to_vec(), bytes, "{name}");
        assert!(parse(&dummy_tensor(dtype)).unwrap().is_dummy());
    }
}

#[test]
fn every_wire_form_reaches_every_block_dtype() {
    let values: Vec<f32> = (0..5000).map(|i| (i as f32 - 2500.0) / 7.0).collect();
    let message = raw_f32(&[1, 5000], &values);
    let tensor = parse(&message).unwrap();
    let mut wide = vec![0; 20_000];
    tensor.write_to(DType::F32, &mut wide).unwrap();
    assert_eq!(wide, message.buffer);
    let mut narrow = vec![0; 10_000];
    tensor.write_to(DType::Bf16, &mut narrow).unwrap();
    let expected: Vec<u8> = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    assert_eq!(narrow, expected);
    let back = parse(&raw_tensor(&[1, 5000], WireDtype::Bf16, narrow.into()).unwrap()).unwrap();
    back.write_to(DType::F32, &mut wide).unwrap();
    let expected: Vec<u8> =
        values.iter().flat_map(|v| bf16::from_f32(*v).to_f32().to_le_bytes()).collect();
    assert_eq!(wide, expected);
    let mut half = vec![0; 10_000];
    tensor.write_to(DType::F16, &mut half).unwrap();
    let expected: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    assert_eq!(half, expected);
}

#[test]
fn first_value_that_is_not_finite_is_named() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0; 5000];
        values[4097] = bad;
        values[4999] = bad;
        let tensor = parse(&raw_f32(&[5000], &values)).unwrap();
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let mut out = vec![0; 5000 * dtype.size_bytes()];
            let error = tensor.write_to(dtype, &mut out).unwrap_err();
            assert_eq!(error, TensorError::NotFinite { index: 4097, dtype: dtype.name() });
        }
    }
}

#[test]
fn values_that_overflow_the_block_dtype_are_refused() {
    let tensor = parse(&raw_f32(&[2], &[1.0, f32::MAX])).unwrap();
    tensor.write_to(DType::F32, &mut [0; 8]).unwrap();
    for dtype in [DType::Bf16, DType::F16] {
        let error = tensor.write_to(dtype, &mut [0; 4]).unwrap_err();
        assert_eq!(error, TensorError::NotFinite { index: 1, dtype: dtype.name() });
    }
    let wide = 1e300f64.to_le_bytes().to_vec();
    let tensor = parse(&raw_tensor(&[1], WireDtype::F64, wide.into()).unwrap()).unwrap();
    assert!(matches!(
        tensor.write_to(DType::F32, &mut [0; 4]),
        Err(TensorError::NotFinite { index: 0, .. })
    ));
}

#[test]
fn shapes_that_lie_are_refused() {
    let with_size =
        |size: &[u32]| Tensor { size: size.to_vec(), dtype: "float32".into(), ..Tensor::default() };
    assert!(matches!(parse(&with_size(&[2])), Err(TensorError::BadBuffer { actual: 0, .. })));
    assert!(matches!(parse(&with_size(&[1, 1, 1, 1, 1])), Err(TensorError::TooLarge { .. })));
    assert!(matches!(parse(&with_size(&[u32::MAX; 4])), Err(TensorError::TooLarge { .. })));
    assert!(matches!(parse(&with_size(&[u32::MAX, 0])), Err(TensorError::TooLarge { .. })));
    assert!(parse(&with_size(&[1, 0, 64])).unwrap().is_dummy());
    let unknown = Tensor { dtype: "complex64".into(), ..Tensor::default() };
    assert_eq!(parse(&unknown).unwrap_err(), TensorError::UnknownDtype("complex64".into()));
    let packed =
        Tensor { compression: 77, size: vec![0], dtype: "float32".into(), ..Tensor::default() };
    assert!(matches!(parse(&packed), Err(TensorError::BadCompression { compression: 77, .. })));
    let half_of_int =
        Tensor { compression: 2, size: vec![0], dtype: "int64".into(), ..Tensor::default() };
    assert!(matches!(parse(&half_of_int), Err(TensorError::BadCompression { compression: 2, .. })));
}

#[test]
fn destination_and_dtype_must_fit() {
    let tensor = parse(&raw_f32(&[2], &[1.0, 2.0])).unwrap();
    assert_eq!(
        tensor.write_to(DType::F32, &mut [0; 4]),
        Err(TensorError::WrongDestination { needed: 8, actual: 4 })
    );
    assert!(matches!(tensor.to_i64_vec(), Err(TensorError::WrongDtype { .. })));
    let ints = parse(&raw_tensor(&[1], WireDtype::I64, vec![0; 8].into()).unwrap()).unwrap();
    assert!(matches!(ints.write_to(DType::F32, &mut [0; 4]), Err(TensorError::WrongDtype { .. })));
}

#[test]
fn pieces_are_what_is_written_whole() {
    for vector in golden::vectors(golden::TENSORS) {
        let name = golden::text(&vector, "name");
        let message = Tensor::decode(&golden::bytes(&vector, "tensor_hex")[..]).unwrap();
        let tensor = parse(&message).unwrap();
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let mut whole = vec![0; tensor.element_count() * dtype.size_bytes()];
            let expected = tensor.write_to(dtype, &mut whole);
            let mut pieces = Vec::new();
            let written = tensor.write_pieces(dtype, |offset, piece| {
                assert_eq!(offset, pieces.len(), "{name}");
                assert!(piece.len() <= PIECE_ELEMENTS * 4, "{name}");
                pieces.extend_from_slice(piece);
                Ok::<_, TensorError>(())
            });
            assert_eq!(written, expected, "{name}");
            if expected.is_ok() {
                assert_eq!(pieces, whole, "{name}");
            }
        }
    }
}

#[test]
fn writer_that_refuses_ends_the_writing() {
    let tensor = parse(&raw_f32(&[5000], &[1.0; 5000])).unwrap();
    for dtype in [DType::F32, DType::Bf16] {
        let mut calls = 0;
        let full = TensorError::WrongDestination { needed: 1, actual: 0 };
        let refused = tensor.write_pieces(dtype, |_, _| {
            calls += 1;
            if calls == 2 { Err(full.clone()) } else { Ok(()) }
        });
        assert_eq!((refused, calls), (Err(full), 2));
    }
}

/// Run with `--release --ignored --nocapture` for numbers.
#[test]
#[ignore = "prints a measurement"]
fn measure_writing() {
    let count = 4 << 20;
    let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
    let limits = ShapeLimits { max_rank: 1, max_elements: count };
    let tensor = WireTensor::parse(&raw_f32(&[count], &values), limits).unwrap();
    for dtype in [DType::F32, DType::Bf16] {
        let mut out = vec![0; count * dtype.size_bytes()];
        let best = (0..20)
            .map(|_| {
                let start = std::time::Instant::now();
                tensor.write_to(dtype, &mut out).unwrap();
                start.elapsed().as_secs_f64()
            })
            .fold(f64::INFINITY, f64::min);
        let rate = (count * 4) as f64 / best / 1e9;
        println!("float32 -> {dtype}: {rate:.1} GB/s of wire bytes, {count} elements");
    }
}

proptest! {
    #[test]
    fn no_message_panics(
        size in prop::collection::vec(prop_oneof![0u32..40, any::<u32>()], 0..6),
        buffer in prop::collection::vec(any::<u8>(), 0..3000),
        dtype in prop::sample::select(vec!["float32", "float16", "bfloat16", "float64", "int64", "int8", "bool", "x"]),
        compression in -1i32..7,
    ) {
        let message = Tensor { buffer: buffer.into(), size, dtype: dtype.into(), compression, ..Tensor::default() };
        if let Ok(tensor) = parse(&message) {
            for dtype in [DType::F32, DType::Bf16, DType::F16] {
                let mut out = vec![0; tensor.element_count() * dtype.size_bytes()];
                let _ = tensor.write_to(dtype, &mut out);
            }
            let _ = (tensor.to_f32_vec(), tensor.to_i64_vec());
        }
    }

    #[test]
    fn no_coded_buffer_panics(
        count in 0usize..6000,
        compression in 1i32..6,
        cut in -2i64..3,
        seed in any::<u8>(),
    ) {
        let blocks = count.div_ceil(4096);
        let (head, tail) = match compression {
            5 => (vec![blocks as u64, 256], 4 * (blocks + 256) + count),
            3 | 4 => (vec![256], 4 * 256 + count),
            1 => (vec![], 2 * count + 8),
            _ => (vec![], 2 * count),
        };
        let mut buffer: Vec<u8> = head.iter().flat_map(|n| n.to_le_bytes()).collect();
        let length = (buffer.len() + tail) as i64 + cut;
        buffer.resize(length.max(0) as usize, seed);
        let message = Tensor {
            buffer: buffer.into(), size: vec![count as u32], dtype: "float32".into(), compression, ..Tensor::default()
        };
        match parse(&message) {
            Ok(tensor) => {
                let _ = tensor.write_to(DType::F32, &mut vec![0; count * 4]);
            }
            Err(error) => {
                let about_the_buffer = matches!(error, TensorError::BadBuffer { .. });
                prop_assert!(about_the_buffer);
            }
        }
    }
}
