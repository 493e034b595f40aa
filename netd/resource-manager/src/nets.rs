//! The IP nets of connected peers. A PeerID costs nothing, an IP net costs money: shares of memory
//! and of connections count by net. Pure but for the lock around the map.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
};

use libp2p::PeerId;
use parking_lot::Mutex;

use super::addresses::Scope;

/// Who shares a bound: one IPv4 address, or one IPv6 net of 56 bits, as providers give them to
/// customers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Net {
    /// No IP address is known: peers behind relays share it.
    Unknown,
    V4(Ipv4Addr),
    /// The first 56 bits of an IPv6 address.
    V6([u8; 7]),
}

impl Net {
    /// The net of an address; an IPv4 address within IPv6 counts as IPv4.
    #[must_use]
    pub fn of(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V4(ip) => Self::V4(ip),
            IpAddr::V6(ip) => {
                let [a, b, c, d, e, f, g, ..] = ip.octets();
                Self::V6([a, b, c, d, e, f, g])
            }
        }
    }

    /// Whether strangers can be here. Loopback and private nets are the operator's own, and a
    /// whole swarm may live on one such address.
    #[must_use]
    pub fn is_public(&self) -> bool {
        match self {
            Self::Unknown => true,
            Self::V4(ip) => Scope::of((*ip).into()) == Scope::World,
            Self::V6([a, b, c, d, e, f, g]) => {
                let octets = [*a, *b, *c, *d, *e, *f, *g, 0, 0, 0, 0, 0, 0, 0, 0, 1];
                Scope::of(octets.into()) == Scope::World
            }
        }
    }
}

/// The net of each connected peer: the one of its latest connection.
#[derive(Debug, Default)]
pub struct Nets {
    of: Mutex<HashMap<PeerId, Net>>,
}

impl Nets {
    /// The net of a peer, [`Net::Unknown`] unless it is connected without a relay.
    pub fn of(&self, peer: &PeerId) -> Net {
        self.of.lock().get(peer).copied().unwrap_or(Net::Unknown)
    }

    /// A peer is connected from `ip`.
    pub fn connected(&self, peer: PeerId, ip: IpAddr) {
        self.of.lock().insert(peer, Net::of(ip));
    }

    /// The last connection of a peer is closed.
    pub fn gone(&self, peer: &PeerId) {
        self.of.lock().remove(peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Net {
        Net::of(text.parse().expect("address"))
    }

    #[test]
    fn neighbours_of_one_customer_share_a_net() {
        assert_eq!(net("2a00:1:2:3400::1"), net("2a00:1:2:34ff:5::2"));
        assert_ne!(net("2a00:1:2:3400::1"), net("2a00:1:2:3500::1"));
        assert_ne!(net("5.6.7.8"), net("5.6.7.9"));
        assert_eq!(net("::ffff:5.6.7.8"), net("5.6.7.8"));
    }

    #[test]
    fn loopback_and_private_nets_are_not_public() {
        for own in ["127.0.0.1", "10.1.2.3", "192.168.0.1", "100.64.0.1", "fd00::1", "fe80::1"] {
            assert!(!net(own).is_public(), "{own}");
        }
        for public in ["5.6.7.8", "2a00::1"] {
            assert!(net(public).is_public(), "{public}");
        }
    }
}
