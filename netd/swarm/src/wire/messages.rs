//! The protobuf messages of hivemind's DHT and of the transformer RPCs, as `prost` structs written
//! by hand.
//!
//! The texts they follow are `proto/dht.proto` and `proto/expert.proto` of this crate. Bulk fields are
//! [`Bytes`], so that decoding from a `Bytes` frame shares the frame's memory instead of copying.
//! Protobuf alone proves nothing about the content: shapes, ids and texts are checked by the
//! modules beside this one.

use bytes::Bytes;

/// Sender of a DHT message: its 20-byte node id, or empty for a node that must not enter routing
/// tables.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodeInfo {
    /// Big-endian DHTID, or empty ("do not add me").
    #[prost(bytes = "bytes", tag = "1")]
    pub node_id: Bytes,
}

/// Credentials that hivemind's optional authorizer uses; Petals leaves them out.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AccessToken {
    /// Name of the user.
    #[prost(string, tag = "1")]
    pub username: String,
    /// Public key of the user.
    #[prost(bytes = "bytes", tag = "2")]
    pub public_key: Bytes,
    /// Text form of the expiration time.
    #[prost(string, tag = "3")]
    pub expiration_time: String,
    /// Signature of the authority.
    #[prost(bytes = "bytes", tag = "4")]
    pub signature: Bytes,
}

/// Authorization of a request; never set in the Petals swarm.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RequestAuthInfo {
    /// Token of the caller.
    #[prost(message, optional, tag = "1")]
    pub client_access_token: Option<AccessToken>,
    /// Key of the callee that the caller expects.
    #[prost(bytes = "bytes", tag = "2")]
    pub service_public_key: Bytes,
    /// Unix seconds.
    #[prost(double, tag = "3")]
    pub time: f64,
    /// 8 random bytes.
    #[prost(bytes = "bytes", tag = "4")]
    pub nonce: Bytes,
    /// Signature over the message without it.
    #[prost(bytes = "bytes", tag = "5")]
    pub signature: Bytes,
}

/// Authorization of a response; never set in the Petals swarm.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ResponseAuthInfo {
    /// Token of the callee.
    #[prost(message, optional, tag = "1")]
    pub service_access_token: Option<AccessToken>,
    /// Nonce of the request.
    #[prost(bytes = "bytes", tag = "2")]
    pub nonce: Bytes,
    /// Signature over the message without it.
    #[prost(bytes = "bytes", tag = "3")]
    pub signature: Bytes,
}

/// Request of `DHTProtocol.rpc_ping` (and of `ReachabilityProtocol.rpc_check`, where `node_id` is a
/// PeerID).
#[derive(Clone, PartialEq, prost::Message)]
pub struct PingRequest {
    /// Never set.
    #[prost(message, optional, tag = "1")]
    pub auth: Option<RequestAuthInfo>,
    #[prost(message, optional, tag = "2")]
    pub peer: Option<NodeInfo>,
    /// Whether the callee shall call back to see if the caller is reachable.
    #[prost(bool, tag = "3")]
    pub validate: bool,
}

/// Response of `DHTProtocol.rpc_ping`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PingResponse {
    /// Never set.
    #[prost(message, optional, tag = "1")]
    pub auth: Option<ResponseAuthInfo>,
    #[prost(message, optional, tag = "2")]
    pub peer: Option<NodeInfo>,
    /// Clock of the callee, Unix seconds.
    #[prost(double, tag = "4")]
    pub dht_time: f64,
    /// Whether the call-back reached the caller.
    #[prost(bool, tag = "5")]
    pub available: bool,
}

/// Request of `DHTProtocol.rpc_store`: aligned lists, one element per item.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StoreRequest {
    /// Never set.
    #[prost(message, optional, tag = "1")]
    pub auth: Option<RequestAuthInfo>,
    /// DHTIDs, 20 bytes each.
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub keys: Vec<Bytes>,
    /// `c0`: regular value; empty: whole dictionary; else msgpack of the subkey.
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub subkeys: Vec<Bytes>,
    /// msgpack values.
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub values: Vec<Bytes>,
    /// Unix seconds.
    #[prost(double, repeated, tag = "5")]
    pub expiration_time: Vec<f64>,
    /// Whether the item goes to the evictable cache.
    #[prost(bool, repeated, tag = "6")]
    pub in_cache: Vec<bool>,
    #[prost(message, optional, tag = "7")]
    pub peer: Option<NodeInfo>,
}

/// Response of `DHTProtocol.rpc_store`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct StoreResponse {
    /// Never set.
    #[prost(message, optional, tag = "1")]
    pub auth: Option<ResponseAuthInfo>,
    /// One flag per item of the request.
    #[prost(bool, repeated, tag = "2")]
    pub store_ok: Vec<bool>,
    #[prost(message, optional, tag = "3")]
    pub peer: Option<NodeInfo>,
}

/// Request of `DHTProtocol.rpc_find`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FindRequest {
    /// Never set.
    #[prost(message, optional, tag = "1")]
    pub auth: Option<RequestAuthInfo>,
    /// DHTIDs, 20 bytes each.
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub keys: Vec<Bytes>,
    #[prost(message, optional, tag = "3")]
    pub peer: Option<NodeInfo>,
}

/// What a find found for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ResultType {
    /// Nothing.
    NotFound = 0,
    FoundRegular = 1,
    FoundDictionary = 2,
}

/// One result of a find, aligned with the keys of the request.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FindResult {
    /// A [`ResultType`].
    #[prost(enumeration = "ResultType", tag = "1")]
    pub r#type: i32,
    /// Stored bytes, or a serialised dictionary (ext 0x50).
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
    /// Unix seconds.
    #[prost(double, tag = "3")]
    pub expiration_time: f64,
    /// Nearest known nodes, nearest first: DHTIDs.
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub nearest_node_ids: Vec<Bytes>,
    /// The same nodes: binary PeerIDs.
    #[prost(bytes = "bytes", repeated, tag = "5")]
    pub nearest_peer_ids: Vec<Bytes>,
}

/// Response of `DHTProtocol.rpc_find`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FindResponse {
    /// Never set.
    #[prost(message, optional, tag = "1")]
    pub auth: Option<ResponseAuthInfo>,
    /// One result per key of the request.
    #[prost(message, repeated, tag = "2")]
    pub results: Vec<FindResult>,
    #[prost(message, optional, tag = "3")]
    pub peer: Option<NodeInfo>,
}

/// Request of `TransformerConnectionHandler.rpc_info`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ExpertUid {
    /// One module uid, or empty.
    #[prost(string, tag = "1")]
    pub uid: String,
}

/// Response of `TransformerConnectionHandler.rpc_info`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ExpertInfo {
    /// msgpack map, see [`super::rpc_info`].
    #[prost(bytes = "bytes", tag = "1")]
    pub serialized_info: Bytes,
}

/// Request of every other transformer RPC.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExpertRequest {
    /// Module uids joined by one space.
    #[prost(string, tag = "1")]
    pub uid: String,
    /// Tensors, in the order that the RPC defines.
    #[prost(message, repeated, tag = "2")]
    pub tensors: Vec<Tensor>,
    /// msgpack map, may be empty; see [`super::metadata`].
    #[prost(bytes = "bytes", tag = "3")]
    pub metadata: Bytes,
}

/// Response of every other transformer RPC.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExpertResponse {
    /// Tensors, in the order that the RPC defines.
    #[prost(message, repeated, tag = "2")]
    pub tensors: Vec<Tensor>,
    /// Never set by Python.
    #[prost(bytes = "bytes", tag = "3")]
    pub metadata: Bytes,
}

/// How the elements of a tensor lie in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Compression {
    /// Raw elements.
    None = 0,
    /// f16 values, one mean and standard deviation per row.
    MeanStd16Bit = 1,
    /// f16 values, clamped.
    Float16 = 2,
    /// u8 indexes into a codebook of quantile means.
    Quantile8Bit = 3,
    /// u8 indexes into a codebook of uniform buckets.
    Uniform8Bit = 4,
    /// u8 indexes into a shared code, one scale per 4096 elements.
    Blockwise8Bit = 5,
}

/// A serialised tensor, or one part of it in a streamed request.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Tensor {
    /// Elements, little-endian, row-major, as `compression` says.
    #[prost(bytes = "bytes", tag = "1")]
    pub buffer: Bytes,
    /// Shape.
    #[prost(uint32, repeated, tag = "2")]
    pub size: Vec<u32>,
    /// Carried through, without effect on servers.
    #[prost(bool, tag = "3")]
    pub requires_grad: bool,
    /// Name of the original element type.
    #[prost(string, tag = "4")]
    pub dtype: String,
    /// A [`Compression`].
    #[prost(enumeration = "Compression", tag = "5")]
    pub compression: i32,
    /// Number of parts of a streamed tensor, informative only.
    #[prost(int32, tag = "6")]
    pub chunks: i32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use testkit::golden;

    fn reencode<M: Message + Default>(bytes: &[u8]) -> Vec<u8> {
        M::decode(bytes).expect("golden message decodes").encode_to_vec()
    }

    #[test]
    fn golden_messages_reencode_byte_for_byte() {
        let mut checked = 0;
        for file in [golden::DHT_MESSAGES, golden::EXPERT_MESSAGES] {
            for vector in golden::vectors(file) {
                let bytes = golden::bytes(&vector, "hex");
                let again = match golden::text(&vector, "type").as_str() {
                    "PingRequest" => reencode::<PingRequest>(&bytes),
                    "PingResponse" => reencode::<PingResponse>(&bytes),
                    "StoreRequest" => reencode::<StoreRequest>(&bytes),
                    "StoreResponse" => reencode::<StoreResponse>(&bytes),
                    "FindRequest" => reencode::<FindRequest>(&bytes),
                    "FindResponse" => reencode::<FindResponse>(&bytes),
                    "ExpertRequest" => reencode::<ExpertRequest>(&bytes),
                    "ExpertResponse" => reencode::<ExpertResponse>(&bytes),
                    "ExpertUID" => reencode::<ExpertUid>(&bytes),
                    "ExpertInfo" => reencode::<ExpertInfo>(&bytes),
                    other => panic!("unknown message type {other}"),
                };
                assert_eq!(again, bytes, "{}", golden::text(&vector, "name"));
                checked += 1;
            }
        }
        assert!(checked >= 14, "only {checked} messages in the golden files");
    }

    #[test]
    fn fields_mean_what_the_reference_put_there() {
        let vectors = golden::vectors(golden::DHT_MESSAGES);
        let bytes = |name: &str| golden::bytes(golden::named(&vectors, name), "hex");
        let response = PingResponse::decode(&bytes("ping_resp")[..]).unwrap();
        assert_eq!((response.dht_time, response.available), (1_700_000_000.25, true));
        let client = PingRequest::decode(&bytes("ping_client_mode")[..]).unwrap();
        assert_eq!(client.peer, Some(NodeInfo::default()));
        let find = FindResponse::decode(&bytes("find_resp")[..]).unwrap();
        let kinds: Vec<_> = find.results.iter().map(FindResult::r#type).collect();
        assert_eq!(
            kinds,
            [ResultType::FoundDictionary, ResultType::FoundRegular, ResultType::NotFound]
        );
    }

    #[test]
    fn tensor_buffer_shares_memory_with_the_frame() {
        let request = ExpertRequest {
            uid: "tiny.0".into(),
            tensors: vec![Tensor { buffer: Bytes::from(vec![7; 4096]), ..Tensor::default() }],
            metadata: Bytes::new(),
        };
        let frame = Bytes::from(request.encode_to_vec());
        let range = frame.as_ptr_range();
        let decoded = ExpertRequest::decode(frame).unwrap();
        assert!(range.contains(&decoded.tensors[0].buffer.as_ptr()));
    }
}
