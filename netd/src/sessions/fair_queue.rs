//! Whose large request is computed next: start-time fair queueing over peers. Each peer has a clock
//! that runs ahead by the cost of what it was granted; the peer that is furthest behind is next, so
//! that one that asks for much waits for itself and not others for it. Clocks of peers that were
//! idle are set to the present: nobody saves up.
//!
//! A peer's own requests go by `points`, the most first, then in the order they came. Points move
//! nobody ahead of another peer: they are a number that any client may write.
//!
//! # Discrepancies
//! Petals accepts points and ignores them, and serves all peers from one queue.

use std::collections::HashMap;
use std::hash::Hash;

/// Names a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    points: f64,
    cost: u64,
}

#[derive(Debug, Default)]
struct PeerLine {
    /// Virtual time at which what was granted is paid for.
    clock: u64,
    waiting: Vec<Waiting>,
}

/// Requests that wait, by peer. The number of them is bounded by the streams that they come in.
#[derive(Debug)]
pub struct FairQueue<P> {
    lines: HashMap<P, PeerLine>,
    now: u64,
    tickets: u64,
}

impl<P> Default for FairQueue<P> {
    fn default() -> FairQueue<P> {
        FairQueue { lines: HashMap::new(), now: 0, tickets: 0 }
    }
}

impl<P: Clone + Eq + Hash> FairQueue<P> {
    /// A request of `peer` that costs `cost` waits.
    pub fn push(&mut self, peer: P, points: f64, cost: u64) -> Ticket {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        let now = self.now;
        let line = self.lines.entry(peer).or_default();
        if line.waiting.is_empty() {
            line.clock = line.clock.max(now);
        }
        line.waiting.push(Waiting { ticket, points, cost });
        ticket
    }

    /// Takes the request that is next.
    pub fn pop(&mut self) -> Option<Ticket> {
        let present = self.lines.iter().filter_map(|(peer, line)| {
            let oldest = line.waiting.iter().map(|w| w.ticket).min()?;
            Some(((line.clock, oldest), peer))
        });
        let ((clock, _), peer) = present.min_by_key(|(rank, _)| *rank)?;
        let peer = peer.clone();
        let line = self.lines.get_mut(&peer)?;
        let by_rank = |a: &&Waiting, b: &&Waiting| {
            let points = b.points.total_cmp(&a.points);
            points.then(a.ticket.cmp(&b.ticket))
        };
        let ticket = line.waiting.iter().min_by(by_rank)?.ticket;
        let at = line.waiting.iter().position(|w| w.ticket == ticket)?;
        let taken = line.waiting.remove(at);
        line.clock = clock.saturating_add(taken.cost.max(1));
        self.now = self.now.max(clock);
        self.forget();
        Some(ticket)
    }

    /// A request does not wait any more.
    pub fn leave(&mut self, ticket: Ticket) {
        for line in self.lines.values_mut() {
            line.waiting.retain(|w| w.ticket != ticket);
        }
        self.forget();
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.lines.values().map(|line| line.waiting.len()).sum()
    }

    /// Forgets peers that wait for nothing and have nothing left to pay. When nobody waits, that is
    /// everybody.
    fn forget(&mut self) {
        let now = self.now;
        if self.lines.values().all(|line| line.waiting.is_empty()) {
            self.lines.clear();
        }
        self.lines.retain(|_, line| !line.waiting.is_empty() || line.clock > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: &mut FairQueue<char>, names: &[(Ticket, &'static str)]) -> Vec<&'static str> {
        let name = |ticket| names.iter().find(|(t, _)| *t == ticket).unwrap().1;
        std::iter::from_fn(|| queue.pop()).map(name).collect()
    }

    #[test]
    fn a_peer_with_many_requests_waits_for_itself() {
        let mut queue = FairQueue::default();
        let mut names = Vec::new();
        for name in ["a0", "a1", "a2", "a3"] {
            names.push((queue.push('a', 0.0, 10), name));
        }
        names.push((queue.push('b', 0.0, 10), "b0"));
        names.push((queue.push('b', 0.0, 10), "b1"));
        assert_eq!(order(&mut queue, &names), ["a0", "b0", "a1", "b1", "a2", "a3"]);
    }

    #[test]
    fn costs_count_and_not_the_number_of_requests() {
        let mut queue = FairQueue::default();
        let mut names = vec![(queue.push('a', 0.0, 100), "a0"), (queue.push('a', 0.0, 100), "a1")];
        for name in ["b0", "b1", "b2", "b3"] {
            names.push((queue.push('b', 0.0, 30), name));
        }
        assert_eq!(order(&mut queue, &names), ["a0", "b0", "b1", "b2", "b3", "a1"]);
    }

    #[test]
    fn points_order_the_requests_of_one_peer_and_move_nobody_past_another() {
        let mut queue = FairQueue::default();
        let names = [
            (queue.push('a', 0.0, 10), "a0"),
            (queue.push('a', 5.0, 10), "a5"),
            (queue.push('b', 0.0, 10), "b0"),
            (queue.push('a', 1e300, 10), "a9"),
        ];
        assert_eq!(order(&mut queue, &names), ["a9", "b0", "a5", "a0"]);
    }

    #[test]
    fn an_idle_peer_saves_nothing_up() {
        let mut queue = FairQueue::default();
        for _ in 0..100 {
            queue.push('a', 0.0, 10);
            queue.push('a', 0.0, 10);
            queue.pop();
        }
        let names: Vec<_> = (0..3).map(|_| (queue.push('b', 0.0, 10), "b")).collect();
        let first: Vec<_> = (0..6).filter_map(|_| queue.pop()).collect();
        let of_b = first.iter().filter(|t| names.iter().any(|(n, _)| n == *t));
        assert_eq!(of_b.count(), 3, "b gets half of the grants and not all at once");
        assert!(!names.iter().all(|(n, _)| first[..3].contains(n)));
    }

    #[test]
    fn peers_without_requests_are_forgotten_and_those_that_left_are_not_served() {
        let mut queue = FairQueue::default();
        let a = queue.push('a', 0.0, 10);
        let b = queue.push('b', 0.0, 10);
        queue.leave(a);
        assert_eq!((queue.waiting(), queue.pop()), (1, Some(b)));
        assert_eq!(queue.pop(), None);
        assert!(queue.lines.is_empty());
    }
}
