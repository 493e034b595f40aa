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
//! session: the client's own copy decides. Petals never compares the two.

mod admission;
pub(crate) mod copies;
mod messages;
mod step;

use std::sync::Arc;

use bytes::Bytes;
use p2p::{InboundStream, InboundWriter, PeerId, SessionMark};
use prost::Message;
use shared::figures::{PushedStep, Trouble};
use swarm::wire::messages::ExpertResponse;
use swarm::wire::metadata::ArgsStructure;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::debug;

use self::admission::admit;
use self::copies::{Unconfirmed, is_same};
use self::messages::Requests;
use self::step::answer_step;
use super::push_client::NextHop;
use super::registry::RegisteredSession;
use super::request::StepMessage;
use super::resumption::Slot;
use super::{Failure, Service};
use crate::sessions::admission::Lease;
use crate::sessions::session::Session;
use crate::telemetry::ShownSession;
use crate::workers::job::Caller;
use crate::workers::link::JobTimes;

/// How a session ended.
enum SessionEnd {
    /// Properly, or by silence: the stream is closed.
    Closed,
    /// The caller has gone.
    Gone,
    /// The next network daemon takes over.
    Replaced,
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
    let (reader, mut writer) = stream.into_split();
    let mut requests = Requests::new(service, peer, reader);
    let deadline = Instant::now() + service.timeouts.session;
    let (mut open, takeover) = (None, Arc::new(Notify::new()));
    let session = run(service, &mut requests, &mut writer, &mut open, &takeover);
    let end = tokio::select! {
        end = timeout_at(deadline, session) => match end {
            Ok(Err(end)) => end,
            Ok(Ok(())) => SessionEnd::Closed,
            Err(_) => SessionEnd::Failed(Failure::timeout()),
        },
        // Its client resumes the session on another stream.
        () = takeover.notified() => SessionEnd::Gone,
    };
    let open = open.filter(|_| matches!(end, SessionEnd::Gone | SessionEnd::Replaced));
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
            writer.finish(requests.into_reader()).await;
        }
        // The next daemon does not know it.
        SessionEnd::Replaced => {
            writer.fail(requests.into_reader(), &Failure::replaced().stream_text()).await;
        }
        SessionEnd::Failed(failure) => {
            service.troubles.count(failure.trouble());
            debug!(%peer, %failure, "session failed");
            writer.fail(requests.into_reader(), &failure.stream_text()).await;
        }
    }
}

/// A session that was admitted, and what of its first message governs all of it.
struct Open {
    session: Session,
    lease: Arc<Lease>,
    structure: Option<ArgsStructure>,
    caller: Caller,
    registered: RegisteredSession,
    /// The service of the blocks that were left, if they are its own.
    before: Option<Arc<Service>>,
    /// Where it is kept when the stream breaks, if its client can resume it.
    slot: Option<Slot>,
    /// When it ends at the latest.
    ends: Instant,
    /// Its row in what is shown of this server.
    shown: ShownSession,
    /// Steps that were pushed here and that the client has not sent yet.
    unconfirmed: Unconfirmed,
    /// The server that outputs are pushed to.
    next_hop: Option<NextHop>,
    /// Keeps a place for the connection of the caller.
    _mark: SessionMark,
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
struct StepAnswer {
    response: ExpertResponse,
    times: JobTimes,
    /// Tokens per row; 0 if nothing was computed.
    tokens: u32,
    /// Where to roll back to if the step must be computed again; `None` if it wrote over tokens
    /// that were there before, or changed the order of the rows.
    undo: Option<u32>,
}

async fn run(
    service: &Service,
    requests: &mut Requests,
    writer: &mut InboundWriter,
    slot: &mut Option<Open>,
    takeover: &Arc<Notify>,
) -> Result<(), SessionEnd> {
    let mut draining = service.draining.clone();
    let first = tokio::select! {
        biased;
        _ = draining.wait_for(|draining| *draining) => return Err(ending(service)),
        first = timeout(service.timeouts.step, requests.next()) => first,
    };
    let Some(mut next) = silence(service, first)? else {
        return Ok(());
    };
    let opening = admit(service, requests.peer, &next, takeover);
    let open = slot.insert(requests.watch(opening).await??);
    requests.opened();
    // A first message without tensors opens nothing. What was pushed has tensors.
    while !next.request.tensors.is_empty() {
        let step = answer_step(service, open, &next);
        if let Some(answer) = requests.watch(step).await?? {
            if next.was_pushed && contradicts(service, open, requests, &next, &answer).await? {
                // The copy was read ahead: it is the next message.
                let Some(copy) = requests.next().await? else {
                    return Ok(());
                };
                next = copy;
                continue;
            }
            open.record(service);
            let answer = answer.telling(open.slot.as_mut());
            let bytes = Bytes::from(answer.response.encode_to_vec());
            let session = &open.session;
            let total = next.arrived.elapsed();
            service.telemetry.step(total, answer.times, session.batch, answer.tokens);
            open.shown.stepped(session.tables.prefix());
            writer.send(bytes).await.map_err(|_| SessionEnd::Gone)?;
            if next.was_pushed {
                service.telemetry.pushed(PushedStep::First);
                open.unconfirmed.keep(next);
            }
        }
        let waiting = open.lease.silence();
        // The bytes of a message that the client sent are not held while the next one is waited for.
        let message = tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => return Err(ending(service)),
            () = sleep_until(open.ends) => return Err(Failure::timeout().into()),
            () = left(&open.before) => return Err(ending(service)),
            // Where both are here, the client's copy counts.
            message = timeout(service.timeouts.step, requests.next()) => silence(service, message)?,
            pushed = open.registered.pushed(), if open.unconfirmed.takes_pushes() => Some(pushed),
            () = waiting.gives_way() => return Err(Failure::gave_way().into()),
        };
        drop(waiting);
        let Some(message) = message else {
            return Ok(());
        };
        next = message;
    }
    Ok(())
}

/// Whether the client's copy of a pushed step has come meanwhile and differs. The step is undone
/// then, and no push is believed any more.
async fn contradicts(
    service: &Service,
    open: &mut Open,
    requests: &Requests,
    pushed: &StepMessage,
    answer: &StepAnswer,
) -> Result<bool, Failure> {
    let Some(copy) = requests.copy_of(pushed) else {
        return Ok(false);
    };
    let dtype = service.facts.dtype;
    if is_same(pushed, copy, open.structure.as_ref(), dtype).await? {
        return Ok(false);
    }
    service.telemetry.pushed(PushedStep::Differs);
    debug!(peer = %requests.peer, "pushed step differs from the client's copy");
    let undo = answer.undo.ok_or_else(step::overwritten)?;
    open.unconfirmed.distrust();
    open.session.tables.roll_back(undo);
    // The copy is no step that comes again: its beam order counts.
    open.session.computed(None);
    open.session.forget_step(pushed.metadata.step_id.as_deref());
    Ok(true)
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

fn ending(service: &Service) -> SessionEnd {
    match service.resumption.is_handed_over() {
        true => SessionEnd::Replaced,
        false => Failure::runtime("this server is shutting down").into(),
    }
}

impl StepAnswer {
    /// The same answer; the first of a session that can be resumed tells its secret.
    fn telling(mut self, slot: Option<&mut Slot>) -> StepAnswer {
        if let Some(told) = slot.and_then(Slot::tell) {
            self.response.metadata = told.add_to(&self.response.metadata).into();
        }
        self
    }
}
