//! Admission of sessions: the async driver over [`super::queue`]. A [`Lease`] is the right to KV
//! memory; it goes back when the last holder drops it. Holders are the session and every job in
//! flight that names its pages, so that pages are not given to another session before the job was
//! answered or its worker reaped. A lease of a worker that cannot be killed is never dropped (see
//! `workers::link`). Where there is no memory for a request, silent sessions may be told to end
//! ([`KvMemory::make_room`]).

mod holders;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use p2p::PeerId;
use parking_lot::Mutex;
use shared::figures::KvFigures;
use shared::ids::PageId;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use self::holders::Holders;
use super::eviction::KvClaim;
use super::pool::{Grant, KvRequest, PoolRefusal};
use super::queue::{Admission, Granted, Ticket, WaitQueue};

/// How often one that waits looks whether claims of others have run out
/// ([`super::shares::CLAIM_LIFE`]).
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// The KV memory of this server. Cheap to clone.
#[derive(Clone, Debug)]
pub struct KvMemory {
    inner: Arc<AdmissionTables>,
}

#[derive(Debug)]
struct AdmissionTables {
    state: Mutex<AdmissionState>,
    /// Bytes of keys and values of one token in one block, for the texts that name bytes.
    token_bytes: u64,
}

#[derive(Debug)]
struct AdmissionState {
    queue: WaitQueue,
    waiting: HashMap<Ticket, oneshot::Sender<Lease>>,
    waits: KvWaits,
    holders: Holders,
}

/// KV memory held by a session and its jobs.
#[derive(Debug)]
pub struct Lease {
    peer: PeerId,
    number: u64,
    grant: Option<Grant>,
    memory: Arc<AdmissionTables>,
}

impl Lease {
    /// The page ids.
    pub fn pages(&self) -> &[PageId] {
        self.grant.as_ref().map_or(&[], Grant::pages)
    }

    /// Its session waits for its client until the guard is dropped.
    pub fn silence(&self) -> Silence<'_> {
        let end = self.memory.state.lock().holders.falls_silent(self.number, Instant::now());
        Silence { lease: self, end }
    }
}

/// The time in which a session waits for its client.
#[derive(Debug)]
pub struct Silence<'a> {
    lease: &'a Lease,
    end: Arc<Notify>,
}

impl Silence<'_> {
    /// Waits until the session must end because others want its memory.
    pub async fn gives_way(&self) {
        self.end.notified().await;
    }
}

impl Drop for Silence<'_> {
    fn drop(&mut self) {
        self.lease.memory.state.lock().holders.speaks(self.lease.number);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            let (peer, now) = (self.peer, Instant::now());
            self.memory.state.lock().holders.leave(self.number);
            self.memory.clone().change(|queue| queue.give_back(peer, grant, now));
        }
    }
}

/// Why there is no KV memory for a session. The texts are those of Petals' `memory_cache.py`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NoMemory {
    /// It does not wait, and there is none now.
    #[error("Could not allocate {bytes} bytes immediately: out of memory")]
    Immediately { bytes: u64 },
    /// It waited in vain.
    #[error(
        "Server's attention cache is full, failed to allocate {bytes} bytes in {seconds} seconds"
    )]
    TimedOut {
        bytes: u64,
        /// How long it waited.
        seconds: f64,
    },
    /// It is more than the whole cache.
    #[error("Could not allocate {bytes} bytes, max cache size = {most} bytes")]
    TooLarge {
        bytes: u64,
        /// The most that a session of its shape can be given.
        most: u64,
    },
    /// Its peer holds as much as it may have while others want memory, or as the operator allows.
    #[error(
        "Could not allocate {bytes} bytes: this peer holds {held} bytes of the server's attention cache, and may hold {most} now"
    )]
    OverShare {
        bytes: u64,
        /// What the peer holds.
        held: u64,
        /// What it may hold now.
        most: u64,
    },
    /// The machine is short of memory.
    #[error("this server is short of memory and takes no new sessions now: try another server")]
    Pressure,
    /// A block that is not here, or twice.
    #[error("{0}")]
    BadBlock(PoolRefusal),
}

/// Sessions that had to wait for memory so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KvWaits {
    /// Those that have got it, have given up, or are gone.
    count: u64,
    /// How long they waited.
    time: Duration,
}

impl KvMemory {
    /// Memory behind `queue`; `token_bytes` is `ModelFacts::kv_token_bytes`.
    pub fn new(queue: WaitQueue, token_bytes: u64) -> KvMemory {
        let state = Mutex::new(AdmissionState {
            queue,
            waiting: HashMap::new(),
            waits: KvWaits::default(),
            holders: Holders::default(),
        });
        KvMemory { inner: Arc::new(AdmissionTables { state, token_bytes }) }
    }

    /// While the machine is short of memory: refuses new sessions, and leaves in the queue those that
    /// wait.
    pub fn close(&self, is_closed: bool) {
        self.inner.change(|queue| queue.close(is_closed, Instant::now()));
    }

    /// Takes memory for `peer`, waiting for at most `timeout`; a timeout of zero never waits. A
    /// future that is dropped leaves the queue.
    ///
    /// # Errors
    /// [`NoMemory`], with the text for the client.
    pub async fn take(
        &self,
        peer: PeerId,
        request: KvRequest,
        timeout: Duration,
    ) -> Result<Lease, NoMemory> {
        if self.inner.state.lock().queue.is_closed() {
            return Err(NoMemory::Pressure);
        }
        let bytes = request.token_blocks().saturating_mul(self.inner.token_bytes);
        let now = Instant::now();
        if timeout.is_zero() {
            let taken = self.inner.state.lock().queue.take_now(peer, &request, now);
            return match taken {
                Ok(grant) => Ok(self.lease(peer, grant)),
                Err(refusal) => Err(self.no_memory(bytes, refusal)),
            };
        }
        let (ticket, mut receiver) = {
            let mut state = self.inner.state.lock();
            match state.queue.take_or_wait(peer, request, now) {
                Ok(Admission::Granted(grant)) => {
                    return Ok(self.inner.lease(&mut state, peer, grant));
                }
                Ok(Admission::Queued(ticket)) => {
                    let (sender, receiver) = oneshot::channel();
                    state.waiting.insert(ticket, sender);
                    (ticket, receiver)
                }
                Err(refusal) => return Err(self.no_memory(bytes, refusal)),
            }
        };
        let entry = QueueEntry { ticket, since: now, memory: &self.inner };
        let outcome = tokio::time::timeout(timeout, self.wait(&mut receiver)).await;
        drop(entry);
        // A lease may have come between the end of the wait and leaving the queue.
        match (outcome, receiver.try_recv()) {
            (Ok(Some(lease)), _) | (_, Ok(lease)) => Ok(lease),
            _ if self.inner.state.lock().queue.is_closed() => Err(NoMemory::Pressure),
            _ => Err(NoMemory::TimedOut { bytes, seconds: timeout.as_secs_f64() }),
        }
    }

    /// Waits for a lease. Claims of others run out without an event, so that the queue is looked at
    /// now and then.
    async fn wait(&self, receiver: &mut oneshot::Receiver<Lease>) -> Option<Lease> {
        loop {
            match tokio::time::timeout(LOOK_AGAIN, &mut *receiver).await {
                Ok(lease) => return lease.ok(),
                Err(_) => self.inner.change(|queue| queue.serve(Instant::now())),
            }
        }
    }

    /// Where there is no memory for `request` of `peer` now: tells silent sessions to end that hold
    /// more than their fair share ([`super::eviction`]). Whether memory is about to come free.
    pub fn make_room(&self, peer: PeerId, request: &KvRequest) -> bool {
        let mut state = self.inner.state.lock();
        let (pool, net_of) = (state.queue.pool(), state.queue.net_of().clone());
        let (missing, budget) = (pool.missing(request), pool.budget());
        let claim =
            KvClaim { net: net_of.net(&peer), peer, asked: request.token_blocks(), missing };
        missing > 0
            && state.holders.make_room(claim, budget, |peer| net_of.net(peer), Instant::now())
    }

    /// Takes for `peer` the pages that a session of it held under another netd.
    ///
    /// # Errors
    /// [`PoolRefusal`]; nothing is taken then.
    pub fn retake(
        &self,
        peer: PeerId,
        request: &KvRequest,
        pages: &[PageId],
    ) -> Result<Lease, PoolRefusal> {
        let grant = self.inner.state.lock().queue.retake(peer, request, pages)?;
        Ok(self.lease(peer, grant))
    }

    /// Figures now, but for parked sessions.
    pub fn figures(&self) -> KvFigures {
        let state = self.inner.state.lock();
        KvFigures {
            tokens_free: state.queue.pool().free(),
            tokens_total: state.queue.pool().budget(),
            waiting: state.queue.waiting() as u64,
            waits: state.waits.count,
            wait_s: state.waits.time.as_secs_f64(),
            parked: 0,
        }
    }

    /// `cache_tokens_left` of the DHT record.
    pub fn tokens_left(&self) -> u64 {
        self.inner.state.lock().queue.pool().cache_tokens_left()
    }

    fn lease(&self, peer: PeerId, grant: Grant) -> Lease {
        self.inner.lease(&mut self.inner.state.lock(), peer, grant)
    }

    fn no_memory(&self, bytes: u64, refusal: PoolRefusal) -> NoMemory {
        match refusal {
            PoolRefusal::Never { most, .. } => {
                NoMemory::TooLarge { bytes, most: most.saturating_mul(self.inner.token_bytes) }
            }
            PoolRefusal::NotNow { .. } => NoMemory::Immediately { bytes },
            PoolRefusal::OverShare { held, most, .. } => NoMemory::OverShare {
                bytes,
                held: held.saturating_mul(self.inner.token_bytes),
                most: most.saturating_mul(self.inner.token_bytes),
            },
            PoolRefusal::BadBlock(_) => NoMemory::BadBlock(refusal),
        }
    }
}

/// A place in the queue, left on drop, also when the caller is gone and its future with it.
struct QueueEntry<'a> {
    ticket: Ticket,
    since: Instant,
    memory: &'a Arc<AdmissionTables>,
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        {
            let mut state = self.memory.state.lock();
            state.waiting.remove(&self.ticket);
            state.waits.count += 1;
            state.waits.time += now.saturating_duration_since(self.since);
        }
        self.memory.change(|queue| queue.leave(self.ticket, now));
    }
}

impl AdmissionTables {
    fn lease(self: &Arc<Self>, state: &mut AdmissionState, peer: PeerId, grant: Grant) -> Lease {
        let number = state.holders.enter(peer, grant.token_blocks());
        Lease { peer, number, grant: Some(grant), memory: self.clone() }
    }

    /// Changes the queue and hands out what that granted. Leases that nobody takes come back here
    /// through their drop.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut WaitQueue) -> Granted) {
        let mut granted = Vec::new();
        {
            let mut state = self.state.lock();
            for (ticket, peer, grant) in change(&mut state.queue) {
                let lease = self.lease(&mut state, peer, grant);
                granted.push((state.waiting.remove(&ticket), lease));
            }
        }
        for (sender, lease) in granted {
            if let Some(sender) = sender {
                let _ = sender.send(lease);
            }
        }
    }
}

#[cfg(test)]
mod tests;
