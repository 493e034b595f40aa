//! Metadata of the transformer RPCs: the msgpack map in `ExpertRequest.metadata`, parsed once into finished values.
//! Source: `petals/server/handler.py` and `petals/client/inference_session.py`; error texts follow theirs.
//!
//! Unknown keys are ignored here and kept for pushes ([`RequestMetadata::for_push`]).
//!
//! # Discrepancies
//! Python looks at a key only where it needs it; here a known key of a wrong type is an error in every RPC. Arguments of
//! `args_structure` that are no tensors are refused, Python would hand them to the model.

use super::msgpack::{Limits, MsgpackError, Value};
use thiserror::Error;

/// Most characters of a session or step id (they are UUIDs).
pub const MAX_ID_CHARS: usize = 128;
/// Most next servers named by one step.
pub const MAX_NEXT_SERVERS: usize = 256;
/// Most arguments of one request; the RPCs take two or three.
pub const MAX_ARGUMENTS: usize = 16;

/// Why metadata is refused; the text goes to the client.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MetadataError {
    /// The bytes are no msgpack value within bounds.
    #[error("cannot read the request's metadata: {0}")]
    Msgpack(#[from] MsgpackError),
    /// The value is no map.
    #[error("the request's metadata must be a map, got {0}")]
    NotMap(String),
    /// `points` is no number.
    #[error("{rpc} should have number of points as a number or None, got {got}")]
    Points {
        /// Name of the RPC.
        rpc: &'static str,
        /// What it was.
        got: String,
    },
    /// `max_length` is missing or no integer.
    #[error("rpc_inference metadata must contain int max_length, got {0}")]
    MaxLength(String),
    /// `output_compression` is no sequence of integers.
    #[error("output_compression must be a tuple/list")]
    OutputCompression,
    /// `output_compression` has a wrong length.
    #[error("output_compression tuple should have {expected} element{}, got {actual}", if *expected == 1 { "" } else { "s" })]
    OutputCompressionLength {
        /// Tensors that the RPC returns.
        expected: usize,
        /// Elements found.
        actual: usize,
    },
    /// Another known key has a wrong type or value.
    #[error("metadata key {key} must be {expected}, got {got}")]
    BadKey {
        /// The key.
        key: &'static str,
        /// What it should be.
        expected: &'static str,
        /// What it was.
        got: String,
    },
    /// `args_structure` names a tensor that the request does not have.
    #[error("args_structure refers to tensor {index}, the request has {count}")]
    NoSuchTensor {
        /// Index named.
        index: usize,
        /// Tensors of the request.
        count: usize,
    },
}

/// Where the output of a step shall be pushed: a session on the next server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextServer {
    /// PeerID in base58.
    pub peer_id: String,
    /// Session there.
    pub session_id: String,
    /// First block, relative to the client's list.
    pub start: u32,
    /// One past the last block.
    pub end: u32,
}

/// Which tensor of the request each positional argument is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArgsStructure(Vec<usize>);

impl ArgsStructure {
    /// The structure that clients send: `count` arguments, each its own tensor.
    #[must_use]
    pub fn in_order(count: usize) -> Self {
        Self((0..count).collect())
    }

    /// The arguments, in the order of the RPC. Clones are cheap for tensors, whose buffers are shared.
    ///
    /// # Errors
    /// [`MetadataError::NoSuchTensor`] if an argument refers to a tensor that is not there.
    pub fn arrange<T: Clone>(&self, tensors: &[T]) -> Result<Vec<T>, MetadataError> {
        let find = |&index| {
            tensors
                .get(index)
                .cloned()
                .ok_or(MetadataError::NoSuchTensor {
                    index,
                    count: tensors.len(),
                })
        };
        self.0.iter().map(find).collect()
    }

    /// `((b"__T0", b"__T1", ...), {})`.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let marker = |index: &usize| Value::Bin([MARKER, index.to_string().as_bytes()].concat());
        Value::Tuple(vec![
            Value::Tuple(self.0.iter().map(marker).collect()),
            Value::Map(Vec::new()),
        ])
    }

    fn parse(value: &Value) -> Result<Self, MetadataError> {
        let bad = || {
            bad_key(
                "args_structure",
                "a pair of tensor arguments and keywords",
                value,
            )
        };
        let [arguments, _keywords] = value.as_sequence().ok_or_else(bad)? else {
            return Err(bad());
        };
        let arguments = arguments
            .as_sequence()
            .filter(|items| items.len() <= MAX_ARGUMENTS)
            .ok_or_else(bad)?;
        arguments
            .iter()
            .map(|argument| tensor_index(argument).ok_or_else(bad))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

const MARKER: &[u8] = b"__T";

fn tensor_index(argument: &Value) -> Option<usize> {
    let Value::Bin(bytes) = argument else {
        return None;
    };
    let digits = std::str::from_utf8(bytes.strip_prefix(MARKER)?).ok()?;
    digits.parse().ok()
}

/// The finished metadata of a request. Absent keys have the values that Python assumes.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestMetadata {
    /// Priority points.
    pub points: f64,
    /// Name of the LoRA adapter.
    pub active_adapter: Option<String>,
    /// How tensors map to arguments.
    pub args_structure: Option<ArgsStructure>,
    /// KV positions to allocate per sequence; see [`Self::required_max_length`].
    pub max_length: Option<i64>,
    /// Session that pushes are addressed to.
    pub session_id: Option<String>,
    /// Names one model step over all servers.
    pub step_id: Option<String>,
    /// Position to continue from.
    pub start_from_position: Option<u64>,
    /// Where to push the output.
    pub next_servers: Vec<NextServer>,
    /// Whether a server pushed this.
    pub pushed: bool,
    /// Seconds to wait for KV memory, at least 0; the caller caps it.
    pub alloc_timeout_s: f64,
    /// Overrides the compression of the reply; see [`Self::output_compression`].
    output_compression: Option<Vec<i128>>,
    raw: Vec<(Value, Value)>,
}

impl RequestMetadata {
    /// Parses the metadata of a request to `rpc`; empty bytes are an empty map.
    ///
    /// # Errors
    /// [`MetadataError`] with the text for the client.
    pub fn parse(bytes: &[u8], rpc: &'static str) -> Result<Self, MetadataError> {
        let map = if bytes.is_empty() {
            Value::Map(Vec::new())
        } else {
            Value::decode(bytes, Limits::SMALL)?
        };
        let key = |name: &str| map.get(name).filter(|value| **value != Value::Nil);
        let text = |name| key(name).map(|value| short_text(name, value)).transpose();
        let mut parsed = Self {
            points: key("points").map_or(Ok(0.0), |value| {
                number(value).ok_or_else(|| points_error(rpc, value))
            })?,
            active_adapter: text("active_adapter")?.filter(|name| !name.is_empty()),
            args_structure: key("args_structure")
                .map(ArgsStructure::parse)
                .transpose()?,
            max_length: key("max_length").map(max_length).transpose()?,
            session_id: text("session_id")?,
            step_id: text("step_id")?,
            start_from_position: key("start_from_position").map(position).transpose()?,
            next_servers: key("next_servers").map_or(Ok(Vec::new()), next_servers)?,
            pushed: key("pushed").is_some_and(|value| *value == Value::Bool(true)),
            alloc_timeout_s: key("alloc_timeout").map_or(Ok(0.0), alloc_timeout)?,
            output_compression: key("output_compression").map(compressions).transpose()?,
            raw: Vec::new(),
        };
        match map {
            Value::Map(entries) => parsed.raw = entries,
            other => return Err(MetadataError::NotMap(other.repr())),
        }
        Ok(parsed)
    }

    /// The KV positions that the first step of a session must ask for.
    ///
    /// # Errors
    /// [`MetadataError::MaxLength`] if there are none.
    pub fn required_max_length(&self) -> Result<i64, MetadataError> {
        self.max_length
            .ok_or_else(|| MetadataError::MaxLength("None".into()))
    }

    /// The compressions asked for the `expected` tensors of the reply, if any were.
    ///
    /// # Errors
    /// [`MetadataError::OutputCompressionLength`] if there are more or fewer.
    pub fn output_compression(&self, expected: usize) -> Result<Option<&[i128]>, MetadataError> {
        match &self.output_compression {
            Some(codes) if codes.len() != expected => Err(MetadataError::OutputCompressionLength {
                expected,
                actual: codes.len(),
            }),
            codes => Ok(codes.as_deref()),
        }
    }

    /// The metadata with which this step is pushed on: everything that the client sent, unknown keys included, but addressed to
    /// the next server's session and with the rest of the servers.
    #[must_use]
    pub fn for_push(&self, session_id: &str, rest: &[NextServer]) -> Vec<u8> {
        let replaced = ["session_id", "next_servers", "pushed"];
        let kept =
            |(key, _): &&(Value, Value)| !replaced.iter().any(|name| key.as_str() == Some(name));
        let mut entries: Vec<_> = self.raw.iter().filter(kept).cloned().collect();
        entries.push((Value::str("session_id"), Value::str(session_id)));
        entries.push((
            Value::str("next_servers"),
            Value::List(rest.iter().map(NextServer::to_value).collect()),
        ));
        entries.push((Value::str("pushed"), Value::Bool(true)));
        Value::Map(entries).encode()
    }
}

impl NextServer {
    fn to_value(&self) -> Value {
        Value::Tuple(vec![
            Value::str(&self.peer_id),
            Value::str(&self.session_id),
            Value::uint(self.start),
            Value::uint(self.end),
        ])
    }
}

/// Metadata of one inference step as clients send it.
#[derive(Clone, Debug, PartialEq)]
pub struct StepMetadata<'a> {
    /// Session on this server, a UUID.
    pub session_id: &'a str,
    /// This model step, a UUID; the same on every server.
    pub step_id: &'a str,
    /// Only in the first step: KV positions to allocate, and the LoRA adapter.
    pub open: Option<(u32, Option<&'a str>)>,
    /// Where to push the output (clients of Petals 2.2 only).
    pub next_servers: &'a [NextServer],
    /// Position to continue from (clients of Petals 2.3 only).
    pub start_from_position: Option<u32>,
}

impl StepMetadata<'_> {
    /// The bytes that Petals' client sends.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut entries = vec![
            ("session_id", Value::str(self.session_id)),
            ("step_id", Value::str(self.step_id)),
        ];
        if let Some((max_length, adapter)) = self.open {
            entries.push(("max_length", Value::uint(max_length)));
            entries.push(("points", Value::Float(0.0)));
            entries.push(("active_adapter", Value::opt_str(adapter)));
        }
        if !self.next_servers.is_empty() {
            let servers = self.next_servers.iter().map(NextServer::to_value).collect();
            entries.push(("next_servers", Value::List(servers)));
        }
        entries.push(("args_structure", ArgsStructure::in_order(3).to_value()));
        if let Some(position) = self.start_from_position {
            entries.push(("start_from_position", Value::uint(position)));
        }
        encode_map(entries)
    }
}

/// Metadata of a forward (`tensor_count` 2) or backward (3) request as clients send it.
#[must_use]
pub fn encode_batch_metadata(adapter: Option<&str>, tensor_count: usize) -> Vec<u8> {
    encode_map(vec![
        ("points", Value::Float(0.0)),
        ("active_adapter", Value::opt_str(adapter)),
        (
            "args_structure",
            ArgsStructure::in_order(tensor_count).to_value(),
        ),
    ])
}

fn encode_map(entries: Vec<(&str, Value)>) -> Vec<u8> {
    Value::Map(
        entries
            .into_iter()
            .map(|(key, value)| (Value::str(key), value))
            .collect(),
    )
    .encode()
}

fn bad_key(key: &'static str, expected: &'static str, got: &Value) -> MetadataError {
    MetadataError::BadKey {
        key,
        expected,
        got: got.repr(),
    }
}

fn points_error(rpc: &'static str, got: &Value) -> MetadataError {
    MetadataError::Points {
        rpc,
        got: got.repr(),
    }
}

/// A Python number; booleans are integers there. NaN counts as no number.
#[expect(
    clippy::cast_precision_loss,
    reason = "a priority or a timeout needs no 64 exact bits"
)]
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Float(value) if !value.is_nan() => Some(*value),
        Value::Int(value) => Some(*value as f64),
        Value::Bool(value) => Some(f64::from(*value)),
        _ => None,
    }
}

fn integer(value: &Value) -> Option<i128> {
    match value {
        Value::Int(value) => Some(*value),
        Value::Bool(value) => Some((*value).into()),
        _ => None,
    }
}

fn short_text(key: &'static str, value: &Value) -> Result<String, MetadataError> {
    let short = |text: &&str| text.chars().count() <= MAX_ID_CHARS;
    let text = value
        .as_str()
        .filter(short)
        .ok_or_else(|| bad_key(key, "a short text or None", value))?;
    Ok(text.to_owned())
}

fn max_length(value: &Value) -> Result<i64, MetadataError> {
    let length = integer(value).and_then(|length| i64::try_from(length).ok());
    length.ok_or_else(|| MetadataError::MaxLength(value.repr()))
}

fn position(value: &Value) -> Result<u64, MetadataError> {
    let position = integer(value).and_then(|position| u64::try_from(position).ok());
    position.ok_or_else(|| bad_key("start_from_position", "an int of at least 0", value))
}

fn alloc_timeout(value: &Value) -> Result<f64, MetadataError> {
    let seconds = number(value).filter(|seconds| *seconds >= 0.0);
    seconds.ok_or_else(|| bad_key("alloc_timeout", "a number of seconds of at least 0", value))
}

fn compressions(value: &Value) -> Result<Vec<i128>, MetadataError> {
    let items = value
        .as_sequence()
        .ok_or(MetadataError::OutputCompression)?;
    items
        .iter()
        .map(|item| integer(item).ok_or(MetadataError::OutputCompression))
        .collect()
}

fn next_servers(value: &Value) -> Result<Vec<NextServer>, MetadataError> {
    let bad = || {
        bad_key(
            "next_servers",
            "a list of (peer id, session id, start, end)",
            value,
        )
    };
    let servers = value
        .as_sequence()
        .filter(|items| items.len() <= MAX_NEXT_SERVERS)
        .ok_or_else(bad)?;
    let text = |value: &Value| short_text("next_servers", value).map_err(|_| bad());
    let block = |value: &Value| {
        integer(value)
            .and_then(|block| u32::try_from(block).ok())
            .ok_or_else(bad)
    };
    let parse = |server: &Value| {
        let [peer_id, session_id, start, end] = server.as_sequence().ok_or_else(bad)? else {
            return Err(bad());
        };
        Ok(NextServer {
            peer_id: text(peer_id)?,
            session_id: text(session_id)?,
            start: block(start)?,
            end: block(end)?,
        })
    };
    servers.iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::golden;
    use proptest::prelude::*;

    fn parse(entries: Vec<(&str, Value)>) -> Result<RequestMetadata, MetadataError> {
        RequestMetadata::parse(&encode_map(entries), "rpc_inference")
    }

    fn error(entries: Vec<(&str, Value)>) -> String {
        parse(entries).unwrap_err().to_string()
    }

    const SESSION: &str = "b6e08d8e-dd83-4e7f-955a-5cfdc36a3011";

    #[test]
    fn golden_first_step_parses_and_reencodes() {
        let bytes = golden::msgpack("metadata_inference_first_step");
        let parsed = RequestMetadata::parse(&bytes, "rpc_inference").unwrap();
        assert_eq!(parsed.required_max_length(), Ok(7));
        assert_eq!(parsed.session_id.as_deref(), Some(SESSION));
        assert_eq!(parsed.start_from_position, Some(0));
        assert_eq!(
            (
                parsed.points,
                parsed.active_adapter.as_deref(),
                parsed.pushed
            ),
            (0.0, None, false)
        );
        assert_eq!(parsed.args_structure, Some(ArgsStructure::in_order(3)));
        let step = StepMetadata {
            session_id: SESSION,
            step_id: "dd64645b-e482-4d5a-a790-4e499d26b89d",
            open: Some((7, None)),
            next_servers: &[],
            start_from_position: Some(0),
        };
        assert_eq!(step.encode(), bytes);
    }

    #[test]
    fn golden_next_servers_parse_and_reencode() {
        let bytes = golden::msgpack("metadata_inference_next_servers");
        let parsed = RequestMetadata::parse(&bytes, "rpc_inference").unwrap();
        let next = NextServer {
            peer_id: "QmU9mzn2oH6NqMDjtcU1zR1SCgCeFFbjZGqhxWzo9nrxJk".into(),
            session_id: SESSION.into(),
            start: 2,
            end: 4,
        };
        assert_eq!(parsed.next_servers, [next]);
        let next_servers = &parsed.next_servers;
        let step = StepMetadata {
            session_id: "s",
            step_id: "t",
            open: None,
            next_servers,
            start_from_position: None,
        };
        assert_eq!(step.encode(), bytes);
    }

    #[test]
    fn golden_args_structures_reencode() {
        for (name, count) in [("inference", 3), ("forward", 2), ("backward", 3)] {
            let bytes = golden::msgpack(&format!("args_structure_{name}"));
            assert_eq!(ArgsStructure::in_order(count).to_value().encode(), bytes);
        }
        let bytes = golden::msgpack("args_structure_same_tensor_twice");
        let twice = ArgsStructure::parse(&Value::decode(&bytes, Limits::SMALL).unwrap()).unwrap();
        assert_eq!(twice.arrange(&["a", "b"]), Ok(vec!["a", "a", "b"]));
        assert_eq!(
            twice.arrange(&["a"]),
            Err(MetadataError::NoSuchTensor { index: 1, count: 1 })
        );
    }

    #[test]
    fn absent_and_nil_keys_have_defaults() {
        let empty = RequestMetadata::parse(b"", "rpc_forward").unwrap();
        let nil = parse(vec![
            ("points", Value::Nil),
            ("active_adapter", Value::Nil),
            ("other", Value::Int(1)),
        ])
        .unwrap();
        assert_eq!(
            RequestMetadata {
                raw: Vec::new(),
                ..nil
            },
            empty
        );
        assert_eq!(
            empty.required_max_length().unwrap_err().to_string(),
            "rpc_inference metadata must contain int max_length, got None"
        );
        assert_eq!(empty.output_compression(1), Ok(None));
    }

    #[test]
    fn wrong_types_give_the_texts_of_the_reference() {
        assert_eq!(
            error(vec![("points", Value::str("many"))]),
            "rpc_inference should have number of points as a number or None, got 'many'"
        );
        assert_eq!(
            error(vec![("max_length", Value::Float(7.0))]),
            "rpc_inference metadata must contain int max_length, got 7.0"
        );
        assert_eq!(
            error(vec![("output_compression", Value::Int(1))]),
            "output_compression must be a tuple/list"
        );
        let two = parse(vec![(
            "output_compression",
            Value::Tuple(vec![Value::Int(0), Value::Int(0)]),
        )])
        .unwrap();
        assert_eq!(
            two.output_compression(1).unwrap_err().to_string(),
            "output_compression tuple should have 1 element, got 2"
        );
        assert!(
            error(vec![("session_id", Value::Int(4))]).contains("session_id must be a short text")
        );
        assert!(
            error(vec![("start_from_position", Value::Int(-1))]).contains("at least 0, got -1")
        );
        assert!(error(vec![("alloc_timeout", Value::Float(-0.5))]).contains("alloc_timeout"));
        assert!(
            error(vec![("next_servers", Value::List(vec![Value::Nil]))]).contains("next_servers")
        );
        assert!(error(vec![("args_structure", Value::List(vec![]))]).contains("args_structure"));
        let not_map = RequestMetadata::parse(&[0x01], "rpc_forward").unwrap_err();
        assert_eq!(not_map, MetadataError::NotMap("1".into()));
    }

    #[test]
    fn push_keeps_unknown_keys_and_readdresses_the_step() {
        let step = parse(vec![
            ("step_id", Value::str("t")),
            ("session_id", Value::str("mine")),
            ("novelty", Value::Int(5)),
        ])
        .unwrap();
        let pushed = RequestMetadata::parse(&step.for_push("theirs", &[]), "rpc_push").unwrap();
        assert_eq!(pushed.session_id.as_deref(), Some("theirs"));
        assert_eq!(pushed.step_id.as_deref(), Some("t"));
        assert!(pushed.pushed && pushed.next_servers.is_empty());
        assert!(pushed.raw.contains(&(Value::str("novelty"), Value::Int(5))));
        assert_eq!(
            pushed
                .raw
                .iter()
                .filter(|(key, _)| key.as_str() == Some("session_id"))
                .count(),
            1
        );
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = RequestMetadata::parse(&bytes, "rpc_inference");
        }

        #[test]
        fn no_value_under_a_known_key_panics(
            key in prop::sample::select(vec![
                "points", "active_adapter", "args_structure", "max_length", "session_id", "step_id",
                "start_from_position", "next_servers", "pushed", "alloc_timeout", "output_compression",
            ]),
            value in prop_oneof![
                any::<i64>().prop_map(|v| Value::Int(v.into())),
                any::<f64>().prop_map(Value::Float),
                prop::collection::vec(any::<u8>(), 0..9).prop_map(|tail| Value::Tuple(vec![
                    Value::Tuple(vec![Value::Bin([MARKER, &tail].concat())]), Value::Nil,
                ])),
                prop::collection::vec(any::<i64>(), 4..5).prop_map(|v| Value::List(vec![
                    Value::List(v.into_iter().map(|v| Value::Int(v.into())).collect()),
                ])),
            ],
        ) {
            let _ = parse(vec![(key, value)]);
        }
    }
}
