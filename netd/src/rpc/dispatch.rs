//! Gives each inbound RPC its handler, in a task of its own. The bounds of [`super::protocols`]
//! bound the tasks.

use std::sync::Arc;

use bytes::Bytes;
use p2p::task;
use p2p::{Inbound, InboundStream, PeerId, UnaryResponder};
use swarm::names;
use swarm::wire::resumption::NOT_SERVING;
use tokio::sync::{mpsc, watch};

use super::passes;
use super::{Failure, Service, inference, info, push};
use crate::membership::rate::{self, serve::Counterpart};
use crate::membership::reachability::Checker;

/// What handlers need.
#[derive(Clone, Debug)]
pub struct Router {
    /// Dials peers that ask whether they can be reached.
    pub checker: Checker,
    /// Sends to and takes from peers that measure their network.
    pub counterpart: Counterpart,
    /// The blocks, once they are served.
    pub service: watch::Receiver<Option<Arc<Service>>>,
}

impl Router {
    /// Hands out RPCs until the node ends. `dht` takes those of the DHT.
    pub async fn run(
        self,
        mut inbound: mpsc::Receiver<Inbound>,
        dht: impl Fn(PeerId, &'static str, Bytes, UnaryResponder),
    ) {
        while let Some(rpc) = inbound.recv().await {
            match rpc {
                Inbound::Unary { peer, protocol, request, responder } => {
                    if names::is_of_dht(protocol) {
                        dht(peer, protocol, request, responder);
                    } else {
                        task::spawn(self.clone().unary(peer, protocol, request, responder));
                    }
                }
                Inbound::Stream { peer, protocol, stream } => {
                    task::spawn(self.clone().stream(peer, protocol, stream));
                }
            }
        }
    }

    async fn unary(
        self,
        peer: PeerId,
        protocol: &'static str,
        request: Bytes,
        responder: UnaryResponder,
    ) {
        if protocol == names::REACHABILITY_CHECK {
            let outcome = self.checker.answer(peer, request).await;
            // Fails only when the caller has gone.
            let _ = responder.respond(outcome).await;
            return;
        }
        let service = self.service.borrow().clone();
        let _active = service.as_ref().map(|service| service.registry.enter());
        let outcome = match (protocol, service.clone()) {
            (_, None) => Err(not_yet()),
            (names::FORWARD, Some(service)) => {
                return passes::serve_unary(&service, passes::FORWARD, peer, request, responder)
                    .await;
            }
            (names::BACKWARD, Some(service)) => {
                return passes::serve_unary(&service, passes::BACKWARD, peer, request, responder)
                    .await;
            }
            (names::INFO, Some(service)) => info::answer(&service, request),
            (names::PUSH, Some(service)) => push::answer(&service, peer, request).await,
            _ => Err(Failure::runtime(format!("{protocol} is not served here"))),
        };
        if let (Err(failure), Some(service)) = (&outcome, service) {
            service.troubles.count(failure.trouble());
        }
        // Fails only when the caller has gone.
        let _ = responder.respond(outcome.map_err(|failure| failure.unary_text())).await;
    }

    async fn stream(self, peer: PeerId, protocol: &'static str, stream: InboundStream) {
        if protocol == rate::PROTOCOL {
            return self.counterpart.serve(peer, stream).await;
        }
        if protocol == names::PUSH_STREAM {
            return push::serve(self.service, peer, stream).await;
        }
        let service = self.service.borrow().clone();
        let _active = service.as_ref().map(|service| service.registry.enter());
        match (protocol, service) {
            (_, None) => stream.fail(&not_yet().stream_text()).await,
            (names::INFERENCE, Some(service)) => inference::serve(&service, peer, stream).await,
            (names::FORWARD_STREAM, Some(service)) => {
                passes::serve_stream(&service, passes::FORWARD, peer, stream).await;
            }
            (names::BACKWARD_STREAM, Some(service)) => {
                passes::serve_stream(&service, passes::BACKWARD, peer, stream).await;
            }
            _ => stream.fail("not served here").await,
        }
    }
}

fn not_yet() -> Failure {
    Failure::runtime(NOT_SERVING)
}
