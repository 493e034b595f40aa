//! `rpc_push`: the output of the server before us, for a session of ours. The client sends the same step itself; whichever
//! comes first is computed, the other is dropped by its step id.

use bytes::Bytes;

use super::forward::decode;
use super::{Failure, Service};
use crate::wire::metadata::RequestMetadata;

/// Takes one pushed step. The answer is empty, also when the session is unknown.
///
/// # Errors
/// Uids that are not served; metadata without a session id.
pub fn answer(service: &Service, request: Bytes) -> Result<Bytes, Failure> {
    let request = decode(request)?;
    service.blocks(&request.uid)?;
    if request.metadata.is_empty() {
        return Err(Failure::bad("Unpack failed: incomplete input"));
    }
    let metadata = RequestMetadata::parse(&request.metadata, "rpc_push")?;
    let session = metadata
        .session_id
        .ok_or_else(|| Failure::unknown("session_id"))?;
    service.registry.push(&session, request);
    Ok(Bytes::new())
}
