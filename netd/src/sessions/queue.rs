//! Who waits for KV memory, and in which order it is granted.
//!
//! Fairness: first come, first served, but a request that does not fit lets smaller ones behind it pass, at most
//! [`MAX_OVERTAKEN`] times. After that nobody passes it until it was served or gave up, so that a large session cannot
//! starve behind a stream of small ones. Requests that do not wait (`alloc_timeout` 0, what every shipped Petals client
//! sends) follow the same rule: they are granted at once or refused, and being granted counts as passing those that wait.
//!
//! # Discrepancies
//! In Petals one waiter at the head blocks everybody behind it, also those that would fit, and makes requests without a
//! timeout fail although there is room.

use super::pool::{Grant, KvRequest, Pool, Refusal};

/// How often one waiting request may be passed.
pub const MAX_OVERTAKEN: u32 = 16;

/// Most requests that wait at once; each is a client's open stream.
pub const MAX_WAITING: usize = 256;

/// Names a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    request: KvRequest,
    overtaken: u32,
}

/// A pool and those that wait for it.
#[derive(Debug)]
pub struct WaitQueue {
    pool: Pool,
    waiting: Vec<Waiting>,
    tickets: u64,
}

/// What became of a request that is willing to wait.
#[derive(Debug)]
pub enum Admission {
    /// Granted at once.
    Granted(Grant),
    /// It waits; the ticket will show up in what [`WaitQueue::give_back`] or [`WaitQueue::leave`] return.
    Queued(Ticket),
}

/// Grants to requests that waited; the caller hands each on.
pub type Granted = Vec<(Ticket, Grant)>;

impl WaitQueue {
    /// A queue before `pool` in which nobody waits.
    pub fn new(pool: Pool) -> WaitQueue {
        WaitQueue {
            pool,
            waiting: Vec::new(),
            tickets: 0,
        }
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Grants `request` now or never.
    ///
    /// # Errors
    /// [`Refusal`], also when there is room but one that waits may not be passed any more.
    pub fn take_now(&mut self, request: &KvRequest) -> Result<Grant, Refusal> {
        if self.waiting.iter().any(|w| w.overtaken >= MAX_OVERTAKEN) {
            return Err(Refusal::NotNow {
                asked: request.token_blocks(),
                free: self.pool.free(),
            });
        }
        let grant = self.pool.take(request)?;
        self.waiting.iter_mut().for_each(|w| w.overtaken += 1);
        Ok(grant)
    }

    /// Grants `request` now or queues it.
    ///
    /// # Errors
    /// [`Refusal::Never`] or [`Refusal::BadBlock`] when waiting cannot help, [`Refusal::NotNow`] when too many wait.
    pub fn take_or_wait(&mut self, request: KvRequest) -> Result<Admission, Refusal> {
        let refused = match self.take_now(&request) {
            Ok(grant) => return Ok(Admission::Granted(grant)),
            Err(refused) => refused,
        };
        if !matches!(refused, Refusal::NotNow { .. }) || self.waiting.len() >= MAX_WAITING {
            return Err(refused);
        }
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.waiting.push(Waiting {
            ticket,
            request,
            overtaken: 0,
        });
        Ok(Admission::Queued(ticket))
    }

    /// Takes memory back and grants what fits now to those that wait.
    #[must_use = "grants are in use until they are given back"]
    pub fn give_back(&mut self, grant: Grant) -> Granted {
        self.pool.give_back(grant);
        self.serve()
    }

    /// One that waited gave up. Those that it held back may be served now.
    #[must_use = "grants are in use until they are given back"]
    pub fn leave(&mut self, ticket: Ticket) -> Granted {
        self.waiting.retain(|w| w.ticket != ticket);
        self.serve()
    }

    fn serve(&mut self) -> Granted {
        let mut granted = Vec::new();
        let mut at = 0;
        while let Some(waiting) = self.waiting.get(at) {
            match self.pool.take(&waiting.request) {
                Ok(grant) => {
                    granted.push((self.waiting.remove(at).ticket, grant));
                    self.waiting[..at].iter_mut().for_each(|w| w.overtaken += 1);
                }
                Err(_) => at += 1,
            }
            if self.waiting[..at]
                .iter()
                .any(|w| w.overtaken >= MAX_OVERTAKEN)
            {
                break;
            }
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::block::{BlockIndex, Span};

    /// 1024 token-blocks in one block, with more pages than any test needs.
    fn queue() -> WaitQueue {
        WaitQueue::new(Pool::new(Span::new(0, 1).unwrap(), 4096, 1024))
    }

    fn request(tokens: u32) -> KvRequest {
        KvRequest {
            blocks: vec![BlockIndex(0)],
            rows: 1,
            max_length: tokens,
        }
    }

    fn ticket(queue: &mut WaitQueue, tokens: u32) -> Ticket {
        match queue.take_or_wait(request(tokens)) {
            Ok(Admission::Queued(ticket)) => ticket,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_small_request_passes_a_large_one_that_waits() {
        let mut queue = queue();
        let held = queue.take_now(&request(612)).unwrap();
        let large = ticket(&mut queue, 512);
        let small = queue.take_now(&request(128)).unwrap();
        assert!(queue.give_back(small).is_empty());
        let granted = queue.give_back(held);
        assert_eq!(granted.iter().map(|(t, _)| *t).collect::<Vec<_>>(), [large]);
    }

    #[test]
    fn nobody_passes_for_ever() {
        let mut queue = queue();
        let held = queue.take_now(&request(612)).unwrap();
        let large = ticket(&mut queue, 512);
        for _ in 0..MAX_OVERTAKEN {
            let small = queue.take_now(&request(1)).unwrap();
            assert!(queue.give_back(small).is_empty());
        }
        assert!(matches!(
            queue.take_now(&request(1)),
            Err(Refusal::NotNow { .. })
        ));
        let behind = ticket(&mut queue, 1);
        let granted: Vec<_> = queue.give_back(held).into_iter().map(|(t, _)| t).collect();
        assert_eq!(granted, [large, behind]);
    }

    #[test]
    fn one_that_gives_up_lets_the_others_through() {
        let mut queue = queue();
        let held = queue.take_now(&request(900)).unwrap();
        let large = ticket(&mut queue, 1024);
        for _ in 0..MAX_OVERTAKEN {
            let small = queue.take_now(&request(1)).unwrap();
            assert!(queue.give_back(small).is_empty());
        }
        let behind = ticket(&mut queue, 100);
        assert_eq!(
            queue
                .leave(large)
                .into_iter()
                .map(|(t, _)| t)
                .collect::<Vec<_>>(),
            [behind]
        );
        assert!(queue.give_back(held).is_empty());
    }

    #[test]
    fn what_never_fits_does_not_wait_and_the_queue_is_bounded() {
        let mut queue = queue();
        assert!(matches!(
            queue.take_or_wait(request(1025)),
            Err(Refusal::Never { .. })
        ));
        let _held = queue.take_now(&request(1024)).unwrap();
        for _ in 0..MAX_WAITING {
            ticket(&mut queue, 1);
        }
        assert!(matches!(
            queue.take_or_wait(request(1)),
            Err(Refusal::NotNow { .. })
        ));
    }
}
