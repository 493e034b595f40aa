//! How much of the KV memory a peer may take while others want some, too. Pure: the time is passed
//! in.
//!
//! The fair share of an IP net is the budget divided by the number of nets with peers that hold, want or
//! were lately refused memory, and that of a peer is its part of the share of its net: a PeerID costs
//! nothing. On private nets, where nobody is a stranger, each peer counts as a net. A peer may take more, and alone it may take everything, but not while
//! another has a *claim*: a request that waits, or was refused for lack of memory within
//! [`CLAIM_LIFE`] (Petals' clients never wait, they come again), and that fits into the
//! share of its own peer. So a client that is alone never notices, and whoever holds more than its
//! share gets no more until the others were served. What is held is taken away from silent sessions
//! alone ([`super::eviction`]).
//!
//! Besides, no peer ever holds more than the operator's `--max_kv_share` of the budget.

use std::collections::HashMap;
use std::fmt;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use p2p::{Net, PeerId};
use tokio::time::Instant;

/// How long a refused request counts as one that waits: Petals' clients try again within seconds,
/// and a minute at most.
pub const CLAIM_LIFE: Duration = Duration::from_secs(60);

/// Most peers that are remembered for a refused request; peers that hold or wait are bounded by
/// their sessions.
pub const MAX_REFUSED: usize = 1024;

/// Tells where peers are connected from.
#[derive(Clone)]
pub struct NetOf(Arc<dyn Fn(&PeerId) -> Net + Send + Sync>);

impl NetOf {
    /// Asks `net_of`.
    pub fn new(net_of: impl Fn(&PeerId) -> Net + Send + Sync + 'static) -> NetOf {
        NetOf(Arc::new(net_of))
    }

    /// The net of a peer.
    pub fn net(&self, peer: &PeerId) -> Net {
        (self.0)(peer)
    }

    /// Who shares with the peer.
    fn company(&self, peer: PeerId) -> Company {
        let net = self.net(&peer);
        if net.is_public() { Company::Net(net) } else { Company::Peer(peer) }
    }
}

/// Nobody is a stranger.
impl Default for NetOf {
    fn default() -> NetOf {
        NetOf::new(|_| Net::V4(Ipv4Addr::LOCALHOST))
    }
}

impl fmt::Debug for NetOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NetOf")
    }
}

/// Who has one fair share together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Company {
    Net(Net),
    Peer(PeerId),
}

/// What a peer holds and wants, in token-blocks.
#[derive(Debug, Default)]
struct Account {
    held: u64,
    waiting: Vec<u64>,
    refused: Option<(u64, Instant)>,
}

impl Account {
    /// Its smallest wish.
    fn wish(&self) -> Option<u64> {
        let refused = self.refused.map(|(asked, _)| asked);
        self.waiting.iter().copied().chain(refused).min()
    }
}

/// Accounts of all peers.
#[derive(Debug)]
pub struct Shares {
    budget: u64,
    cap: u64,
    net_of: NetOf,
    accounts: HashMap<PeerId, Account>,
}

/// Why a request is not granted although there may be memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// It alone is more than any peer may hold.
    Cap(u64),
    /// With what its peer holds it is more than it may have now: held and allowed.
    Share(u64, u64),
}

/// The shares at one moment.
#[derive(Debug)]
pub struct Moment<'a> {
    shares: &'a Shares,
    /// How many peers are in each company.
    companies: HashMap<Company, usize>,
    claims: usize,
}

impl Shares {
    /// Shares of `budget` token-blocks, of which one peer may hold at most the part `max_share`, among peers
    /// that are where `net_of` says.
    pub fn new(budget: u64, max_share: f64, net_of: NetOf) -> Shares {
        let cap = (budget as f64 * max_share.clamp(0.0, 1.0)).ceil();
        Shares { budget, cap: (cap as u64).min(budget), net_of, accounts: HashMap::new() }
    }

    /// `peer` was given memory.
    pub fn granted(&mut self, peer: PeerId, asked: u64) {
        let account = self.accounts.entry(peer).or_default();
        account.held += asked;
        account.refused = None;
    }

    /// `peer` gave memory back.
    pub fn given_back(&mut self, peer: PeerId, held: u64) {
        if let Some(account) = self.accounts.get_mut(&peer) {
            account.held = account.held.saturating_sub(held);
        }
    }

    /// A request of `peer` waits.
    pub fn waits(&mut self, peer: PeerId, asked: u64) {
        self.accounts.entry(peer).or_default().waiting.push(asked);
    }

    /// A request of `peer` waits no more.
    pub fn waits_no_more(&mut self, peer: PeerId, asked: u64) {
        if let Some(account) = self.accounts.get_mut(&peer)
            && let Some(at) = account.waiting.iter().position(|other| *other == asked)
        {
            account.waiting.swap_remove(at);
        }
    }

    /// A request of `peer` was refused; the smallest of late counts.
    pub fn refused(&mut self, peer: PeerId, asked: u64, now: Instant) {
        let known = self.accounts.contains_key(&peer);
        let refused = self.accounts.values().filter(|a| a.refused.is_some());
        if !known && refused.count() >= MAX_REFUSED {
            return;
        }
        let account = self.accounts.entry(peer).or_default();
        let before = account.refused.map_or(asked, |(before, _)| before);
        account.refused = Some((asked.min(before), now + CLAIM_LIFE));
    }

    /// The shares now, as they are with `asking` among those who want memory.
    pub fn at(&mut self, now: Instant, asking: Option<PeerId>) -> Moment<'_> {
        self.accounts.retain(|_, account| {
            account.refused = account.refused.filter(|(_, until)| *until > now);
            account.held > 0 || account.wish().is_some()
        });
        let unknown = asking.filter(|peer| !self.accounts.contains_key(peer));
        let mut companies = HashMap::new();
        for peer in self.accounts.keys().copied().chain(unknown) {
            *companies.entry(self.net_of.company(peer)).or_default() += 1;
        }
        let mut moment = Moment { shares: self, companies, claims: 0 };
        let accounts = moment.shares.accounts.iter();
        moment.claims =
            accounts.filter(|(peer, account)| moment.has_claim(**peer, account)).count();
        moment
    }
}

impl Moment<'_> {
    /// Whether `peer` may take `asked` more.
    pub fn may_take(&self, peer: PeerId, asked: u64) -> Result<(), Over> {
        let (held, cap) = (self.held(peer), self.shares.cap);
        let after = held.saturating_add(asked);
        // What is more than the whole budget is for the pool to refuse.
        if cap < self.shares.budget && asked > cap {
            return Err(Over::Cap(cap));
        }
        if cap < self.shares.budget && after > cap {
            return Err(Over::Share(held, cap));
        }
        let own = self.shares.accounts.get(&peer);
        let own_claim = usize::from(own.is_some_and(|account| self.has_claim(peer, account)));
        let fair = self.fair(peer);
        match after > fair && self.claims > own_claim {
            true => Err(Over::Share(held, fair)),
            false => Ok(()),
        }
    }

    /// Whether a request of `peer` that others passed too often may hold them up: unless it wants
    /// more than its share on top of what it holds.
    pub fn may_hold_up(&self, peer: PeerId, asked: u64) -> bool {
        let held = self.held(peer);
        held == 0 || held.saturating_add(asked) <= self.fair(peer)
    }

    /// The fair share of a peer.
    fn fair(&self, peer: PeerId) -> u64 {
        let peers = self.companies.get(&self.shares.net_of.company(peer)).copied().unwrap_or(1);
        let of_company = self.shares.budget / self.companies.len().max(1) as u64;
        (of_company / peers.max(1) as u64).min(self.shares.cap)
    }

    fn held(&self, peer: PeerId) -> u64 {
        self.shares.accounts.get(&peer).map_or(0, |account| account.held)
    }

    fn has_claim(&self, peer: PeerId, account: &Account) -> bool {
        let fits = |wish: u64| account.held.saturating_add(wish) <= self.fair(peer);
        account.wish().is_some_and(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers() -> [PeerId; 3] {
        std::array::from_fn(|_| PeerId::random())
    }

    #[test]
    fn a_lone_peer_may_take_everything_also_after_it_was_refused() {
        let (mut shares, now, [one, ..]) =
            (Shares::new(1000, 1.0, NetOf::default()), Instant::now(), peers());
        shares.granted(one, 900);
        shares.refused(one, 200, now);
        shares.waits(one, 150);
        assert_eq!(shares.at(now, Some(one)).may_take(one, 100), Ok(()));
        assert_eq!(shares.at(now, Some(one)).may_take(one, 1001), Ok(()));
    }

    #[test]
    fn while_another_has_a_claim_nobody_grows_beyond_its_share() {
        let (mut shares, now, [one, two, three]) =
            (Shares::new(1000, 1.0, NetOf::default()), Instant::now(), peers());
        shares.granted(one, 600);
        shares.granted(two, 100);
        // Nobody wants anything.
        assert_eq!(shares.at(now, Some(one)).may_take(one, 300), Ok(()));
        shares.refused(two, 400, now);
        let moment = shares.at(now, Some(one));
        assert_eq!(moment.may_take(one, 1), Err(Over::Share(600, 500)));
        assert_eq!(moment.may_take(two, 400), Ok(()));
        // A third makes the shares smaller: the wish of the second is more than its share then, and
        // holds up nobody.
        let moment = shares.at(now, Some(three));
        assert_eq!(moment.may_take(three, 900), Ok(()));
        assert_eq!(moment.may_take(one, 1), Ok(()));
        shares.waits(three, 300);
        let moment = shares.at(now, None);
        assert_eq!(moment.may_take(one, 1), Err(Over::Share(600, 333)));
        assert_eq!(moment.may_take(two, 233), Ok(()));
        shares.waits_no_more(three, 300);
        let later = now + CLAIM_LIFE;
        assert_eq!(shares.at(later, Some(one)).may_take(one, 400), Ok(()));
        shares.given_back(one, 600);
        shares.given_back(two, 100);
        shares.at(later, None);
        assert!(shares.accounts.is_empty());
    }

    #[test]
    fn the_operators_cap_holds_for_a_lone_peer_too() {
        let (mut shares, now, [one, two, _]) =
            (Shares::new(1000, 0.4, NetOf::default()), Instant::now(), peers());
        shares.granted(one, 300);
        let moment = shares.at(now, Some(one));
        assert_eq!(moment.may_take(one, 100), Ok(()));
        assert_eq!(moment.may_take(one, 101), Err(Over::Share(300, 400)));
        assert_eq!(moment.may_take(two, 401), Err(Over::Cap(400)));
    }

    #[test]
    fn a_crowd_of_one_net_has_the_share_of_one_net() {
        let crowd: Vec<PeerId> = (0..10).map(|_| PeerId::random()).collect();
        let honest = PeerId::random();
        let of_honest = honest;
        let net_of = NetOf::new(move |peer| {
            Net::V4(Ipv4Addr::new(5, 6, 7, if *peer == of_honest { 1 } else { 2 }))
        });
        let (mut shares, now) = (Shares::new(1000, 1.0, net_of), Instant::now());
        for peer in &crowd {
            shares.granted(*peer, 40);
            shares.refused(*peer, 10, now);
        }
        let moment = shares.at(now, Some(honest));
        assert_eq!(moment.may_take(honest, 500), Ok(()));
        assert_eq!(moment.may_take(crowd[0], 10), Ok(()));
        assert_eq!(moment.may_take(crowd[0], 11), Err(Over::Share(40, 50)));
        shares.refused(honest, 500, now);
        let moment = shares.at(now, None);
        assert_eq!(moment.may_take(crowd[0], 11), Err(Over::Share(40, 50)));
        assert_eq!(moment.may_take(honest, 501), Err(Over::Share(0, 500)));
    }

    #[test]
    fn refused_strangers_are_bounded() {
        let (mut shares, now) = (Shares::new(1000, 1.0, NetOf::default()), Instant::now());
        for _ in 0..2 * MAX_REFUSED {
            shares.refused(PeerId::random(), 1, now);
        }
        assert_eq!(shares.accounts.len(), MAX_REFUSED);
        let [one, ..] = peers();
        assert_eq!(shares.at(now + CLAIM_LIFE, Some(one)).may_take(one, 1000), Ok(()));
        assert!(shares.accounts.is_empty());
    }
}
