//! What can be read from an address: its peer, whether it leads through a relay, whether it could be
//! dialled. Pure.

use libp2p::{Multiaddr, PeerId, multiaddr::Protocol};
use resource_manager::addresses::{Scope, scope};

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

/// Whether an address stands for every IPv6 address of the machine.
pub(super) fn is_ip6_wildcard(addr: &Multiaddr) -> bool {
    matches!(addr.iter().next(), Some(Protocol::Ip6(ip)) if ip.is_unspecified())
}
