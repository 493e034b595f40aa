//! Which silent sessions give up their memory to a request for which there is none. Pure: what is
//! held and how long it was silent are passed in.
//!
//! The fair share of an IP net is the budget divided by the nets that hold or want memory, and that
//! of a peer is its net's share divided by the peers of that net. A session gives way when it was
//! silent for [`MAX_SILENCE`], its net holds more than its share, and the net of the request would
//! not hold more than it. Within the net of the request, the same holds between peers. So a
//! request never makes its own side the new hoarder, and a client that keeps its share may think as
//! long as it likes.
//!
//! The largest net gives first, in it the largest peer, of its sessions the one that was silent
//! longest. If all that may be asked for is not enough, nobody gives anything.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use p2p::{Net, PeerId};

/// A session that was silent for so long gives way. The pause between two steps of a client that
/// computes is shorter.
pub const MAX_SILENCE: Duration = Duration::from_secs(5);

/// What one session holds.
#[derive(Clone, Copy, Debug)]
pub struct Holding {
    /// Where its peer is connected from.
    pub net: Net,
    pub peer: PeerId,
    /// Token-blocks.
    pub held: u64,
    /// Time since its last answer; zero while it has work, or cannot be ended.
    pub silent: Duration,
}

/// A request that was not granted for lack of memory.
#[derive(Clone, Copy, Debug)]
pub struct KvClaim {
    /// Where its peer is connected from.
    pub net: Net,
    pub peer: PeerId,
    /// Token-blocks that it wants.
    pub asked: u64,
    /// Token-blocks that must come free for it.
    pub missing: u64,
}

/// The places in `holdings` of the sessions that must end for `claim`, out of a budget of
/// token-blocks; none if that is not enough.
pub fn choose(holdings: &[Holding], claim: &KvClaim, budget: u64) -> Vec<usize> {
    let mut accounts = Accounts::of(holdings, claim, budget);
    let is_silent = |at: &usize| holdings[*at].silent >= MAX_SILENCE && holdings[*at].held > 0;
    let mut candidates: Vec<usize> = (0..holdings.len()).filter(is_silent).collect();
    candidates.sort_by_key(|at| holdings[*at].silent);
    let (mut chosen, mut freed) = (Vec::new(), 0);
    while freed < claim.missing {
        let ranks = candidates.iter().enumerate();
        let ranks = ranks.filter(|(_, at)| accounts.must_give(&holdings[**at], claim));
        let ranks = ranks.map(|(rank, at)| (accounts.held_around(&holdings[*at]), rank));
        let Some((_, rank)) = ranks.max() else {
            return Vec::new();
        };
        let at = candidates.remove(rank);
        accounts.release(&holdings[at]);
        freed += holdings[at].held;
        chosen.push(at);
    }
    chosen
}

/// What nets and peers hold.
struct Accounts {
    nets: HashMap<Net, u64>,
    peers: HashMap<PeerId, u64>,
    net_share: u64,
    peer_share: u64,
}

impl Accounts {
    fn of(holdings: &[Holding], claim: &KvClaim, budget: u64) -> Accounts {
        let mut nets = HashMap::from([(claim.net, 0)]);
        let mut peers = HashMap::from([(claim.peer, 0)]);
        let mut neighbours = HashMap::from([(claim.peer, 0)]);
        for holding in holdings {
            *nets.entry(holding.net).or_default() += holding.held;
            *peers.entry(holding.peer).or_default() += holding.held;
            if holding.net == claim.net {
                neighbours.insert(holding.peer, 0);
            }
        }
        let net_share = budget / nets.len() as u64;
        let peer_share = net_share / neighbours.len() as u64;
        Accounts { nets, peers, net_share, peer_share }
    }

    /// Whether the side of `holding` holds more than its share, and at least what that of `claim`
    /// would hold.
    fn must_give(&self, holding: &Holding, claim: &KvClaim) -> bool {
        let (held, own, share) = match holding.net == claim.net {
            false => (get(&self.nets, holding.net), get(&self.nets, claim.net), self.net_share),
            true => (get(&self.peers, holding.peer), get(&self.peers, claim.peer), self.peer_share),
        };
        holding.peer != claim.peer && held > share && own.saturating_add(claim.asked) <= held
    }

    fn held_around(&self, holding: &Holding) -> (u64, u64) {
        (get(&self.nets, holding.net), get(&self.peers, holding.peer))
    }

    fn release(&mut self, holding: &Holding) {
        for held in [self.nets.get_mut(&holding.net), self.peers.get_mut(&holding.peer)] {
            held.into_iter().for_each(|held| *held -= holding.held);
        }
    }
}

fn get<K: Eq + Hash>(of: &HashMap<K, u64>, key: K) -> u64 {
    of.get(&key).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUDGET: u64 = 1000;

    fn net(last: u8) -> Net {
        Net::of([203, 0, 113, last].into())
    }

    fn holding(net: Net, peer: PeerId, held: u64, seconds: u64) -> Holding {
        Holding { net, peer, held, silent: Duration::from_secs(seconds) }
    }

    fn claim(net: Net, asked: u64, missing: u64) -> KvClaim {
        KvClaim { net, peer: PeerId::random(), asked, missing }
    }

    #[test]
    fn one_peer_with_all_the_memory_gives_what_is_above_its_share_longest_silent_first() {
        let hoarder = PeerId::random();
        let held: Vec<_> = (0..10).map(|n| holding(net(1), hoarder, 100, 60 + n)).collect();
        assert_eq!(choose(&held, &claim(net(2), 200, 200), BUDGET), [9, 8]);
        assert_eq!(choose(&held, &claim(net(1), 200, 200), BUDGET), [9, 8], "in its net");
        assert_eq!(choose(&held, &claim(net(2), 500, 500), BUDGET).len(), 5);
        assert!(choose(&held, &claim(net(2), 501, 501), BUDGET).is_empty(), "over its own share");
        let own = KvClaim { peer: hoarder, ..claim(net(1), 100, 100) };
        assert!(choose(&held, &own, BUDGET).is_empty(), "its own");
    }

    #[test]
    fn peer_ids_of_one_net_have_one_share_together() {
        let held: Vec<_> = (0..10).map(|_| holding(net(1), PeerId::random(), 100, 60)).collect();
        assert_eq!(choose(&held, &claim(net(2), 400, 400), BUDGET).len(), 4);
        // Among themselves each has its own.
        assert!(choose(&held, &claim(net(1), 400, 400), BUDGET).is_empty());
        assert_eq!(choose(&held, &claim(net(1), 90, 90), BUDGET).len(), 1);
    }

    #[test]
    fn who_works_or_was_silent_for_a_moment_only_gives_nothing() {
        let hoarder = PeerId::random();
        for seconds in [0, 4] {
            let held = [holding(net(1), hoarder, 1000, seconds)];
            assert!(choose(&held, &claim(net(2), 100, 100), BUDGET).is_empty());
        }
        let held = [holding(net(1), hoarder, 1000, 5)];
        assert_eq!(choose(&held, &claim(net(2), 100, 100), BUDGET), [0]);
    }

    #[test]
    fn who_has_its_share_may_think_as_long_as_it_likes() {
        let (one, two) = (PeerId::random(), PeerId::random());
        let held = [holding(net(1), one, 330, 600), holding(net(2), two, 670, 0)];
        assert!(choose(&held, &claim(net(3), 100, 100), BUDGET).is_empty());
    }

    proptest! {
        /// What is given is enough, comes from silent sessions, and from nets that held at least
        /// what the claim's net will hold.
        #[test]
        fn memory_goes_from_the_larger_to_the_smaller(
            held in prop::collection::vec((0u8..4, 0usize..4, 0u64..200, 0u64..10), 0..20),
            from in 0u8..5, asked in 1u64..600, missing in 1u64..600,
        ) {
            let peers: Vec<Vec<PeerId>> =
                (0..4).map(|_| (0..4).map(|_| PeerId::random()).collect()).collect();
            let held: Vec<_> = held
                .iter()
                .map(|&(at, peer, held, silent)| holding(net(at), peers[at as usize][peer], held, silent))
                .collect();
            let claim = claim(net(from), asked, missing.min(asked));
            let chosen = choose(&held, &claim, BUDGET);
            if !chosen.is_empty() {
                prop_assert!(chosen.iter().map(|at| held[*at].held).sum::<u64>() >= claim.missing);
            }
            let of_net = |at: &mut dyn Iterator<Item = usize>, net: Net| {
                at.map(|at| held[at]).filter(|h| h.net == net).map(|h| h.held).sum::<u64>()
            };
            let given = of_net(&mut chosen.iter().copied(), claim.net);
            let own = of_net(&mut (0..held.len()), claim.net) - given + asked;
            for at in chosen {
                prop_assert!(held[at].silent >= MAX_SILENCE);
                if held[at].net != claim.net {
                    prop_assert!(of_net(&mut (0..held.len()), held[at].net) >= own);
                }
            }
        }
    }
}
