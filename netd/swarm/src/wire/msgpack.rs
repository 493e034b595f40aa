//! MessagePack as hivemind speaks it: tuples are extension 0x40 around an array, floats are always
//! 64 bits, dictionaries keep their order. Follows `hivemind/utils/serializer.py`
//! (`MSGPackSerializer`) and the MessagePack specification.
//!
//! [`Value::decode`] is our own recursive reader, because two bounds must hold before anything is
//! allocated: depth (tuples nest *inside* the payload of extensions, where a plain reader does not
//! look) and the number of values. Tests compare the reader and the writer with the crate `rmpv`.

mod reader;
#[cfg(test)]
mod tests;
mod writer;

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
    /// Bounds of request metadata and of one stored record: real ones have under 1 KiB, depth 4,
    /// 100 values; a server that pings hundreds of neighbours stays far below.
    pub const SMALL: Self = Self { max_bytes: 64 << 10, max_depth: 16, max_values: 4096 };
    /// Bounds of a dictionary of the DHT: its values are opaque bytes, one per subkey.
    pub const DICTIONARY: Self = Self { max_bytes: 4 << 20, max_depth: 16, max_values: 64 << 10 };
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
    TooLarge { limit: usize, what: &'static str },
    /// The bytes break the format.
    #[error("msgpack is malformed: {0}")]
    Malformed(&'static str),
}

/// A value of the dialect.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Python's `None`.
    Nil,
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
            return Err(MsgpackError::TooLarge { limit: limits.max_bytes, what: "bytes" });
        }
        reader::read(bytes, limits)
    }

    /// The bytes that Python's serializer writes for this value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        writer::write(self, &mut out);
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
        self.as_map()?.iter().rev().find(|(k, _)| k.as_str() == Some(key)).map(|(_, v)| v)
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
            Self::Str(text) => {
                format!("'{}'", text.chars().take(MAX_REPR_CHARS).collect::<String>())
            }
            Self::Bin(bytes) => format!("<{} bytes>", bytes.len()),
            Self::List(items) => format!("<list of {}>", items.len()),
            Self::Tuple(items) => format!("<tuple of {}>", items.len()),
            Self::Map(entries) => format!("<dict of {}>", entries.len()),
            Self::Ext(kind, bytes) => format!("<ext {kind} of {} bytes>", bytes.len()),
        };
        text.chars().take(MAX_REPR_CHARS).collect()
    }
}

const MAX_REPR_CHARS: usize = 80;
