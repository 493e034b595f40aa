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
use hivemind::names;
use hivemind::p2p::{InboundError, InboundStream, PeerId};
use hivemind::wire::keys;
use hivemind::wire::metadata::RequestMetadata;
use shared::shm::board::Trouble;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tracing::debug;

use super::frames::CountedFrames;
use super::registry::Pushed;
use super::request::{StepMessage, decode};
use super::{Failure, Service};

/// Takes one pushed step. The answer is empty, also when the session is unknown.
///
/// # Errors
/// Uids that are not served; metadata without a session id; a step without tensors, or over other
/// blocks.
pub async fn answer(service: &Service, peer: PeerId, request: Bytes) -> Result<Bytes, Failure> {
    let held = service.budget.hold_any(peer, request.len()).await;
    take(service, peer, request, held)
}

/// Takes the pushed steps of one stream until it ends; nothing is answered. A step for
/// a session that is unknown or has enough of them is dropped; one that no session can take ends
/// the stream with an error.
pub async fn serve(
    current: watch::Receiver<Option<Arc<Service>>>,
    peer: PeerId,
    stream: InboundStream,
) {
    let (reader, writer) = stream.into_split();
    let mut frames = CountedFrames::new(reader, peer);
    loop {
        let Some(service) = current.borrow().clone() else {
            return;
        };
        let mut draining = service.draining.clone();
        let frame = tokio::select! {
            frame = frames.next(&service) => frame,
            _ = draining.wait_for(|draining| *draining) => return,
        };
        let failure = match frame {
            Ok(Some((bytes, held))) => {
                let held = match held {
                    None => service.budget.hold_any(peer, bytes.len()).await,
                    held => held,
                };
                match take(&service, peer, bytes, held) {
                    Ok(_) => continue,
                    Err(failure) => failure,
                }
            }
            Ok(None) => return writer.finish(frames.into_reader()).await,
            Err(InboundError::Cancelled) => return,
            Err(error) => error.into(),
        };
        service.troubles.count(failure.trouble());
        return writer.fail(frames.into_reader(), &failure.stream_text()).await;
    }
}

fn take(
    service: &Service,
    peer: PeerId,
    request: Bytes,
    held: Option<OwnedSemaphorePermit>,
) -> Result<Bytes, Failure> {
    let request = decode(request)?;
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
        _ => Ok(Bytes::new()),
    }
}
