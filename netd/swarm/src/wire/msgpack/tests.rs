use super::*;
use proptest::prelude::*;
use testkit::golden;

fn decode(bytes: &[u8]) -> Result<Value, MsgpackError> {
    Value::decode(bytes, Limits::SMALL)
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Nil),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(|v| Value::Int(v.into())),
        any::<u64>().prop_map(|v| Value::Int(v.into())),
        prop::num::f64::ANY
            .prop_filter("NaN differs from itself", |v| !v.is_nan())
            .prop_map(Value::Float),
        ".{0,40}".prop_map(Value::Str),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(Value::Bin),
        (1i8..60, prop::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(kind, bytes)| Value::Ext(kind, bytes)),
    ];
    leaf.prop_recursive(4, 64, 20, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..20).prop_map(Value::List),
            prop::collection::vec(inner.clone(), 0..20).prop_map(Value::Tuple),
            prop::collection::vec((inner.clone(), inner), 0..20).prop_map(Value::Map),
        ]
    })
}

#[test]
fn golden_values_reencode_byte_for_byte() {
    let vectors = golden::vectors(golden::MSGPACK);
    assert!(vectors.len() >= 30);
    for vector in vectors {
        let bytes = golden::bytes(&vector, "msgpack_hex");
        let value = decode(&bytes).unwrap_or_else(|e| panic!("{vector}: {e}"));
        assert_eq!(value.encode(), bytes, "{}", golden::text(&vector, "name"));
    }
}

#[test]
fn nested_tuples_decode_as_tuples() {
    let expected = Value::Tuple(vec![
        Value::Int(1),
        Value::Tuple(vec![Value::str("a"), Value::Float(2.5)]),
        Value::List(vec![Value::Bool(true), Value::Nil]),
    ]);
    assert_eq!(decode(&golden::msgpack("tuple_nested")), Ok(expected));
}

#[test]
fn depth_counts_tuples_inside_extensions() {
    let nest =
        |levels: usize| (1..levels).fold(Value::Nil, |inner, _| Value::Tuple(vec![inner])).encode();
    // One tuple costs two levels: the extension and the array in it.
    assert!(decode(&nest(8)).is_ok());
    assert_eq!(decode(&nest(9)), Err(MsgpackError::TooLarge { limit: 16, what: "levels" }));
}

#[test]
fn counts_beyond_the_input_are_refused_before_allocation() {
    assert_eq!(decode(&[0xdd, 0xff, 0xff, 0xff, 0xff]), Err(MsgpackError::Incomplete));
    assert_eq!(decode(&[0xdf, 0xff, 0xff, 0xff, 0xff]), Err(MsgpackError::Incomplete));
    assert_eq!(decode(&[0xc6, 0xff, 0xff, 0xff, 0xff]), Err(MsgpackError::Incomplete));
    let many = Value::List(vec![Value::Nil; 5000]).encode();
    assert_eq!(decode(&many), Err(MsgpackError::TooLarge { limit: 4096, what: "values" }));
}

#[test]
fn malformed_bytes_are_named() {
    assert_eq!(decode(&[]), Err(MsgpackError::Incomplete));
    assert_eq!(decode(&[0xc0, 0xc0]), Err(MsgpackError::Trailing(1)));
    assert_eq!(decode(&[0xc1]), Err(MsgpackError::Malformed("reserved marker 0xc1")));
    assert_eq!(decode(&[0xa1, 0xff]), Err(MsgpackError::Malformed("text that is not UTF-8")));
    assert_eq!(
        decode(&[0xd4, 0x40, 0xc0]),
        Err(MsgpackError::Malformed("a tuple that is not one array"))
    );
}

/// The value as the crate `rmpv` has it.
fn to_rmpv(value: &Value) -> rmpv::Value {
    let all = |items: &[Value]| rmpv::Value::Array(items.iter().map(to_rmpv).collect());
    match value {
        Value::Nil => rmpv::Value::Nil,
        Value::Bool(value) => rmpv::Value::Boolean(*value),
        Value::Int(value) => match u64::try_from(*value) {
            Ok(value) => value.into(),
            Err(_) => i64::try_from(*value).expect("an integer of msgpack").into(),
        },
        Value::Float(value) => rmpv::Value::F64(*value),
        Value::Str(text) => rmpv::Value::from(text.as_str()),
        Value::Bin(bytes) => rmpv::Value::Binary(bytes.clone()),
        Value::List(items) => all(items),
        Value::Tuple(items) => rmpv::Value::Ext(EXT_TUPLE, write_with_rmpv(&all(items))),
        Value::Map(entries) => {
            rmpv::Value::Map(entries.iter().map(|(k, v)| (to_rmpv(k), to_rmpv(v))).collect())
        }
        Value::Ext(kind, bytes) => rmpv::Value::Ext(*kind, bytes.clone()),
    }
}

fn write_with_rmpv(value: &rmpv::Value) -> Vec<u8> {
    let mut out = Vec::new();
    rmpv::encode::write_value(&mut out, value).expect("memory");
    out
}

/// Holds what the reader says of `bytes` against `rmpv`.
fn compare_with_rmpv(bytes: &[u8]) -> Result<(), TestCaseError> {
    let mut rest = bytes;
    let theirs = rmpv::decode::read_value(&mut rest);
    match (decode(bytes), theirs) {
        // rmpv keeps tuples as extensions: what it writes again must be what we read. (The bytes
        // are compared, because a NaN differs from itself.)
        (Ok(ours), Ok(theirs)) => {
            let again = decode(&write_with_rmpv(&theirs)).map(|value| value.encode());
            prop_assert_eq!(again, Ok(ours.encode()));
            prop_assert!(rest.is_empty());
        }
        (Ok(ours), Err(theirs)) => prop_assert!(false, "{:?}, but rmpv: {}", ours, theirs),
        (Err(MsgpackError::Trailing(_)), theirs) => prop_assert!(theirs.is_ok()),
        // What ends early for us ends early for rmpv, unless it is inside a tuple, which is opaque
        // to rmpv.
        (Err(MsgpackError::Incomplete), theirs) => {
            prop_assert!(theirs.is_err() || bytes.contains(&0x40));
        }
        // Bounds and tuples are ours alone; rmpv reads text that is not UTF-8 as bytes.
        (Err(_), _) => {}
    }
    Ok(())
}

#[test]
fn lengths_at_the_bounds_of_their_forms_are_written_as_rmpv_writes_them() {
    for length in [0, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 255, 256, 65_535, 65_536] {
        let values = [
            Value::Str("x".repeat(length)),
            Value::Bin(vec![7; length]),
            Value::Ext(5, vec![7; length]),
            Value::List(vec![Value::Nil; length]),
            Value::Tuple(vec![Value::Nil; length]),
            Value::Map(vec![(Value::Nil, Value::Nil); length]),
        ];
        for value in values {
            assert!(value.encode() == write_with_rmpv(&to_rmpv(&value)), "{}", value.repr());
        }
    }
}

#[test]
fn integers_at_the_bounds_of_their_forms_are_written_as_rmpv_writes_them() {
    for bit in 0..64 {
        for off in -1..=1 {
            for value in [(1i128 << bit) + off, -(1i128 << bit) + off] {
                let value = Value::Int(value.clamp(i64::MIN.into(), u64::MAX.into()));
                assert_eq!(value.encode(), write_with_rmpv(&to_rmpv(&value)), "{}", value.repr());
            }
        }
    }
    assert_eq!(Value::Int(i128::MAX).encode(), Value::uint(u64::MAX).encode());
    assert_eq!(Value::Int(i128::MIN).encode(), Value::Int(i64::MIN.into()).encode());
}

proptest! {
    #[test]
    fn values_survive_a_round_trip(value in any_value()) {
        prop_assert_eq!(decode(&value.encode()), Ok(value));
    }

    #[test]
    fn writer_agrees_with_rmpv(value in any_value()) {
        prop_assert_eq!(value.encode(), write_with_rmpv(&to_rmpv(&value)));
    }

    #[test]
    fn reader_agrees_with_rmpv(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        compare_with_rmpv(&bytes)?;
    }

    #[test]
    fn reader_agrees_with_rmpv_on_changed_values(
        value in any_value(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = write_with_rmpv(&to_rmpv(&value));
        for (at, byte) in changes {
            *at.get_mut(&mut bytes) = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        compare_with_rmpv(&bytes)?;
    }
}
