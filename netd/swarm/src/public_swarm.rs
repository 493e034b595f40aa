//! The public swarm of Petals, where everybody is a stranger.

/// Its bootstrap peers (`petals/constants.py`, `PUBLIC_INITIAL_PEERS`).
pub const INITIAL_PEERS: [&str; 6] = [
    "/dns/bootstrap1.petals.dev/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/dns/bootstrap2.petals.dev/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
    "/dns6/bootstrap1.petals.dev/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/dns6/bootstrap2.petals.dev/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
    "/ip4/159.89.214.152/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/ip4/159.203.156.48/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
];

/// Whether whoever enters through these peers enters the public swarm: one of its own is among them,
/// at whatever address.
pub fn is_entered_through<P: AsRef<str>>(initial_peers: &[P]) -> bool {
    initial_peers.iter().any(|addr| {
        let given = peer_id(addr.as_ref());
        given.is_some() && INITIAL_PEERS.iter().any(|known| peer_id(known) == given)
    })
}

/// The PeerID at the end of an address.
fn peer_id(addr: &str) -> Option<&str> {
    addr.rsplit_once("/p2p/").map(|(_, peer)| peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_its_peers_at_any_address_is_the_public_swarm() {
        assert!(is_entered_through(&INITIAL_PEERS));
        let peer = "QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5";
        let other = "QmaJ8JYiVHbtmNQTUjBqiGUJZNbXqp8Kd2tBRYDQ8zZ7hU";
        let at = |peer: &str| format!("/ip4/10.0.0.1/tcp/31337/p2p/{peer}");
        assert!(is_entered_through(&[at(other), at(peer)]));
        assert!(!is_entered_through(&[at(other)]));
        assert!(!is_entered_through(&["/ip4/159.203.156.48/tcp/31338"]));
        assert!(!is_entered_through::<String>(&[]));
    }
}
