//! Sessions that outlive their stream: after it broke, or netd died, a session whose client can
//! resume it is *parked* for `--session_grace`. Its pages stay allocated and count against the KV
//! budget and the share of its peer.
//!
//! ```text
//!   open ──(stream breaks)──> parked ──(same peer, id and secret)──> open
//!     │                         │ grace over, or others want memory: freed
//!     └──(netd dies)── record in the segment ──(next netd, before it serves)──> parked
//! ```
//!
//! The record of a session is written after each step, before the answer leaves: a client never
//! knows more than the record. Pages that it names are complete, because a step writes at or after
//! its start and into copies, and a step that goes back is recorded before it is computed.

use std::sync::Arc;
use std::time::Duration;

use p2p::PeerId;
use parking_lot::{Mutex, MutexGuard};
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::{Digest, Sha256};
use shared::block::BlockIndex;
use shared::clock::monotonic_ns;
use shared::figures::ResumptionFigures;
use shared::job::MAX_ROWS;
use shared::shm::sessions::{SESSION_RECORDS, SessionRecords};
use swarm::wire::resumption::{Resumable, Secret};
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::{debug, info};

use super::{Failure, Service};
use crate::sessions::admission::Lease;
use crate::sessions::pool::KvRequest;
use crate::sessions::session::Session;
use crate::sessions::session_record::Record;
use crate::sessions::table::SessionTables;
use crate::workers::Workers;

/// Most sessions of one peer that can be resumed, open and parked.
pub(crate) const MAX_PER_PEER: usize = 32;
/// How long a parked session is safe from those who want its memory.
const SAFE: Duration = Duration::from_secs(2);
/// How long a client waits for its own session to leave its old stream.
const HANDOVER: Duration = Duration::from_secs(5);
/// Time between two looks at it.
const LOOK: Duration = Duration::from_millis(2);

/// A session without a stream.
#[derive(Debug)]
pub(super) struct Parked {
    pub session: Session,
    pub lease: Arc<Lease>,
    workers: Arc<Workers>,
}

#[derive(Debug)]
struct ResumptionEntry {
    peer: PeerId,
    id: String,
    secret_hash: [u8; 32],
    deadline_ns: u64,
    standing: ResumptionState,
}

#[derive(Debug)]
enum ResumptionState {
    /// Its stream is told to leave it.
    Open(Arc<Notify>),
    Parked {
        since: Instant,
        session: Box<Parked>,
    },
}

/// All sessions that can be resumed. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Resumption(Arc<ResumptionTable>);

#[derive(Debug)]
struct ResumptionTable {
    grace: Duration,
    records: Option<SessionRecords>,
    state: Mutex<Lot>,
}

#[derive(Debug)]
struct Lot {
    slots: Vec<Option<ResumptionEntry>>,
    figures: ResumptionFigures,
    restored: bool,
    /// Another netd is about to read the records.
    is_handed_over: bool,
}

/// The slot of an open session; freed on drop unless the session was parked.
#[derive(Debug)]
pub(super) struct Slot {
    all: Resumption,
    index: usize,
    /// For the first answer.
    pub secret: Option<Secret>,
}

impl Resumption {
    /// Keeps sessions for `grace` in `records`; without records or time it keeps none.
    pub fn new(records: Option<SessionRecords>, grace: Duration) -> Resumption {
        let slots = (0..SESSION_RECORDS).map(|_| None).collect();
        let figures = ResumptionFigures::default();
        let state = Lot { slots, figures, restored: false, is_handed_over: false };
        Resumption(Arc::new(ResumptionTable { grace, records, state: Mutex::new(state) }))
    }

    /// Sessions that are parked now.
    pub fn parked(&self) -> u64 {
        self.lock().entries().filter(|(_, entry)| entry.since().is_some()).count() as u64
    }

    /// What became of sessions so far.
    pub fn figures(&self) -> ResumptionFigures {
        self.lock().figures.clone()
    }

    /// Another netd takes over what is parked from now on, and what is open.
    pub fn hand_over(&self) {
        self.lock().is_handed_over = true;
    }

    /// Whether another netd takes over.
    pub(super) fn is_handed_over(&self) -> bool {
        self.lock().is_handed_over
    }

    /// A slot for a session that opens, if there is one.
    pub(super) fn open(
        &self,
        peer: PeerId,
        id: Option<&str>,
        ends: Duration,
        takeover: &Arc<Notify>,
    ) -> Option<Slot> {
        let id = id?.to_owned();
        if self.0.records.is_none() || self.0.grace.is_zero() {
            return None;
        }
        let mut secret = Secret::default();
        OsRng.try_fill_bytes(&mut secret).ok()?;
        let ends = u64::try_from(ends.as_nanos()).unwrap_or(u64::MAX);
        let mut lot = self.lock();
        let of_peer = lot.entries().filter(|(_, entry)| entry.peer == peer).count();
        let index = lot.slots.iter().position(Option::is_none);
        let index = index.filter(|_| of_peer < MAX_PER_PEER)?;
        lot.slots[index] = Some(ResumptionEntry {
            peer,
            id,
            secret_hash: hash(&secret),
            deadline_ns: monotonic_ns().saturating_add(ends),
            standing: ResumptionState::Open(takeover.clone()),
        });
        Some(Slot { all: self.clone(), index, secret: Some(secret) })
    }

    /// The parked session of this peer, id and secret. One that still has a stream leaves it first.
    pub(super) async fn claim(
        &self,
        peer: PeerId,
        id: Option<&str>,
        secret: &Secret,
        takeover: &Arc<Notify>,
    ) -> Result<(Slot, Parked, Duration), Failure> {
        let unknown = || {
            Failure::runtime(
                "no session of this client with this id and secret is kept here; open a new session and send its tokens again",
            )
        };
        let (id, secret_hash) = (id.ok_or_else(unknown)?, hash(secret));
        let end = Instant::now() + HANDOVER;
        while Instant::now() < end {
            match self.look(peer, id, &secret_hash, takeover) {
                Looked::Unknown => return Err(unknown()),
                Looked::Found(found) => return Ok(*found),
                Looked::NotYet => tokio::time::sleep(LOOK).await,
            }
        }
        Err(Failure::runtime("the session to resume is still in use; send its tokens again"))
    }

    fn look(&self, peer: PeerId, id: &str, hash: &[u8; 32], takeover: &Arc<Notify>) -> Looked {
        let mut lot = self.lock();
        let is_it = |entry: &ResumptionEntry| {
            (entry.peer, entry.id.as_str(), &entry.secret_hash) == (peer, id, hash)
        };
        let Some(index) = lot.entries().find(|(_, entry)| is_it(entry)).map(|(at, _)| at) else {
            return Looked::Unknown;
        };
        let Some(entry) = lot.slots.get_mut(index).and_then(Option::as_mut) else {
            return Looked::Unknown;
        };
        match &entry.standing {
            ResumptionState::Open(stream) => {
                stream.notify_one();
                Looked::NotYet
            }
            // A job of the old stream may still write.
            ResumptionState::Parked { session, .. } if Arc::strong_count(&session.lease) > 1 => {
                Looked::NotYet
            }
            ResumptionState::Parked { .. } => {
                let left = Duration::from_nanos(entry.deadline_ns.saturating_sub(monotonic_ns()));
                let state =
                    std::mem::replace(&mut entry.standing, ResumptionState::Open(takeover.clone()));
                let ResumptionState::Parked { session, .. } = state else { return Looked::NotYet };
                lot.figures.resumed += 1;
                let slot = Slot { all: self.clone(), index, secret: None };
                Looked::Found(Box::new((slot, *session, left)))
            }
        }
    }

    /// Frees what was parked for too long, and one session if others wait for memory.
    pub fn sweep(&self, someone_waits: bool) {
        let now = Instant::now();
        let lot = self.lock();
        let is_over = |entry: &ResumptionEntry| {
            entry.since().is_some_and(|since| since + self.0.grace <= now)
                || (entry.since().is_some() && entry.deadline_ns <= monotonic_ns())
        };
        let over: Vec<usize> =
            lot.entries().filter(|(_, entry)| is_over(entry)).map(|(at, _)| at).collect();
        drop(lot);
        over.into_iter().for_each(|index| self.free(index));
        if someone_waits {
            self.evict(None);
        }
    }

    /// Frees the oldest parked session, of `peer` if it is given; false if there is none.
    pub(super) fn evict(&self, peer: Option<PeerId>) -> bool {
        let now = Instant::now();
        let lot = self.lock();
        let parked = lot.entries().filter(|(_, entry)| peer.is_none_or(|peer| entry.peer == peer));
        let oldest = parked.filter_map(|(at, entry)| Some((entry.since()?, at))).min();
        drop(lot);
        let oldest = oldest.filter(|(since, _)| *since + SAFE <= now);
        oldest.inspect(|(_, index)| self.free(*index)).is_some()
    }

    /// Frees all parked sessions: the pages of their workers go.
    pub fn clear(&self) {
        let parked: Vec<usize> = {
            let lot = self.lock();
            lot.entries().filter(|(_, e)| e.since().is_some()).map(|(at, _)| at).collect()
        };
        parked.into_iter().for_each(|index| self.free(index));
    }

    fn free(&self, index: usize) {
        let entry = {
            let mut lot = self.lock();
            lot.figures.expired += 1;
            self.clear_record(index);
            lot.slots.get_mut(index).and_then(Option::take)
        };
        // Outside the lock: the lease goes back to those who wait.
        if let Some(entry) = entry {
            debug!(peer = %entry.peer, "parked session freed");
        }
    }

    fn clear_record(&self, index: usize) {
        if let Some(records) = &self.0.records {
            records.clear(index);
        }
    }

    /// Takes over the sessions of the netd before, once, before anything else holds KV memory.
    pub fn restore(&self, service: &Service) {
        let Some(records) = &self.0.records else { return };
        if std::mem::replace(&mut self.lock().restored, true) {
            return;
        }
        let (mut restored, mut dropped) = (0, 0);
        for index in 0..SESSION_RECORDS {
            let Some(bytes) = records.read(index) else { continue };
            let record = Record::decode(&bytes).filter(|_| !self.0.grace.is_zero());
            match record.and_then(|record| self.revive(service, record)) {
                Some(entry) => {
                    restored += 1;
                    self.lock().slots[index] = Some(entry);
                }
                None => {
                    dropped += 1;
                    records.clear(index);
                }
            }
        }
        self.lock().figures.restored += restored;
        if restored + dropped > 0 {
            info!(restored, dropped, "sessions of the network daemon before");
        }
    }

    /// The session behind a record, if everything in it fits to what is here now.
    fn revive(&self, service: &Service, record: Record) -> Option<ResumptionEntry> {
        let Record { peer, id, secret_hash, blocks, deadline_ns, .. } = record;
        let rows = u32::try_from(record.rows.len()).ok().filter(|rows| *rows <= MAX_ROWS)?;
        let is_known = |adapter: u32| (adapter as usize) < service.facts.adapters.len();
        let fits = record.max_length <= service.limits.inference_max_length
            && record.adapter.is_none_or(is_known)
            && !blocks.is_empty()
            && service.workers.kv_version(&blocks) == record.kv_version
            && deadline_ns > monotonic_ns();
        let is_new = {
            let lot = self.lock();
            let of_peer = lot.entries().filter(|(_, entry)| entry.peer == peer).count();
            of_peer < MAX_PER_PEER && lot.entries().all(|(_, entry)| entry.id != id)
        };
        let (length, pages) = (record.max_length, &record.pages);
        let tables = SessionTables::restore(record.rows, record.prefix, length, pages)?;
        if !fits || !is_new {
            return None;
        }
        let request = KvRequest { blocks: blocks.clone(), rows, max_length: length };
        let lease = service.kv.retake(peer, &request, pages).ok()?;
        // Its client comes back: a place is kept for the connection.
        drop(service.push_client.p2p().mark_session(peer));
        let losses = service.workers.kv_losses(&blocks);
        let mut session = Session::new(blocks, record.adapter, rows, tables, losses);
        session.last_step = record.last_step;
        let (lease, workers) = (Arc::new(lease), service.workers.clone());
        let session = Box::new(Parked { session, lease, workers });
        let standing = ResumptionState::Parked { since: Instant::now(), session };
        Some(ResumptionEntry { peer, id, secret_hash, deadline_ns, standing })
    }

    fn lock(&self) -> MutexGuard<'_, Lot> {
        self.0.state.lock()
    }
}

enum Looked {
    Unknown,
    NotYet,
    Found(Box<(Slot, Parked, Duration)>),
}

impl Lot {
    fn entries(&self) -> impl Iterator<Item = (usize, &ResumptionEntry)> {
        self.slots.iter().enumerate().filter_map(|(at, entry)| Some((at, entry.as_ref()?)))
    }
}

impl ResumptionEntry {
    /// Since when it is parked.
    fn since(&self) -> Option<Instant> {
        match self.standing {
            ResumptionState::Open(_) => None,
            ResumptionState::Parked { since, .. } => Some(since),
        }
    }
}

impl Parked {
    /// Checks that the session can go on over `blocks` of `service`.
    pub(super) fn check(&self, service: &Service, blocks: &[BlockIndex]) -> Result<(), Failure> {
        if self.session.blocks != blocks || !Arc::ptr_eq(&self.workers, &service.workers) {
            let text =
                "this session ran other blocks; open a new session and send its tokens again";
            return Err(Failure::runtime(text));
        }
        Ok(())
    }
}

impl Slot {
    /// What the first answer tells the client, once.
    pub(super) fn tell(&mut self) -> Option<Resumable> {
        let grace_ms = u64::try_from(self.all.0.grace.as_millis()).unwrap_or(u64::MAX);
        self.secret.take().map(|secret| Resumable { secret, grace_ms })
    }

    /// Writes the record of `session`; false if it does not fit, and the session cannot be resumed.
    pub(super) fn record(&self, service: &Service, session: &Session, lease: &Lease) -> bool {
        let Some(records) = &self.all.0.records else { return false };
        let record = {
            let lot = self.all.lock();
            let Some(Some(entry)) = lot.slots.get(self.index) else { return false };
            Record {
                peer: entry.peer,
                id: entry.id.clone(),
                secret_hash: entry.secret_hash,
                blocks: session.blocks.clone(),
                adapter: session.adapter,
                max_length: session.tables.max_length(),
                prefix: session.tables.prefix(),
                kv_version: service.workers.kv_version(&session.blocks),
                last_step: session.last_step,
                deadline_ns: entry.deadline_ns,
                pages: lease.pages().to_vec(),
                rows: session.tables.rows().to_vec(),
            }
        };
        let written = records.write(self.index, &record.encode());
        if written.is_err() {
            records.clear(self.index);
        }
        written.is_ok()
    }

    /// Keeps the session without its stream.
    pub(super) fn park(self, mut session: Session, lease: Arc<Lease>, workers: Arc<Workers>) {
        session.forget_steps();
        let session = Box::new(Parked { session, lease, workers });
        let mut lot = self.all.lock();
        if let Some(Some(entry)) = lot.slots.get_mut(self.index) {
            entry.standing = ResumptionState::Parked { since: Instant::now(), session };
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut lot = self.all.lock();
        // One that is cut off goes on from its record.
        if !lot.is_handed_over
            && let Some(slot) = lot.slots.get_mut(self.index)
            && slot.as_ref().is_some_and(|entry| entry.since().is_none())
        {
            *slot = None;
            self.all.clear_record(self.index);
        }
    }
}

fn hash(secret: &Secret) -> [u8; 32] {
    Sha256::digest(secret).into()
}
