//! The protobuf messages of hivemind's libp2p daemon that cross the network (`p2pd.proto`, proto2).

use bytes::Bytes;

/// The one message of unary calls, in both directions.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PersistentConnectionRequest {
    /// 16 random bytes; the answer carries those of its request.
    #[prost(bytes = "bytes", required, tag = "1")]
    pub call_id: Bytes,
    /// Variants that only a daemon and its own client exchange are absent: they decode to `None`.
    #[prost(oneof = "Call", tags = "3, 4")]
    pub call: Option<Call>,
}

/// What a [`PersistentConnectionRequest`] is.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Call {
    #[prost(message, tag = "3")]
    Request(CallUnaryRequest),
    #[prost(message, tag = "4")]
    Response(CallUnaryResponse),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct CallUnaryRequest {
    /// PeerID bytes of the callee.
    #[prost(bytes = "bytes", required, tag = "1")]
    pub peer: Bytes,
    /// The name of the protocol.
    #[prost(string, required, tag = "2")]
    pub proto: String,
    /// The request message of the RPC.
    #[prost(bytes = "bytes", required, tag = "3")]
    pub data: Bytes,
}

/// An answer.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct CallUnaryResponse {
    /// A Python caller ignores an answer without it and waits for its timeout.
    #[prost(oneof = "CallOutcome", tags = "1, 2")]
    pub outcome: Option<CallOutcome>,
}

/// The two ways a call ends.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum CallOutcome {
    /// The response message of the RPC.
    #[prost(bytes = "bytes", tag = "1")]
    Response(Bytes),
    /// UTF-8 text.
    #[prost(bytes = "bytes", tag = "2")]
    Error(Bytes),
}

/// Payload of an error frame of an RPC stream.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RpcError {
    /// Text for the caller.
    #[prost(string, optional, tag = "1")]
    pub message: Option<String>,
}
