//! Who holds KV memory, and which of them are silent.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use p2p::{Net, PeerId};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::sessions::eviction::{Holding, KvClaim, choose};

/// All leases, by number.
#[derive(Debug, Default)]
pub(super) struct Holders {
    numbers: u64,
    holders: HashMap<u64, KvHolder>,
}

#[derive(Debug)]
struct KvHolder {
    peer: PeerId,
    held: u64,
    silent: Option<Silent>,
}

/// A session that waits for its client.
#[derive(Debug)]
struct Silent {
    since: Instant,
    end: Arc<Notify>,
    is_told: bool,
}

impl Holders {
    /// A lease of `held` token-blocks; its number.
    pub(super) fn enter(&mut self, peer: PeerId, held: u64) -> u64 {
        self.numbers += 1;
        self.holders.insert(self.numbers, KvHolder { peer, held, silent: None });
        self.numbers
    }

    pub(super) fn leave(&mut self, number: u64) {
        self.holders.remove(&number);
    }

    /// The session of a lease waits for its client from now on; what tells it to end.
    pub(super) fn falls_silent(&mut self, number: u64, now: Instant) -> Arc<Notify> {
        let end = Arc::new(Notify::new());
        if let Some(holder) = self.holders.get_mut(&number) {
            holder.silent = Some(Silent { since: now, end: end.clone(), is_told: false });
        }
        end
    }

    pub(super) fn speaks(&mut self, number: u64) {
        if let Some(holder) = self.holders.get_mut(&number) {
            holder.silent = None;
        }
    }

    /// Tells silent sessions to end for `claim`; whether memory is about to come free.
    pub(super) fn make_room(
        &mut self,
        mut claim: KvClaim,
        budget: u64,
        net_of: impl Fn(&PeerId) -> Net,
        now: Instant,
    ) -> bool {
        let is_told =
            |holder: &KvHolder| holder.silent.as_ref().is_some_and(|silent| silent.is_told);
        let (told, others): (Vec<_>, Vec<_>) = self.holders.values_mut().partition(|h| is_told(h));
        let coming: u64 = told.iter().map(|holder| holder.held).sum();
        if coming >= claim.missing {
            return claim.missing > 0;
        }
        claim.missing -= coming;
        let holding = |holder: &&mut KvHolder| Holding {
            net: net_of(&holder.peer),
            peer: holder.peer,
            held: holder.held,
            silent: holder
                .silent
                .as_ref()
                .map_or(Duration::ZERO, |silent| now.saturating_duration_since(silent.since)),
        };
        let holdings: Vec<_> = others.iter().map(holding).collect();
        let chosen = choose(&holdings, &claim, budget);
        let mut others = others;
        for &at in &chosen {
            if let Some(silent) = &mut others[at].silent {
                silent.is_told = true;
                silent.end.notify_one();
            }
        }
        !chosen.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sessions::eviction::MAX_SILENCE;

    fn is_notified(end: &Notify) -> bool {
        use futures::FutureExt;
        end.notified().now_or_never().is_some()
    }

    #[test]
    fn who_is_told_once_counts_as_memory_to_come_and_who_speaks_is_not_told() {
        let (mut holders, began) = (Holders::default(), Instant::now());
        let hoarder = PeerId::random();
        let numbers = [400, 300, 300].map(|held| holders.enter(hoarder, held));
        let ends = numbers.map(|number| holders.falls_silent(number, began));
        let claim = |missing| {
            let (net, peer) = (Net::Unknown, PeerId::random());
            KvClaim { net, peer, asked: missing, missing }
        };
        let ask = |holders: &mut Holders, missing, now| {
            holders.make_room(claim(missing), 1000, |_| Net::Unknown, now)
        };
        assert!(!ask(&mut holders, 300, began + MAX_SILENCE / 2), "a short silence");
        let now = began + MAX_SILENCE;
        holders.speaks(numbers[0]);
        assert!(ask(&mut holders, 300, now));
        assert!(ask(&mut holders, 300, now), "the same memory is still to come");
        let told = ends.each_ref().map(|end| is_notified(end));
        assert_eq!(told.iter().filter(|told| **told).count(), 1, "{told:?}");
        assert!(!told[0], "it has spoken");
        // The one that was told speaks after all: what was said to it is void.
        let spoke = numbers[told.iter().position(|told| *told).unwrap()];
        holders.speaks(spoke);
        assert!(!is_notified(&holders.falls_silent(spoke, now)));
        numbers.into_iter().for_each(|number| holders.leave(number));
        assert!(!ask(&mut holders, 300, now + MAX_SILENCE), "nobody holds anything");
    }
}
