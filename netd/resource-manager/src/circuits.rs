//! How fast this node relays for others on average: all circuits together. Peers that want more than
//! there is get the same, however many circuits each has; what some leave is for the others. A circuit
//! is a stream that a peer opens with the protocol `HOP`; what goes through it in both directions counts.
//!
//! ```text
//!   peer ── hop stream ── Pace ── relay (libp2p copies) ── stop stream ── destination
//!                          └─ limit of all circuits, with one share for each peer
//! ```
//! libp2p bounds number, life and bytes of circuits and has no rate. The multiplexer sees what this node
//! answers when a protocol is agreed on, and paces the stream from then on: its reader and its writer
//! wait, so that windows fill up and both ends of the circuit slow down.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use libp2p::PeerId;
use parking_lot::Mutex;

use super::upload::{Allowance, UploadLimit, UploadShare};

/// What all circuits relay per second until a node is told otherwise: a quarter of 100 Mbit/s.
pub const DEFAULT_RELAY_BYTES_PER_S: u64 = 100_000_000 / 8 / RELAY_PART_OF_NETWORK;
/// Circuits get so large a part of the network's speed: a quarter.
pub const RELAY_PART_OF_NETWORK: u64 = 4;

/// How much unused time circuits make up for. Hidden states come in bursts, a few MB each time that a
/// client's turn comes to a server; they pass as fast as the network, and on average no more than the rate.
pub const SAVED: Duration = Duration::from_secs(10);

/// The protocol of a circuit, from the peer that asks for it.
const HOP: &[u8] = b"/libp2p/circuit/relay/0.2.0/hop\n";
/// What a listener says before it agrees on a protocol.
const HEADER: &[u8] = b"/multistream/1.0.0\n";
/// What it says to a protocol that it does not speak.
const NOT_AVAILABLE: &[u8] = b"na\n";

/// The rate of all circuits of a node, and who uses it.
#[derive(Debug)]
pub struct CircuitRates {
    bytes_per_s: AtomicU64,
    /// What circuits have carried, both directions.
    carried: AtomicU64,
    users: Mutex<Users>,
}

#[derive(Debug, Default)]
struct Users {
    /// The limit of all circuits, made for the first one.
    limit: Option<UploadLimit>,
    /// The shares of those peers that have a circuit.
    shares: HashMap<PeerId, Weak<UploadShare>>,
}

impl Default for CircuitRates {
    fn default() -> Self {
        Self {
            bytes_per_s: AtomicU64::new(DEFAULT_RELAY_BYTES_PER_S),
            carried: AtomicU64::new(0),
            users: Mutex::default(),
        }
    }
}

impl CircuitRates {
    /// All circuits together relay so many bytes per second from now on.
    pub fn set(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
        let users = self.users.lock();
        if let Some(limit) = &users.limit {
            limit.set_rate(bytes_per_s);
        }
    }

    /// Bytes that circuits have carried, both directions together.
    pub fn carried(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }

    /// The limit of all circuits, and the share of `peer` in it.
    fn of(&self, peer: PeerId) -> (UploadLimit, Arc<UploadShare>) {
        let bytes_per_s = self.bytes_per_s.load(Ordering::Relaxed);
        let mut users = self.users.lock();
        let limit =
            users.limit.get_or_insert_with(|| UploadLimit::saving(bytes_per_s, SAVED)).clone();
        users.shares.retain(|_, share| share.strong_count() > 0);
        let known = users.shares.get(&peer).and_then(Weak::upgrade);
        let share = known.unwrap_or_default();
        users.shares.insert(peer, Arc::downgrade(&share));
        (limit, share)
    }

    #[cfg(test)]
    fn peers(&self) -> usize {
        self.users.lock().shares.len()
    }
}

/// Whose circuits are paced, and by what.
#[derive(Clone, Debug)]
pub struct Relayed {
    pub rates: Arc<CircuitRates>,
    pub peer: PeerId,
}

/// The pace of one stream that a peer opened.
#[derive(Debug)]
pub enum Pace {
    /// No protocol is agreed on yet.
    Negotiating(Relayed, CircuitAnswers),
    /// It is no circuit.
    Free,
    Circuit(Box<Circuit>),
}

/// Reads and writes of a circuit.
#[derive(Debug)]
pub struct Circuit {
    rates: Arc<CircuitRates>,
    reads: Allowance,
    writes: Allowance,
}

impl Circuit {
    fn of(relayed: &Relayed) -> Circuit {
        let (limit, share) = relayed.rates.of(relayed.peer);
        Circuit {
            rates: relayed.rates.clone(),
            reads: Allowance::sharing(Some(limit.clone()), share.clone()),
            writes: Allowance::sharing(Some(limit), share),
        }
    }

    fn read(&mut self, bytes: usize) {
        self.rates.carried.fetch_add(bytes as u64, Ordering::Relaxed);
        self.reads.spend(bytes);
    }

    fn wrote(&mut self, bytes: usize) {
        self.rates.carried.fetch_add(bytes as u64, Ordering::Relaxed);
        self.writes.spend(bytes);
    }
}

impl Pace {
    /// That of a stream whose protocol is not agreed on yet; nobody's are paced without `relayed`.
    pub fn of(relayed: Option<Relayed>) -> Pace {
        relayed.map_or(Pace::Free, |relayed| Pace::Negotiating(relayed, CircuitAnswers::default()))
    }

    /// Bytes that may be read now, of `wanted`.
    pub fn poll_read(&mut self, cx: &Context<'_>, wanted: usize) -> Poll<usize> {
        match self {
            Pace::Circuit(circuit) => circuit.reads.poll_grant(cx, wanted),
            Pace::Free | Pace::Negotiating(..) => Poll::Ready(wanted),
        }
    }

    /// So many bytes were read.
    pub fn read(&mut self, bytes: usize) {
        if let Pace::Circuit(circuit) = self {
            circuit.read(bytes);
        }
    }

    /// Bytes that may be written now, of `wanted`.
    pub fn poll_write(&mut self, cx: &Context<'_>, wanted: usize) -> Poll<usize> {
        match self {
            Pace::Circuit(circuit) => circuit.writes.poll_grant(cx, wanted),
            Pace::Free | Pace::Negotiating(..) => Poll::Ready(wanted),
        }
    }

    /// These bytes were written.
    pub fn wrote(&mut self, bytes: &[u8]) {
        let (relayed, is_hop) = match self {
            Pace::Free => return,
            Pace::Circuit(circuit) => return circuit.wrote(bytes.len()),
            Pace::Negotiating(relayed, answers) => match answers.agreed(bytes) {
                Some(is_hop) => (relayed, is_hop),
                None => return,
            },
        };
        *self = match is_hop {
            true => Pace::Circuit(Box::new(Circuit::of(relayed))),
            false => Pace::Free,
        };
    }
}

/// What this node has answered on a stream, up to the protocol.
#[derive(Debug, Default)]
pub struct CircuitAnswers(Vec<u8>);

impl CircuitAnswers {
    /// Whether the circuit protocol was agreed on; `None` as long as none was.
    fn agreed(&mut self, bytes: &[u8]) -> Option<bool> {
        self.0.extend_from_slice(bytes);
        loop {
            let (message, end) = message(&self.0)?;
            // A list of protocols ends with an empty line.
            let is_answer =
                message != HEADER && message != NOT_AVAILABLE && !message.ends_with(b"\n\n");
            if is_answer {
                return Some(message == HOP);
            }
            self.0.drain(..end);
        }
    }
}

/// The first message, whose length comes before it, and where it ends.
fn message(bytes: &[u8]) -> Option<(&[u8], usize)> {
    let mut length = 0usize;
    for (index, byte) in bytes.iter().take(3).enumerate() {
        length |= usize::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            let (start, end) = (index + 1, index + 1 + length);
            return Some((bytes.get(start..end)?, end));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(messages: &[&[u8]]) -> Vec<u8> {
        let framed = messages.iter().flat_map(|m| [&[m.len() as u8], *m].concat());
        framed.collect()
    }

    #[test]
    fn only_a_stream_that_becomes_a_circuit_is_paced() {
        let cases: [(&[&[u8]], Option<bool>); 6] = [
            (&[HEADER], None),
            (&[HEADER, HOP], Some(true)),
            (&[HEADER, b"DHTProtocol.rpc_find\n"], Some(false)),
            (&[HEADER, NOT_AVAILABLE, NOT_AVAILABLE, HOP], Some(true)),
            (&[HEADER, b"\x05/a/b\n\x20/libp2p/circuit/relay/0.2.0/hop\n\n", HOP], Some(true)),
            (&[HEADER, NOT_AVAILABLE, b"/ipfs/ping/1.0.0\n"], Some(false)),
        ];
        for (messages, wanted) in cases {
            let bytes = framed(messages);
            assert_eq!(CircuitAnswers::default().agreed(&bytes), wanted, "{messages:?}");
            // However it is cut.
            let mut answers = CircuitAnswers::default();
            let found = bytes.iter().map(|byte| answers.agreed(&[*byte])).find(Option::is_some);
            assert_eq!(found.flatten(), wanted, "{messages:?}");
        }
    }

    #[tokio::test]
    async fn circuits_of_a_peer_have_one_share_of_the_limit_of_all() {
        let rates = CircuitRates::default();
        let peer = PeerId::random();
        let (limit, share) = rates.of(peer);
        let (same_limit, same_share) = rates.of(peer);
        assert!(limit.is(&same_limit) && Arc::ptr_eq(&share, &same_share));
        let (same_limit, other_share) = rates.of(PeerId::random());
        assert!(limit.is(&same_limit) && !Arc::ptr_eq(&share, &other_share));
    }

    #[tokio::test]
    async fn peers_are_forgotten_with_their_circuits() {
        let rates = CircuitRates::default();
        let kept = rates.of(PeerId::random());
        for _ in 0..1000 {
            drop(rates.of(PeerId::random()));
        }
        assert!(rates.peers() <= 2, "{} peers", rates.peers());
        drop(kept);
    }
}
