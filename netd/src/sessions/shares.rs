//! How much of the KV memory a peer may take while others want some, too. Pure: the time is passed
//! in.
//!
//! The fair share of a peer is the budget divided by the number of peers that hold, want or were
//! lately refused memory. A peer may take more, and alone it may take everything, but not while
//! another has a *claim*: a request that waits, or was refused for lack of memory within
//! [`CLAIM_LIFE`] (Petals' clients never wait, they come again), and that fits into the
//! share of its own peer. So a client that is alone never notices, and whoever holds more than its
//! share gets no more until the others were served. What is held is taken away from silent sessions
//! alone ([`super::giving_way`]).
//!
//! Besides, no peer ever holds more than the operator's `--max_kv_share` of the budget.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hivemind::p2p::PeerId;

/// How long a refused request counts as one that waits: Petals' clients try again within seconds,
/// and a minute at most.
pub const CLAIM_LIFE: Duration = Duration::from_secs(60);

/// Most peers that are remembered for a refused request; peers that hold or wait are bounded by
/// their sessions.
pub const MAX_REFUSED: usize = 1024;

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
    fair: u64,
    claims: usize,
}

impl Shares {
    /// Shares of `budget` token-blocks, of which one peer may hold at most the part `max_share`.
    pub fn new(budget: u64, max_share: f64) -> Shares {
        let cap = (budget as f64 * max_share.clamp(0.0, 1.0)).ceil();
        Shares { budget, cap: (cap as u64).min(budget), accounts: HashMap::new() }
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
        let unknown = asking.is_some_and(|peer| !self.accounts.contains_key(&peer));
        let peers = self.accounts.len() + usize::from(unknown);
        let mut moment = Moment {
            fair: (self.budget / peers.max(1) as u64).min(self.cap),
            shares: self,
            claims: 0,
        };
        let accounts = moment.shares.accounts.values();
        moment.claims = accounts.filter(|account| moment.has_claim(account)).count();
        moment
    }
}

impl Moment<'_> {
    /// Whether `peer` may take `asked` more.
    ///
    /// # Errors
    /// [`Over`].
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
        let own_claim = usize::from(own.is_some_and(|account| self.has_claim(account)));
        match after > self.fair && self.claims > own_claim {
            true => Err(Over::Share(held, self.fair)),
            false => Ok(()),
        }
    }

    /// Whether a request of `peer` that others passed too often may hold them up: unless it wants
    /// more than its share on top of what it holds.
    pub fn may_hold_up(&self, peer: PeerId, asked: u64) -> bool {
        let held = self.held(peer);
        held == 0 || held.saturating_add(asked) <= self.fair
    }

    fn held(&self, peer: PeerId) -> u64 {
        self.shares.accounts.get(&peer).map_or(0, |account| account.held)
    }

    fn has_claim(&self, account: &Account) -> bool {
        let fits = |wish: u64| account.held.saturating_add(wish) <= self.fair;
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
        let (mut shares, now, [one, ..]) = (Shares::new(1000, 1.0), Instant::now(), peers());
        shares.granted(one, 900);
        shares.refused(one, 200, now);
        shares.waits(one, 150);
        assert_eq!(shares.at(now, Some(one)).may_take(one, 100), Ok(()));
        assert_eq!(shares.at(now, Some(one)).may_take(one, 1001), Ok(()));
    }

    #[test]
    fn while_another_has_a_claim_nobody_grows_beyond_its_share() {
        let (mut shares, now, [one, two, three]) =
            (Shares::new(1000, 1.0), Instant::now(), peers());
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
        let (mut shares, now, [one, two, _]) = (Shares::new(1000, 0.4), Instant::now(), peers());
        shares.granted(one, 300);
        let moment = shares.at(now, Some(one));
        assert_eq!(moment.may_take(one, 100), Ok(()));
        assert_eq!(moment.may_take(one, 101), Err(Over::Share(300, 400)));
        assert_eq!(moment.may_take(two, 401), Err(Over::Cap(400)));
    }

    #[test]
    fn refused_strangers_are_bounded() {
        let (mut shares, now) = (Shares::new(1000, 1.0), Instant::now());
        for _ in 0..2 * MAX_REFUSED {
            shares.refused(PeerId::random(), 1, now);
        }
        assert_eq!(shares.accounts.len(), MAX_REFUSED);
        let [one, ..] = peers();
        assert_eq!(shares.at(now + CLAIM_LIFE, Some(one)).may_take(one, 1000), Ok(()));
        assert!(shares.accounts.is_empty());
    }
}
