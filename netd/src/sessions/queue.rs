//! Who waits for KV memory, and in which order it is granted.
//!
//! Fairness: first come, first served, but a request that does not fit lets smaller ones behind it
//! pass, at most [`MAX_OVERTAKEN`] times. After that nobody passes it until it was served or gave
//! up, so that a large session cannot starve behind a stream of small ones. Nobody passes those who
//! have a claim by asking for more than its fair share ([`super::shares`]); who holds memory and
//! waits for more than its share holds up nobody. Requests that do not wait (`alloc_timeout` 0,
//! what every shipped Petals client sends) follow the same rule: they are granted at once or
//! refused, and being granted counts as passing those that wait.
//!
//! # Discrepancies
//! In Petals one waiter at the head blocks everybody behind it, also those that would fit, and
//! makes requests without a timeout fail although there is room.

use p2p::PeerId;
use shared::ids::PageId;
use tokio::time::Instant;

use super::pool::{Grant, KvRequest, Pool, PoolRefusal};
use super::shares::{Moment, NetOf, Over, Shares};

/// How often one waiting request may be passed.
pub const MAX_OVERTAKEN: u32 = 16;

/// Most requests that wait at once; each is a client's open stream.
pub const MAX_WAITING: usize = 256;

/// Names a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug)]
struct QueuedSession {
    ticket: Ticket,
    peer: PeerId,
    request: KvRequest,
    overtaken: u32,
}

impl QueuedSession {
    /// Whether nobody may pass it any more.
    fn holds_up(&self, moment: &Moment<'_>) -> bool {
        let asked = self.request.token_blocks();
        self.overtaken >= MAX_OVERTAKEN && moment.may_hold_up(self.peer, asked)
    }
}

/// A pool and those that wait for it.
#[derive(Debug)]
pub struct WaitQueue {
    pool: Pool,
    net_of: NetOf,
    shares: Shares,
    waiting: Vec<QueuedSession>,
    tickets: u64,
    /// Whether those that wait are granted nothing.
    is_closed: bool,
}

/// What became of a request that is willing to wait.
#[derive(Debug)]
pub enum Admission {
    /// Granted at once.
    Granted(Grant),
    /// It waits; the ticket will show up in what [`WaitQueue::give_back`] or [`WaitQueue::leave`]
    /// return.
    Queued(Ticket),
}

/// Grants to requests that waited; the caller hands each on.
pub type Granted = Vec<(Ticket, PeerId, Grant)>;

impl WaitQueue {
    /// A queue before `pool` in which nobody waits; one peer may hold the part `max_share` of it, and
    /// `net_of` tells where peers are.
    pub fn new(pool: Pool, max_share: f64, net_of: NetOf) -> WaitQueue {
        WaitQueue {
            shares: Shares::new(pool.budget(), max_share, net_of.clone()),
            net_of,
            pool,
            waiting: Vec::new(),
            tickets: 0,
            is_closed: false,
        }
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Where peers are.
    pub fn net_of(&self) -> &NetOf {
        &self.net_of
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether those that wait are granted nothing now.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Stops grants to those that wait, or resumes them.
    #[must_use = "grants are in use until they are given back"]
    pub fn close(&mut self, is_closed: bool, now: Instant) -> Granted {
        self.is_closed = is_closed;
        self.serve(now)
    }

    /// Grants `request` of `peer` now or never.
    ///
    /// # Errors
    /// [`PoolRefusal`], also when there is room but one that waits may not be passed any more.
    pub fn take_now(
        &mut self,
        peer: PeerId,
        request: &KvRequest,
        now: Instant,
    ) -> Result<Grant, PoolRefusal> {
        let asked = request.token_blocks();
        let taken = self.take(peer, request, now);
        if let Err(PoolRefusal::NotNow { .. } | PoolRefusal::OverShare { .. }) = taken {
            self.shares.refused(peer, asked, now);
        }
        taken
    }

    /// Grants `request` of `peer` now or queues it.
    ///
    /// # Errors
    /// [`PoolRefusal::Never`] or [`PoolRefusal::BadBlock`] when waiting cannot help, another when too many
    /// wait.
    pub fn take_or_wait(
        &mut self,
        peer: PeerId,
        request: KvRequest,
        now: Instant,
    ) -> Result<Admission, PoolRefusal> {
        let refused = match self.take(peer, &request, now) {
            Ok(grant) => return Ok(Admission::Granted(grant)),
            Err(refused) => refused,
        };
        let may_wait =
            matches!(refused, PoolRefusal::NotNow { .. } | PoolRefusal::OverShare { .. });
        if !may_wait || self.waiting.len() >= MAX_WAITING {
            return Err(refused);
        }
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.shares.waits(peer, request.token_blocks());
        self.waiting.push(QueuedSession { ticket, peer, request, overtaken: 0 });
        Ok(Admission::Queued(ticket))
    }

    /// Grants `peer` the pages that a session of it held before. Only before anything else is
    /// granted: nobody waits then.
    ///
    /// # Errors
    /// [`PoolRefusal`]; nothing is taken then.
    pub fn retake(
        &mut self,
        peer: PeerId,
        request: &KvRequest,
        pages: &[PageId],
    ) -> Result<Grant, PoolRefusal> {
        let grant = self.pool.retake(request, pages)?;
        self.shares.granted(peer, grant.token_blocks());
        Ok(grant)
    }

    /// Takes memory of `peer` back and grants what fits now to those that wait.
    #[must_use = "grants are in use until they are given back"]
    pub fn give_back(&mut self, peer: PeerId, grant: Grant, now: Instant) -> Granted {
        self.shares.given_back(peer, grant.token_blocks());
        self.pool.give_back(grant);
        self.serve(now)
    }

    /// One that waited gave up. Those that it held back may be served now.
    #[must_use = "grants are in use until they are given back"]
    pub fn leave(&mut self, ticket: Ticket, now: Instant) -> Granted {
        if let Some(at) = self.waiting.iter().position(|w| w.ticket == ticket) {
            self.forget(at);
        }
        self.serve(now)
    }

    /// Grants to those that wait what fits now: the claims that held them up may have run out.
    #[must_use = "grants are in use until they are given back"]
    pub fn serve(&mut self, now: Instant) -> Granted {
        let mut granted = Vec::new();
        if self.is_closed {
            return granted;
        }
        let mut at = 0;
        while let Some(waiting) = self.waiting.get(at) {
            let (peer, asked) = (waiting.peer, waiting.request.token_blocks());
            let moment = self.shares.at(now, None);
            // Whom nobody may pass any more is next, whatever its share.
            let allowed = moment.may_take(peer, asked).is_ok() || waiting.holds_up(&moment);
            match self.pool.take(&waiting.request) {
                Ok(grant) if allowed => {
                    granted.push((self.forget(at), peer, grant));
                    self.shares.granted(peer, asked);
                    self.waiting[..at].iter_mut().for_each(|w| w.overtaken += 1);
                    // Those before may take more now that one claim less stands against them.
                    at = 0;
                    continue;
                }
                Ok(grant) => self.pool.give_back(grant),
                Err(_) => {}
            }
            at += 1;
            if self.held_up(at, now) {
                break;
            }
        }
        granted
    }

    fn take(
        &mut self,
        peer: PeerId,
        request: &KvRequest,
        now: Instant,
    ) -> Result<Grant, PoolRefusal> {
        self.pool.check(request)?;
        let asked = request.token_blocks();
        let allowed = self.shares.at(now, Some(peer)).may_take(peer, asked);
        match allowed {
            Err(Over::Cap(most)) => return Err(PoolRefusal::Never { asked, most }),
            Err(Over::Share(held, most)) => {
                return Err(PoolRefusal::OverShare { asked, held, most });
            }
            Ok(()) => {}
        }
        if self.held_up(self.waiting.len(), now) {
            return Err(PoolRefusal::NotNow { asked, free: self.pool.free() });
        }
        let grant = self.pool.take(request)?;
        self.shares.granted(peer, asked);
        self.waiting.iter_mut().for_each(|w| w.overtaken += 1);
        Ok(grant)
    }

    /// Whether one of the first `count` that wait may not be passed any more.
    fn held_up(&mut self, count: usize, now: Instant) -> bool {
        let moment = self.shares.at(now, None);
        let mut first = self.waiting.iter().take(count);
        first.any(|waiting| waiting.holds_up(&moment))
    }

    fn forget(&mut self, at: usize) -> Ticket {
        let gone = self.waiting.remove(at);
        self.shares.waits_no_more(gone.peer, gone.request.token_blocks());
        gone.ticket
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::block::{BlockIndex, Span};

    /// 1024 token-blocks in one block, with more pages than any test needs; time stands still.
    struct Rig {
        queue: WaitQueue,
        now: Instant,
    }

    /// What a peer took, until it gives it back.
    struct Held {
        peer: PeerId,
        grant: Grant,
    }

    fn rig() -> Rig {
        let pool = Pool::new(Span::new(0, 1).unwrap(), 4096, 1024);
        Rig { queue: WaitQueue::new(pool, 1.0, NetOf::default()), now: Instant::now() }
    }

    fn request(tokens: u32) -> KvRequest {
        KvRequest { blocks: vec![BlockIndex(0)], rows: 1, max_length: tokens }
    }

    impl Rig {
        fn take(&mut self, peer: PeerId, tokens: u32) -> Result<Grant, PoolRefusal> {
            self.queue.take_now(peer, &request(tokens), self.now)
        }

        fn hold(&mut self, peer: PeerId, tokens: u32) -> Held {
            Held { peer, grant: self.take(peer, tokens).unwrap() }
        }

        /// A peer of its own takes.
        fn someone(&mut self, tokens: u32) -> Held {
            self.hold(PeerId::random(), tokens)
        }

        fn wait(&mut self, peer: PeerId, tokens: u32) -> Ticket {
            let queued = self.queue.take_or_wait(peer, request(tokens), self.now);
            match queued {
                Ok(Admission::Queued(ticket)) => ticket,
                other => panic!("{other:?}"),
            }
        }

        fn give_back(&mut self, held: Held) -> Vec<Ticket> {
            tickets(self.queue.give_back(held.peer, held.grant, self.now))
        }

        fn small_ones_pass(&mut self, count: u32) {
            for _ in 0..count {
                let small = self.someone(1);
                assert!(self.give_back(small).is_empty());
            }
        }
    }

    fn tickets(granted: Granted) -> Vec<Ticket> {
        granted.into_iter().map(|(ticket, ..)| ticket).collect()
    }

    #[test]
    fn a_small_request_passes_a_large_one_that_waits() {
        let mut rig = rig();
        let held = rig.someone(612);
        let large = rig.wait(PeerId::random(), 512);
        let small = rig.someone(128);
        assert!(rig.give_back(small).is_empty());
        assert_eq!(rig.give_back(held), [large]);
    }

    #[test]
    fn nobody_passes_for_ever() {
        let mut rig = rig();
        let held = rig.someone(612);
        let large = rig.wait(PeerId::random(), 512);
        rig.small_ones_pass(MAX_OVERTAKEN);
        let refused = rig.take(PeerId::random(), 1);
        assert!(matches!(refused, Err(PoolRefusal::NotNow { .. })));
        let behind = rig.wait(PeerId::random(), 1);
        assert_eq!(rig.give_back(held), [large, behind]);
    }

    #[test]
    fn one_that_gives_up_lets_the_others_through() {
        let mut rig = rig();
        let held = rig.someone(900);
        let large = rig.wait(PeerId::random(), 1024);
        rig.small_ones_pass(MAX_OVERTAKEN);
        let behind = rig.wait(PeerId::random(), 100);
        assert_eq!(tickets(rig.queue.leave(large, rig.now)), [behind]);
        assert!(rig.give_back(held).is_empty());
    }

    #[test]
    fn what_never_fits_does_not_wait_and_the_queue_is_bounded() {
        let mut rig = rig();
        let one = PeerId::random();
        let asked = rig.queue.take_or_wait(one, request(1025), rig.now);
        assert!(matches!(asked, Err(PoolRefusal::Never { .. })));
        let _held = rig.take(one, 1024).unwrap();
        for _ in 0..MAX_WAITING {
            rig.wait(PeerId::random(), 1);
        }
        let asked = rig.queue.take_or_wait(one, request(1), rig.now);
        assert!(asked.is_err());
        // Also beyond any share.
        let asked = rig.queue.take_or_wait(one, request(1025), rig.now);
        assert!(matches!(asked, Err(PoolRefusal::Never { .. })));
    }

    #[test]
    fn a_peer_over_its_share_goes_behind_those_who_wait() {
        let mut rig = rig();
        let (greedy, modest) = (PeerId::random(), PeerId::random());
        let mut held: Vec<_> = (0..4).map(|_| rig.hold(greedy, 256)).collect();
        let more = rig.wait(greedy, 256);
        let first = rig.wait(modest, 300);
        // What the greedy one gives back goes to the other, although its own request came before.
        assert!(rig.give_back(held.remove(0)).is_empty());
        let over = PoolRefusal::OverShare { asked: 10, held: 768, most: 512 };
        assert_eq!(rig.take(greedy, 10), Err(over));
        assert_eq!(rig.give_back(held.remove(0)), [first]);
        // The other has what it wants.
        assert_eq!(rig.give_back(held.remove(0)), [more]);
    }

    /// Petals' clients do not wait: whoever was refused finds memory when it comes again.
    #[test]
    fn who_was_refused_goes_before_a_peer_over_its_share_for_a_while() {
        let mut rig = rig();
        let (greedy, modest) = (PeerId::random(), PeerId::random());
        let held: Vec<_> = (0..4).map(|_| rig.hold(greedy, 256)).collect();
        assert!(rig.take(modest, 200).is_err());
        for one in held {
            assert!(rig.give_back(one).is_empty());
            // It comes back at once each time, up to its share and no further.
            let again = rig.take(greedy, 256);
            assert!(
                matches!(again, Err(PoolRefusal::OverShare { .. })) || rig.queue.pool.free() >= 256
            );
        }
        let _held = rig.take(modest, 200).unwrap();
    }

    #[test]
    fn a_peer_that_waits_for_more_than_its_share_is_served_when_the_claims_have_run_out() {
        let mut rig = rig();
        let (greedy, gone) = (PeerId::random(), PeerId::random());
        let held = rig.hold(greedy, 1000);
        assert!(rig.take(gone, 100).is_err());
        assert!(rig.give_back(held).is_empty());
        let _held = rig.take(greedy, 500).unwrap();
        let more = rig.wait(greedy, 500);
        rig.small_ones_pass(2 * MAX_OVERTAKEN);
        assert!(rig.queue.serve(rig.now).is_empty());
        let later = rig.now + crate::sessions::shares::CLAIM_LIFE;
        assert_eq!(tickets(rig.queue.serve(later)), [more]);
    }
}
