//! `rpc_push` and the standing streams of Sepal servers: the output of the server before us, for a
//! session of ours. The client sends the same step itself; whichever comes first is computed, the
//! other is compared with it and dropped. Who knows the id of a session, which is a random UUID,
//! may push to it; what it pushes can only be the session's next step or be dropped (see
//! [`super::inference`]).
//!
//! # Discrepancies
//! Pushes without tensors, or over other blocks than the session's, are refused; in Petals the
//! first ends the session, and the second is computed.

use std::sync::Arc;

use bytes::Bytes;
use p2p::{InboundError, InboundStream, MemoryPurpose, PeerId, ReceivedRequest, Reservation};
use shared::figures::Trouble;
use swarm::names;
use swarm::wire::keys;
use swarm::wire::messages::ExpertRequest;
use swarm::wire::metadata::RequestMetadata;
use swarm::wire::packing;
use tokio::sync::watch;
use tracing::debug;

use super::registry::Pushed;
use super::request::{StepMessage, decode};
use super::{Failure, Service};

/// Takes one pushed step. The answer is empty, also when the session is unknown.
///
/// # Errors
/// Uids that are not served; metadata without a session id; a step without tensors, or over other
/// blocks.
pub async fn answer(service: &Service, peer: PeerId, request: Bytes) -> Result<Bytes, Failure> {
    // A step that there is no room for is dropped: the client sends its own copy.
    if let Some(held) = keep(service, peer, request.len()) {
        take(service, peer, decode(request)?, Some(held))?;
    }
    Ok(Bytes::new())
}

/// Takes the pushed steps of one stream until it ends; nothing is answered. A step for
/// a session that is unknown or has enough of them is dropped; one that no session can take ends
/// the stream with an error.
pub async fn serve(
    current: watch::Receiver<Option<Arc<Service>>>,
    peer: PeerId,
    stream: InboundStream,
) {
    let (mut reader, writer) = stream.into_split();
    reader.set_purpose(MemoryPurpose::Push);
    loop {
        let Some(service) = current.borrow().clone() else {
            return;
        };
        reader.set_max_frame_bytes(service.max_request_bytes());
        let mut draining = service.draining.clone();
        let frame = tokio::select! {
            frame = reader.recv() => frame,
            _ = draining.wait_for(|draining| *draining) => return,
        };
        let failure = match frame {
            Ok(Some(received)) => match take_frame(&service, peer, received) {
                Ok(()) => continue,
                Err(failure) => failure,
            },
            Ok(None) => return writer.finish(reader).await,
            Err(InboundError::Cancelled) => return,
            Err(error) => error.into(),
        };
        service.troubles.count(failure.trouble());
        return writer.fail(reader, &failure.stream_text()).await;
    }
}

/// What counts for a pushed step; `None`, and counted, if there is no room for it.
fn keep(service: &Service, peer: PeerId, bytes: usize) -> Option<Reservation> {
    let held = service.push_client.p2p().keep_push(peer, bytes);
    if held.is_none() {
        service.troubles.count(Trouble::Push);
        debug!(%peer, bytes, "no room for a pushed step");
    }
    held
}

/// Takes a step of a standing stream, whose tensors may be [packed](packing).
fn take_frame(service: &Service, peer: PeerId, received: ReceivedRequest) -> Result<(), Failure> {
    let ReceivedRequest { bytes, mut held } = received;
    let mut kept = bytes.len();
    let mut request = decode(bytes)?;
    let mut is_packed = false;
    for tensor in &request.tensors {
        let bytes = packing::unpacked_bytes(tensor)?;
        is_packed |= bytes.is_some();
        kept += bytes.unwrap_or(0);
    }
    if is_packed {
        drop(held.take());
        held = keep(service, peer, kept);
        if held.is_none() {
            return Ok(());
        }
        for tensor in &mut request.tensors {
            if packing::unpacked_bytes(tensor)?.is_some() {
                *tensor = packing::unpack(tensor)?;
            }
        }
    }
    take(service, peer, request, held)
}

fn take(
    service: &Service,
    peer: PeerId,
    request: ExpertRequest,
    held: Option<Reservation>,
) -> Result<(), Failure> {
    let before = service.before(&request.uid);
    let blocks = before.as_deref().unwrap_or(service).blocks(&request.uid)?;
    if request.metadata.is_empty() {
        return Err(Failure::bad("Unpack failed: incomplete input"));
    }
    let metadata = RequestMetadata::parse(&request.metadata, names::PUSH)?;
    let session = metadata.session_id.clone();
    let session = session.ok_or_else(|| Failure::unknown(keys::SESSION_ID))?;
    if request.tensors.is_empty() {
        return Err(Failure::bad("a pushed step must have tensors"));
    }
    let outcome =
        service.registry.push(&session, &blocks, StepMessage::pushed(request, metadata, held));
    if outcome != Pushed::Taken {
        service.troubles.count(Trouble::Push);
        debug!(%peer, ?outcome, "pushed step dropped");
    }
    match outcome {
        Pushed::OtherBlocks => Err(Failure::bad("the session runs other blocks")),
        _ => Ok(()),
    }
}
