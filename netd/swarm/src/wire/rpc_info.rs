//! The map that `rpc_info` returns, written and read. Source:
//! `TransformerConnectionHandler.rpc_info` in Petals' `server/handler.py` and `get_info` in
//! `server/backend.py`; descriptors are hivemind's `BatchTensorDescriptor`.

use super::msgpack::{EXT_TENSOR_DESCRIPTOR, Limits, MsgpackError, Value};
use super::tensor::WireDtype;
use thiserror::Error;

/// Why bytes are not the answer of an `rpc_info`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InfoError {
    /// The bytes are no msgpack value within bounds.
    #[error("cannot read rpc_info: {0}")]
    Msgpack(#[from] MsgpackError),
    /// A key is missing or malformed.
    #[error("rpc_info has no usable {0}")]
    Key(&'static str),
}

/// What a server answers about itself and one of its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcInfo {
    /// Version of the server's software.
    pub version: String,
    /// Whether its DHT node is in client mode.
    pub dht_client_mode: bool,
    /// Free KV cache in tokens of one block (a key and a value together).
    pub cache_tokens_available: u64,
    /// Shapes and types of the block; absent if no uid was asked for.
    pub schema: Option<Schema>,
}

/// What the schemas say: hidden states `[batch, 1..=2048, hidden]` in `dtype` everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schema {
    /// Width of the hidden states.
    pub hidden_size: u32,
    /// Dtype of hidden states, outputs included.
    pub dtype: WireDtype,
    /// Compression that clients shall use, a number of [`super::messages::Compression`].
    pub compression: i32,
}

impl RpcInfo {
    /// The bytes that Petals serves for the same content.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut entries = vec![
            (Value::str("version"), Value::str(&self.version)),
            (Value::str("dht_client_mode"), Value::Bool(self.dht_client_mode)),
            (Value::str("cache_tokens_available"), Value::uint(self.cache_tokens_available)),
        ];
        if let Some(schema) = &self.schema {
            entries.extend(schema.entries());
        }
        Value::Map(entries).encode()
    }

    /// Reads the answer of a server.
    ///
    /// # Errors
    /// [`InfoError`] if a key is missing or of a wrong type; the schema keys may be missing
    /// together.
    pub fn decode(bytes: &[u8]) -> Result<Self, InfoError> {
        let map = Value::decode(bytes, Limits::SMALL)?;
        let version =
            map.get("version").and_then(Value::as_str).ok_or(InfoError::Key("version"))?;
        let Some(Value::Bool(dht_client_mode)) = map.get("dht_client_mode") else {
            return Err(InfoError::Key("dht_client_mode"));
        };
        let cache_tokens = match map.get("cache_tokens_available") {
            Some(Value::Int(tokens)) => u64::try_from(*tokens).ok(),
            _ => None,
        };
        Ok(Self {
            version: version.to_owned(),
            dht_client_mode: *dht_client_mode,
            cache_tokens_available: cache_tokens.ok_or(InfoError::Key("cache_tokens_available"))?,
            schema: map
                .get("inference_schema")
                .map(|inference| Schema::decode(&map, inference))
                .transpose()?,
        })
    }
}

impl Schema {
    fn entries(&self) -> [(Value, Value); 4] {
        let hidden = self.hidden_states();
        let scalar = |dtype| descriptor(vec![Value::Nil], dtype, 0);
        let arguments = |tensors| Value::Tuple(vec![Value::Tuple(tensors), Value::Map(Vec::new())]);
        [
            (Value::str("forward_schema"), arguments(vec![hidden.clone()])),
            (Value::str("outputs_schema"), Value::Tuple(vec![hidden.clone()])),
            (Value::str("keyword_names"), Value::Tuple(Vec::new())),
            (
                Value::str("inference_schema"),
                arguments(vec![hidden, scalar(self.dtype), scalar(WireDtype::I64)]),
            ),
        ]
    }

    fn hidden_states(&self) -> Value {
        let size = vec![
            Value::Nil,
            Value::Int(1),
            Value::Int(SCHEMA_TOKENS),
            Value::uint(self.hidden_size),
        ];
        descriptor(size, self.dtype, self.compression)
    }

    fn decode(map: &Value, inference: &Value) -> Result<Self, InfoError> {
        let bad = InfoError::Key("inference_schema");
        let hidden = first_argument(inference).and_then(Self::from_descriptor).ok_or(bad)?;
        let outputs =
            map.get("outputs_schema").and_then(Value::as_sequence).and_then(<[Value]>::first);
        let outputs =
            outputs.and_then(Self::from_descriptor).ok_or(InfoError::Key("outputs_schema"))?;
        Ok(Self { dtype: outputs.dtype, ..hidden })
    }

    fn from_descriptor(value: &Value) -> Option<Self> {
        let Value::Ext(EXT_TENSOR_DESCRIPTOR, payload) = value else {
            return None;
        };
        let map = Value::decode(payload, Limits::SMALL).ok()?;
        let dtype =
            map.get("dtype")?.as_str()?.strip_prefix("torch.").and_then(WireDtype::parse)?;
        let (Value::Int(hidden), Value::Int(compression)) =
            (map.get("size")?.as_sequence()?.last()?, map.get("compression")?)
        else {
            return None;
        };
        Some(Self {
            hidden_size: (*hidden).try_into().ok()?,
            dtype,
            compression: (*compression).try_into().ok()?,
        })
    }
}

/// Length that Petals writes into the schemas (`BatchTensorDescriptor(1, 2048, hidden)`); nobody
/// reads it.
const SCHEMA_TOKENS: i128 = 2048;

fn first_argument(schema: &Value) -> Option<&Value> {
    schema.as_sequence()?.first()?.as_sequence()?.first()
}

fn descriptor(size: Vec<Value>, dtype: WireDtype, compression: i32) -> Value {
    let entries = [
        ("size", Value::Tuple(size)),
        ("dtype", Value::Str(format!("torch.{}", dtype.name()))),
        ("layout", Value::str("torch.strided")),
        ("requires_grad", Value::Bool(false)),
        ("pin_memory", Value::Bool(false)),
        ("compression", Value::Int(compression.into())),
        ("device_type", Value::Nil),
        ("device_index", Value::Nil),
    ];
    let map =
        Value::Map(entries.into_iter().map(|(key, value)| (Value::str(key), value)).collect());
    Value::Ext(EXT_TENSOR_DESCRIPTOR, map.encode())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use testkit::golden;

    fn golden_info() -> RpcInfo {
        RpcInfo {
            version: "2.3.0.dev2".into(),
            dht_client_mode: false,
            cache_tokens_available: 65_536,
            schema: Some(Schema { hidden_size: 64, dtype: WireDtype::F32, compression: 0 }),
        }
    }

    #[test]
    fn golden_info_is_written_byte_for_byte_and_read_back() {
        let bytes = golden::msgpack("rpc_info_dict_full");
        assert_eq!(golden_info().encode(), bytes);
        assert_eq!(RpcInfo::decode(&bytes), Ok(golden_info()));
    }

    #[test]
    fn golden_descriptors_are_written_byte_for_byte() {
        for (dtype, name) in [
            (WireDtype::F32, "float32"),
            (WireDtype::F16, "float16"),
            (WireDtype::Bf16, "bfloat16"),
        ] {
            let bytes = golden::msgpack(&format!("BatchTensorDescriptor_torch.{name}"));
            assert_eq!(
                Schema { hidden_size: 64, dtype, compression: 0 }.hidden_states().encode(),
                bytes
            );
        }
    }

    #[test]
    fn answer_without_uid_has_no_schema() {
        let info = RpcInfo { schema: None, ..golden_info() };
        assert_eq!(RpcInfo::decode(&info.encode()), Ok(info));
        assert_eq!(RpcInfo::decode(&[0x80]), Err(InfoError::Key("version")));
    }

    proptest! {
        #[test]
        fn damaged_answers_do_not_panic(position in 0usize..900, byte in any::<u8>()) {
            let mut bytes = golden_info().encode();
            let position = position % bytes.len();
            bytes[position] = byte;
            let _ = RpcInfo::decode(&bytes);
        }
    }
}
