//! What servers publish in the DHT: [`ServerInfo`] under every block they serve, [`ModelInfo`] in
//! the index of models. Source: `petals/data_structures.py`; the reader drops exactly what its
//! pydantic models drop.
//!
//! The DHT has no signatures: anybody can write anything under any peer's name, so every number is
//! checked on reading. Floats must be floats on the wire (`1` for a throughput makes every reader
//! drop the record) and are written so.

use super::msgpack::{Limits, MsgpackError, Value};
use thiserror::Error;

/// Key of the index of models.
pub const MODELS_KEY: &str = "_petals.models";

/// Why a record is dropped.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// The bytes are no msgpack value within bounds.
    #[error("cannot read the record: {0}")]
    Msgpack(#[from] MsgpackError),
    /// The value has a wrong outer form.
    #[error("record must be {0}")]
    Form(&'static str),
    /// A field is missing or has a wrong type or value.
    #[error("record field {field} must be {expected}, got {got}")]
    Field {
        field: &'static str,
        /// What it should be.
        expected: &'static str,
        got: String,
    },
}

/// What a server says about itself; clients use [`ServerState::Online`] only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServerState {
    /// It ended; the record stays until it expires.
    Offline = 0,
    Joining = 1,
    Online = 2,
}

/// One server's record, the same under each of its blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerInfo {
    /// State of the server.
    pub state: ServerState,
    /// Ranking value, requests per second, finite and at least 0.
    pub throughput: f64,
    /// First block.
    pub start_block: Option<u64>,
    /// One past the last block.
    pub end_block: Option<u64>,
    /// Name for the leaderboard.
    pub public_name: Option<String>,
    /// Version of the server's software.
    pub version: Option<String>,
    /// Tokens per second that the link carries.
    pub network_rps: Option<f64>,
    /// Tokens per second and block, forward.
    pub forward_rps: Option<f64>,
    /// Tokens per second and block, inference.
    pub inference_rps: Option<f64>,
    /// LoRA adapters loaded.
    pub adapters: Vec<String>,
    /// Block dtype.
    pub torch_dtype: Option<String>,
    /// `none`, `int8` or `nf4`.
    pub quant_type: Option<String>,
    /// Whether it is reachable through a relay only.
    pub using_relay: Option<bool>,
    /// Free KV cache, keys and values counted apart.
    pub cache_tokens_left: Option<u64>,
    /// Seconds to likely next servers by PeerID, `inf` for unreachable ones.
    pub next_pings: Option<Vec<(String, f64)>>,
}

impl ServerInfo {
    /// A record without optional fields.
    #[must_use]
    pub fn new(state: ServerState, throughput: f64) -> Self {
        Self {
            state,
            throughput,
            start_block: None,
            end_block: None,
            public_name: None,
            version: None,
            network_rps: None,
            forward_rps: None,
            inference_rps: None,
            adapters: Vec::new(),
            torch_dtype: None,
            quant_type: None,
            using_relay: None,
            cache_tokens_left: None,
            next_pings: None,
        }
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`RecordError`] for everything that Petals' readers drop.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let value = Value::decode(bytes, Limits::SMALL)?;
        let parts = value
            .as_sequence()
            .ok_or(RecordError::Form("a tuple of state, throughput and details"))?;
        let [state, throughput, rest @ ..] = parts else {
            return Err(RecordError::Form("at least state and throughput"));
        };
        let none = Value::Map(Vec::new());
        let extra = rest.first().unwrap_or(&none);
        let entries =
            extra.as_map().ok_or(RecordError::Form("a tuple whose third element is a map"))?;
        if entries
            .iter()
            .any(|(key, _)| key.as_str().is_none_or(|k| k == "state" || k == "throughput"))
        {
            return Err(RecordError::Form(
                "a tuple whose third element has other text keys than state and throughput",
            ));
        }
        Self::from_parts(state, throughput, &RecordFields(extra))
    }

    /// The bytes that Petals publishes for the same content.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let uint = |value: Option<u64>| value.map_or(Value::Nil, Value::uint);
        let float = |value: Option<f64>| value.map_or(Value::Nil, Value::Float);
        let text = |value: &Option<String>| Value::opt_str(value.as_deref());
        let ping = |(peer, seconds): &(String, f64)| (Value::str(peer), Value::Float(*seconds));
        let extra = [
            ("start_block", uint(self.start_block)),
            ("end_block", uint(self.end_block)),
            ("public_name", text(&self.public_name)),
            ("version", text(&self.version)),
            ("network_rps", float(self.network_rps)),
            ("forward_rps", float(self.forward_rps)),
            ("inference_rps", float(self.inference_rps)),
            ("adapters", Value::Tuple(self.adapters.iter().map(Value::str).collect())),
            ("torch_dtype", text(&self.torch_dtype)),
            ("quant_type", text(&self.quant_type)),
            ("using_relay", self.using_relay.map_or(Value::Nil, Value::Bool)),
            ("cache_tokens_left", uint(self.cache_tokens_left)),
            (
                "next_pings",
                self.next_pings
                    .as_ref()
                    .map_or(Value::Nil, |p| Value::Map(p.iter().map(ping).collect())),
            ),
        ];
        let extra = extra.into_iter().map(|(key, value)| (Value::str(key), value)).collect();
        let state = Value::Int(self.state as i128);
        Value::Tuple(vec![state, Value::Float(self.throughput), Value::Map(extra)]).encode()
    }

    fn from_parts(
        state: &Value,
        throughput: &Value,
        extra: &RecordFields<'_>,
    ) -> Result<Self, RecordError> {
        Ok(Self {
            state: server_state(state)?,
            throughput: rate("throughput", throughput)?,
            start_block: extra.optional("start_block", count)?,
            end_block: extra.optional("end_block", count)?,
            public_name: extra.optional("public_name", text)?,
            version: extra.optional("version", text)?,
            network_rps: extra.optional("network_rps", rate)?,
            forward_rps: extra.optional("forward_rps", rate)?,
            inference_rps: extra.optional("inference_rps", rate)?,
            adapters: extra.0.get("adapters").map_or(Ok(Vec::new()), adapters)?,
            torch_dtype: extra.optional("torch_dtype", text)?,
            quant_type: extra.optional("quant_type", text)?,
            using_relay: extra.optional("using_relay", flag)?,
            cache_tokens_left: extra.optional("cache_tokens_left", count)?,
            next_pings: extra.optional("next_pings", pings)?,
        })
    }
}

/// A model's entry in the index of models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Blocks of the model, at least 1.
    pub num_blocks: u64,
    /// Where its weights are, unless they come from a local folder.
    pub repository: Option<String>,
}

impl ModelInfo {
    /// Reads an entry.
    ///
    /// # Errors
    /// [`RecordError`] for everything that Petals' readers drop.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let value = Value::decode(bytes, Limits::SMALL)?;
        if value.as_map().is_none() {
            return Err(RecordError::Form("a map"));
        }
        let num_blocks = count("num_blocks", value.get("num_blocks").unwrap_or(&Value::Nil))?;
        if num_blocks == 0 {
            return Err(bad("num_blocks", "at least 1", &Value::Int(0)));
        }
        Ok(Self { num_blocks, repository: RecordFields(&value).optional("repository", text)? })
    }

    /// The bytes that Petals publishes for the same content.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        Value::Map(vec![
            (Value::str("num_blocks"), Value::uint(self.num_blocks)),
            (Value::str("repository"), Value::opt_str(self.repository.as_deref())),
        ])
        .encode()
    }
}

/// Optional fields of a map.
struct RecordFields<'a>(&'a Value);

impl RecordFields<'_> {
    fn optional<T>(
        &self,
        key: &'static str,
        parse: impl Fn(&'static str, &Value) -> Result<T, RecordError>,
    ) -> Result<Option<T>, RecordError> {
        self.0
            .get(key)
            .filter(|value| **value != Value::Nil)
            .map(|value| parse(key, value))
            .transpose()
    }
}

fn bad(field: &'static str, expected: &'static str, got: &Value) -> RecordError {
    RecordError::Field { field, expected, got: got.repr() }
}

/// Python looks the state up by equality, so `2.0` and `True` name states too.
fn server_state(value: &Value) -> Result<ServerState, RecordError> {
    let number = match value {
        Value::Int(number) => Some(*number),
        Value::Bool(flag) => Some((*flag).into()),
        Value::Float(number) => [0.0, 1.0, 2.0].iter().position(|n| n == number).map(|n| n as i128),
        _ => None,
    };
    match number {
        Some(0) => Ok(ServerState::Offline),
        Some(1) => Ok(ServerState::Joining),
        Some(2) => Ok(ServerState::Online),
        _ => Err(bad("state", "0, 1 or 2", value)),
    }
}

fn rate(field: &'static str, value: &Value) -> Result<f64, RecordError> {
    match value {
        Value::Float(rate) if rate.is_finite() && *rate >= 0.0 => Ok(*rate),
        _ => Err(bad(field, "a finite float of at least 0", value)),
    }
}

fn count(field: &'static str, value: &Value) -> Result<u64, RecordError> {
    match value {
        Value::Int(count) => {
            u64::try_from(*count).map_err(|_| bad(field, "an int of at least 0", value))
        }
        _ => Err(bad(field, "an int of at least 0", value)),
    }
}

fn text(field: &'static str, value: &Value) -> Result<String, RecordError> {
    value.as_str().map(str::to_owned).ok_or_else(|| bad(field, "text", value))
}

fn flag(field: &'static str, value: &Value) -> Result<bool, RecordError> {
    match value {
        Value::Bool(flag) => Ok(*flag),
        _ => Err(bad(field, "a bool", value)),
    }
}

fn adapters(value: &Value) -> Result<Vec<String>, RecordError> {
    let names = value.as_sequence().ok_or_else(|| bad("adapters", "a tuple of texts", value))?;
    names.iter().map(|name| text("adapters", name)).collect()
}

fn pings(field: &'static str, value: &Value) -> Result<Vec<(String, f64)>, RecordError> {
    let entries = value.as_map().ok_or_else(|| bad(field, "a map of seconds by peer", value))?;
    let parse = |(peer, seconds): &(Value, Value)| match seconds {
        Value::Float(seconds) if *seconds >= 0.0 => Ok((text(field, peer)?, *seconds)),
        _ => Err(bad(field, "a map of seconds of at least 0", seconds)),
    };
    entries.iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use testkit::golden;

    fn with_extra(key: &str, value: Value) -> Result<ServerInfo, RecordError> {
        tuple(vec![Value::Int(2), Value::Float(1.0), Value::Map(vec![(Value::str(key), value)])])
    }

    fn tuple(parts: Vec<Value>) -> Result<ServerInfo, RecordError> {
        ServerInfo::decode(&Value::Tuple(parts).encode())
    }

    #[test]
    fn golden_server_records_decode_and_reencode() {
        for name in ["minimal", "full", "offline", "ping_inf"] {
            let bytes = golden::msgpack(&format!("ServerInfo_{name}"));
            assert_eq!(ServerInfo::decode(&bytes).unwrap().encode(), bytes, "{name}");
        }
        let full = ServerInfo::decode(&golden::msgpack("ServerInfo_full")).unwrap();
        assert_eq!((full.state, full.throughput), (ServerState::Joining, 123.456));
        assert_eq!(
            (full.start_block, full.end_block, full.cache_tokens_left),
            (Some(0), Some(4), Some(8192))
        );
        assert_eq!(full.adapters, ["org/adapter"]);
        assert_eq!(full.next_pings.unwrap()[0].1, 0.0125);
        let minimal = golden::msgpack("ServerInfo_minimal");
        assert_eq!(ServerInfo::new(ServerState::Online, 1.0).encode(), minimal);
    }

    #[test]
    fn golden_model_records_decode_and_reencode() {
        for (name, blocks) in [("ModelInfo", 80), ("ModelInfo_norepo", 4)] {
            let bytes = golden::msgpack(name);
            let info = ModelInfo::decode(&bytes).unwrap();
            assert_eq!((info.num_blocks, info.encode()), (blocks, bytes));
        }
        let record = |value: Value| {
            ModelInfo::decode(&Value::Map(vec![(Value::str("num_blocks"), value)]).encode())
        };
        assert!(record(Value::Int(1)).is_ok());
        assert!(record(Value::Int(0)).is_err() && record(Value::Float(3.0)).is_err());
        assert!(ModelInfo::decode(&Value::List(vec![]).encode()).is_err());
    }

    #[test]
    fn records_of_a_real_server_decode() {
        let file = golden::file(golden::DHT_RECORDS);
        let entries = file["records"][0]["entries"].as_object().unwrap();
        assert!(!entries.is_empty());
        for entry in entries.values() {
            let info = ServerInfo::decode(&golden::bytes(entry, "value_hex")).unwrap();
            assert_eq!(
                (info.state, info.start_block, info.end_block),
                (ServerState::Online, Some(0), Some(4))
            );
        }
    }

    #[test]
    fn whatever_python_drops_is_dropped() {
        let float = Value::Float;
        for throughput in
            [Value::Int(1), float(-1.0), float(f64::NAN), float(f64::INFINITY), Value::Nil]
        {
            assert!(tuple(vec![Value::Int(2), throughput.clone()]).is_err(), "{throughput:?}");
        }
        for state in [Value::Int(3), Value::Int(-1), Value::str("2"), Value::Nil, float(0.5)] {
            assert!(tuple(vec![state.clone(), float(1.0)]).is_err(), "{state:?}");
        }
        assert!(tuple(vec![Value::Int(2)]).is_err());
        assert!(ServerInfo::decode(&Value::str("xx").encode()).is_err());
        assert!(tuple(vec![Value::Int(2), float(1.0), Value::Nil]).is_err());
        assert!(
            tuple(vec![Value::Int(2), float(1.0), Value::Map(vec![(Value::Int(1), Value::Nil)])])
                .is_err()
        );
        for key in ["network_rps", "forward_rps", "inference_rps"] {
            for value in [Value::Int(1), float(f64::NAN), float(-0.5), float(f64::INFINITY)] {
                assert!(with_extra(key, value).is_err());
            }
        }
        for key in ["start_block", "end_block", "cache_tokens_left"] {
            for value in [float(1.0), Value::Int(-1), Value::Bool(true)] {
                assert!(with_extra(key, value).is_err());
            }
        }
        assert!(
            with_extra("adapters", Value::Nil).is_err()
                && with_extra("adapters", Value::str("a")).is_err()
        );
        assert!(
            with_extra("state", Value::Int(1)).is_err()
                && with_extra("throughput", float(1.0)).is_err()
        );
        for ping in [Value::Int(1), float(f64::NAN), float(-1.0)] {
            assert!(with_extra("next_pings", Value::Map(vec![(Value::str("p"), ping)])).is_err());
        }
    }

    #[test]
    fn whatever_python_accepts_is_accepted() {
        let two = ServerInfo::decode(&Value::List(vec![Value::Int(2), Value::Float(1.0)]).encode())
            .unwrap();
        assert_eq!(two, ServerInfo::new(ServerState::Online, 1.0));
        let empty = Value::Map(Vec::new());
        assert!(tuple(vec![Value::Float(2.0), Value::Float(0.0), empty, Value::Int(9)]).is_ok());
        assert!(with_extra("unheard_of", Value::Int(1)).is_ok());
        assert!(with_extra("adapters", Value::List(vec![Value::str("a")])).is_ok());
        let reversed = Value::Map(vec![
            (Value::str("start_block"), Value::Int(5)),
            (Value::str("end_block"), Value::Int(3)),
        ]);
        assert!(tuple(vec![Value::Int(2), Value::Float(1.0), reversed]).is_ok());
        let far = Value::Map(vec![(Value::str("p"), Value::Float(f64::INFINITY))]);
        assert_eq!(
            with_extra("next_pings", far).unwrap().next_pings,
            Some(vec![("p".into(), f64::INFINITY)])
        );
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = (ServerInfo::decode(&bytes), ModelInfo::decode(&bytes));
        }

        #[test]
        fn damaged_records_do_not_panic(position in 0usize..255, byte in any::<u8>()) {
            let mut bytes = golden::msgpack("ServerInfo_full");
            let position = position % bytes.len();
            bytes[position] = byte;
            let _ = ServerInfo::decode(&bytes);
        }
    }
}
