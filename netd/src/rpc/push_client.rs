//! Pushing the output of a step on to the next server of the chain (petals `handler.py`,
//! `_push_outputs`), so that the next server can begin before the client has brought it the same
//! states. The client's own copy stays the fallback: a push that fails, or finds no room among
//! those under way, is counted and forgotten.
//!
//! ```text
//!   the session's metadata names the next server
//!     -> a connection and a standing stream (/sepal/push/2) are opened
//!   a step was computed
//!     stream open   -> one frame on it, packed: no answer, no bound of unary calls
//!     else          -> rpc_push: name and request in one piece, one one-way delay
//! ```
//!
//! # Discrepancies
//! Petals sends the prompts and hypo ids of the session's first message with every push; here they
//! are those of the step. Blocks are named as the client numbers them, as in Petals. Outputs whose
//! compression changes them again when the client compresses its copy are not pushed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use p2p::task;
use p2p::{CallError, MAX_UNARY_BYTES, P2p, PeerId, RpcStream};
use prost::Message;
use shared::figures::Trouble;
use swarm::names;
use swarm::wire::messages::{Compression, ExpertRequest, Tensor};
use swarm::wire::metadata::{NextServer, RequestMetadata};
use swarm::wire::packing;
use swarm::wire::uid;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tracing::debug;

use super::Failure;
use super::dial_budget::{DialBudget, Namer};
use super::error_counts::ErrorCounts;

/// Bytes of pushes under way, of all sessions: outputs that the next servers have not taken yet.
pub(crate) const MAX_PUSH_BYTES: usize = 256 << 20;
/// Pushes are counted in pieces of this size.
const PIECE_BYTES: usize = 1 << 10;
/// Pushes of one session that wait for their stream.
pub(crate) const MAX_WAITING: usize = 2;
/// A push that takes longer has no use: the client has brought its copy.
pub(crate) const PUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// Room for the envelope of a unary call.
const ENVELOPE_BYTES: usize = 1 << 10;
/// Next servers of one session, one after another: a client that names ever new ones aims dials.
pub(crate) const MAX_HOPS: u32 = 8;

/// Sends outputs on.
#[derive(Debug)]
pub struct PushClient {
    p2p: P2p,
    prefix: String,
    room: Arc<Semaphore>,
    troubles: Arc<ErrorCounts>,
    dial_budget: Arc<DialBudget>,
}

/// The way of one session's outputs to its next server. It ends with this value.
#[derive(Debug)]
pub struct NextHop {
    peer: PeerId,
    pushes: mpsc::Sender<Push>,
    /// How many the session has named.
    count: u32,
}

/// One output under way.
#[derive(Debug)]
struct Push {
    request: ExpertRequest,
    /// What it takes of all pushes.
    _room: OwnedSemaphorePermit,
}

impl PushClient {
    /// Pushes from `p2p`.
    pub fn new(p2p: P2p, prefix: &str, troubles: Arc<ErrorCounts>) -> PushClient {
        let room = Arc::new(Semaphore::new(MAX_PUSH_BYTES / PIECE_BYTES));
        PushClient { p2p, prefix: prefix.to_owned(), room, troubles, dial_budget: Arc::default() }
    }

    /// The node that pushes.
    pub fn p2p(&self) -> &P2p {
        &self.p2p
    }

    /// Connects to the first of the next servers in a step of `client`, if there is one, and opens
    /// a stream to it, while the step is computed.
    pub fn prepare(&self, hop: &mut Option<NextHop>, client: PeerId, metadata: &RequestMetadata) {
        let next = metadata.next_servers.first().and_then(|next| self.addressee(next).ok());
        let Some((peer, _)) = next else {
            return;
        };
        let count = hop.as_ref().map_or(0, |hop| hop.count);
        let is_new = hop.as_ref().is_none_or(|hop| hop.peer != peer && count < MAX_HOPS);
        let namer = Namer::of(client, self.p2p.net_of(&client));
        if is_new && self.dial_budget.aim(namer, Instant::now()) {
            let (pushes, queue) = mpsc::channel(MAX_WAITING);
            let (dial_budget, troubles) = (self.dial_budget.clone(), self.troubles.clone());
            let way = Way { p2p: self.p2p.clone(), peer, namer, dial_budget, troubles };
            task::spawn(way.carry(queue));
            *hop = Some(NextHop { peer, pushes, count: count + 1 });
        }
    }

    /// Pushes `output` to the first of the step's next servers, in the background, by the way that
    /// was [prepared](Self::prepare). `step` are the tensors of the step, of which those after the
    /// hidden states go along.
    pub fn push(
        &self,
        hop: Option<&NextHop>,
        metadata: &RequestMetadata,
        output: &Tensor,
        step: &[Tensor],
    ) {
        let [next, rest @ ..] = metadata.next_servers.as_slice() else {
            return;
        };
        if !is_idempotent(output) {
            return;
        }
        if let Err(failure) = self.try_push(hop, next, rest, metadata, output, step) {
            self.troubles.count(Trouble::Push);
            debug!(%failure, peer = next.peer_id, "output not pushed");
        }
    }

    fn try_push(
        &self,
        hop: Option<&NextHop>,
        next: &NextServer,
        rest: &[NextServer],
        metadata: &RequestMetadata,
        output: &Tensor,
        step: &[Tensor],
    ) -> Result<(), Failure> {
        let (peer, uid) = self.addressee(next)?;
        let hop = hop.filter(|hop| hop.peer == peer);
        let hop = hop.ok_or_else(|| {
            Failure::bad("the session, or its client, has named too many next servers")
        })?;
        // Copied, or they would keep the memory of the whole request whose room is given back.
        let owned = |tensor: &Tensor| {
            let buffer = Bytes::copy_from_slice(&tensor.buffer);
            Tensor { buffer, ..tensor.clone() }
        };
        let others = step.get(1..).unwrap_or_default().iter().map(owned);
        let request = ExpertRequest {
            uid,
            tensors: std::iter::once(output.clone()).chain(others).collect(),
            metadata: metadata.for_push(&next.session_id, rest).into(),
        };
        let pieces = u32::try_from(request.encoded_len().div_ceil(PIECE_BYTES));
        let room =
            pieces.ok().and_then(|pieces| self.room.clone().try_acquire_many_owned(pieces).ok());
        let room = room.ok_or_else(|| Failure::runtime("too many pushes are under way"))?;
        let push = Push { request, _room: room };
        let sent = hop.pushes.try_send(push);
        sent.map_err(|_| {
            Failure::runtime(
                "the pushes before it have not left yet, or the peer cannot be reached",
            )
        })
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

/// Whether a client that decodes the output and encodes it again sends the same values.
fn is_idempotent(output: &Tensor) -> bool {
    let kinds = [Compression::None, Compression::Float16];
    kinds.iter().any(|kind| output.compression == *kind as i32)
}

/// To a next server.
struct Way {
    p2p: P2p,
    peer: PeerId,
    namer: Namer,
    dial_budget: Arc<DialBudget>,
    troubles: Arc<ErrorCounts>,
}

impl Way {
    /// Carries the pushes of one session until it ends, or the next server cannot be reached.
    async fn carry(self, mut queue: mpsc::Receiver<Push>) {
        let Way { p2p, peer, .. } = &self;
        let mut standing: Option<RpcStream> = None;
        let opening = p2p.open_stream(*peer, names::PUSH_STREAM, PUSH_TIMEOUT);
        let mut opening = std::pin::pin!(opening);
        let mut is_opening = true;
        loop {
            tokio::select! {
                opened = &mut opening, if is_opening => {
                    is_opening = false;
                    debug!(%peer, standing = opened.is_ok(), "way to the next server");
                    if let Err(CallError::Unreachable { .. } | CallError::Timeout(_)) = opened {
                        return self.give_up(queue);
                    }
                    self.dial_budget.hit(self.namer);
                    standing = opened.ok();
                }
                push = queue.recv() => {
                    let Some(push) = push else { break };
                    if !send(&mut standing, &push).await {
                        task::spawn(call(p2p.clone(), *peer, push, self.troubles.clone()));
                    }
                }
            }
        }
        if let Some(stream) = standing {
            stream.close().await;
        }
    }

    /// Pushes that wait are lost; those that come find the queue closed.
    fn give_up(&self, mut queue: mpsc::Receiver<Push>) {
        queue.close();
        while queue.try_recv().is_ok() {
            self.troubles.count(Trouble::Push);
        }
    }
}

impl Push {
    fn plain(&self) -> Bytes {
        self.request.encode_to_vec().into()
    }

    /// With the output in fewer bytes, if that is possible: for a Sepal server.
    fn packed(&self) -> Bytes {
        let Some(output) = self.request.tensors.first().and_then(packing::pack) else {
            return self.plain();
        };
        let mut request = self.request.clone();
        request.tensors[0] = output;
        request.encode_to_vec().into()
    }
}

/// Whether the standing stream, if there is one, took the push. One that fails is given up.
async fn send(standing: &mut Option<RpcStream>, push: &Push) -> bool {
    let Some(stream) = standing else {
        return false;
    };
    let sent = tokio::time::timeout(PUSH_TIMEOUT, stream.send(push.packed())).await;
    if !matches!(sent, Ok(Ok(()))) {
        *standing = None;
    }
    standing.is_some()
}

async fn call(p2p: P2p, peer: PeerId, push: Push, troubles: Arc<ErrorCounts>) {
    let request = push.plain();
    if request.len() > MAX_UNARY_BYTES - ENVELOPE_BYTES {
        return debug!(%peer, bytes = request.len(), "output exceeds a unary call, not pushed");
    }
    if let Err(error) = p2p.call_unary(peer, names::PUSH, request, PUSH_TIMEOUT).await {
        troubles.count(Trouble::Push);
        debug!(%peer, %error, "push failed");
    }
}

#[cfg(test)]
mod tests {
    use swarm::wire::tensor::{WireDtype, raw_tensor};

    use super::*;

    #[test]
    fn sepal_servers_get_bfloat16_packed_and_others_get_it_plain() {
        let states = |dtype: WireDtype| {
            let bytes = vec![0; 64 * dtype.size_bytes()];
            raw_tensor(&[1, 1, 64], dtype, bytes.into()).unwrap()
        };
        let push = |dtype| {
            let tensors = vec![states(dtype), states(WireDtype::I64)];
            let request = ExpertRequest { tensors, ..ExpertRequest::default() };
            let room = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
            Push { request, _room: room }
        };
        let wide = push(WireDtype::F32);
        assert_eq!(wide.packed(), wide.plain());
        let push = push(WireDtype::Bf16);
        assert_eq!(ExpertRequest::decode(push.plain()).unwrap(), push.request);
        let mut packed = ExpertRequest::decode(push.packed()).unwrap();
        packed.tensors[0] = packing::unpack(&packed.tensors[0]).unwrap();
        assert_eq!(packed, push.request);
    }
}
