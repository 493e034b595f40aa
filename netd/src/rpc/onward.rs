//! Pushing the output of a step on to the next server of the chain (petals `handler.py`,
//! `_push_outputs`), so that the next server can begin before the client has brought it the same
//! states. The client's own copy stays the fallback: a push that fails, or finds no room among
//! those under way, is counted and forgotten.
//!
//! # Discrepancies
//! Petals sends the prompts and hypo ids of the session's first message with every push; here they
//! are those of the step. Blocks are named as the client numbers them, as in Petals.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hivemind::names;
use hivemind::p2p::{P2p, PeerId};
use hivemind::wire::messages::{ExpertRequest, Tensor};
use hivemind::wire::metadata::{NextServer, RequestMetadata};
use hivemind::wire::uid;
use prost::Message;
use shared::shm::board::Trouble;
use tokio::sync::Semaphore;
use tracing::debug;

use super::Failure;
use super::troubles::Troubles;

/// Pushes under way at once: as many as sessions can have steps under way. Each holds one output.
const MAX_PUSHES: usize = 256;

/// Sends outputs on.
#[derive(Debug)]
pub struct Onward {
    p2p: P2p,
    prefix: String,
    timeout: Duration,
    room: Arc<Semaphore>,
    troubles: Arc<Troubles>,
}

impl Onward {
    /// Pushes from `p2p`, each for at most `timeout`.
    pub fn new(p2p: P2p, prefix: &str, timeout: Duration, troubles: Arc<Troubles>) -> Onward {
        Onward {
            p2p,
            prefix: prefix.to_owned(),
            timeout,
            room: Arc::new(Semaphore::new(MAX_PUSHES)),
            troubles,
        }
    }

    /// The node that pushes.
    pub fn p2p(&self) -> &P2p {
        &self.p2p
    }

    /// Pushes `output` to the first of the step's next servers, in the background. `step` are the
    /// tensors of the step, of which those after the hidden states go along.
    pub fn push(&self, metadata: &RequestMetadata, output: &Tensor, step: &[Tensor]) {
        let [next, rest @ ..] = metadata.next_servers.as_slice() else {
            return;
        };
        let (peer, uid) = match self.addressee(next) {
            Ok(found) => found,
            Err(failure) => {
                self.troubles.count(Trouble::Push);
                debug!(%failure, "output not pushed");
                return;
            }
        };
        let Ok(room) = self.room.clone().try_acquire_owned() else {
            self.troubles.count(Trouble::Push);
            debug!(%peer, "too many pushes under way, output not pushed");
            return;
        };
        let others = step.get(1..).unwrap_or_default().iter().cloned();
        let request = ExpertRequest {
            uid,
            tensors: std::iter::once(output.clone()).chain(others).collect(),
            metadata: metadata.for_push(&next.session_id, rest).into(),
        };
        let (p2p, timeout, troubles) = (self.p2p.clone(), self.timeout, self.troubles.clone());
        tokio::spawn(async move {
            let bytes = Bytes::from(request.encode_to_vec());
            if let Err(error) = p2p.call_unary(peer, names::PUSH, bytes, timeout).await {
                troubles.count(Trouble::Push);
                debug!(%peer, %error, "push failed");
            }
            drop(room);
        });
    }

    fn addressee(&self, next: &NextServer) -> Result<(PeerId, String), Failure> {
        let peer: PeerId = next
            .peer_id
            .parse()
            .map_err(|_| Failure::bad("next_servers names an invalid PeerID"))?;
        let count = next.end.saturating_sub(next.start) as usize;
        if peer == self.p2p.peer_id() || !(1..=uid::MAX_CHAIN).contains(&count) {
            return Err(Failure::bad("next_servers names this server, or no blocks, or too many"));
        }
        Ok((peer, uid::chain(&self.prefix, next.start..next.end)))
    }
}
