//! Turns of large requests: only so many are with the workers at once, and [`super::fair`] says whose is next. Decode steps
//! take no turn: they are small, and the workers batch them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libp2p::PeerId;
use tokio::sync::oneshot;

use super::fair::{FairQueue, Ticket};

/// A number of turns. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Turns {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    free: usize,
    queue: FairQueue<PeerId>,
    waiting: HashMap<Ticket, oneshot::Sender<Turn>>,
}

/// The right to be computed; the next one's when it is dropped.
#[derive(Debug)]
pub struct Turn(Turns);

impl Turns {
    /// `most` turns at once.
    pub fn new(most: usize) -> Turns {
        Turns {
            state: Arc::new(Mutex::new(State {
                free: most,
                queue: FairQueue::default(),
                waiting: HashMap::new(),
            })),
        }
    }

    /// Waits for a turn. A future that is dropped leaves the queue.
    pub async fn take(&self, peer: PeerId, points: f64, cost: u64) -> Turn {
        let (ticket, mut receiver) = {
            let mut state = self.lock();
            let ticket = state.queue.push(peer, points, cost);
            let (sender, receiver) = oneshot::channel();
            state.waiting.insert(ticket, sender);
            (ticket, receiver)
        };
        self.grant();
        let place = Place {
            ticket,
            turns: self,
        };
        let turn = (&mut receiver).await;
        drop(place);
        // The sender is dropped unsent only by a place that is left.
        turn.unwrap_or_else(|_| Turn(self.clone()))
    }

    /// Requests that wait for a turn.
    pub fn waiting(&self) -> usize {
        self.lock().queue.waiting()
    }

    fn grant(&self) {
        loop {
            let sender = {
                let mut state = self.lock();
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
            // A turn that nobody takes comes back through its drop.
            let _ = sender.send(Turn(self.clone()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.lock().free += 1;
        self.0.grant();
    }
}

/// A place in the queue, left on drop.
struct Place<'a> {
    ticket: Ticket,
    turns: &'a Turns,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
        if state.waiting.remove(&self.ticket).is_some() {
            state.queue.leave(self.ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_are_bounded_and_shared_among_peers() {
        let turns = Turns::new(1);
        let (a, b) = (PeerId::random(), PeerId::random());
        let held = turns.take(a, 0.0, 10).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for (peer, name) in [(a, "a0"), (a, "a1"), (a, "a2"), (b, "b0")] {
            let (turns, order) = (turns.clone(), order.clone());
            let waiting = turns.waiting();
            let of = turns.clone();
            tasks.push(tokio::spawn(async move {
                let _turn = turns.take(peer, 0.0, 10).await;
                order.lock().unwrap().push(name);
            }));
            while of.waiting() == waiting {
                tokio::task::yield_now().await;
            }
        }
        drop(held);
        for task in tasks {
            task.await.unwrap();
        }
        let order = order.lock().unwrap().clone();
        assert!(
            order.iter().position(|n| *n == "b0").unwrap() <= 1,
            "{order:?}"
        );
        assert_eq!(turns.lock().free, 1);
    }

    #[tokio::test]
    async fn one_that_gives_up_leaves_no_turn_behind() {
        let turns = Turns::new(1);
        let held = turns.take(PeerId::random(), 0.0, 1).await;
        let task = tokio::spawn({
            let turns = turns.clone();
            async move { turns.take(PeerId::random(), 0.0, 1).await }
        });
        while turns.waiting() == 0 {
            tokio::task::yield_now().await;
        }
        task.abort();
        assert!(task.await.is_err());
        assert_eq!(turns.waiting(), 0);
        drop(held);
        let _again = turns.take(PeerId::random(), 0.0, 1).await;
    }
}
