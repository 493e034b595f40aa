//! MessagePack as hivemind speaks it: tuples are extension 0x40 around an array, floats are always 64 bits, dictionaries
//! keep their order. Follows `hivemind/utils/serializer.py` (`MSGPackSerializer`) and the MessagePack specification.
//!
//! [`Value::decode`] is our own recursive reader, because two bounds must hold before anything is allocated: depth
//! (tuples nest *inside* the payload of extensions, where a plain reader does not look) and the number of values.
//! Writing goes through `rmpv`; tests hold the reader against `rmpv`'s.

use thiserror::Error;

/// Extension type of a Python tuple; the payload is a msgpack array.
pub const EXT_TUPLE: i8 = 0x40;
/// Extension type of a dictionary of the DHT (`DictionaryDHTValue`).
pub const EXT_DHT_DICTIONARY: i8 = 0x50;
/// Extension type of a tensor descriptor (`BatchTensorDescriptor`).
pub const EXT_TENSOR_DESCRIPTOR: i8 = 0x51;

/// What a decoded value may cost at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Length of the input.
    pub max_bytes: usize,
    /// Nesting; a scalar has depth 1.
    pub max_depth: usize,
    /// Values in all, keys of maps included.
    pub max_values: usize,
}

impl Limits {
    /// Bounds of request metadata and of one stored record: real ones have under 1 KiB, depth 4, 100 values; a server
    /// that pings hundreds of neighbours stays far below.
    pub const SMALL: Self = Self {
        max_bytes: 64 << 10,
        max_depth: 16,
        max_values: 4096,
    };
    /// Bounds of a dictionary of the DHT: its values are opaque bytes, one per subkey.
    pub const DICTIONARY: Self = Self {
        max_bytes: 4 << 20,
        max_depth: 16,
        max_values: 64 << 10,
    };
}

/// Why bytes are not a value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MsgpackError {
    /// The input ends inside a value.
    #[error("msgpack ends inside a value")]
    Incomplete,
    /// Bytes follow the value.
    #[error("msgpack has {0} bytes after its value")]
    Trailing(usize),
    /// A bound of [`Limits`] is exceeded.
    #[error("msgpack exceeds the limit of {limit} {what}")]
    TooLarge {
        /// The bound.
        limit: usize,
        /// What it counts.
        what: &'static str,
    },
    /// The bytes break the format.
    #[error("msgpack is malformed: {0}")]
    Malformed(&'static str),
}

/// A value of the dialect.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Python's `None`.
    Nil,
    /// A boolean.
    Bool(bool),
    /// Any msgpack integer, `i64::MIN..=u64::MAX`.
    Int(i128),
    /// A float; 32-bit floats are widened.
    Float(f64),
    /// Text.
    Str(String),
    /// Python's `bytes`.
    Bin(Vec<u8>),
    /// Python's `list`.
    List(Vec<Value>),
    /// Python's `tuple`, extension 0x40.
    Tuple(Vec<Value>),
    /// Python's `dict`, in the order written.
    Map(Vec<(Value, Value)>),
    /// Any other extension with its raw payload.
    Ext(i8, Vec<u8>),
}

impl Value {
    /// Reads exactly one value.
    ///
    /// # Errors
    /// [`MsgpackError`] if the bytes are not one value of the dialect within `limits`.
    pub fn decode(bytes: &[u8], limits: Limits) -> Result<Self, MsgpackError> {
        if bytes.len() > limits.max_bytes {
            return Err(MsgpackError::TooLarge {
                limit: limits.max_bytes,
                what: "bytes",
            });
        }
        let mut values_left = limits.max_values;
        let mut reader = Reader {
            rest: bytes,
            limits,
            values_left: &mut values_left,
        };
        let value = reader.value(1)?;
        match reader.rest.len() {
            0 => Ok(value),
            n => Err(MsgpackError::Trailing(n)),
        }
    }

    /// The bytes that Python's serializer writes for this value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        rmpv::encode::write_value(&mut out, &self.to_rmpv())
            .expect("writing into memory does not fail");
        out
    }

    /// A text value.
    pub fn str(text: impl Into<String>) -> Self {
        Self::Str(text.into())
    }

    /// An optional text value, nil if absent.
    pub fn opt_str(text: Option<&str>) -> Self {
        text.map_or(Self::Nil, Self::str)
    }

    /// An unsigned value.
    pub fn uint(value: impl Into<u64>) -> Self {
        Self::Int(value.into().into())
    }

    /// Elements of a list or tuple.
    #[must_use]
    pub fn as_sequence(&self) -> Option<&[Value]> {
        match self {
            Self::List(items) | Self::Tuple(items) => Some(items),
            _ => None,
        }
    }

    /// Text, if it is text.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Entries of a map.
    #[must_use]
    pub fn as_map(&self) -> Option<&[(Value, Value)]> {
        match self {
            Self::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// The value under a text key of a map; the last one if repeated, as in Python.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.as_map()?
            .iter()
            .rev()
            .find(|(k, _)| k.as_str() == Some(key))
            .map(|(_, v)| v)
    }

    /// A short rendering after Python's `repr`, for error texts; long content is cut.
    #[must_use]
    pub fn repr(&self) -> String {
        let text = match self {
            Self::Nil => "None".to_owned(),
            Self::Bool(true) => "True".to_owned(),
            Self::Bool(false) => "False".to_owned(),
            Self::Int(value) => value.to_string(),
            Self::Float(value) => format!("{value:?}"),
            Self::Str(text) => format!(
                "'{}'",
                text.chars().take(MAX_REPR_CHARS).collect::<String>()
            ),
            Self::Bin(bytes) => format!("<{} bytes>", bytes.len()),
            Self::List(items) => format!("<list of {}>", items.len()),
            Self::Tuple(items) => format!("<tuple of {}>", items.len()),
            Self::Map(entries) => format!("<dict of {}>", entries.len()),
            Self::Ext(kind, bytes) => format!("<ext {kind} of {} bytes>", bytes.len()),
        };
        text.chars().take(MAX_REPR_CHARS).collect()
    }

    fn to_rmpv(&self) -> rmpv::Value {
        let all = |items: &[Value]| rmpv::Value::Array(items.iter().map(Value::to_rmpv).collect());
        match self {
            Self::Nil => rmpv::Value::Nil,
            Self::Bool(value) => rmpv::Value::Boolean(*value),
            Self::Int(value) => integer(*value),
            Self::Float(value) => rmpv::Value::F64(*value),
            Self::Str(text) => rmpv::Value::from(text.as_str()),
            Self::Bin(bytes) => rmpv::Value::Binary(bytes.clone()),
            Self::List(items) => all(items),
            Self::Tuple(items) => {
                let mut payload = Vec::new();
                rmpv::encode::write_value(&mut payload, &all(items))
                    .expect("writing into memory does not fail");
                rmpv::Value::Ext(EXT_TUPLE, payload)
            }
            Self::Map(entries) => rmpv::Value::Map(
                entries
                    .iter()
                    .map(|(k, v)| (k.to_rmpv(), v.to_rmpv()))
                    .collect(),
            ),
            Self::Ext(kind, bytes) => rmpv::Value::Ext(*kind, bytes.clone()),
        }
    }
}

const MAX_REPR_CHARS: usize = 80;

/// msgpack has no integers outside `i64::MIN..=u64::MAX`; wider ones, which no reader here produces, saturate.
fn integer(value: i128) -> rmpv::Value {
    match (u64::try_from(value), i64::try_from(value)) {
        (Ok(value), _) => value.into(),
        (_, Ok(value)) => value.into(),
        _ if value < 0 => i64::MIN.into(),
        _ => u64::MAX.into(),
    }
}

struct Reader<'a, 'c> {
    rest: &'a [u8],
    limits: Limits,
    values_left: &'c mut usize,
}

impl<'a> Reader<'a, '_> {
    fn value(&mut self, depth: usize) -> Result<Value, MsgpackError> {
        if depth > self.limits.max_depth {
            return Err(MsgpackError::TooLarge {
                limit: self.limits.max_depth,
                what: "levels",
            });
        }
        *self.values_left = self
            .values_left
            .checked_sub(1)
            .ok_or(MsgpackError::TooLarge {
                limit: self.limits.max_values,
                what: "values",
            })?;
        let [marker] = self.array()?;
        Ok(match marker {
            0x00..=0x7f => Value::Int(marker.into()),
            0x80..=0x8f => self.map(usize::from(marker & 0x0f), depth)?,
            0x90..=0x9f => Value::List(self.items(usize::from(marker & 0x0f), depth)?),
            0xa0..=0xbf => self.text(usize::from(marker & 0x1f))?,
            0xc0 => Value::Nil,
            0xc1 => return Err(MsgpackError::Malformed("reserved marker 0xc1")),
            0xc2 => Value::Bool(false),
            0xc3 => Value::Bool(true),
            0xc4..=0xc6 => {
                let length = self.length(1 << (marker - 0xc4))?;
                Value::Bin(self.take(length)?.to_vec())
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (marker - 0xc7))?;
                self.extension(length, depth)?
            }
            0xca => Value::Float(f32::from_be_bytes(self.array()?).into()),
            0xcb => Value::Float(f64::from_be_bytes(self.array()?)),
            0xcc => Value::Int(u8::from_be_bytes(self.array()?).into()),
            0xcd => Value::Int(u16::from_be_bytes(self.array()?).into()),
            0xce => Value::Int(u32::from_be_bytes(self.array()?).into()),
            0xcf => Value::Int(u64::from_be_bytes(self.array()?).into()),
            0xd0 => Value::Int(i8::from_be_bytes(self.array()?).into()),
            0xd1 => Value::Int(i16::from_be_bytes(self.array()?).into()),
            0xd2 => Value::Int(i32::from_be_bytes(self.array()?).into()),
            0xd3 => Value::Int(i64::from_be_bytes(self.array()?).into()),
            0xd4..=0xd8 => self.extension(1 << (marker - 0xd4), depth)?,
            0xd9..=0xdb => {
                let length = self.length(1 << (marker - 0xd9))?;
                self.text(length)?
            }
            0xdc | 0xdd => {
                let count = self.length(2 << (marker - 0xdc))?;
                Value::List(self.items(count, depth)?)
            }
            0xde | 0xdf => {
                let count = self.length(2 << (marker - 0xde))?;
                self.map(count, depth)?
            }
            0xe0..=0xff => Value::Int(i8::from_be_bytes([marker]).into()),
        })
    }

    fn extension(&mut self, length: usize, depth: usize) -> Result<Value, MsgpackError> {
        let kind = i8::from_be_bytes(self.array()?);
        let payload = self.take(length)?;
        if kind != EXT_TUPLE {
            return Ok(Value::Ext(kind, payload.to_vec()));
        }
        let mut inner = Reader {
            rest: payload,
            limits: self.limits,
            values_left: self.values_left,
        };
        match (inner.value(depth + 1)?, inner.rest.len()) {
            (Value::List(items), 0) => Ok(Value::Tuple(items)),
            _ => Err(MsgpackError::Malformed("a tuple that is not one array")),
        }
    }

    fn items(&mut self, count: usize, depth: usize) -> Result<Vec<Value>, MsgpackError> {
        self.admit(count)?;
        (0..count).map(|_| self.value(depth + 1)).collect()
    }

    fn map(&mut self, count: usize, depth: usize) -> Result<Value, MsgpackError> {
        self.admit(count.saturating_mul(2))?;
        let entries: Result<_, _> = (0..count)
            .map(|_| Ok((self.value(depth + 1)?, self.value(depth + 1)?)))
            .collect();
        Ok(Value::Map(entries?))
    }

    /// Refuses a count before its elements are allocated: each takes at least one byte and counts once.
    fn admit(&self, count: usize) -> Result<(), MsgpackError> {
        if count > self.rest.len() {
            return Err(MsgpackError::Incomplete);
        }
        if count > *self.values_left {
            return Err(MsgpackError::TooLarge {
                limit: self.limits.max_values,
                what: "values",
            });
        }
        Ok(())
    }

    fn text(&mut self, length: usize) -> Result<Value, MsgpackError> {
        match std::str::from_utf8(self.take(length)?) {
            Ok(text) => Ok(Value::str(text)),
            Err(_) => Err(MsgpackError::Malformed("text that is not UTF-8")),
        }
    }

    /// A big-endian length of 1, 2 or 4 bytes.
    fn length(&mut self, width: usize) -> Result<usize, MsgpackError> {
        let bytes = self.take(width)?;
        Ok(bytes
            .iter()
            .fold(0, |length, &byte| length << 8 | usize::from(byte)))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], MsgpackError> {
        let (head, tail) = self
            .rest
            .split_at_checked(length)
            .ok_or(MsgpackError::Incomplete)?;
        self.rest = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MsgpackError> {
        let (head, tail) = self
            .rest
            .split_first_chunk()
            .ok_or(MsgpackError::Incomplete)?;
        self.rest = tail;
        Ok(*head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::golden;
    use proptest::prelude::*;

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
        let nest = |levels: usize| {
            (1..levels)
                .fold(Value::Nil, |inner, _| Value::Tuple(vec![inner]))
                .encode()
        };
        // One tuple costs two levels: the extension and the array in it.
        assert!(decode(&nest(8)).is_ok());
        assert_eq!(
            decode(&nest(9)),
            Err(MsgpackError::TooLarge {
                limit: 16,
                what: "levels"
            })
        );
    }

    #[test]
    fn counts_beyond_the_input_are_refused_before_allocation() {
        assert_eq!(
            decode(&[0xdd, 0xff, 0xff, 0xff, 0xff]),
            Err(MsgpackError::Incomplete)
        );
        assert_eq!(
            decode(&[0xdf, 0xff, 0xff, 0xff, 0xff]),
            Err(MsgpackError::Incomplete)
        );
        assert_eq!(
            decode(&[0xc6, 0xff, 0xff, 0xff, 0xff]),
            Err(MsgpackError::Incomplete)
        );
        let many = Value::List(vec![Value::Nil; 5000]).encode();
        assert_eq!(
            decode(&many),
            Err(MsgpackError::TooLarge {
                limit: 4096,
                what: "values"
            })
        );
    }

    #[test]
    fn malformed_bytes_are_named() {
        assert_eq!(decode(&[]), Err(MsgpackError::Incomplete));
        assert_eq!(decode(&[0xc0, 0xc0]), Err(MsgpackError::Trailing(1)));
        assert_eq!(
            decode(&[0xc1]),
            Err(MsgpackError::Malformed("reserved marker 0xc1"))
        );
        assert_eq!(
            decode(&[0xa1, 0xff]),
            Err(MsgpackError::Malformed("text that is not UTF-8"))
        );
        assert_eq!(
            decode(&[0xd4, 0x40, 0xc0]),
            Err(MsgpackError::Malformed("a tuple that is not one array"))
        );
    }

    proptest! {
        #[test]
        fn values_survive_a_round_trip(value in any_value()) {
            prop_assert_eq!(decode(&value.encode()), Ok(value));
        }

        #[test]
        fn reader_agrees_with_rmpv(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let theirs = rmpv::decode::read_value(&mut &bytes[..]);
            match decode(&bytes) {
                // rmpv keeps tuples as extensions and invalid text as bytes; our encoding must be what it read.
                Ok(value) => prop_assert_eq!(
                    Ok(value),
                    theirs.map_err(|e| e.to_string()).map(|v| {
                        let mut again = Vec::new();
                        rmpv::encode::write_value(&mut again, &v).expect("memory");
                        decode(&again).expect("what rmpv wrote")
                    })
                ),
                // What ends early for us ends early for rmpv, unless it is inside a tuple, which is opaque to rmpv.
                Err(MsgpackError::Incomplete) => {
                    prop_assert!(theirs.is_err() || bytes.contains(&0x40));
                }
                Err(_) => {}
            }
        }
    }
}
