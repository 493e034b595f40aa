//! What servers have room for: the length of a session, and how many sessions of this node.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use p2p::PeerId;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Swarm, SwarmError};

/// Sessions of this node on one server at once. A server takes 256 streams of sessions from one peer, and a
/// connection carries 256 streams of all kinds: the rest is for look-ups, and for sessions whose end the server
/// has not seen yet.
pub const MAX_SESSIONS_PER_SERVER: usize = 224;
/// Servers whose sessions are counted; those without any are forgotten.
const MAX_COUNTED: usize = 1024;

/// The right to a session on one server, until it is dropped.
#[derive(Debug)]
pub struct SessionSlot {
    _permit: OwnedSemaphorePermit,
}

/// Sessions of this node, of all its models, by server.
#[derive(Debug, Default)]
pub(super) struct SessionSlots {
    servers: Mutex<HashMap<PeerId, Arc<Semaphore>>>,
}

impl SessionSlots {
    /// Whether a session on `peer` would have to wait.
    pub(super) fn is_full(&self, peer: &PeerId) -> bool {
        self.servers.lock().get(peer).is_some_and(|free| free.available_permits() == 0)
    }

    fn of(&self, peer: PeerId) -> Arc<Semaphore> {
        let mut servers = self.servers.lock();
        if servers.len() >= MAX_COUNTED {
            let is_used = |free: &Semaphore| free.available_permits() < MAX_SESSIONS_PER_SERVER;
            servers.retain(|_, free| is_used(free) || Arc::strong_count(free) > 1);
        }
        let new = || Arc::new(Semaphore::new(MAX_SESSIONS_PER_SERVER));
        Arc::clone(servers.entry(peer).or_insert_with(new))
    }

    /// A slot on each of `peers`, after those who asked before.
    async fn take(&self, peers: &[PeerId]) -> Vec<SessionSlot> {
        let mut order: Vec<(PeerId, usize)> = peers.iter().copied().zip(0..).collect();
        // All take them in the same order: two that wait never hold what the other waits for.
        order.sort_unstable();
        let mut slots = Vec::with_capacity(order.len());
        for (peer, index) in order {
            // No semaphore is ever closed.
            if let Ok(permit) = self.of(peer).acquire_owned().await {
                slots.push((index, SessionSlot { _permit: permit }));
            }
        }
        slots.sort_unstable_by_key(|(index, _)| *index);
        slots.into_iter().map(|(_, slot)| slot).collect()
    }
}

impl Swarm {
    /// Tokens of the longest session that servers have a cache for, by their records; `None` if they name no
    /// limit.
    pub fn longest_session(&self) -> Option<u64> {
        let known = self.known();
        let of_block = |block: u32| {
            let block = block as usize;
            let serving = known.servers.iter().filter(|s| (s.start..s.end).contains(&block));
            serving.map(|server| server.info.cache_tokens_left.unwrap_or(u64::MAX)).max()
        };
        let least = (0..self.config.num_blocks).filter_map(of_block).min();
        least.filter(|tokens| *tokens < u64::MAX)
    }

    /// Whether some server of the model has as many sessions of this node as it may.
    pub fn is_crowded(&self) -> bool {
        let peers: Vec<PeerId> = self.known().servers.iter().filter_map(super::peer).collect();
        peers.iter().any(|peer| self.slots.is_full(peer))
    }

    /// The right to a session on each of `peers`, in their order; waits while others have them all.
    ///
    /// # Errors
    /// [`SwarmError::Crowded`] if it takes longer than `patience`.
    pub async fn session_slots(
        &self,
        peers: &[PeerId],
        patience: Duration,
    ) -> Result<Vec<SessionSlot>, SwarmError> {
        let slots = tokio::time::timeout(patience, self.slots.take(peers)).await;
        slots.map_err(|_| SwarmError::Crowded { sessions: MAX_SESSIONS_PER_SERVER, patience })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    // Without a runtime, whose tasks yield after so many steps.
    #[test]
    fn sessions_beyond_the_bound_wait_and_the_first_that_came_is_the_first_served() {
        let (slots, peer) = (SessionSlots::default(), PeerId::random());
        let peers = [peer];
        let mut held = Vec::new();
        for _ in 0..MAX_SESSIONS_PER_SERVER {
            assert!(!slots.is_full(&peer));
            held.extend(slots.take(&peers).now_or_never().expect("free"));
        }
        assert!(slots.is_full(&peer));
        let (mut first, mut second) = (Box::pin(slots.take(&peers)), Box::pin(slots.take(&peers)));
        assert!(first.as_mut().now_or_never().is_none());
        assert!(second.as_mut().now_or_never().is_none());
        assert!(slots.take(&[PeerId::random()]).now_or_never().is_some(), "others have theirs");
        held.pop();
        assert!(second.as_mut().now_or_never().is_none());
        let given = first.as_mut().now_or_never().expect("the first in the queue");
        assert!(second.as_mut().now_or_never().is_none());
        drop(given);
        assert!(second.as_mut().now_or_never().is_some());
    }

    #[tokio::test]
    async fn routes_over_the_same_servers_never_wait_for_each_other() {
        let slots = Arc::new(SessionSlots::default());
        let (one, other) = (PeerId::random(), PeerId::random());
        let walk = |peers: [PeerId; 2]| {
            let slots = Arc::clone(&slots);
            async move {
                for _ in 0..3 {
                    let held = slots.take(&peers).await;
                    assert_eq!(held.len(), 2);
                    tokio::task::yield_now().await;
                }
            }
        };
        let walks = (0..4 * MAX_SESSIONS_PER_SERVER)
            .map(|number| walk(if number % 2 == 0 { [one, other] } else { [other, one] }));
        futures::future::join_all(walks).await;
        assert!(!slots.is_full(&one) && !slots.is_full(&other));
    }

    #[tokio::test]
    async fn servers_without_sessions_are_forgotten() {
        let slots = SessionSlots::default();
        let peer = PeerId::random();
        let held = slots.take(&[peer]).await;
        for _ in 0..2 * MAX_COUNTED {
            slots.take(&[PeerId::random()]).await;
        }
        assert!(slots.servers.lock().len() <= MAX_COUNTED);
        assert!(slots.servers.lock().contains_key(&peer));
        drop(held);
    }
}
