//! Forward passes over whole sequences, without a session (petals `client/sequential_autograd.py`): the batch is cut into
//! pieces of about `PIECE_TOKENS` tokens, each piece goes its own random way through the swarm, all at once, and a piece whose
//! server fails goes another way.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use netd::p2p::{CallError, P2p, PeerId};
use netd::wire::messages::{ExpertRequest, ExpertResponse, Tensor};
use netd::wire::metadata::encode_batch_metadata;
use netd::wire::stream_parts::{PART_BYTES, PartAssembler, PartError, PartLimits, split};
use netd::wire::tensor::{
    ShapeLimits, TensorError, WireDtype, WireTensor, dummy_tensor, raw_tensor,
};
use netd::wire::uid;
use prost::Message;
use shared::dtype::DType;

use crate::routing::Leg;
use crate::swarm::{Purpose, Swarm, SwarmError};

const FORWARD: &str = "TransformerConnectionHandler.rpc_forward";
const FORWARD_STREAM: &str = "TransformerConnectionHandler.rpc_forward_stream";
/// Tokens of one piece, unless one sequence is longer (`MAX_TOKENS_IN_BATCH`).
const PIECE_TOKENS: usize = 1024;
/// Bytes of tensors above which a request is streamed (`MAX_UNARY_PAYLOAD_SIZE / 4`).
const MAX_UNARY_TENSOR_BYTES: usize = 1 << 20;
/// Time of one request, as in Petals' client.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(180);
/// Rounds in which pieces that failed are tried again.
const MAX_ROUNDS: u32 = 8;
/// Pause before the second round; doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Hidden states `[rows, tokens, hidden]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Type of the elements.
    pub dtype: DType,
    /// Sequences.
    pub rows: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Elements, row-major, little-endian.
    pub bytes: Bytes,
}

/// Why a batch could not be computed.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The servers of a block are gone or cannot be found.
    #[error(transparent)]
    Swarm(#[from] SwarmError),
    /// A piece failed in every round.
    #[error("a part of the batch failed on {rounds} servers, the last was {peer}")]
    Failed {
        /// How often.
        rounds: u32,
        /// The last server.
        peer: PeerId,
        /// Its error.
        source: Box<PassError>,
    },
    /// No sequences, no tokens, or bytes that do not divide.
    #[error("a batch of {rows} sequences of {tokens} tokens cannot have {bytes} bytes")]
    Shape {
        /// Sequences.
        rows: usize,
        /// Tokens.
        tokens: usize,
        /// Bytes.
        bytes: usize,
    },
}

/// Why one server did not compute a piece.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// The call.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The answer is no message of the protocol.
    #[error("decode the answer of the server")]
    Decode(#[from] prost::DecodeError),
    /// The answer's tensor is malformed.
    #[error("the answer of the server holds no usable tensor")]
    Tensor(#[from] TensorError),
    /// The answer's parts do not make a tensor.
    #[error("the answer of the server has parts that do not fit")]
    Parts(#[from] PartError),
    /// It took too long.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The answer has no tensor, or one of another shape.
    #[error("the server answered with shape {got:?} instead of {want:?}")]
    Shape {
        /// Received.
        got: Vec<usize>,
        /// Sent.
        want: Vec<usize>,
    },
}

/// Runs `input` through `blocks`.
///
/// # Errors
/// [`BatchError`] when a block has no server, or servers keep failing.
pub async fn forward(
    swarm: &mut Swarm,
    blocks: Range<u32>,
    input: &Batch,
) -> Result<Batch, BatchError> {
    let mut pieces = cut(input)?;
    let mut left: Vec<usize> = (0..pieces.len()).collect();
    for round in 1..=MAX_ROUNDS {
        let mut routes = Vec::new();
        for _ in &left {
            let draw = rand::random();
            routes.push(swarm.route(blocks.clone(), Purpose::Batch { draw }).await?);
        }
        let (p2p, prefix) = (swarm.p2p().clone(), swarm.prefix().to_owned());
        let passes = left.iter().zip(&routes).map(|(&at, legs)| {
            let piece = pieces[at].clone();
            pass(&p2p, &prefix, legs, piece)
        });
        let results = join_all(passes).await;
        let mut failed = Vec::new();
        for (&at, result) in left.iter().zip(results) {
            match result {
                Ok(output) => pieces[at] = output,
                Err((peer, source)) => {
                    tracing::warn!(%peer, error = %source, "server failed, looking for another");
                    swarm.ban(peer);
                    failed.push((at, peer, source));
                }
            }
        }
        if failed.is_empty() {
            return Ok(join(input, pieces));
        }
        if round == MAX_ROUNDS {
            let (_, peer, source) = failed.swap_remove(0);
            return Err(BatchError::Failed {
                rounds: MAX_ROUNDS,
                peer,
                source: Box::new(source),
            });
        }
        left = failed.into_iter().map(|(at, ..)| at).collect();
        tokio::time::sleep(FIRST_PAUSE * (1 << (round - 1))).await;
    }
    Err(shape_error(input))
}

fn shape_error(batch: &Batch) -> BatchError {
    BatchError::Shape {
        rows: batch.rows,
        tokens: batch.tokens,
        bytes: batch.bytes.len(),
    }
}

/// Pieces of whole sequences.
fn cut(batch: &Batch) -> Result<Vec<Batch>, BatchError> {
    let (rows, tokens, len) = (batch.rows, batch.tokens, batch.bytes.len());
    let elements = rows * tokens * batch.dtype.size_bytes();
    if elements == 0 || len == 0 || !len.is_multiple_of(elements) {
        return Err(shape_error(batch));
    }
    let most = (PIECE_TOKENS / tokens).max(1);
    let row_bytes = len / rows;
    let piece = |from: usize| {
        let count = most.min(rows - from);
        Batch {
            rows: count,
            bytes: batch
                .bytes
                .slice(from * row_bytes..(from + count) * row_bytes),
            ..batch.clone()
        }
    };
    Ok((0..rows).step_by(most).map(piece).collect())
}

/// The pieces one after the other, in the dtype of the first.
fn join(whole: &Batch, pieces: Vec<Batch>) -> Batch {
    let dtype = pieces.first().map_or(whole.dtype, |piece| piece.dtype);
    let mut bytes = Vec::new();
    for piece in pieces {
        if piece.dtype == dtype {
            bytes.extend_from_slice(&piece.bytes);
        } else {
            let mut values = vec![0.0; piece.bytes.len() / piece.dtype.size_bytes()];
            kernels::ops::convert::to_f32(piece.dtype, &piece.bytes, &mut values);
            let mut converted = vec![0; values.len() * dtype.size_bytes()];
            kernels::ops::convert::from_f32(dtype, &values, &mut converted);
            bytes.extend(converted);
        }
    }
    Batch {
        dtype,
        rows: whole.rows,
        tokens: whole.tokens,
        bytes: bytes.into(),
    }
}

/// One piece along its route; the server that failed with its error.
async fn pass(
    p2p: &P2p,
    prefix: &str,
    legs: &[Leg<PeerId>],
    piece: Batch,
) -> Result<Batch, (PeerId, PassError)> {
    let mut states = piece;
    for leg in legs {
        let work = call(p2p, prefix, leg, &states);
        let done = tokio::time::timeout(REQUEST_TIMEOUT, work).await;
        states = done
            .unwrap_or(Err(PassError::Timeout(REQUEST_TIMEOUT)))
            .map_err(|error| (leg.peer, error))?;
    }
    Ok(states)
}

async fn call(
    p2p: &P2p,
    prefix: &str,
    leg: &Leg<PeerId>,
    states: &Batch,
) -> Result<Batch, PassError> {
    let width = states.bytes.len() / (states.rows * states.tokens * states.dtype.size_bytes());
    let shape = [states.rows, states.tokens, width];
    let hidden = raw_tensor(&shape, states.dtype.into(), states.bytes.clone())?;
    let request = ExpertRequest {
        uid: uid::chain(prefix, leg.blocks.clone()),
        tensors: vec![hidden, dummy_tensor(WireDtype::F32)],
        metadata: encode_batch_metadata(None, 2).into(),
    };
    let answer = if states.bytes.len() <= MAX_UNARY_TENSOR_BYTES {
        let bytes = request.encode_to_vec().into();
        let answer = p2p.call_unary(leg.peer, FORWARD, bytes, REQUEST_TIMEOUT);
        ExpertResponse::decode(answer.await?)?.tensors
    } else {
        streamed(p2p, leg.peer, request).await?
    };
    let Some(tensor) = answer.first() else {
        let (got, want) = (Vec::new(), shape.to_vec());
        return Err(PassError::Shape { got, want });
    };
    let limits = ShapeLimits {
        max_rank: 3,
        max_elements: states.bytes.len(),
    };
    let tensor = WireTensor::parse(tensor, limits)?;
    if tensor.shape() != shape {
        return Err(PassError::Shape {
            got: tensor.shape().to_vec(),
            want: shape.to_vec(),
        });
    }
    let (dtype, bytes) = tensor.to_block()?;
    Ok(Batch {
        dtype,
        rows: states.rows,
        tokens: states.tokens,
        bytes: bytes.into(),
    })
}

/// A request in parts, with uid and metadata in each, and the tensors of its answer.
async fn streamed(
    p2p: &P2p,
    peer: PeerId,
    request: ExpertRequest,
) -> Result<Vec<Tensor>, PassError> {
    let most: usize = request.tensors.iter().map(|t| 2 * t.buffer.len()).sum();
    let mut parts = PartAssembler::new(PartLimits {
        max_tensors: 4,
        max_bytes: most,
        max_parts: 16 + 2 * most.div_ceil(PART_BYTES),
    });
    let mut stream = p2p
        .open_stream(peer, FORWARD_STREAM, REQUEST_TIMEOUT)
        .await?;
    for tensor in request.tensors.clone() {
        for part in split(tensor, PART_BYTES) {
            let message = ExpertRequest {
                tensors: vec![part],
                ..request.clone()
            };
            stream.send(message.encode_to_vec().into()).await?;
        }
    }
    stream.finish().await?;
    while let Some(message) = stream.recv().await? {
        for part in ExpertResponse::decode(message)?.tensors {
            parts.push(part)?;
        }
    }
    stream.close().await;
    Ok(parts.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(rows: usize, tokens: usize) -> Batch {
        let bytes: Vec<u8> = (0..rows * tokens * 2)
            .flat_map(|n| (n as f32).to_le_bytes())
            .collect();
        Batch {
            dtype: DType::F32,
            rows,
            tokens,
            bytes: bytes.into(),
        }
    }

    #[test]
    fn batches_are_cut_into_whole_sequences_and_joined_again() {
        for (rows, tokens, pieces) in [(1, 1, 1), (5, 512, 3), (3, 1500, 3), (8, 128, 1)] {
            let whole = batch(rows, tokens);
            let cut = cut(&whole).unwrap();
            assert_eq!(cut.len(), pieces, "{rows} x {tokens}");
            assert_eq!(join(&whole, cut), whole);
        }
    }

    #[test]
    fn what_is_no_batch_is_refused() {
        assert!(cut(&batch(0, 4)).is_err());
        assert!(cut(&batch(4, 0)).is_err());
        let odd = Batch {
            bytes: vec![0; 30].into(),
            ..batch(2, 2)
        };
        assert!(cut(&odd).is_err());
    }
}
