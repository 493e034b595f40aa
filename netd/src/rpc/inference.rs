//! `rpc_inference`: one stream is one session.
//!
//! ```text
//!   first message -> admission (uids, max_length, KV memory) -> steps, one answer each -> empty message -> close
//!                                                                 any error -> error frame -> close
//! ```
//!
//! A session ends with its stream: when the client closes it, when it errs, after `step_timeout` of
//! silence, after `session_timeout` in all. Its pages go back then, or when the last job that names
//! them was answered.
//!
//! # Discrepancies
//! `start_from_position` is checked (Petals' check never fires). The end frame without an empty
//! request is a proper end. A first message without tensors opens nothing and ends the session, as
//! in Petals. An id that another open session has is refused (in Petals the second session takes it
//! over). A pushed step that cannot be computed is dropped and counted, and does not end the
//! session: the client's own copy decides.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hivemind::p2p::{InboundError, InboundReader, InboundStream, InboundWriter, PeerId};
use hivemind::wire::messages::{ExpertResponse, Tensor};
use hivemind::wire::metadata::ArgsStructure;
use hivemind::wire::resumption::Secret;
use hivemind::wire::step_times::StepTimes;
use prost::Message;
use shared::job::{JobKind, MAX_ROWS};
use shared::shm::board::Trouble;
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::debug;

use super::budget::COUNTED_BYTES;
use super::compute::Arguments;
use super::registry::Registered;
use super::request::{StepMessage, decode};
use super::resumption::Slot;
use super::{Failure, Service};
use crate::sessions::admission::{Lease, NoMemory};
use crate::sessions::pool::KvRequest;
use crate::sessions::session::Session;
use crate::sessions::table::SessionTables;
use crate::telemetry::ShownSession;
use crate::workers::job::Caller;
use crate::workers::link::{JobFailure, JobTimes};

/// How a session ended.
enum SessionEnd {
    /// Properly, or by silence: the stream is closed.
    Closed,
    /// The caller has gone.
    Gone,
    /// With an error for the caller.
    Failed(Failure),
}

impl From<Failure> for SessionEnd {
    fn from(failure: Failure) -> SessionEnd {
        SessionEnd::Failed(failure)
    }
}

/// Serves one session from its first message to its end.
pub async fn serve(service: &Service, peer: PeerId, stream: InboundStream) {
    let (mut reader, mut writer) = stream.into_split();
    reader.set_max_frame_bytes(COUNTED_BYTES as u64);
    let mut requests = Requests {
        service,
        peer,
        held: None,
        reader,
        ahead: None,
        broken: None,
        ended: false,
        is_open: false,
    };
    let deadline = Instant::now() + service.timeouts.session;
    let (mut open, takeover) = (None, Arc::new(Notify::new()));
    let session = run(service, &mut requests, &mut writer, (&mut open, &takeover));
    let end = tokio::select! {
        end = timeout_at(deadline, session) => match end {
            Ok(Err(end)) => end,
            Ok(Ok(())) => SessionEnd::Closed,
            Err(_) => SessionEnd::Failed(Failure::timeout()),
        },
        // Its client resumes the session on another stream.
        () = takeover.notified() => SessionEnd::Gone,
    };
    let open = open.filter(|_| matches!(end, SessionEnd::Gone));
    if open.is_some_and(|open| open.park(service)) {
        debug!(%peer, "session parked");
        return;
    }
    match end {
        SessionEnd::Gone => {
            service.troubles.count(Trouble::Abandoned);
            debug!(%peer, "session cancelled");
        }
        SessionEnd::Closed => {
            debug!(%peer, "session closed");
            writer.finish(requests.reader).await;
        }
        SessionEnd::Failed(failure) => {
            service.troubles.count(failure.trouble());
            debug!(%peer, %failure, "session failed");
            writer.fail(requests.reader, &failure.stream_text()).await;
        }
    }
}

/// A session that was admitted, and what of its first message governs all of it.
struct Open {
    session: Session,
    lease: Arc<Lease>,
    structure: Option<ArgsStructure>,
    caller: Caller,
    registered: Registered,
    /// The service of the blocks that were left, if they are its own.
    before: Option<Arc<Service>>,
    /// Where it is kept when the stream breaks, if its client can resume it.
    slot: Option<Slot>,
    /// When it ends at the latest.
    ends: Instant,
    /// Its row in what is shown of this server.
    shown: ShownSession,
}

impl Open {
    /// Keeps the session for its client; false if it cannot be resumed.
    fn park(self, service: &Service) -> bool {
        let Open { session, lease, registered, before, slot, .. } = self;
        // The client may come back with the same id at once.
        drop(registered);
        let slot = slot.filter(|slot| before.is_none() && slot.secret.is_none());
        slot.map(|slot| slot.park(session, lease, service.workers.clone())).is_some()
    }

    /// Writes what a later netd needs; a session that does not fit is not kept.
    fn record(&mut self, service: &Service) {
        let (session, lease) = (&self.session, &self.lease);
        self.slot = self.slot.take().filter(|slot| slot.record(service, session, lease));
    }
}

/// An answer that was computed, and what is counted of it.
struct Answer {
    response: ExpertResponse,
    times: JobTimes,
    /// Tokens per row; 0 if nothing was computed.
    tokens: u32,
}

async fn run(
    service: &Service,
    requests: &mut Requests<'_>,
    writer: &mut InboundWriter,
    (slot, takeover): (&mut Option<Open>, &Arc<Notify>),
) -> Result<(), SessionEnd> {
    let mut draining = service.draining.clone();
    let first = tokio::select! {
        biased;
        _ = draining.wait_for(|draining| *draining) => return Err(ending().into()),
        first = timeout(service.timeouts.step, requests.next()) => first,
    };
    let Some(mut next) = silence(service, first)? else {
        return Ok(());
    };
    let opening = admit(service, requests.peer, &next, takeover);
    let open = slot.insert(requests.watch(opening).await??);
    requests.is_open = true;
    // A first message without tensors opens nothing. What was pushed has tensors.
    while !next.request.tensors.is_empty() {
        let step = answer_step(service, open, &next);
        if let Some(answer) = requests.watch(step).await?? {
            open.record(service);
            let answer = answer.telling(open.slot.as_mut());
            let bytes = Bytes::from(answer.response.encode_to_vec());
            let session = &open.session;
            let total = next.arrived.elapsed();
            service.telemetry.step(total, answer.times, session.batch, answer.tokens);
            open.shown.stepped(session.tables.prefix());
            writer.send(bytes).await.map_err(|_| SessionEnd::Gone)?;
        }
        // The bytes of this message are not held any more while the next one is waited for.
        drop(next);
        let message = tokio::select! {
            message = timeout(service.timeouts.step, requests.next()) => silence(service, message)?,
            pushed = open.registered.pushed() => Some(pushed),
            _ = draining.wait_for(|draining| *draining) => return Err(ending().into()),
            () = sleep_until(open.ends) => return Err(Failure::timeout().into()),
            () = left(&open.before) => return Err(ending().into()),
        };
        let Some(message) = message else {
            return Ok(());
        };
        next = message;
    }
    Ok(())
}

/// The message that was waited for; `None` if the caller has ended, or said nothing for too long.
fn silence(
    service: &Service,
    message: Result<Result<Option<StepMessage>, SessionEnd>, tokio::time::error::Elapsed>,
) -> Result<Option<StepMessage>, SessionEnd> {
    message.unwrap_or_else(|_| {
        service.troubles.count(Trouble::TimedOut);
        Ok(None)
    })
}

/// Waits until the blocks of a session that this server had left are not served any more.
async fn left(before: &Option<Arc<Service>>) {
    match before {
        None => std::future::pending().await,
        Some(service) => {
            let mut draining = service.draining.clone();
            let _ = draining.wait_for(|draining| *draining).await;
        }
    }
}

fn ending() -> Failure {
    Failure::runtime("this server is shutting down")
}

impl Answer {
    /// The same answer; the first of a session that can be resumed tells its secret.
    fn telling(mut self, slot: Option<&mut Slot>) -> Answer {
        if let Some(told) = slot.and_then(Slot::tell) {
            self.response.metadata = told.add_to(&self.response.metadata).into();
        }
        self
    }
}

/// Goes on with a session that was parked here.
async fn resume(
    service: &Service,
    peer: PeerId,
    first: &StepMessage,
    (secret, takeover): (&Secret, &Arc<Notify>),
) -> Result<Open, Failure> {
    let StepMessage { request, metadata, .. } = first;
    let blocks = service.blocks(&request.uid)?;
    let adapter = service.adapter(metadata)?;
    let id = metadata.session_id.as_deref();
    let (slot, parked, left) = service.resumption.claim(peer, id, secret, takeover).await?;
    parked.check(service, &blocks)?;
    let (session, lease) = (parked.session, parked.lease);
    if session.adapter != adapter {
        return Err(Failure::bad("this session has another adapter"));
    }
    let registered = service.registry.register(id, &blocks);
    let registered =
        registered.ok_or_else(|| Failure::bad("the session id is in use by another session"))?;
    let length = session.tables.max_length();
    debug!(%peer, prefix = session.tables.prefix(), "session resumed");
    Ok(Open {
        shown: service.telemetry.session(&blocks, session.batch, length),
        session,
        lease,
        structure: metadata.args_structure.clone(),
        caller: Caller { peer, points: metadata.points, compression: service.compression },
        registered,
        before: None,
        slot: Some(slot),
        ends: Instant::now() + left,
    })
}

/// KV memory for a session that opens. Parked sessions give way, those of the peer itself where it
/// has its share.
async fn take_kv(
    service: &Service,
    peer: PeerId,
    kv: KvRequest,
    wait: Duration,
) -> Result<Lease, NoMemory> {
    while service.resumption.figures().parked > 0 {
        let evicted = match service.kv.take(peer, kv.clone(), Duration::ZERO).await {
            Err(NoMemory::Immediately { .. }) => service.resumption.evict(None),
            Err(NoMemory::OverShare { .. }) => service.resumption.evict(Some(peer)),
            taken => return taken,
        };
        if !evicted {
            break;
        }
    }
    service.kv.take(peer, kv, wait).await
}

async fn admit(
    service: &Service,
    peer: PeerId,
    first: &StepMessage,
    takeover: &Arc<Notify>,
) -> Result<Open, Failure> {
    let StepMessage { request, metadata, .. } = first;
    if let Some(secret) = &metadata.resume {
        return resume(service, peer, first, (secret, takeover)).await;
    }
    let before = service.before(&request.uid);
    let service = before.as_deref().unwrap_or(service);
    let blocks = service.blocks(&request.uid)?;
    let asked = metadata.required_max_length()?;
    let most = service.limits.inference_max_length;
    let max_length =
        u32::try_from(asked).ok().filter(|length| *length <= most).ok_or_else(|| {
            Failure::too_large(format!("Cannot allocate KV cache for {asked} tokens, max = {most}"))
        })?;
    let adapter = service.adapter(metadata)?;
    let batch = match request.tensors.first() {
        Some(Tensor { size, .. }) => size.first().copied().unwrap_or(1),
        None => 1,
    };
    if batch > MAX_ROWS {
        let text = format!("batch of {batch} sequences is over the limit of {MAX_ROWS}");
        return Err(Failure::too_large(text));
    }
    let id = metadata.session_id.as_deref();
    let registered = service.registry.register(id, &blocks).ok_or_else(|| {
        let id = id.unwrap_or_default();
        Failure::bad(format!("session id {id} is in use by another open session"))
    })?;
    let kv = KvRequest { blocks: blocks.clone(), rows: batch, max_length };
    let asked = Duration::try_from_secs_f64(metadata.alloc_timeout_s).unwrap_or(Duration::MAX);
    let lease = take_kv(service, peer, kv, asked.min(service.timeouts.max_alloc)).await?;
    let lasts = service.timeouts.session;
    let slot = metadata.wants_resumption && before.is_none();
    let slot = slot.then(|| service.resumption.open(peer, id, lasts, takeover)).flatten();
    let tables = SessionTables::new(batch as usize, max_length, lease.pages());
    let kv_losses = service.workers.kv_losses(&blocks);
    let shown = service.telemetry.session(&blocks, batch, max_length);
    Ok(Open {
        shown,
        session: Session::new(blocks, adapter, batch, tables, kv_losses),
        lease: Arc::new(lease),
        structure: metadata.args_structure.clone(),
        caller: Caller { peer, points: metadata.points, compression: service.compression },
        registered,
        before: before.clone(),
        slot,
        ends: Instant::now() + lasts,
    })
}

/// Answers one step; `None` if it came before, or was pushed here and cannot be computed. Its
/// output is on its way to the next server, if the client named one.
async fn answer_step(
    service: &Service,
    open: &mut Open,
    next: &StepMessage,
) -> Result<Option<Answer>, Failure> {
    let before = open.before.clone();
    let service = before.as_deref().unwrap_or(service);
    let step_id = next.metadata.step_id.as_deref();
    if !open.session.is_new_step(step_id) {
        return Ok(None);
    }
    match compute_step(service, open, next).await {
        Ok((output, spent, tokens)) => {
            let wants_times = next.metadata.wants_times;
            let metadata = if wants_times { times(next, spent) } else { Bytes::new() };
            let response = ExpertResponse { tensors: vec![output], metadata };
            Ok(Some(Answer { response, times: spent, tokens }))
        }
        Err(failure) if next.was_pushed => {
            service.troubles.count(Trouble::Push);
            debug!(%failure, "pushed step dropped");
            open.session.forget_step(step_id);
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// The output of a step, how long its job took, and its tokens per row.
async fn compute_step(
    service: &Service,
    open: &mut Open,
    next: &StepMessage,
) -> Result<(Tensor, JobTimes, u32), Failure> {
    let StepMessage { request, metadata, .. } = next;
    let session = &mut open.session;
    let start = metadata.start_from_position;
    let arguments = Arguments::of(&request.tensors, open.structure.as_ref(), true)?;
    if arguments.hidden.is_dummy() {
        let position = session.tables.check(start, 0)?;
        session.tables.roll_back(position);
        session.computed(None);
        return Ok((service.echo(&arguments.hidden)?, JobTimes::default(), 0));
    }
    let route = (session.blocks.clone(), session.adapter);
    let mut job = service.job(JobKind::Step, route, &arguments, open.caller)?;
    if job.batch != session.batch {
        let text = format!("batch of {} sequences in a session of {}", job.batch, session.batch);
        return Err(Failure::bad(text));
    }
    check_kv(service, session)?;
    let tokens = job.tokens;
    // A step that comes again finds the rows in its order.
    let step_id = metadata.step_id.as_deref();
    let hypo_ids = arguments.hypo_ids.as_deref().filter(|_| !session.was_last(step_id));
    let prefix = session.tables.prefix();
    job.plan = session.tables.begin(start, job.tokens, hypo_ids)?;
    if let Some(slot) = open.slot.as_ref().filter(|_| session.tables.prefix() < prefix) {
        // What it writes over is not to be believed if netd dies meanwhile.
        slot.record(service, session, &open.lease);
    }
    job.lease = Some(open.lease.clone());
    let computed = service.compute(job, &arguments).await;
    // Lost before the job was submitted, the pages that it read were those of nobody.
    let computed = computed.and_then(|done| check_kv(service, session).map(|()| done));
    match computed {
        Ok((output, times)) => {
            session.tables.commit();
            session.computed(step_id);
            if arguments.prompts.is_none() {
                service.onward.push(metadata, &output, &request.tensors);
            }
            Ok((output, times, tokens))
        }
        Err(failure) => {
            session.tables.abort();
            Err(failure)
        }
    }
}

/// Fails once a worker of the session's blocks has died and its KV pages with it.
fn check_kv(service: &Service, session: &Session) -> Result<(), Failure> {
    match service.workers.kv_losses(&session.blocks) == session.kv_losses {
        true => Ok(()),
        false => Err(JobFailure::CacheLost.into()),
    }
}

/// The metadata of an answer to a client that asks for times.
fn times(next: &StepMessage, spent: JobTimes) -> Bytes {
    let server_ns = u64::try_from(next.arrived.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let JobTimes { queue_ns, compute_ns } = spent;
    StepTimes { queue_ns, compute_ns, server_ns }.encode().into()
}

/// The caller's messages. While a step is computed one more is read, so that the end of the stream
/// is seen. A large message is counted for the peer before it is read.
struct Requests<'a> {
    service: &'a Service,
    peer: PeerId,
    reader: InboundReader,
    ahead: Option<(Bytes, Instant)>,
    held: Option<OwnedSemaphorePermit>,
    broken: Option<InboundError>,
    ended: bool,
    /// Whether the session was admitted.
    is_open: bool,
}

impl Requests<'_> {
    /// The next message; `None` after the caller's end of input, or a message without tensors that
    /// ends the open session. May be dropped and called again without loss.
    async fn next(&mut self) -> Result<Option<StepMessage>, SessionEnd> {
        while self.ahead.is_none() && self.broken.is_none() && !self.ended {
            self.read().await;
        }
        if let Some((message, arrived)) = self.ahead.take() {
            let request = decode(message)?;
            let held = self.held.take();
            if self.is_open && request.tensors.is_empty() {
                return Ok(None);
            }
            return Ok(Some(StepMessage::sent(request, arrived, held)?));
        }
        match self.broken.take() {
            Some(InboundError::Cancelled) => Err(SessionEnd::Gone),
            Some(error) => Err(Failure::from(error).into()),
            None => Ok(None),
        }
    }

    /// Runs `work` unless the caller goes away meanwhile.
    async fn watch<T>(&mut self, work: impl Future<Output = T>) -> Result<T, SessionEnd> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.cancelled() => Err(SessionEnd::Gone),
        }
    }

    async fn cancelled(&mut self) {
        while self.ahead.is_none() && self.broken.is_none() {
            self.read().await;
        }
        if self.broken != Some(InboundError::Cancelled) {
            std::future::pending().await
        }
    }

    async fn read(&mut self) {
        match self.reader.recv().await {
            Ok(Some(message)) => {
                self.ahead = Some((message, Instant::now()));
                self.reader.set_max_frame_bytes(COUNTED_BYTES as u64);
            }
            Ok(None) => self.ended = true,
            // Nothing of the frame was read yet: it is read once there is room for it.
            Err(InboundError::TooLarge { bytes, .. }) if self.may_read(bytes) => {
                let len = usize::try_from(bytes).unwrap_or(usize::MAX);
                self.held = self.service.budget.hold(self.peer, len).await;
                self.reader.set_max_frame_bytes(bytes);
            }
            Err(InboundError::TooLarge { bytes, .. }) => {
                let limit = self.service.max_request_bytes();
                self.broken = Some(InboundError::TooLarge { bytes, limit });
            }
            Err(error) => self.broken = Some(error),
        }
    }

    fn may_read(&self, bytes: u64) -> bool {
        self.held.is_none() && bytes <= self.service.max_request_bytes()
    }
}
