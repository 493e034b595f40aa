//! `rpc_forward` and `rpc_forward_stream`: blocks over whole sequences, without a cache. [`Rpc`] tells them from those of
//! [`super::backward`], which travel the same way.

use bytes::Bytes;
use libp2p::PeerId;
use prost::Message;
use shared::block::BlockIndex;
use shared::shm::board::Trouble;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::compute::{Arguments, Asked};
use super::{Failure, Service, backward, reply};
use crate::p2p::{InboundError, InboundStream, UnaryResponder};
use crate::wire::messages::{ExpertRequest, ExpertResponse, Tensor};
use crate::wire::metadata::RequestMetadata;
use crate::wire::stream_parts::{self, PART_BYTES, PartAssembler, PartLimits};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rpc {
    /// Hidden states.
    Forward,
    /// Gradients.
    Backward,
}

/// A request whose blocks are served and whose metadata is read.
#[derive(Debug)]
pub(super) struct Request<'a> {
    /// Who asks.
    pub peer: PeerId,
    /// The blocks in the order in which they run.
    pub blocks: Vec<BlockIndex>,
    /// Its tensors.
    pub tensors: &'a [Tensor],
    /// Its metadata.
    pub metadata: RequestMetadata,
    /// Its adapter, by index.
    pub adapter: Option<u32>,
}

/// Tensors of one request; two are used.
const MAX_TENSORS: usize = 16;

/// Bytes of a frame beside its part of a tensor: uids, metadata, headers.
const FRAME_ROOM_BYTES: usize = 1 << 20;

/// Serves one unary call.
pub async fn serve_unary(
    service: &Service,
    rpc: Rpc,
    peer: PeerId,
    request: Bytes,
    mut responder: UnaryResponder,
) {
    let work = async {
        let _held = service.budget.hold(peer, request.len()).await;
        let request = decode(request)?;
        let response = ExpertResponse {
            tensors: answer(service, rpc, peer, &request).await?,
            metadata: Bytes::new(),
        };
        Ok(Bytes::from(response.encode_to_vec()))
    };
    let outcome = tokio::select! {
        outcome = timeout(service.timeouts.request, work) => outcome.unwrap_or_else(|_| Err(Failure::timeout())),
        () = responder.cancelled() => return service.troubles.count(Trouble::Abandoned),
    };
    if let Err(failure) = &outcome {
        service.troubles.count(failure.trouble());
    }
    let _ = responder
        .respond(outcome.map_err(|failure| failure.unary_text()))
        .await;
}

/// Serves one stream: parts of tensors up to the caller's end of input, then parts of the answer.
pub async fn serve_stream(service: &Service, rpc: Rpc, peer: PeerId, stream: InboundStream) {
    let (mut reader, mut writer) = stream.into_split();
    reader.set_max_frame_bytes((PART_BYTES + FRAME_ROOM_BYTES) as u64);
    let work = async {
        let (request, _held) = match collect(service, rpc, peer, &mut reader).await? {
            Some(collected) => collected,
            None => return Ok(None),
        };
        tokio::select! {
            tensors = answer(service, rpc, peer, &request) => tensors.map(Some),
            _ = reader.recv() => Ok(None),
        }
    };
    let outcome = timeout(service.timeouts.request, work).await;
    match outcome.unwrap_or_else(|_| Err(Failure::timeout())) {
        Ok(None) => service.troubles.count(Trouble::Abandoned),
        Ok(Some(tensors)) => {
            let parts = tensors
                .into_iter()
                .flat_map(|tensor| stream_parts::split(tensor, PART_BYTES));
            for part in parts {
                let response = ExpertResponse {
                    tensors: vec![part],
                    metadata: Bytes::new(),
                };
                if writer.send(response.encode_to_vec().into()).await.is_err() {
                    return service.troubles.count(Trouble::Abandoned);
                }
            }
            writer.finish(reader).await;
        }
        Err(failure) => {
            service.troubles.count(failure.trouble());
            writer.fail(reader, &failure.stream_text()).await;
        }
    }
}

/// The whole request, with its part of the peer's budget; `None` if the caller has gone. The budget is asked once, for what
/// the first part says of its tensor, so that no two requests of a peer wait for each other's rest.
async fn collect(
    service: &Service,
    rpc: Rpc,
    peer: PeerId,
    reader: &mut crate::p2p::InboundReader,
) -> Result<Option<(ExpertRequest, Option<OwnedSemaphorePermit>)>, Failure> {
    let most = usize::try_from(service.max_request_bytes()).unwrap_or(usize::MAX);
    let limits = PartLimits {
        max_tensors: MAX_TENSORS,
        max_bytes: most,
        max_parts: MAX_TENSORS + 2 * most.div_ceil(PART_BYTES),
    };
    let mut parts = PartAssembler::new(limits);
    let mut first: Option<ExpertRequest> = None;
    let mut held = None;
    loop {
        let frame = match reader.recv().await {
            Ok(Some(frame)) => frame,
            Ok(None) => break,
            Err(InboundError::Cancelled) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let len = frame.len();
        let mut request = decode(frame)?;
        if first.is_none() {
            let whole = expected_bytes(rpc, &request).clamp(len, most.max(len));
            held = service.budget.hold(peer, whole).await;
        }
        for part in std::mem::take(&mut request.tensors) {
            parts.push(part)?;
        }
        match &first {
            None => first = Some(request),
            Some(first) if first.uid != request.uid => {
                return Err(Failure::bad(
                    "all parts of a request must have the same uids",
                ));
            }
            Some(_) => {}
        }
    }
    let Some(first) = first else {
        return Err(Failure::bad("the request is empty"));
    };
    let request = ExpertRequest {
        tensors: parts.finish(),
        ..first
    };
    Ok(Some((request, held)))
}

/// Bytes of a streamed request by its first part: tensors like the first, as float32, and as much again for prompts.
fn expected_bytes(rpc: Rpc, first: &ExpertRequest) -> usize {
    let elements = first.tensors.first().map_or(0, |part| {
        let sizes = part.size.iter().map(|size| *size as usize);
        sizes.fold(4, usize::saturating_mul)
    });
    let tensors = match rpc {
        Rpc::Forward => 2,
        Rpc::Backward => 3,
    };
    elements.saturating_mul(tensors)
}

/// The tensors that answer `request`.
async fn answer(
    service: &Service,
    rpc: Rpc,
    peer: PeerId,
    request: &ExpertRequest,
) -> Result<Vec<Tensor>, Failure> {
    let before = service.before(&request.uid);
    let service = before.as_deref().unwrap_or(service);
    let blocks = service.blocks(&request.uid)?;
    let name = match rpc {
        Rpc::Forward => "rpc_forward",
        Rpc::Backward => "rpc_backward",
    };
    let metadata = RequestMetadata::parse(&request.metadata, name)?;
    let adapter = service.adapter(&metadata)?;
    let request = Request {
        peer,
        blocks,
        tensors: &request.tensors,
        metadata,
        adapter,
    };
    match rpc {
        Rpc::Forward => forward(service, request).await.map(|output| vec![output]),
        Rpc::Backward => backward::backward(service, &request).await,
    }
}

async fn forward(service: &Service, request: Request<'_>) -> Result<Tensor, Failure> {
    let metadata = &request.metadata;
    let kinds = reply::kinds(metadata.output_compression(1)?, 1, service.compression)?;
    let asked = Asked {
        peer: request.peer,
        points: metadata.points,
        compression: kinds.first().copied().unwrap_or(service.compression),
    };
    let arguments = Arguments::of(request.tensors, metadata.args_structure.as_ref(), false)?;
    if arguments.hidden.is_dummy() {
        return service.echo(&arguments.hidden);
    }
    let computed = (request.blocks, request.adapter);
    let computed = service.compute(computed, &arguments, None, &asked);
    Ok(computed.await?.0)
}

/// The request behind a message.
pub(super) fn decode(message: Bytes) -> Result<ExpertRequest, Failure> {
    ExpertRequest::decode(message)
        .map_err(|error| Failure::bad(format!("cannot read the request: {error}")))
}
