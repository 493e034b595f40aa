//! What an address says of where its peer is: an IP address, how far away that is. Pure.

use std::net::{IpAddr, SocketAddr};

use libp2p::{Multiaddr, multiaddr::Protocol};

/// The IP address that an address starts with.
pub fn ip_of(addr: &Multiaddr) -> Option<IpAddr> {
    match addr.iter().next()? {
        Protocol::Ip4(ip) => Some(ip.into()),
        Protocol::Ip6(ip) => Some(ip.to_canonical()),
        _ => None,
    }
}

/// The fixed TCP port and IP address of a listen address.
pub fn socket_addr(addr: &Multiaddr) -> Option<SocketAddr> {
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

/// The scope of an address that starts with an IP address; names have none.
pub fn scope(addr: &Multiaddr) -> Option<Scope> {
    match addr.iter().next()? {
        Protocol::Ip4(ip) => Some(Scope::of(ip.into())),
        Protocol::Ip6(ip) => Some(Scope::of(ip.into())),
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
