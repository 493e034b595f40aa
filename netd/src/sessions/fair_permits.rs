//! Permits of large requests: only so many are with the workers at once, and [`super::fair_queue`] says
//! whose is next. Decode steps need no permit: they are small, and the workers batch them.

use std::collections::HashMap;
use std::sync::Arc;

use p2p::PeerId;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::fair_queue::{FairQueue, Ticket};

/// A number of permits. Cheap to clone.
#[derive(Clone, Debug)]
pub struct FairPermits {
    state: Arc<Mutex<PermitState>>,
}

#[derive(Debug)]
struct PermitState {
    free: usize,
    queue: FairQueue<PeerId>,
    waiting: HashMap<Ticket, oneshot::Sender<Permit>>,
}

/// The right to be computed; the next one's when it is dropped.
#[derive(Debug)]
pub struct Permit(FairPermits);

impl FairPermits {
    /// `most` permits at once.
    pub fn new(most: usize) -> FairPermits {
        FairPermits {
            state: Arc::new(Mutex::new(PermitState {
                free: most,
                queue: FairQueue::default(),
                waiting: HashMap::new(),
            })),
        }
    }

    /// Waits for a permit. A future that is dropped leaves the queue.
    pub async fn acquire(&self, peer: PeerId, points: f64, cost: u64) -> Permit {
        let (ticket, mut receiver) = {
            let mut state = self.state.lock();
            let ticket = state.queue.push(peer, points, cost);
            let (sender, receiver) = oneshot::channel();
            state.waiting.insert(ticket, sender);
            (ticket, receiver)
        };
        self.grant();
        let entry = QueueEntry { ticket, permits: self };
        let permit = (&mut receiver).await;
        drop(entry);
        // The sender is dropped unsent only by an entry that is left.
        permit.unwrap_or_else(|_| Permit(self.clone()))
    }

    /// Requests that wait for a permit.
    pub fn waiting(&self) -> usize {
        self.state.lock().queue.waiting()
    }

    fn grant(&self) {
        loop {
            let sender = {
                let mut state = self.state.lock();
                if state.free == 0 {
                    return;
                }
                let Some(ticket) = state.queue.pop() else {
                    return;
                };
                let Some(sender) = state.waiting.remove(&ticket) else {
                    continue;
                };
                state.free -= 1;
                sender
            };
            // A permit that nobody takes comes back through its drop.
            let _ = sender.send(Permit(self.clone()));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.state.lock().free += 1;
        self.0.grant();
    }
}

/// An entry in the queue, left on drop.
struct QueueEntry<'a> {
    ticket: Ticket,
    permits: &'a FairPermits,
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        let mut state = self.permits.state.lock();
        if state.waiting.remove(&self.ticket).is_some() {
            state.queue.leave(self.ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn permits_are_bounded_and_shared_among_peers() {
        let permits = FairPermits::new(1);
        let (a, b) = (PeerId::random(), PeerId::random());
        let held = permits.acquire(a, 0.0, 10).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for (peer, name) in [(a, "a0"), (a, "a1"), (a, "a2"), (b, "b0")] {
            let (permits, order) = (permits.clone(), order.clone());
            let waiting = permits.waiting();
            let of = permits.clone();
            tasks.push(tokio::spawn(async move {
                let _permit = permits.acquire(peer, 0.0, 10).await;
                order.lock().push(name);
            }));
            while of.waiting() == waiting {
                tokio::task::yield_now().await;
            }
        }
        drop(held);
        for task in tasks {
            task.await.unwrap();
        }
        let order = order.lock().clone();
        assert!(order.iter().position(|n| *n == "b0").unwrap() <= 1, "{order:?}");
        assert_eq!(permits.state.lock().free, 1);
    }

    #[tokio::test]
    async fn one_that_gives_up_leaves_no_permit_behind() {
        let permits = FairPermits::new(1);
        let held = permits.acquire(PeerId::random(), 0.0, 1).await;
        let task = tokio::spawn({
            let permits = permits.clone();
            async move { permits.acquire(PeerId::random(), 0.0, 1).await }
        });
        while permits.waiting() == 0 {
            tokio::task::yield_now().await;
        }
        task.abort();
        assert!(task.await.is_err());
        assert_eq!(permits.waiting(), 0);
        drop(held);
        let _again = permits.acquire(PeerId::random(), 0.0, 1).await;
    }
}
