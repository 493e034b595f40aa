//! How requests over whole sequences travel: `rpc_forward`, `rpc_backward` and their streams.
//! [`super::forward`] and [`super::backward`] compute them.

use bytes::Bytes;
use p2p::{
    InboundError, InboundReader, InboundStream, MemoryPurpose, PeerId, ReceivedRequest,
    Reservation, UnaryResponder,
};
use prost::Message;
use shared::figures::Trouble;
use shared::job::WorkKind;
use swarm::names;
use swarm::wire::messages::{ExpertRequest, ExpertResponse, Tensor};
use swarm::wire::metadata::RequestMetadata;
use swarm::wire::stream_parts::{self, PART_BYTES, PartAssembler, PartLimits};
use tokio::time::timeout;

use super::request::{BlockRequest, decode};
use super::{Failure, Service, backward, forward};

/// One of the two RPCs over whole sequences.
#[derive(Debug)]
pub struct Rpc {
    name: &'static str,
    kind: WorkKind,
    /// Tensors of the size of the first that a request is expected to have, prompts included.
    tensors: usize,
}

/// Hidden states are asked for.
pub const FORWARD: &Rpc = &Rpc { name: names::FORWARD, kind: WorkKind::Forward, tensors: 2 };
/// Gradients are asked for.
pub const BACKWARD: &Rpc = &Rpc { name: names::BACKWARD, kind: WorkKind::Backward, tensors: 3 };

/// Tensors of one request; two are used.
const MAX_TENSORS: usize = 16;

/// Bytes of a frame beside its part of a tensor: uids, metadata, headers.
const FRAME_ROOM_BYTES: usize = 1 << 20;

/// Serves one unary call.
pub async fn serve_unary(
    service: &Service,
    rpc: &Rpc,
    peer: PeerId,
    request: Bytes,
    mut responder: UnaryResponder,
) {
    let work = async {
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
    let _ = responder.respond(outcome.map_err(|failure| failure.unary_text())).await;
}

/// Serves one stream: parts of tensors up to the caller's end of input, then parts of the answer.
pub async fn serve_stream(service: &Service, rpc: &Rpc, peer: PeerId, stream: InboundStream) {
    let (mut reader, mut writer) = stream.into_split();
    reader.set_max_frame_bytes((PART_BYTES + FRAME_ROOM_BYTES) as u64);
    let work = async {
        let (request, _held) = match collect(service, rpc, &mut reader).await? {
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
            let parts =
                tensors.into_iter().flat_map(|tensor| stream_parts::split(tensor, PART_BYTES));
            for part in parts {
                let response = ExpertResponse { tensors: vec![part], metadata: Bytes::new() };
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

/// The whole request, with what counts for it; `None` if the caller has gone. Room is asked for once,
/// for what the first part says of its tensor, so that no two requests wait for each other's rest.
async fn collect(
    service: &Service,
    rpc: &Rpc,
    reader: &mut InboundReader,
) -> Result<Option<(ExpertRequest, Option<Reservation>)>, Failure> {
    let most = usize::try_from(service.max_request_bytes()).unwrap_or(usize::MAX);
    let limits = PartLimits {
        max_tensors: MAX_TENSORS,
        max_bytes: most,
        max_parts: MAX_TENSORS + 2 * most.div_ceil(PART_BYTES),
    };
    let mut parts = PartAssembler::new(limits);
    let mut first: Option<ExpertRequest> = None;
    let mut whole = None;
    loop {
        let ReceivedRequest { bytes: frame, held } = match reader.recv().await {
            Ok(Some(received)) => received,
            Ok(None) => break,
            Err(InboundError::Cancelled) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let len = frame.len();
        let mut request = decode(frame)?;
        match &mut whole {
            None => whole = Some(Whole::reserve(reader, rpc, &request, len, most).await),
            Some(whole) => whole.received(len)?,
        }
        // It is a part of what is reserved for the whole.
        drop(held);
        for part in std::mem::take(&mut request.tensors) {
            parts.push(part)?;
        }
        match &first {
            None => first = Some(request),
            Some(first) if first.uid != request.uid => {
                return Err(Failure::bad("all parts of a request must have the same uids"));
            }
            Some(_) => {}
        }
    }
    let Some(first) = first else {
        return Err(Failure::bad("the request is empty"));
    };
    let request = ExpertRequest { tensors: parts.finish(), ..first };
    Ok(Some((request, whole.map(|whole| whole.held))))
}

/// What is reserved for a streamed request, and how much of it has come.
struct Whole {
    held: Reservation,
    reserved: usize,
    received: usize,
}

impl Whole {
    /// Reserves for a request of which the first part has come.
    async fn reserve(
        reader: &mut InboundReader,
        rpc: &Rpc,
        first: &ExpertRequest,
        received: usize,
        most: usize,
    ) -> Whole {
        let reserved = expected_bytes(rpc, first).clamp(received, most.max(received));
        reader.set_purpose(MemoryPurpose::Whole);
        Whole { held: reader.reserve(reserved).await, reserved, received }
    }

    /// Counts another part. Prompts may take more than the first part let expect.
    fn received(&mut self, bytes: usize) -> Result<(), Failure> {
        self.received += bytes;
        let more = self.received.saturating_sub(self.reserved);
        if more > 0 && !self.held.try_grow(more) {
            return Err(Failure::runtime(format!(
                "no room for {} bytes of a request, {} were expected; try again, or send fewer rows",
                self.received, self.reserved
            )));
        }
        self.reserved = self.reserved.max(self.received);
        Ok(())
    }
}

/// Bytes of a streamed request by its first part: tensors like the first, as float32, and as much
/// again for prompts.
fn expected_bytes(rpc: &Rpc, first: &ExpertRequest) -> usize {
    let elements = first.tensors.first().map_or(0, |part| {
        let sizes = part.size.iter().map(|size| *size as usize);
        sizes.fold(4, usize::saturating_mul)
    });
    elements.saturating_mul(rpc.tensors)
}

/// The tensors that answer `request`.
async fn answer(
    service: &Service,
    rpc: &Rpc,
    peer: PeerId,
    request: &ExpertRequest,
) -> Result<Vec<Tensor>, Failure> {
    let before = service.before(&request.uid);
    let service = before.as_deref().unwrap_or(service);
    let blocks = service.blocks(&request.uid)?;
    let metadata = RequestMetadata::parse(&request.metadata, rpc.name)?;
    let adapter = service.adapter(&metadata)?;
    let request = BlockRequest { peer, blocks, tensors: &request.tensors, metadata, adapter };
    let tensors = match rpc.kind {
        WorkKind::Backward => backward::backward(service, &request).await?,
        _ => vec![forward::forward(service, &request).await?],
    };
    // The answer has the shape of the hidden states: [batch, tokens, hidden].
    let tokens = match tensors.first().map(|output| output.size.as_slice()) {
        Some([batch, tokens, _]) => u64::from(*batch) * u64::from(*tokens),
        _ => 0,
    };
    service.telemetry.answered(rpc.kind, tokens);
    Ok(tensors)
}
