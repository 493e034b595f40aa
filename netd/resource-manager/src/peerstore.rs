//! Peers that matter to this node: those with a session here, and servers of its model. When the
//! places for connections run out, the last ones are for them.
//!
//! A PeerID costs nothing and is known only after the handshake, so a peer earns its standing
//! before the node is full: a session holds KV memory, and a record names the server's own PeerID.
//! The set is bounded, for one public IP net too. It outlives connections: a peer whose connection
//! broke comes back. Pure but for the lock.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use libp2p::PeerId;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::nets::Net;

/// Servers of the model that are remembered.
pub const MAX_KNOWN_SERVERS: usize = 4096;
/// Peers that are remembered because of a session.
pub const MAX_SESSION_PEERS: usize = 1024;
/// The same of one public IP net.
pub const MAX_SESSION_PEERS_PER_NET: usize = 32;
/// How long a peer is remembered after its last session: longer than a client tries to come back.
pub const SESSION_PEER_MEMORY: Duration = Duration::from_secs(600);

/// How much a connection with a peer is worth to this node, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerStanding {
    /// Nothing is known of the peer.
    Stranger,
    /// The peer announces that it serves blocks of the same model.
    Server,
    /// The peer has a session here, or had one a short time ago.
    Session,
}

/// The peers that matter.
#[derive(Debug, Default)]
pub struct Peerstore {
    book: Mutex<Book>,
}

/// An open session of a peer, until it is dropped.
#[derive(Debug)]
pub struct SessionMark {
    peerstore: Arc<Peerstore>,
    peer: PeerId,
}

#[derive(Debug, Default)]
struct Book {
    sessions: HashMap<PeerId, SessionPeer>,
    /// Peers of `sessions` by their net.
    nets: HashMap<Net, usize>,
    servers: HashSet<PeerId>,
}

#[derive(Debug)]
struct SessionPeer {
    net: Net,
    open: usize,
    /// When its last session ended.
    idle_since: Instant,
}

impl Peerstore {
    /// A peer of `net` opens a session. Beyond the bounds of the set nothing is remembered of it.
    pub fn session(self: &Arc<Self>, peer: PeerId, net: Net) -> SessionMark {
        self.book.lock().open(peer, net, Instant::now());
        SessionMark { peerstore: Arc::clone(self), peer }
    }

    /// Replaces the servers. Where there are too many, those that were known before stay.
    pub fn set_servers(&self, servers: impl IntoIterator<Item = PeerId>) {
        let servers: HashSet<PeerId> = servers.into_iter().collect();
        let mut book = self.book.lock();
        book.servers.retain(|server| servers.contains(server));
        for server in servers {
            if book.servers.len() >= MAX_KNOWN_SERVERS {
                break;
            }
            book.servers.insert(server);
        }
    }

    /// What a peer is worth now.
    pub fn standing(&self, peer: &PeerId) -> PeerStanding {
        let book = self.book.lock();
        if book.sessions.contains_key(peer) {
            PeerStanding::Session
        } else if book.servers.contains(peer) {
            PeerStanding::Server
        } else {
            PeerStanding::Stranger
        }
    }

    /// Whether a peer with a session was last seen in this net.
    pub fn has_session_in(&self, net: Net) -> bool {
        self.book.lock().nets.contains_key(&net)
    }

    /// Forgets peers whose last session ended [`SESSION_PEER_MEMORY`] ago.
    pub fn sweep(&self, now: Instant) {
        self.book.lock().sweep(now);
    }
}

impl Drop for SessionMark {
    fn drop(&mut self) {
        self.peerstore.book.lock().close(&self.peer, Instant::now());
    }
}

impl Book {
    fn open(&mut self, peer: PeerId, net: Net, now: Instant) {
        let open = self.forget(&peer).map_or(0, |known| known.open);
        let of_net = self.nets.get(&net).copied().unwrap_or(0);
        let is_full = net.is_public() && of_net >= MAX_SESSION_PEERS_PER_NET;
        if is_full || (self.sessions.len() >= MAX_SESSION_PEERS && !self.drop_longest_idle()) {
            return;
        }
        *self.nets.entry(net).or_default() += 1;
        self.sessions.insert(peer, SessionPeer { net, open: open + 1, idle_since: now });
    }

    fn close(&mut self, peer: &PeerId, now: Instant) {
        if let Some(known) = self.sessions.get_mut(peer) {
            known.open = known.open.saturating_sub(1);
            known.idle_since = now;
        }
    }

    fn sweep(&mut self, now: Instant) {
        let is_over = |known: &SessionPeer| {
            known.open == 0 && now.duration_since(known.idle_since) >= SESSION_PEER_MEMORY
        };
        let over: Vec<PeerId> = self
            .sessions
            .iter()
            .filter(|(_, known)| is_over(known))
            .map(|(peer, _)| *peer)
            .collect();
        for peer in over {
            self.forget(&peer);
        }
    }

    /// Makes room; false if all peers have open sessions.
    fn drop_longest_idle(&mut self) -> bool {
        let idle = self.sessions.iter().filter(|(_, known)| known.open == 0);
        let Some(peer) = idle.min_by_key(|(_, known)| known.idle_since).map(|(peer, _)| *peer)
        else {
            return false;
        };
        self.forget(&peer).is_some()
    }

    fn forget(&mut self, peer: &PeerId) -> Option<SessionPeer> {
        let known = self.sessions.remove(peer)?;
        if let Some(count) = self.nets.get_mut(&known.net) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.nets.remove(&known.net);
            }
        }
        Some(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(last: u8) -> Net {
        Net::of([5, 6, 7, last].into())
    }

    #[test]
    fn a_peer_is_known_while_it_has_a_session_and_for_a_time_after_it() {
        let (known, peer) = (Arc::<Peerstore>::default(), PeerId::random());
        assert_eq!(known.standing(&peer), PeerStanding::Stranger);
        let first = known.session(peer, net(1));
        let second = known.session(peer, net(1));
        drop(first);
        let (now, long) = (Instant::now(), SESSION_PEER_MEMORY * 2);
        known.sweep(now + long);
        assert_eq!(known.standing(&peer), PeerStanding::Session, "one session is open");
        drop(second);
        known.sweep(now + SESSION_PEER_MEMORY / 2);
        assert_eq!(known.standing(&peer), PeerStanding::Session, "it may come back");
        assert!(known.has_session_in(net(1)));
        known.sweep(now + long);
        assert_eq!(known.standing(&peer), PeerStanding::Stranger);
        assert!(!known.has_session_in(net(1)));
        assert!(known.book.lock().sessions.is_empty() && known.book.lock().nets.is_empty());
    }

    #[test]
    fn sessions_of_one_public_net_make_few_peers_known_and_push_nobody_out() {
        let (known, other) = (Arc::<Peerstore>::default(), PeerId::random());
        let _other = known.session(other, net(2));
        let peers: Vec<_> = (0..2 * MAX_SESSION_PEERS).map(|_| PeerId::random()).collect();
        for peer in &peers {
            drop(known.session(*peer, net(1)));
        }
        let is_known = |peer: &&PeerId| known.standing(peer) == PeerStanding::Session;
        assert_eq!(peers.iter().filter(is_known).count(), MAX_SESSION_PEERS_PER_NET);
        assert!(is_known(&&other));
    }

    #[test]
    fn a_full_set_forgets_who_is_idle_longest_and_never_who_has_a_session() {
        let known = Arc::<Peerstore>::default();
        let own = Net::of([10, 0, 0, 1].into());
        let (idle, newcomer, refused) = (PeerId::random(), PeerId::random(), PeerId::random());
        drop(known.session(idle, own));
        let marks: Vec<_> =
            (1..MAX_SESSION_PEERS).map(|_| known.session(PeerId::random(), own)).collect();
        let _mark = known.session(newcomer, own);
        assert_eq!(known.standing(&idle), PeerStanding::Stranger);
        assert_eq!(known.standing(&newcomer), PeerStanding::Session);
        let _more = known.session(refused, own);
        assert_eq!(known.standing(&refused), PeerStanding::Stranger, "all others have sessions");
        assert_eq!(known.book.lock().sessions.len(), MAX_SESSION_PEERS);
        drop(marks);
    }

    #[test]
    fn a_flood_of_announced_servers_pushes_none_of_the_known_ones_out() {
        let (known, server) = (Peerstore::default(), PeerId::random());
        known.set_servers([server]);
        let flood: Vec<_> = (0..2 * MAX_KNOWN_SERVERS).map(|_| PeerId::random()).collect();
        known.set_servers(flood.iter().copied().chain([server]));
        assert_eq!(known.standing(&server), PeerStanding::Server);
        assert_eq!(known.book.lock().servers.len(), MAX_KNOWN_SERVERS);
        known.set_servers(flood);
        assert_eq!(
            known.standing(&server),
            PeerStanding::Stranger,
            "it announces nothing any more"
        );
    }
}
