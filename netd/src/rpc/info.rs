//! `rpc_info`: what a client asks of a server once, before it uses it.

use bytes::Bytes;
use prost::Message;
use swarm::wire::messages::{ExpertInfo, ExpertUid};
use swarm::wire::rpc_info::{RpcInfo, Schema};

use super::{Failure, PETALS_VERSION, Service};

/// Answers one request.
///
/// # Errors
/// `KeyError` for a uid that is not served.
pub fn answer(service: &Service, request: Bytes) -> Result<Bytes, Failure> {
    let uid = ExpertUid::decode(request).map_err(|error| Failure::bad(error.to_string()))?.uid;
    if !uid.is_empty() && service.served(&uid).is_none() && service.before(&uid).is_none() {
        let uid: String = uid.chars().take(80).collect();
        return Err(Failure::unknown(uid));
    }
    let schema = (!uid.is_empty()).then(|| Schema {
        hidden_size: service.facts.hidden_size,
        dtype: service.facts.dtype.into(),
        compression: service.compression as i32,
    });
    let info = RpcInfo {
        version: PETALS_VERSION.to_owned(),
        dht_client_mode: service.dht_client_mode,
        cache_tokens_available: service.kv.figures().tokens_free,
        schema,
    };
    Ok(ExpertInfo { serialized_info: info.encode().into() }.encode_to_vec().into())
}
