//! What can be read from an address: its peer, its IP address, how far away that is. Pure.

use std::net::{IpAddr, SocketAddr};

use libp2p::{Multiaddr, PeerId, multiaddr::Protocol};

/// The peer that an address names at its end.
pub(super) fn peer_of(addr: &Multiaddr) -> Option<PeerId> {
    match addr.iter().last() {
        Some(Protocol::P2p(peer)) => Some(peer),
        _ => None,
    }
}

/// The address alone; routing tables keep the peer beside it.
pub(super) fn without_peer(mut addr: Multiaddr) -> Multiaddr {
    if peer_of(&addr).is_some() {
        addr.pop();
    }
    addr
}

/// Whether an address starts with an IP address that the whole world can dial.
pub(super) fn is_public(addr: &Multiaddr) -> bool {
    scope(addr) == Some(Scope::World)
}

/// Whether an address leads through a relay.
pub(super) fn is_relayed(addr: &Multiaddr) -> bool {
    addr.iter().any(|part| part == Protocol::P2pCircuit)
}

/// The IP address that an address starts with.
pub fn ip_of(addr: &Multiaddr) -> Option<IpAddr> {
    match addr.iter().next()? {
        Protocol::Ip4(ip) => Some(ip.into()),
        Protocol::Ip6(ip) => Some(ip.to_canonical()),
        _ => None,
    }
}

/// Where an IP address means the same machine, from the nearest to the farthest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// On this machine: loopback.
    Machine,
    /// On a net of its own: private and link-local addresses, those behind a carrier's NAT.
    Site,
    /// Everywhere.
    World,
}

impl Scope {
    /// The scope of an IP address.
    #[must_use]
    pub fn of(ip: IpAddr) -> Scope {
        let (loopback, private) = match ip {
            IpAddr::V4(ip) => {
                let carrier_nat = ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64;
                let private = ip.is_private() || ip.is_link_local() || carrier_nat;
                (ip.is_loopback(), private)
            }
            IpAddr::V6(ip) => {
                (ip.is_loopback(), ip.is_unique_local() || ip.is_unicast_link_local())
            }
        };
        match (loopback, private) {
            (true, _) => Scope::Machine,
            (false, true) => Scope::Site,
            (false, false) => Scope::World,
        }
    }
}

/// Whether an announced address could be dialled. An address of a narrower scope than the one that
/// the peer is seen at would be somebody else: our own loopback, or a machine of our own site. As
/// in p2pd.
pub(super) fn is_dialable(addr: &Multiaddr, seen_at: Option<Scope>) -> bool {
    let unusable = addr.iter().any(|part| match part {
        Protocol::Ip4(ip) => ip.is_unspecified(),
        Protocol::Ip6(ip) => ip.is_unspecified(),
        Protocol::Tcp(port) | Protocol::Udp(port) => port == 0,
        _ => false,
    });
    let too_near = matches!((scope(addr), seen_at), (Some(own), Some(seen)) if own < seen);
    !unusable && !too_near && !addr.is_empty()
}

/// The scope of an address that starts with an IP address; names have none.
pub(super) fn scope(addr: &Multiaddr) -> Option<Scope> {
    match addr.iter().next()? {
        Protocol::Ip4(ip) => Some(Scope::of(ip.into())),
        Protocol::Ip6(ip) => Some(Scope::of(ip.into())),
        _ => None,
    }
}

/// The fixed TCP port and IP address of a listen address.
pub(super) fn socket_addr(addr: &Multiaddr) -> Option<SocketAddr> {
    let mut parts = addr.iter();
    let ip = match parts.next()? {
        Protocol::Ip4(ip) => IpAddr::V4(ip),
        Protocol::Ip6(ip) => IpAddr::V6(ip),
        _ => return None,
    };
    match parts.next()? {
        Protocol::Tcp(port) if port != 0 => Some(SocketAddr::new(ip, port)),
        _ => None,
    }
}

/// Whether an address stands for every IPv6 address of the machine.
pub(super) fn is_ip6_wildcard(addr: &Multiaddr) -> bool {
    matches!(addr.iter().next(), Some(Protocol::Ip6(ip)) if ip.is_unspecified())
}
