//! Bytes of requests held per peer: one peer cannot fill the memory with large requests while
//! others wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use hivemind::p2p::PeerId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests below this are not counted: the bounds on streams bound them, and decode steps stay off
/// the lock.
pub const COUNTED_BYTES: usize = 256 << 10;

/// Bytes are counted in pieces of this size.
const PIECE_BYTES: u64 = 1 << 10;

/// Bytes that each peer may hold.
#[derive(Debug)]
pub struct PeerBudget {
    pieces: u32,
    peers: Mutex<HashMap<PeerId, Arc<Semaphore>>>,
}

impl PeerBudget {
    /// A budget of `bytes` per peer.
    pub fn new(bytes: u64) -> PeerBudget {
        let pieces = u32::try_from(bytes / PIECE_BYTES).unwrap_or(u32::MAX).max(1);
        PeerBudget { pieces, peers: Mutex::default() }
    }

    /// Counts `bytes` for `peer` until the permit is dropped, waiting until it holds little enough.
    /// More than the whole budget counts as the whole of it.
    pub async fn hold(&self, peer: PeerId, bytes: usize) -> Option<OwnedSemaphorePermit> {
        if bytes < COUNTED_BYTES {
            return None;
        }
        self.hold_any(peer, bytes).await
    }

    /// As [`Self::hold`], for messages that are kept beyond their handling: all of them count.
    pub async fn hold_any(&self, peer: PeerId, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let pieces = u32::try_from((bytes as u64).div_ceil(PIECE_BYTES))
            .unwrap_or(u32::MAX)
            .min(self.pieces);
        let semaphore = {
            let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
            // Peers that hold nothing and wait for nothing are forgotten.
            peers.retain(|other, semaphore| *other == peer || Arc::strong_count(semaphore) > 1);
            let full = || Arc::new(Semaphore::new(self.pieces as usize));
            peers.entry(peer).or_insert_with(full).clone()
        };
        semaphore.acquire_many_owned(pieces).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn one_peer_waits_for_itself_and_not_for_others() {
        let budget = PeerBudget::new(4 << 20);
        let (one, two) = (PeerId::random(), PeerId::random());
        let held = budget.hold(one, 3 << 20).await;
        let more = budget.hold(one, 2 << 20);
        assert!(tokio::time::timeout(Duration::from_millis(20), more).await.is_err());
        assert!(budget.hold(two, 100 << 20).await.is_some());
        assert!(budget.hold(one, 10).await.is_none());
        drop(held);
        assert!(budget.hold(one, 2 << 20).await.is_some());
    }
}
