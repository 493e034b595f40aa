//! One `rpc_forward` or `rpc_backward` on one server (petals `client/remote_forward_backward.py`):
//! small requests as one message, large ones as a stream of parts.

use std::time::Duration;

use p2p::{CallError, P2p, PeerId};
use prost::Message;
use swarm::names;
use swarm::wire::messages::{ExpertRequest, ExpertResponse, Tensor};
use swarm::wire::metadata::encode_batch_metadata;
use swarm::wire::stream_parts::{PART_BYTES, PartAssembler, PartError, PartLimits, split};
use swarm::wire::tensor::{TensorError, WireDtype, dummy_tensor};
use swarm::wire::uid;

use crate::states::{AnswerError, Hidden, Prompts};
use swarm::routing::Leg;

/// Names of the unary call and of the stream.
const FORWARD: [&str; 2] = [names::FORWARD, names::FORWARD_STREAM];
const BACKWARD: [&str; 2] = [names::BACKWARD, names::BACKWARD_STREAM];
/// Bytes of tensors above which a request is streamed (`MAX_UNARY_PAYLOAD_SIZE / 4`).
const MAX_UNARY_TENSOR_BYTES: usize = 1 << 20;
/// Time of one request, as in Petals' client.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(180);

/// Why one server did not compute a piece.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    #[error(transparent)]
    Call(#[from] CallError),
    /// The answer is no message of the protocol.
    #[error("cannot decode the server's answer")]
    Decode(#[from] prost::DecodeError),
    /// The answer holds no states.
    #[error(transparent)]
    Answer(#[from] AnswerError),
    /// The input cannot be sent.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The answer's parts do not make a tensor.
    #[error("the parts of the server's answer do not fit together")]
    Parts(#[from] PartError),
    /// It took too long.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
}

/// The model's servers as one client calls them.
#[derive(Clone)]
pub(crate) struct ModelCaller {
    pub(crate) p2p: P2p,
    pub(crate) prefix: String,
}

impl ModelCaller {
    /// Runs `inputs` through the blocks of `leg`, with the prompts of these blocks.
    pub(crate) async fn forward(
        &self,
        leg: &Leg<PeerId>,
        inputs: &Hidden,
        prompts: Option<&Prompts>,
    ) -> Result<Hidden, PassError> {
        let tensors = vec![inputs.message()?, message(prompts)?];
        let answer = self.call(leg, FORWARD, tensors).await?;
        Ok(Hidden::read(answer.first(), inputs)?)
    }

    /// Gradients of the inputs, and of the prompts if there are any, from those of the outputs.
    pub(crate) async fn backward(
        &self,
        leg: &Leg<PeerId>,
        inputs: &Hidden,
        gradient: &Hidden,
        prompts: Option<&Prompts>,
    ) -> Result<(Hidden, Option<Prompts>), PassError> {
        let tensors = vec![inputs.message()?, gradient.message()?, message(prompts)?];
        let answer = self.call(leg, BACKWARD, tensors).await?;
        let prompts = prompts.map(|prompts| Prompts::read(answer.get(1), prompts));
        Ok((Hidden::read(answer.first(), inputs)?, prompts.transpose()?))
    }

    async fn call(
        &self,
        leg: &Leg<PeerId>,
        [unary, stream]: [&'static str; 2],
        tensors: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, PassError> {
        let bytes: usize = tensors.iter().map(|tensor| tensor.buffer.len()).sum();
        let request = ExpertRequest {
            uid: uid::chain(&self.prefix, leg.blocks.clone()),
            metadata: encode_batch_metadata(None, tensors.len()).into(),
            tensors,
        };
        let work = async {
            if bytes > MAX_UNARY_TENSOR_BYTES {
                return streamed(&self.p2p, leg.peer, stream, request).await;
            }
            let bytes = request.encode_to_vec().into();
            let answer = self.p2p.call_unary(leg.peer, unary, bytes, REQUEST_TIMEOUT);
            Ok(ExpertResponse::decode(answer.await?)?.tensors)
        };
        let done = tokio::time::timeout(REQUEST_TIMEOUT, work).await;
        done.unwrap_or(Err(PassError::Timeout(REQUEST_TIMEOUT)))
    }
}

fn message(prompts: Option<&Prompts>) -> Result<Tensor, TensorError> {
    prompts.map_or_else(|| Ok(dummy_tensor(WireDtype::F32)), Prompts::message)
}

/// A request in parts, with uid and metadata in each, and the tensors of its answer.
async fn streamed(
    p2p: &P2p,
    peer: PeerId,
    protocol: &'static str,
    request: ExpertRequest,
) -> Result<Vec<Tensor>, PassError> {
    let most: usize = request.tensors.iter().map(|t| 2 * t.buffer.len()).sum();
    let mut parts = PartAssembler::new(PartLimits {
        max_tensors: 4,
        max_bytes: most,
        max_parts: 16 + 2 * most.div_ceil(PART_BYTES),
    });
    let mut stream = p2p.open_stream(peer, protocol, REQUEST_TIMEOUT).await?;
    for tensor in request.tensors.clone() {
        for part in split(tensor, PART_BYTES) {
            let message = ExpertRequest { tensors: vec![part], ..request.clone() };
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
