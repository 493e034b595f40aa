//! Requests as the handlers have them: decoded, and with the bytes that count for them.

use bytes::Bytes;
use p2p::{PeerId, Reservation};
use prost::Message;
use shared::block::BlockIndex;
use swarm::names;
use swarm::wire::fields;
use swarm::wire::messages::{ExpertRequest, Tensor};
use swarm::wire::metadata::RequestMetadata;
use tokio::time::Instant;

use super::Failure;

/// Fields of a request: its uids, its metadata and its tensors, of which no RPC uses more than three.
pub(crate) const MAX_FIELDS: usize = 64;

/// A request whose blocks are served and whose metadata is read.
#[derive(Debug)]
pub(super) struct BlockRequest<'a> {
    pub peer: PeerId,
    /// The blocks in the order in which they run.
    pub blocks: Vec<BlockIndex>,
    pub tensors: &'a [Tensor],
    pub metadata: RequestMetadata,
    /// Its adapter, by index.
    pub adapter: Option<u32>,
}

/// A message to a session.
#[derive(Debug)]
pub struct StepMessage {
    pub request: ExpertRequest,
    pub metadata: RequestMetadata,
    /// When its last byte was read.
    pub arrived: Instant,
    /// Whether another server sent it.
    pub was_pushed: bool,
    /// What counts for it, if it is large.
    _held: Option<Reservation>,
}

impl StepMessage {
    /// A step that the caller sent itself.
    ///
    /// # Errors
    /// With the text for the client, when its metadata makes no sense.
    pub fn sent(
        request: ExpertRequest,
        arrived: Instant,
        held: Option<Reservation>,
    ) -> Result<StepMessage, Failure> {
        let metadata = RequestMetadata::parse(&request.metadata, names::INFERENCE)?;
        Ok(StepMessage { request, metadata, arrived, was_pushed: false, _held: held })
    }

    /// A step that another server sent, with what counts for it.
    pub fn pushed(
        request: ExpertRequest,
        metadata: RequestMetadata,
        held: Option<Reservation>,
    ) -> StepMessage {
        StepMessage { request, metadata, arrived: Instant::now(), was_pushed: true, _held: held }
    }
}

/// The request behind a message.
pub(super) fn decode(message: Bytes) -> Result<ExpertRequest, Failure> {
    if !fields::has_at_most(&message, MAX_FIELDS) {
        return Err(Failure::bad(format!("a request has at most {MAX_FIELDS} fields and tensors")));
    }
    ExpertRequest::decode(message)
        .map_err(|error| Failure::bad(format!("cannot read the request: {error}")))
}
