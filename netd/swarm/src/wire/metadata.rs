//! Metadata of the transformer RPCs: the msgpack map in `ExpertRequest.metadata`, parsed once into
//! finished values. Source: `petals/server/handler.py` and `petals/client/inference_session.py`;
//! error texts follow theirs.
//!
//! Unknown keys are ignored here and kept for pushes ([`RequestMetadata::for_push`]).
//!
//! # Discrepancies
//! Python looks at a key only where it needs it; here a known key of a wrong type is an error in
//! every RPC. Arguments of `args_structure` that are no tensors are refused, Python would hand them
//! to the model.

use thiserror::Error;

use super::keys;
use super::msgpack::{Limits, MsgpackError, Value};
use super::resumption::{self, Secret};
use crate::names;

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
    #[error("{} should have number of points as a number or None, got {got}", names::short(.rpc))]
    Points {
        /// Name of the RPC, one of [`names`].
        rpc: &'static str,
        got: String,
    },
    /// `max_length` is missing or no integer.
    #[error(
        "{rpc} metadata must contain int {key}, got {0}",
        rpc = names::short(names::INFERENCE),
        key = keys::MAX_LENGTH
    )]
    MaxLength(String),
    /// `output_compression` is no sequence of integers.
    #[error("{} must be a tuple/list", keys::OUTPUT_COMPRESSION)]
    OutputCompression,
    /// `output_compression` has a wrong length.
    #[error(
        "{} tuple should have {expected} element{}, got {actual}",
        keys::OUTPUT_COMPRESSION, if *expected == 1 { "" } else { "s" }
    )]
    OutputCompressionLength {
        /// Tensors that the RPC returns.
        expected: usize,
        /// Elements found.
        actual: usize,
    },
    /// Another known key has a wrong type or value.
    #[error("metadata key {key} must be {expected}, got {got}")]
    BadKey {
        key: &'static str,
        /// What it should be.
        expected: &'static str,
        got: String,
    },
    /// `args_structure` names a tensor that the request does not have.
    #[error("{} refers to tensor {index}, the request has {count}", keys::ARGS_STRUCTURE)]
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

    /// The arguments, in the order of the RPC. Clones are cheap for tensors, whose buffers are
    /// shared.
    ///
    /// # Errors
    /// [`MetadataError::NoSuchTensor`] if an argument refers to a tensor that is not there.
    pub fn arrange<T: Clone>(&self, tensors: &[T]) -> Result<Vec<T>, MetadataError> {
        let find = |&index| {
            tensors
                .get(index)
                .cloned()
                .ok_or(MetadataError::NoSuchTensor { index, count: tensors.len() })
        };
        self.0.iter().map(find).collect()
    }

    /// Whether each argument is the tensor at its own position.
    #[must_use]
    pub fn is_in_order(&self) -> bool {
        self.0.iter().copied().eq(0..self.0.len())
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
        let bad =
            || bad_key(keys::ARGS_STRUCTURE, "a pair of tensor arguments and keywords", value);
        let [arguments, _keywords] = value.as_sequence().ok_or_else(bad)? else {
            return Err(bad());
        };
        let arguments =
            arguments.as_sequence().filter(|items| items.len() <= MAX_ARGUMENTS).ok_or_else(bad)?;
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
    /// Whether a pushed step has the tensors of this very step.
    pub exact_push: bool,
    /// Seconds to wait for KV memory, at least 0; the caller caps it.
    pub alloc_timeout_s: f64,
    /// Whether the answer shall tell where the time of the step went.
    pub wants_times: bool,
    /// Whether the client can resume the session.
    pub wants_resumption: bool,
    /// The secret of the session that the client resumes.
    pub resume: Option<Secret>,
    /// Overrides the compression of the reply; see [`Self::output_compression`].
    output_compression: Option<Vec<i128>>,
    raw: Vec<(Value, Value)>,
}

impl RequestMetadata {
    /// Parses the metadata of a request to `rpc`, one of [`names`]; empty bytes are an empty map.
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
            points: key(keys::POINTS)
                .map_or(Ok(0.0), |value| number(value).ok_or_else(|| points_error(rpc, value)))?,
            active_adapter: text(keys::ACTIVE_ADAPTER)?.filter(|name| !name.is_empty()),
            args_structure: key(keys::ARGS_STRUCTURE).map(ArgsStructure::parse).transpose()?,
            max_length: key(keys::MAX_LENGTH).map(max_length).transpose()?,
            session_id: text(keys::SESSION_ID)?,
            step_id: text(keys::STEP_ID)?,
            start_from_position: key(keys::START_FROM_POSITION).map(position).transpose()?,
            next_servers: key(keys::NEXT_SERVERS).map_or(Ok(Vec::new()), next_servers)?,
            pushed: key(keys::PUSHED).is_some_and(|value| *value == Value::Bool(true)),
            exact_push: key(keys::SEPAL_EXACT).is_some_and(|value| *value == Value::Bool(true)),
            alloc_timeout_s: key(keys::ALLOC_TIMEOUT).map_or(Ok(0.0), alloc_timeout)?,
            wants_times: key(keys::SEPAL_TIMING).is_some_and(|value| *value == Value::Bool(true)),
            wants_resumption: key(keys::SEPAL_RESUMABLE)
                .is_some_and(|value| *value == Value::Bool(true)),
            resume: key(keys::SEPAL_RESUME).map(resume).transpose()?,
            output_compression: key(keys::OUTPUT_COMPRESSION).map(compressions).transpose()?,
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
        self.max_length.ok_or_else(|| MetadataError::MaxLength("None".into()))
    }

    /// The compressions asked for the `expected` tensors of the reply, if any were.
    ///
    /// # Errors
    /// [`MetadataError::OutputCompressionLength`] if there are more or fewer.
    pub fn output_compression(&self, expected: usize) -> Result<Option<&[i128]>, MetadataError> {
        match &self.output_compression {
            Some(codes) if codes.len() != expected => {
                Err(MetadataError::OutputCompressionLength { expected, actual: codes.len() })
            }
            codes => Ok(codes.as_deref()),
        }
    }

    /// The metadata with which this step is pushed on: everything that the client sent, unknown
    /// keys included, but addressed to the next server's session and with the rest of the
    /// servers.
    #[must_use]
    pub fn for_push(&self, session_id: &str, rest: &[NextServer]) -> Vec<u8> {
        let replaced = [
            keys::SESSION_ID,
            keys::NEXT_SERVERS,
            keys::PUSHED,
            keys::SEPAL_EXACT,
            // What this server alone may know.
            keys::SEPAL_RESUMABLE,
            keys::SEPAL_RESUME,
        ];
        let kept =
            |(key, _): &&(Value, Value)| !replaced.iter().any(|name| key.as_str() == Some(name));
        let mut entries: Vec<_> = self.raw.iter().filter(kept).cloned().collect();
        entries.push((Value::str(keys::SESSION_ID), Value::str(session_id)));
        entries.push((
            Value::str(keys::NEXT_SERVERS),
            Value::List(rest.iter().map(NextServer::to_value).collect()),
        ));
        entries.push((Value::str(keys::PUSHED), Value::Bool(true)));
        entries.push((Value::str(keys::SEPAL_EXACT), Value::Bool(true)));
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
    /// Whether a Sepal server shall tell where the time of the step went.
    pub wants_times: bool,
}

impl StepMetadata<'_> {
    /// The bytes that Petals' client sends, which never asks for times.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode_map(self.entries())
    }

    /// The same from a client that can resume the session, or with its secret resumes it.
    #[must_use]
    pub fn encode_resumable(&self, secret: Option<&Secret>) -> Vec<u8> {
        let mut entries = self.entries();
        entries.push(match secret {
            Some(secret) => (keys::SEPAL_RESUME, Value::Bin(secret.to_vec())),
            None => (keys::SEPAL_RESUMABLE, Value::Bool(true)),
        });
        encode_map(entries)
    }

    fn entries(&self) -> Vec<(&'static str, Value)> {
        let mut entries = vec![
            (keys::SESSION_ID, Value::str(self.session_id)),
            (keys::STEP_ID, Value::str(self.step_id)),
        ];
        if let Some((max_length, adapter)) = self.open {
            entries.push((keys::MAX_LENGTH, Value::uint(max_length)));
            entries.push((keys::POINTS, Value::Float(0.0)));
            entries.push((keys::ACTIVE_ADAPTER, Value::opt_str(adapter)));
        }
        if !self.next_servers.is_empty() {
            let servers = self.next_servers.iter().map(NextServer::to_value).collect();
            entries.push((keys::NEXT_SERVERS, Value::List(servers)));
        }
        entries.push((keys::ARGS_STRUCTURE, ArgsStructure::in_order(3).to_value()));
        if let Some(position) = self.start_from_position {
            entries.push((keys::START_FROM_POSITION, Value::uint(position)));
        }
        if self.wants_times {
            entries.push((keys::SEPAL_TIMING, Value::Bool(true)));
        }
        entries
    }
}

/// Metadata of a forward (`tensor_count` 2) or backward (3) request as clients send it.
#[must_use]
pub fn encode_batch_metadata(adapter: Option<&str>, tensor_count: usize) -> Vec<u8> {
    encode_map(vec![
        (keys::POINTS, Value::Float(0.0)),
        (keys::ACTIVE_ADAPTER, Value::opt_str(adapter)),
        (keys::ARGS_STRUCTURE, ArgsStructure::in_order(tensor_count).to_value()),
    ])
}

fn encode_map(entries: Vec<(&str, Value)>) -> Vec<u8> {
    Value::Map(entries.into_iter().map(|(key, value)| (Value::str(key), value)).collect()).encode()
}

fn bad_key(key: &'static str, expected: &'static str, got: &Value) -> MetadataError {
    MetadataError::BadKey { key, expected, got: got.repr() }
}

fn points_error(rpc: &'static str, got: &Value) -> MetadataError {
    MetadataError::Points { rpc, got: got.repr() }
}

/// A Python number; booleans are integers there. NaN counts as no number.
#[expect(clippy::cast_precision_loss, reason = "a priority or a timeout needs no 64 exact bits")]
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
    let text =
        value.as_str().filter(short).ok_or_else(|| bad_key(key, "a short text or None", value))?;
    Ok(text.to_owned())
}

fn max_length(value: &Value) -> Result<i64, MetadataError> {
    let length = integer(value).and_then(|length| i64::try_from(length).ok());
    length.ok_or_else(|| MetadataError::MaxLength(value.repr()))
}

fn position(value: &Value) -> Result<u64, MetadataError> {
    let position = integer(value).and_then(|position| u64::try_from(position).ok());
    position.ok_or_else(|| bad_key(keys::START_FROM_POSITION, "an int of at least 0", value))
}

fn resume(value: &Value) -> Result<Secret, MetadataError> {
    // The text does not repeat what may be a secret.
    resumption::secret(value).ok_or_else(|| MetadataError::BadKey {
        key: keys::SEPAL_RESUME,
        expected: "32 bytes",
        got: "another value".to_owned(),
    })
}

fn alloc_timeout(value: &Value) -> Result<f64, MetadataError> {
    let seconds = number(value).filter(|seconds| *seconds >= 0.0);
    seconds.ok_or_else(|| bad_key(keys::ALLOC_TIMEOUT, "a number of seconds of at least 0", value))
}

fn compressions(value: &Value) -> Result<Vec<i128>, MetadataError> {
    let items = value.as_sequence().ok_or(MetadataError::OutputCompression)?;
    items.iter().map(|item| integer(item).ok_or(MetadataError::OutputCompression)).collect()
}

fn next_servers(value: &Value) -> Result<Vec<NextServer>, MetadataError> {
    let bad = || bad_key(keys::NEXT_SERVERS, "a list of (peer id, session id, start, end)", value);
    let servers =
        value.as_sequence().filter(|items| items.len() <= MAX_NEXT_SERVERS).ok_or_else(bad)?;
    let text = |value: &Value| short_text(keys::NEXT_SERVERS, value).map_err(|_| bad());
    let block =
        |value: &Value| integer(value).and_then(|block| u32::try_from(block).ok()).ok_or_else(bad);
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
    use proptest::prelude::*;
    use testkit::golden;

    fn parse(entries: Vec<(&str, Value)>) -> Result<RequestMetadata, MetadataError> {
        RequestMetadata::parse(&encode_map(entries), names::INFERENCE)
    }

    fn error(entries: Vec<(&str, Value)>) -> String {
        parse(entries).unwrap_err().to_string()
    }

    const SESSION: &str = "b6e08d8e-dd83-4e7f-955a-5cfdc36a3011";

    #[test]
    fn golden_first_step_parses_and_reencodes() {
        let bytes = golden::msgpack("metadata_inference_first_step");
        let parsed = RequestMetadata::parse(&bytes, names::INFERENCE).unwrap();
        assert_eq!(parsed.required_max_length(), Ok(7));
        assert_eq!(parsed.session_id.as_deref(), Some(SESSION));
        assert_eq!(parsed.start_from_position, Some(0));
        assert_eq!(
            (parsed.points, parsed.active_adapter.as_deref(), parsed.pushed),
            (0.0, None, false)
        );
        assert_eq!(parsed.args_structure, Some(ArgsStructure::in_order(3)));
        let step = StepMetadata {
            session_id: SESSION,
            step_id: "dd64645b-e482-4d5a-a790-4e499d26b89d",
            open: Some((7, None)),
            next_servers: &[],
            start_from_position: Some(0),
            wants_times: false,
        };
        assert_eq!(step.encode(), bytes);
    }

    #[test]
    fn golden_next_servers_parse_and_reencode() {
        let bytes = golden::msgpack("metadata_inference_next_servers");
        let parsed = RequestMetadata::parse(&bytes, names::INFERENCE).unwrap();
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
            wants_times: false,
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
        assert_eq!(twice.arrange(&["a"]), Err(MetadataError::NoSuchTensor { index: 1, count: 1 }));
    }

    #[test]
    fn absent_and_nil_keys_have_defaults() {
        let empty = RequestMetadata::parse(b"", names::FORWARD).unwrap();
        let nil = parse(vec![
            (keys::POINTS, Value::Nil),
            (keys::ACTIVE_ADAPTER, Value::Nil),
            ("other", Value::Int(1)),
        ])
        .unwrap();
        assert_eq!(RequestMetadata { raw: Vec::new(), ..nil }, empty);
        assert_eq!(
            empty.required_max_length().unwrap_err().to_string(),
            "rpc_inference metadata must contain int max_length, got None"
        );
        assert_eq!(empty.output_compression(1), Ok(None));
    }

    #[test]
    fn wrong_types_give_the_texts_of_the_reference() {
        assert_eq!(
            error(vec![(keys::POINTS, Value::str("many"))]),
            "rpc_inference should have number of points as a number or None, got 'many'"
        );
        assert_eq!(
            error(vec![(keys::MAX_LENGTH, Value::Float(7.0))]),
            "rpc_inference metadata must contain int max_length, got 7.0"
        );
        assert_eq!(
            error(vec![(keys::OUTPUT_COMPRESSION, Value::Int(1))]),
            "output_compression must be a tuple/list"
        );
        let two = parse(vec![(
            keys::OUTPUT_COMPRESSION,
            Value::Tuple(vec![Value::Int(0), Value::Int(0)]),
        )])
        .unwrap();
        assert_eq!(
            two.output_compression(1).unwrap_err().to_string(),
            "output_compression tuple should have 1 element, got 2"
        );
        assert!(
            error(vec![(keys::SESSION_ID, Value::Int(4))])
                .contains("session_id must be a short text")
        );
        assert!(
            error(vec![(keys::START_FROM_POSITION, Value::Int(-1))]).contains("at least 0, got -1")
        );
        assert!(
            error(vec![(keys::ALLOC_TIMEOUT, Value::Float(-0.5))]).contains(keys::ALLOC_TIMEOUT)
        );
        assert!(
            error(vec![(keys::NEXT_SERVERS, Value::List(vec![Value::Nil]))])
                .contains(keys::NEXT_SERVERS)
        );
        assert!(
            error(vec![(keys::ARGS_STRUCTURE, Value::List(vec![]))]).contains(keys::ARGS_STRUCTURE)
        );
        let not_map = RequestMetadata::parse(&[0x01], names::FORWARD).unwrap_err();
        assert_eq!(not_map, MetadataError::NotMap("1".into()));
    }

    #[test]
    fn push_keeps_unknown_keys_and_readdresses_the_step() {
        let step = parse(vec![
            (keys::STEP_ID, Value::str("t")),
            (keys::SESSION_ID, Value::str("mine")),
            ("novelty", Value::Int(5)),
        ])
        .unwrap();
        let pushed = RequestMetadata::parse(&step.for_push("theirs", &[]), names::PUSH).unwrap();
        assert_eq!(pushed.session_id.as_deref(), Some("theirs"));
        assert_eq!(pushed.step_id.as_deref(), Some("t"));
        assert!(pushed.pushed && pushed.next_servers.is_empty());
        assert!(pushed.raw.contains(&(Value::str("novelty"), Value::Int(5))));
        assert_eq!(
            pushed.raw.iter().filter(|(key, _)| key.as_str() == Some(keys::SESSION_ID)).count(),
            1
        );
    }

    #[test]
    fn times_are_told_only_to_those_who_ask() {
        for wants_times in [false, true] {
            let step = StepMetadata {
                session_id: "s",
                step_id: "t",
                open: None,
                next_servers: &[],
                start_from_position: Some(3),
                wants_times,
            };
            let parsed = RequestMetadata::parse(&step.encode(), names::INFERENCE).unwrap();
            assert_eq!(parsed.wants_times, wants_times);
        }
        let no_bool = parse(vec![(keys::SEPAL_TIMING, Value::Int(1))]).unwrap();
        assert!(!no_bool.wants_times);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = RequestMetadata::parse(&bytes, names::INFERENCE);
        }

        #[test]
        fn no_value_under_a_known_key_panics(
            key in prop::sample::select(vec![
                keys::POINTS, keys::ACTIVE_ADAPTER, keys::ARGS_STRUCTURE, keys::MAX_LENGTH, keys::SESSION_ID, keys::STEP_ID,
                keys::START_FROM_POSITION, keys::NEXT_SERVERS, keys::PUSHED, keys::ALLOC_TIMEOUT, keys::OUTPUT_COMPRESSION, keys::SEPAL_TIMING,
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
