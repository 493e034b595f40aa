//! Pools of bytes: what peers announce is reserved before it is read, from the pools of the peer, its
//! IP net and the process at once, in the manner of go-libp2p's resource manager. A PeerID costs
//! nothing, so a pool per peer alone would be no bound.
//!
//! ```text
//!   process ──> net (an IPv4 address, an IPv6 /56) ──> peer        a reservation counts in all three
//! ```
//! Who finds no room waits. The one whose net holds the fewest bytes goes first, then the one whose
//! peer does, then the one that came first; nobody overtakes it, however little they ask. The asks of one
//! peer are served in their order.
//!
//! Loopback and private nets have no pool of their own: the operator's whole swarm may share one
//! such address, and behind it nobody is a stranger.

mod book;

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use libp2p::PeerId;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::nets::Net;
pub use book::PoolBounds;
use book::{Book, MemoryClaim};

/// What is reserved, and who waits. Clones of the [`Arc`] are handles of the same pools.
#[derive(Debug)]
pub struct Pools {
    book: Mutex<Book<oneshot::Sender<()>>>,
}

/// Bytes of a request that count for its peer, its net and the process until it is dropped.
#[derive(Debug)]
pub struct Reservation {
    pools: Arc<Pools>,
    claim: MemoryClaim,
}

/// An ask for bytes, until it is granted. Dropping it gives up.
#[derive(Debug)]
pub struct MemoryAsk {
    pools: Arc<Pools>,
    claim: MemoryClaim,
    ticket: u64,
    granted: oneshot::Receiver<()>,
    is_over: bool,
}

impl Pools {
    pub fn new(bounds: PoolBounds) -> Arc<Self> {
        Arc::new(Self { book: Mutex::new(Book::new(bounds)) })
    }

    /// Asks for bytes. More than a whole pool counts as the whole of it.
    pub fn ask(self: &Arc<Self>, peer: PeerId, net: Net, bytes: usize) -> MemoryAsk {
        let (grant, granted) = oneshot::channel();
        let mut book = self.book.lock();
        let claim = book.claim(peer, net, bytes);
        let ticket = book.wait(claim, grant);
        serve(&mut book);
        drop(book);
        MemoryAsk { pools: Arc::clone(self), claim, ticket, granted, is_over: false }
    }

    /// Reserves now; `None` if there is no room or somebody waits for it.
    pub fn try_reserve(
        self: &Arc<Self>,
        peer: PeerId,
        net: Net,
        bytes: usize,
    ) -> Option<Reservation> {
        let mut book = self.book.lock();
        let claim = book.claim(peer, net, bytes);
        let is_free = !book.someone_waits() && book.has_room(&claim);
        is_free.then(|| {
            book.take(&claim);
            Reservation { pools: Arc::clone(self), claim }
        })
    }

    /// Whether an ask waits.
    pub fn someone_waits(&self) -> bool {
        self.book.lock().someone_waits()
    }

    /// Makes room for one request of so many bytes in every pool.
    pub fn make_room_for(&self, bytes: usize) {
        let mut book = self.book.lock();
        book.raise(bytes);
        serve(&mut book);
    }
}

/// Grants what there is room for. One that has given up meanwhile sees its ticket gone and gives
/// the bytes back.
fn serve(book: &mut Book<oneshot::Sender<()>>) {
    while let Some(grant) = book.next() {
        let _ = grant.send(());
    }
}

impl Future for MemoryAsk {
    type Output = Reservation;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Reservation> {
        // The other end stays in the book until it grants.
        Pin::new(&mut self.granted).poll(cx).map(|_| {
            self.is_over = true;
            Reservation { pools: Arc::clone(&self.pools), claim: self.claim }
        })
    }
}

impl Drop for MemoryAsk {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut book = self.pools.book.lock();
        if !book.forget(&self.claim, self.ticket) {
            book.give_back(&self.claim);
        }
        serve(&mut book);
    }
}

impl Reservation {
    /// Counts so many more bytes; false, and nothing changes, if there is no room for them now.
    #[must_use]
    pub fn try_grow(&mut self, bytes: usize) -> bool {
        let mut book = self.pools.book.lock();
        let more = MemoryClaim { bytes, ..self.claim };
        let fits = book.has_room(&more);
        if fits {
            book.take(&more);
            self.claim.bytes += bytes;
        }
        fits
    }

    /// Counts so many bytes less, at most all.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.claim.bytes);
        self.claim.bytes -= bytes;
        let mut book = self.pools.book.lock();
        book.give_back(&MemoryClaim { bytes, ..self.claim });
        serve(&mut book);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut book = self.pools.book.lock();
        book.give_back(&self.claim);
        serve(&mut book);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const BOUNDS: PoolBounds = PoolBounds { total: 100, net: 60, peer: 40 };

    fn net(last: u8) -> Net {
        Net::of([5, 6, 7, last].into())
    }

    #[tokio::test]
    async fn who_waits_is_served_when_bytes_are_freed() {
        let (pools, peer) = (Pools::new(BOUNDS), PeerId::random());
        let held = pools.ask(peer, net(1), 40).await;
        let mut waiting = pools.ask(peer, net(1), 40);
        assert!((&mut waiting).now_or_never().is_none());
        assert!(pools.someone_waits());
        drop(held);
        assert_eq!(waiting.await.claim.bytes, 40);
        assert!(!pools.someone_waits());
    }

    #[test]
    fn asks_that_are_given_up_hold_nothing_whether_they_were_granted_or_not() {
        let (pools, peers) = (Pools::new(BOUNDS), [PeerId::random(), PeerId::random()]);
        let granted = pools.ask(peers[0], net(1), 40);
        let waiting = pools.ask(peers[0], net(1), 40);
        let behind = pools.ask(peers[0], net(1), 1);
        drop(waiting);
        drop(granted);
        assert!(behind.now_or_never().is_some());
        assert!(pools.try_reserve(peers[0], net(1), 40).is_some());
        assert!(pools.try_reserve(peers[1], net(2), 40).is_some());
    }

    #[test]
    fn reservations_grow_only_where_there_is_room_and_shrink() {
        let (pools, peer) = (Pools::new(BOUNDS), PeerId::random());
        let mut held = pools.try_reserve(peer, net(1), 30).expect("free");
        assert!(held.try_grow(10));
        assert!(!held.try_grow(1));
        held.shrink(5);
        assert!(held.try_grow(5));
        held.shrink(100);
        assert!(held.try_grow(40));
        drop(held);
        assert!(pools.try_reserve(peer, net(1), 40).is_some());
    }

    #[test]
    fn the_largest_request_fits_once_it_is_known() {
        let (pools, peer) = (Pools::new(BOUNDS), PeerId::random());
        let whole = pools.ask(peer, net(1), 1000).now_or_never().expect("counts as a whole pool");
        assert_eq!(whole.claim.bytes, 40);
        drop(whole);
        pools.make_room_for(1000);
        let large = pools.ask(peer, net(1), 1000).now_or_never().expect("there is room");
        assert_eq!(large.claim.bytes, 1000);
    }
}
