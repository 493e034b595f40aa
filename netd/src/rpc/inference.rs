//! `rpc_inference`: one stream is one session.
//!
//! ```text
//!   first message -> admission (uids, max_length, KV memory) -> steps, one answer each -> empty message -> close
//!                                                                 any error -> error frame -> close
//! ```
//!
//! A session ends with its stream: when the client closes it, when it errs, after `step_timeout` of silence, after
//! `session_timeout` in all. Its pages go back then, or when the last job that names them was answered.
//!
//! # Discrepancies
//! `start_from_position` is checked (Petals' check never fires). The end frame without an empty request is a proper end. A
//! first message without tensors opens nothing and ends the session, as in Petals. An id that another open session has is
//! refused (in Petals the second session takes it over). A pushed step that cannot be computed is dropped and counted, and
//! does not end the session: the client's own copy decides.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use libp2p::PeerId;
use prost::Message;
use shared::job::MAX_ROWS;
use shared::shm::board::Trouble;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use super::budget::COUNTED_BYTES;
use super::compute::{Arguments, Asked};
use super::forward::decode;
use super::registry::Registered;
use super::{Failure, Service};
use crate::p2p::{InboundError, InboundReader, InboundStream, InboundWriter};
use crate::sessions::admission::Lease;
use crate::sessions::pool::KvRequest;
use crate::sessions::session::Session;
use crate::sessions::table::SessionTables;
use crate::wire::messages::{ExpertRequest, ExpertResponse, Tensor};
use crate::wire::metadata::{ArgsStructure, RequestMetadata};
use crate::wire::msgpack::{Limits, Value};
use crate::workers::link::{JobFailure, JobTimes};

const RPC: &str = "rpc_inference";

/// Key of request metadata by which our own client asks for times in the answer's metadata.
pub const TIMING_KEY: &str = "sepal_timing";

/// How a session ended.
enum End {
    /// Properly, or by silence: the stream is closed.
    Closed,
    /// The caller has gone.
    Gone,
    /// With an error for the caller.
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> End {
        End::Failed(failure)
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
    };
    let deadline = Instant::now() + service.timeouts.session;
    let session = run(service, &mut requests, &mut writer);
    let end = match timeout_at(deadline, session).await {
        Ok(Err(end)) => end,
        Ok(Ok(())) => End::Closed,
        Err(_) => End::Failed(Failure::timeout()),
    };
    match end {
        End::Gone => {
            service.troubles.count(Trouble::Abandoned);
            debug!(%peer, "session cancelled");
        }
        End::Closed => {
            debug!(%peer, "session closed");
            writer.finish(requests.reader).await;
        }
        End::Failed(failure) => {
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
    asked: Asked,
    registered: Registered,
    /// The service of the blocks that were left, if they are its own.
    before: Option<Arc<Service>>,
}

async fn run(
    service: &Service,
    requests: &mut Requests<'_>,
    writer: &mut InboundWriter,
) -> Result<(), End> {
    let mut draining = service.draining.clone();
    let first = tokio::select! {
        biased;
        _ = draining.wait_for(|draining| *draining) => return Err(ending().into()),
        first = timeout(service.timeouts.step, requests.next()) => first,
    };
    let Some(mut next) = silence(service, first)? else {
        return Ok(());
    };
    let metadata = RequestMetadata::parse(&next.request.metadata, RPC).map_err(Failure::from)?;
    let opening = admit(service, requests.peer, &next.request, &metadata);
    let mut open = requests.watch(opening).await??;
    // The end of a session, also in place of its first step. What was pushed has tensors.
    while !next.request.tensors.is_empty() {
        let step = step(service, &mut open, &next);
        if let Some((output, times)) = requests.watch(step).await?? {
            let metadata = timing(&next, times);
            let response = ExpertResponse {
                tensors: vec![output],
                metadata,
            };
            let bytes = Bytes::from(response.encode_to_vec());
            service.stats.record(next.arrived.elapsed());
            writer.send(bytes).await.map_err(|_| End::Gone)?;
        }
        // The bytes of this message are not held any more while the next one is waited for.
        drop(next);
        let message = tokio::select! {
            message = timeout(service.timeouts.step, requests.next()) => silence(service, message)?,
            pushed = open.registered.pushed() => Some(pushed),
            _ = draining.wait_for(|draining| *draining) => return Err(ending().into()),
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
    message: Result<Result<Option<Next>, End>, tokio::time::error::Elapsed>,
) -> Result<Option<Next>, End> {
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

async fn admit(
    service: &Service,
    peer: PeerId,
    request: &ExpertRequest,
    metadata: &RequestMetadata,
) -> Result<Open, Failure> {
    let before = service.before(&request.uid);
    let service = before.as_deref().unwrap_or(service);
    let blocks = service.blocks(&request.uid)?;
    let asked = metadata.required_max_length()?;
    let most = service.limits.inference_max_length;
    let max_length = u32::try_from(asked)
        .ok()
        .filter(|length| *length <= most)
        .ok_or_else(|| {
            Failure::too_large(format!(
                "Cannot allocate KV cache for {asked} tokens, max = {most}"
            ))
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
    let kv = KvRequest {
        blocks: blocks.clone(),
        rows: batch,
        max_length,
    };
    let asked = Duration::try_from_secs_f64(metadata.alloc_timeout_s).unwrap_or(Duration::MAX);
    let lease = service
        .kv
        .take(peer, kv, asked.min(service.timeouts.max_alloc))
        .await?;
    let tables = SessionTables::new(batch as usize, max_length, lease.pages());
    let kv_losses = service.workers.kv_losses(&blocks);
    Ok(Open {
        session: Session::new(blocks, adapter, batch, tables, kv_losses),
        lease: Arc::new(lease),
        structure: metadata.args_structure.clone(),
        asked: Asked {
            peer,
            points: metadata.points,
            compression: service.compression,
        },
        registered,
        before: before.clone(),
    })
}

/// One step; `None` if it came before, or was pushed here and cannot be computed. Its output is on its way to the next
/// server, if the client named one.
async fn step(
    service: &Service,
    open: &mut Open,
    next: &Next,
) -> Result<Option<(Tensor, JobTimes)>, Failure> {
    let metadata = RequestMetadata::parse(&next.request.metadata, RPC)?;
    let step_id = metadata.step_id.as_deref();
    if !open.session.is_new_step(step_id) {
        return Ok(None);
    }
    match compute(service, open, &next.request, &metadata).await {
        Ok(done) => Ok(Some(done)),
        Err(failure) if next.was_pushed => {
            service.troubles.count(Trouble::Push);
            debug!(%failure, "pushed step dropped");
            open.session.forget_step(step_id);
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

async fn compute(
    service: &Service,
    open: &mut Open,
    request: &ExpertRequest,
    metadata: &RequestMetadata,
) -> Result<(Tensor, JobTimes), Failure> {
    let before = open.before.clone();
    let service = before.as_deref().unwrap_or(service);
    let session = &mut open.session;
    let start = metadata.start_from_position;
    let arguments = Arguments::of(&request.tensors, open.structure.as_ref(), true)?;
    if arguments.hidden.is_dummy() {
        let position = session.tables.check(start, 0)?;
        session.tables.roll_back(position);
        return Ok((service.echo(&arguments.hidden)?, JobTimes::default()));
    }
    let (batch, tokens) = arguments.batch_and_tokens(service)?;
    if batch != session.batch {
        let text = format!(
            "batch of {batch} sequences in a session of {}",
            session.batch
        );
        return Err(Failure::bad(text));
    }
    check_kv(service, session)?;
    let plan = session
        .tables
        .begin(start, tokens, arguments.hypo_ids.as_deref())?;
    let pages = Some((plan, open.lease.clone()));
    let computed = service
        .compute(
            (session.blocks.clone(), session.adapter),
            &arguments,
            pages,
            &open.asked,
        )
        .await;
    // Lost before the job was submitted, the pages that it read were those of nobody.
    let computed = computed.and_then(|done| check_kv(service, session).map(|()| done));
    match computed {
        Ok((output, times)) => {
            session.tables.commit();
            if arguments.prompts.is_none() {
                service.onward.push(metadata, &output, &request.tensors);
            }
            Ok((output, times))
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

/// Times for our own client, if it asked for them.
fn timing(next: &Next, times: JobTimes) -> Bytes {
    let raw = &next.request.metadata;
    let asked = raw
        .windows(TIMING_KEY.len())
        .any(|window| window == TIMING_KEY.as_bytes())
        && Value::decode(raw, Limits::SMALL)
            .is_ok_and(|map| map.get(TIMING_KEY) == Some(&Value::Bool(true)));
    if !asked {
        return Bytes::new();
    }
    let server_ns = u64::try_from(next.arrived.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let entry = |key: &str, value: u64| (Value::str(key), Value::uint(value));
    let map = Value::Map(vec![
        entry("queue_ns", times.queue_ns),
        entry("compute_ns", times.compute_ns),
        entry("server_ns", server_ns),
    ]);
    map.encode().into()
}

/// A message to a session.
#[derive(Debug)]
pub(super) struct Next {
    /// The message.
    pub request: ExpertRequest,
    /// When its last byte was read.
    arrived: Instant,
    /// Whether another server sent it.
    was_pushed: bool,
    /// Its part of the peer's budget, if it is large.
    _held: Option<OwnedSemaphorePermit>,
}

impl Next {
    /// A step that another server sent, with its part of that peer's budget.
    pub fn pushed(request: ExpertRequest, held: Option<OwnedSemaphorePermit>) -> Next {
        Next {
            request,
            arrived: Instant::now(),
            was_pushed: true,
            _held: held,
        }
    }
}

/// The caller's messages. While a step is computed one more is read, so that the end of the stream is seen. A large message
/// is counted for the peer before it is read.
struct Requests<'a> {
    service: &'a Service,
    peer: PeerId,
    reader: InboundReader,
    ahead: Option<(Bytes, Instant)>,
    held: Option<OwnedSemaphorePermit>,
    broken: Option<InboundError>,
    ended: bool,
}

impl Requests<'_> {
    /// The next message; `None` after the caller's end of input. May be dropped and called again without loss.
    async fn next(&mut self) -> Result<Option<Next>, End> {
        while self.ahead.is_none() && self.broken.is_none() && !self.ended {
            self.read().await;
        }
        if let Some((message, arrived)) = self.ahead.take() {
            let _held = self.held.take();
            return Ok(Some(Next {
                request: decode(message)?,
                arrived,
                was_pushed: false,
                _held,
            }));
        }
        match self.broken.take() {
            Some(InboundError::Cancelled) => Err(End::Gone),
            Some(error) => Err(Failure::from(error).into()),
            None => Ok(None),
        }
    }

    /// Runs `work` unless the caller goes away meanwhile.
    async fn watch<T>(&mut self, work: impl Future<Output = T>) -> Result<T, End> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.cancelled() => Err(End::Gone),
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
