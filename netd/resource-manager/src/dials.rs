//! Which addresses are dialled. Peers decide where a node dials: they announce addresses, answer
//! lookups, and name next servers. So every dial of the node passes here, whoever asked for it.
//! Pure but for the lock around the attempts.
//!
//! ```text
//!   no unicast address                                   never
//!   the operator's own initial peers                     always
//!   nets nearer than Traversal::nearest                  never: the machine and the site are no business of strangers
//!   ports of system services but 80 and 443              never
//!   ports that did not answer as a peer, within a minute  three of one peer and IP address, eight of one public IP net
//! ```

use std::{
    collections::{HashMap, HashSet},
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use libp2p::{Multiaddr, PeerId, multiaddr::Protocol};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{
    addresses::{Scope, socket_addr},
    nets::Net,
};

/// How long a port counts that did not answer as a peer does.
pub const MEMORY: Duration = Duration::from_secs(60);
/// Such ports of one peer at one IP address: a restarted server has another port.
pub const MAX_PORTS_PER_PEER: usize = 3;
/// Such ports of one public IP net: several servers may be behind one NAT.
pub const MAX_PORTS_PER_NET: usize = 8;
/// Peers and nets with such ports.
pub const MAX_TARGETS: usize = 4096;
/// Ports below are those of system services.
const FIRST_USER_PORT: u16 = 1024;
/// Ports of system services at which servers listen that must get through firewalls.
const WEB_PORTS: [u16; 2] = [80, 443];

/// Why an address is not dialled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialRefusal {
    #[error("{0} is not the address of one machine")]
    NoUnicast(IpAddr),
    #[error(
        "{0} is on a private net, and this node dials public addresses only; --dial_private_nets on allows it"
    )]
    TooNear(IpAddr),
    #[error(
        "port {0} is one of a system service; peers listen at {FIRST_USER_PORT} or above, 80 or 443"
    )]
    SystemPort(u16),
    #[error(
        "{count} ports of {target} did not answer as a peer within the last {} s: no other one is dialled before the minute is over",
        MEMORY.as_secs()
    )]
    TooManyPorts { target: Target, count: usize },
    #[error("too many addresses were dialled in vain within the last minute")]
    TooManyTargets,
}

/// Whose ports count together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    Peer(PeerId, IpAddr),
    Net(Net),
}

impl Target {
    fn max_ports(&self) -> usize {
        match self {
            Target::Peer(..) => MAX_PORTS_PER_PEER,
            Target::Net(_) => MAX_PORTS_PER_NET,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Peer(peer, ip) => write!(f, "{peer} at {ip}"),
            Target::Net(net) => write!(f, "the net {net:?}"),
        }
    }
}

/// Judges dials; one for each node.
#[derive(Debug)]
pub struct DialGate {
    nearest: Scope,
    initial_peers: HashSet<SocketAddr>,
    silent: Mutex<HashMap<Target, Vec<SilentPort>>>,
}

/// A port that has not answered as a peer does.
#[derive(Debug)]
struct SilentPort {
    port: u16,
    last: Instant,
}

/// A dial under way.
#[derive(Debug)]
pub struct DialAttempt {
    gate: Arc<DialGate>,
    socket: SocketAddr,
    targets: Vec<Target>,
}

impl DialGate {
    /// Nets nearer than `nearest` are reached at `initial_peers` alone.
    pub fn new(nearest: Scope, initial_peers: &[Multiaddr]) -> Arc<DialGate> {
        let initial_peers = initial_peers.iter().filter_map(socket_addr).collect();
        Arc::new(DialGate { nearest, initial_peers, silent: Mutex::default() })
    }

    /// Admits a dial of `addr`, which may end in `/p2p/ID`. `None`: it has no IP address and port,
    /// or is the operator's own, and is not counted.
    pub fn admit(
        self: &Arc<Self>,
        addr: &Multiaddr,
        now: Instant,
    ) -> Result<Option<DialAttempt>, DialRefusal> {
        let Some(socket) = socket_addr(addr).map(canonical) else {
            return Ok(None);
        };
        if self.initial_peers.contains(&socket) {
            return Ok(None);
        }
        self.judge(socket)?;
        let peer = addr.iter().find_map(|part| match part {
            Protocol::P2p(peer) => Some(Target::Peer(peer, socket.ip())),
            _ => None,
        });
        let net = Some(Net::of(socket.ip())).filter(Net::is_public).map(Target::Net);
        let targets: Vec<Target> = peer.into_iter().chain(net).collect();
        let mut silent = self.silent.lock();
        if silent.len() >= MAX_TARGETS {
            silent.retain(|_, ports| ports.iter().any(|port| port.last + MEMORY > now));
        }
        for target in &targets {
            check(&mut silent, target, socket, now)?;
        }
        for target in &targets {
            note(silent.entry(*target).or_default(), socket.port(), now);
        }
        Ok(Some(DialAttempt { gate: Arc::clone(self), socket, targets }))
    }

    /// What needs no memory.
    fn judge(&self, socket: SocketAddr) -> Result<(), DialRefusal> {
        let (ip, port) = (socket.ip(), socket.port());
        if !is_unicast(ip) {
            return Err(DialRefusal::NoUnicast(ip));
        }
        if Scope::of(ip) < self.nearest {
            return Err(DialRefusal::TooNear(ip));
        }
        if port < FIRST_USER_PORT && !WEB_PORTS.contains(&port) {
            return Err(DialRefusal::SystemPort(port));
        }
        Ok(())
    }
}

impl DialAttempt {
    /// A peer answered.
    pub fn succeeded(self) {
        let mut silent = self.gate.silent.lock();
        for target in &self.targets {
            if let Some(ports) = silent.get_mut(target) {
                ports.retain(|known| known.port != self.socket.port());
                if ports.is_empty() {
                    silent.remove(target);
                }
            }
        }
    }
}

fn check(
    silent: &mut HashMap<Target, Vec<SilentPort>>,
    target: &Target,
    socket: SocketAddr,
    now: Instant,
) -> Result<(), DialRefusal> {
    let targets = silent.len();
    let Some(ports) = silent.get_mut(target) else {
        return if targets < MAX_TARGETS { Ok(()) } else { Err(DialRefusal::TooManyTargets) };
    };
    ports.retain(|port| port.last + MEMORY > now);
    match ports.len() {
        count if count < target.max_ports() => Ok(()),
        _ if ports.iter().any(|known| known.port == socket.port()) => Ok(()),
        count => Err(DialRefusal::TooManyPorts { target: *target, count }),
    }
}

fn note(ports: &mut Vec<SilentPort>, port: u16, now: Instant) {
    match ports.iter_mut().find(|known| known.port == port) {
        Some(known) => known.last = now,
        None => ports.push(SilentPort { port, last: now }),
    }
}

/// The same socket; an IPv4 address within IPv6 is the IPv4 address.
fn canonical(socket: SocketAddr) -> SocketAddr {
    SocketAddr::new(socket.ip().to_canonical(), socket.port())
}

/// Whether an address can be that of one machine.
fn is_unicast(ip: IpAddr) -> bool {
    match ip {
        // 0.0.0.0/8 is this net, 240.0.0.0/4 is reserved and ends in the broadcast address.
        IpAddr::V4(v4) => !v4.is_multicast() && v4.octets()[0] != 0 && v4.octets()[0] < 240,
        IpAddr::V6(v6) => !v6.is_multicast() && !v6.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> Multiaddr {
        text.parse().unwrap()
    }

    fn at(ip: &str, port: u16, peer: PeerId) -> Multiaddr {
        addr(&format!("/ip4/{ip}/tcp/{port}/p2p/{peer}"))
    }

    #[test]
    fn private_nets_and_what_is_no_machine_are_dialled_for_the_operator_alone() {
        let own = addr("/ip4/192.168.1.2/tcp/31337");
        let gate = DialGate::new(Scope::World, std::slice::from_ref(&own));
        let refused = |text: &str| gate.admit(&addr(text), Instant::now()).err();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        for text in ["127.0.0.1", "10.0.0.1", "192.168.1.2", "169.254.169.254", "100.64.0.1"] {
            let too_near = Some(DialRefusal::TooNear(ip(text)));
            assert_eq!(refused(&format!("/ip4/{text}/tcp/4001")), too_near, "{text}");
        }
        for text in ["::1", "fe80::1", "fd00::1"] {
            let too_near = Some(DialRefusal::TooNear(ip(text)));
            assert_eq!(refused(&format!("/ip6/{text}/tcp/4001")), too_near, "{text}");
        }
        let within = refused("/ip6/::ffff:10.0.0.1/tcp/4001");
        assert_eq!(within, Some(DialRefusal::TooNear(ip("10.0.0.1"))));
        for text in ["0.1.2.3", "224.0.0.1", "240.0.0.1", "255.255.255.255"] {
            let none = Some(DialRefusal::NoUnicast(ip(text)));
            assert_eq!(refused(&format!("/ip4/{text}/tcp/4001")), none, "{text}");
        }
        assert_eq!(refused("/ip4/203.0.113.1/tcp/4001"), None);
        assert!(matches!(gate.admit(&own, Instant::now()), Ok(None)));
        let everywhere = DialGate::new(Scope::Machine, &[]);
        for text in ["/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.1/tcp/4001", "/ip6/::1/tcp/4001"] {
            assert!(everywhere.admit(&addr(text), Instant::now()).is_ok(), "{text}");
        }
        assert!(everywhere.admit(&addr("/ip4/224.0.0.1/tcp/4001"), Instant::now()).is_err());
    }

    #[test]
    fn ports_of_system_services_are_not_dialled() {
        let gate = DialGate::new(Scope::Machine, &[addr("/ip4/203.0.113.9/tcp/25")]);
        let judged = |text: &str| gate.admit(&addr(text), Instant::now()).map(drop);
        assert_eq!(judged("/ip4/203.0.113.1/tcp/25"), Err(DialRefusal::SystemPort(25)));
        for port in [80, 443, 1024, 65535] {
            assert_eq!(judged(&format!("/ip4/203.0.113.1/tcp/{port}")), Ok(()));
        }
        assert_eq!(judged("/ip4/203.0.113.9/tcp/25"), Ok(()), "the operator's own");
    }

    #[test]
    fn a_peer_has_few_ports_that_do_not_answer_and_others_lose_nothing() {
        let gate = DialGate::new(Scope::Machine, &[]);
        let (liar, honest, now) = (PeerId::random(), PeerId::random(), Instant::now());
        for port in 4001..=4003 {
            assert!(gate.admit(&at("127.0.0.1", port, liar), now).is_ok());
        }
        let refused = gate.admit(&at("127.0.0.1", 4004, liar), now).unwrap_err();
        assert!(
            refused.to_string().starts_with(&format!("3 ports of {liar} at 127.0.0.1")),
            "{refused}"
        );
        assert!(gate.admit(&at("127.0.0.1", 4001, liar), now).is_ok(), "the same again");
        assert!(gate.admit(&at("127.0.0.1", 4004, honest), now).is_ok());
        // One answers after all.
        gate.admit(&at("127.0.0.1", 4002, liar), now).unwrap().unwrap().succeeded();
        assert!(gate.admit(&at("127.0.0.1", 4004, liar), now).is_ok());
        assert!(gate.admit(&at("127.0.0.1", 4005, liar), now).is_err());
        assert!(gate.admit(&at("127.0.0.1", 4005, liar), now + MEMORY).is_ok());
    }

    #[test]
    fn peer_ids_without_end_aim_at_few_ports_of_a_public_net() {
        let gate = DialGate::new(Scope::World, &[]);
        let now = Instant::now();
        let dial = |port| gate.admit(&at("203.0.113.7", port, PeerId::random()), now).map(drop);
        let dialled = (4001..4017).filter(|port| dial(*port).is_ok()).count();
        assert_eq!(dialled, MAX_PORTS_PER_NET);
        assert_eq!(dial(4001), Ok(()), "the same again");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let gate = DialGate::new(Scope::Machine, &[]);
        let now = Instant::now();
        let dial = |now| gate.admit(&at("127.0.0.1", 4001, PeerId::random()), now).map(drop);
        let dialled = (0..MAX_TARGETS + 10).filter(|_| dial(now).is_ok()).count();
        assert_eq!(dialled, MAX_TARGETS);
        assert_eq!(dial(now), Err(DialRefusal::TooManyTargets));
        assert_eq!(dial(now + MEMORY), Ok(()));
    }
}
