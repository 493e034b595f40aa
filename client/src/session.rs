//! One inference session on one server: a stream of `rpc_inference` (petals `client/inference_session.py`,
//! `_ServerInferenceSession`).

use std::time::{Duration, Instant};

use bytes::Bytes;
use netd::p2p::{CallError, P2p, PeerId, RpcStream};
use netd::wire::messages::{ExpertRequest, ExpertResponse};
use netd::wire::metadata::StepMetadata;
use netd::wire::msgpack::{Limits, Value};
use netd::wire::tensor::{
    ShapeLimits, TensorError, WireDtype, WireTensor, dummy_tensor, raw_tensor,
};
use netd::wire::uid;
use prost::Message;
use shared::dtype::DType;

use crate::routing::Leg;

/// Protocol of inference sessions.
const RPC_INFERENCE: &str = "TransformerConnectionHandler.rpc_inference";

/// Time to open a stream to a server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for one step on one server, as in Petals' client.
const STEP_TIMEOUT: Duration = Duration::from_secs(180);

/// Why a step on a server failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// No answer to a step in time.
    #[error("no answer to a step within {0:?}")]
    Timeout(Duration),
    /// The server closed the stream without an answer.
    #[error("the server closed the session")]
    Closed,
    /// The answer is no message of the protocol.
    #[error("decode the answer of the server")]
    Decode(#[from] prost::DecodeError),
    /// The answer's tensor is malformed.
    #[error("the answer of the server holds no usable tensor")]
    Tensor(#[from] TensorError),
    /// The answer's tensor has another shape than the question's.
    #[error("the server answered with shape {got:?} instead of {want:?}")]
    Shape {
        /// Received.
        got: Vec<usize>,
        /// Sent.
        want: Vec<usize>,
    },
}

/// Hidden states `[1, tokens, hidden]` of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Hidden {
    /// Type of the elements.
    pub dtype: DType,
    /// Tokens.
    pub tokens: usize,
    /// Elements, row-major, little-endian.
    pub bytes: Bytes,
}

impl Hidden {
    /// Bytes of one token.
    fn token_bytes(&self) -> usize {
        self.bytes.len() / self.tokens.max(1)
    }

    /// The last `tokens` tokens.
    pub fn last(&self, tokens: usize) -> Hidden {
        let skip = self.tokens.saturating_sub(tokens) * self.token_bytes();
        Hidden {
            dtype: self.dtype,
            tokens: tokens.min(self.tokens),
            bytes: self.bytes.slice(skip..),
        }
    }

    /// The last token as f32 `[hidden]`.
    pub fn last_f32(&self) -> Vec<f32> {
        let last = self.last(1);
        let mut out = vec![0.0; last.bytes.len() / self.dtype.size_bytes()];
        kernels::ops::convert::to_f32(self.dtype, &last.bytes, &mut out);
        out
    }
}

/// Where the time of one step on one server went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTiming {
    /// From sending to the last byte of the answer, seen by the client.
    pub total: Duration,
    /// Waiting in the server's ring, if the server tells.
    pub queue: Duration,
    /// Computing, if the server tells.
    pub compute: Duration,
}

impl std::ops::AddAssign for StepTiming {
    fn add_assign(&mut self, other: StepTiming) {
        self.total += other.total;
        self.queue += other.queue;
        self.compute += other.compute;
    }
}

/// A session on one server.
pub struct ServerSession {
    leg: Leg<PeerId>,
    uids: String,
    session_id: String,
    stream: RpcStream,
    max_length: u32,
    position: u32,
    opened: bool,
}

impl ServerSession {
    /// Opens the stream; the server reserves cache for `max_length` tokens at the first step.
    ///
    /// # Errors
    /// [`SessionError::Call`] when the server cannot be reached.
    pub async fn open(
        p2p: &P2p,
        prefix: &str,
        leg: Leg<PeerId>,
        max_length: u32,
    ) -> Result<ServerSession, SessionError> {
        let stream = p2p
            .open_stream(leg.peer, RPC_INFERENCE, CONNECT_TIMEOUT)
            .await?;
        let uids = uid::chain(prefix, leg.blocks.clone());
        let session_id = uuid::Uuid::new_v4().to_string();
        Ok(ServerSession {
            leg,
            uids,
            session_id,
            stream,
            max_length,
            position: 0,
            opened: false,
        })
    }

    /// The server and the blocks it runs.
    pub fn leg(&self) -> &Leg<PeerId> {
        &self.leg
    }

    /// Tokens in the server's cache.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Runs `input` through the server's blocks, starting at the session's position. `step_id` is the same on all servers
    /// of a step.
    ///
    /// # Errors
    /// [`SessionError`]; the session is of no use afterwards.
    pub async fn step(
        &mut self,
        input: &Hidden,
        step_id: &str,
    ) -> Result<(Hidden, StepTiming), SessionError> {
        let request = self.request(input, step_id)?;
        let began = Instant::now();
        self.stream.send(request.encode_to_vec().into()).await?;
        let answer = tokio::time::timeout(STEP_TIMEOUT, self.stream.recv())
            .await
            .map_err(|_| SessionError::Timeout(STEP_TIMEOUT))??
            .ok_or(SessionError::Closed)?;
        let total = began.elapsed();
        let response = ExpertResponse::decode(answer)?;
        let output = self.output(&response, input)?;
        self.opened = true;
        self.position += u32::try_from(input.tokens).unwrap_or(u32::MAX);
        let (queue, compute) = timing(&response.metadata);
        Ok((
            output,
            StepTiming {
                total,
                queue,
                compute,
            },
        ))
    }

    fn request(&self, input: &Hidden, step_id: &str) -> Result<ExpertRequest, SessionError> {
        let width = input.bytes.len() / (input.tokens.max(1) * input.dtype.size_bytes());
        let hidden = raw_tensor(
            &[1, input.tokens, width],
            input.dtype.into(),
            input.bytes.clone(),
        )?;
        let metadata = StepMetadata {
            session_id: &self.session_id,
            step_id,
            open: (!self.opened).then_some((self.max_length, None)),
            next_servers: &[],
            start_from_position: Some(self.position),
        };
        Ok(ExpertRequest {
            uid: self.uids.clone(),
            tensors: vec![
                hidden,
                dummy_tensor(WireDtype::F32),
                dummy_tensor(WireDtype::I64),
            ],
            metadata: ask_timing(&metadata.encode()).into(),
        })
    }

    fn output(&self, response: &ExpertResponse, input: &Hidden) -> Result<Hidden, SessionError> {
        let max_elements = input.bytes.len();
        let tensor = match response.tensors.first() {
            Some(message) => WireTensor::parse(
                message,
                ShapeLimits {
                    max_rank: 3,
                    max_elements,
                },
            )?,
            None => return Err(SessionError::Closed),
        };
        let width = input.bytes.len() / (input.tokens.max(1) * input.dtype.size_bytes());
        let want = [1, input.tokens, width];
        if tensor.shape() != want {
            return Err(SessionError::Shape {
                got: tensor.shape().to_vec(),
                want: want.to_vec(),
            });
        }
        let (dtype, bytes) = tensor.to_block()?;
        Ok(Hidden {
            dtype,
            tokens: input.tokens,
            bytes: bytes.into(),
        })
    }

    /// Ends the session: the server frees its cache.
    ///
    /// # Errors
    /// [`SessionError::Call`] when the connection is gone already.
    pub async fn close(mut self) -> Result<(), SessionError> {
        self.stream
            .send(ExpertRequest::default().encode_to_vec().into())
            .await?;
        self.stream.finish().await?;
        while self.stream.recv().await?.is_some() {}
        self.stream.close().await;
        Ok(())
    }
}

/// Adds the key that makes a Sepal server tell its times; other servers ignore it.
fn ask_timing(metadata: &[u8]) -> Vec<u8> {
    match Value::decode(metadata, Limits::SMALL) {
        Ok(Value::Map(mut entries)) => {
            entries.push((Value::str("sepal_timing"), Value::Bool(true)));
            Value::Map(entries).encode()
        }
        _ => metadata.to_vec(),
    }
}

/// Times in the metadata of an answer, zero where they are absent.
fn timing(metadata: &[u8]) -> (Duration, Duration) {
    let map = Value::decode(metadata, Limits::SMALL).unwrap_or(Value::Nil);
    let field = |key| match map.get(key) {
        Some(Value::Int(ns)) => Duration::from_nanos(u64::try_from(*ns).unwrap_or(0)),
        _ => Duration::ZERO,
    };
    (field("queue_ns"), field("compute_ns"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_takes_the_end_of_the_tokens() {
        let values: Vec<u8> = (0..6).flat_map(|v| (v as f32).to_le_bytes()).collect();
        let hidden = Hidden {
            dtype: DType::F32,
            tokens: 3,
            bytes: values.into(),
        };
        assert_eq!(hidden.last(2).bytes, hidden.bytes.slice(8..));
        assert_eq!(hidden.last_f32(), [4.0, 5.0]);
        assert_eq!(hidden.last(9), hidden);
    }

    #[test]
    fn times_are_asked_for_and_read_without_trust() {
        let asked = ask_timing(
            &StepMetadata {
                session_id: "a",
                step_id: "b",
                open: None,
                next_servers: &[],
                start_from_position: Some(3),
            }
            .encode(),
        );
        assert_eq!(
            Value::decode(&asked, Limits::SMALL)
                .unwrap()
                .get("sepal_timing"),
            Some(&Value::Bool(true))
        );
        let told = Value::Map(vec![
            (Value::str("queue_ns"), Value::Int(-5)),
            (Value::str("compute_ns"), Value::Int(7_000)),
        ]);
        assert_eq!(
            timing(&told.encode()),
            (Duration::ZERO, Duration::from_micros(7))
        );
        assert_eq!(timing(b"\xc1"), (Duration::ZERO, Duration::ZERO));
    }
}
