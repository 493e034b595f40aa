//! Names of the RPCs, as peers negotiate them. Each name is written here and nowhere else.

/// The DHT asks whether a node is alive, and learns its address.
pub const DHT_PING: &str = "DHTProtocol.rpc_ping";
/// The DHT stores records.
pub const DHT_STORE: &str = "DHTProtocol.rpc_store";
/// The DHT finds records and the nodes nearest to their keys.
pub const DHT_FIND: &str = "DHTProtocol.rpc_find";

/// A server asks a peer to dial it.
pub const REACHABILITY_CHECK: &str = "ReachabilityProtocol.rpc_check";

/// Figures and schema of a server.
pub const INFO: &str = "TransformerConnectionHandler.rpc_info";
/// Blocks over whole sequences.
pub const FORWARD: &str = "TransformerConnectionHandler.rpc_forward";
/// [`FORWARD`] for large tensors.
pub const FORWARD_STREAM: &str = "TransformerConnectionHandler.rpc_forward_stream";
/// Gradients of blocks over whole sequences.
pub const BACKWARD: &str = "TransformerConnectionHandler.rpc_backward";
/// [`BACKWARD`] for large tensors.
pub const BACKWARD_STREAM: &str = "TransformerConnectionHandler.rpc_backward_stream";
/// One inference session.
pub const INFERENCE: &str = "TransformerConnectionHandler.rpc_inference";
/// A step of a session, sent by the server before.
pub const PUSH: &str = "TransformerConnectionHandler.rpc_push";
/// Steps of one session, sent by the Sepal server before: one stream for all, without answers.
pub const PUSH_STREAM: &str = "/sepal/push/2";

/// The name without its service, as error texts have it: `rpc_inference`.
#[must_use]
pub fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Whether the RPC belongs to the DHT.
#[must_use]
pub fn is_of_dht(name: &str) -> bool {
    [DHT_PING, DHT_STORE, DHT_FIND].contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_have_no_service() {
        assert_eq!(short(INFERENCE), "rpc_inference");
        assert_eq!(short(REACHABILITY_CHECK), "rpc_check");
        assert_eq!(short("plain"), "plain");
    }

    #[test]
    fn the_dht_has_three_rpcs() {
        assert!(is_of_dht(DHT_FIND) && !is_of_dht(INFERENCE) && !is_of_dht(REACHABILITY_CHECK));
    }
}
