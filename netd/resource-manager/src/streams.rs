//! Streams that peers open, counted by protocol, and by protocol and peer.

use std::{collections::HashMap, sync::Arc};

use libp2p::PeerId;
use parking_lot::Mutex;

/// How many streams of one protocol there may be at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamBounds {
    pub per_peer: usize,
    /// Of all peers together.
    pub total: usize,
}

/// The streams that are open. It holds nothing of a peer whose streams are closed.
#[derive(Debug, Default)]
pub struct StreamCounts {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    total: HashMap<&'static str, usize>,
    per_peer: HashMap<(PeerId, &'static str), usize>,
}

/// One admitted stream; counts until it is dropped.
#[derive(Debug)]
pub struct StreamPermit {
    counted: Arc<StreamCounts>,
    peer: PeerId,
    protocol: &'static str,
}

impl StreamCounts {
    /// Counts one more stream of `peer`; `None` if a bound is reached.
    pub fn admit(
        self: &Arc<Self>,
        peer: PeerId,
        protocol: &'static str,
        bounds: StreamBounds,
    ) -> Option<StreamPermit> {
        let mut counts = self.counts.lock();
        let total = counts.total.get(protocol).copied().unwrap_or(0);
        let of_peer = counts.per_peer.get(&(peer, protocol)).copied().unwrap_or(0);
        if total >= bounds.total || of_peer >= bounds.per_peer {
            return None;
        }
        counts.total.insert(protocol, total + 1);
        counts.per_peer.insert((peer, protocol), of_peer + 1);
        Some(StreamPermit { counted: Arc::clone(self), peer, protocol })
    }

    /// Whether any stream of this peer is counted.
    pub fn has_any_of(&self, peer: &PeerId) -> bool {
        self.counts.lock().per_peer.keys().any(|(counted, _)| counted == peer)
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut counts = self.counted.counts.lock();
        if let Some(total) = counts.total.get_mut(self.protocol) {
            *total = total.saturating_sub(1);
        }
        let key = (self.peer, self.protocol);
        let left = counts.per_peer.get(&key).copied().unwrap_or(0).saturating_sub(1);
        if left == 0 {
            counts.per_peer.remove(&key);
        } else {
            counts.per_peer.insert(key, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_bounds_hold_and_dropped_permits_are_free_again() {
        let streams = Arc::<StreamCounts>::default();
        let bounds = StreamBounds { per_peer: 2, total: 3 };
        let (one, two) = (PeerId::random(), PeerId::random());
        assert!(!streams.has_any_of(&one));
        let first = streams.admit(one, "a", bounds).expect("free");
        assert!(streams.has_any_of(&one));
        let _second = streams.admit(one, "a", bounds).expect("free");
        assert!(streams.admit(one, "a", bounds).is_none(), "third of one peer");
        let _third = streams.admit(two, "a", bounds).expect("another peer");
        assert!(streams.admit(two, "a", bounds).is_none(), "fourth in total");
        assert!(streams.admit(two, "b", bounds).is_some(), "another protocol");
        drop(first);
        assert!(streams.admit(two, "a", bounds).is_some());
        let left = streams.counts.lock().per_peer.len();
        assert_eq!(left, 2, "the admissions of the last lines are dropped");
    }
}
