//! One step of a session: computed once, from whichever copy comes first.

use bytes::Bytes;
use shared::figures::{PushedStep, Trouble};
use shared::job::WorkKind;
use swarm::wire::messages::{Compression, ExpertResponse, Tensor};
use swarm::wire::step_times::StepTimes;
use tracing::debug;

use super::copies::is_same;
use super::{Open, StepAnswer};
use crate::rpc::compute::Arguments;
use crate::rpc::request::StepMessage;
use crate::rpc::{Failure, Service};
use crate::sessions::session::Session;
use crate::workers::link::{JobFailure, JobTimes};

/// Answers one step; `None` if it came before, or was pushed here and cannot be computed. Its
/// output is on its way to the next server, if the client named one.
///
/// # Errors
/// With the text for the client; also when it sends other values than those that were pushed here
/// for the step, and the answer to those has left.
pub(super) async fn answer_step(
    service: &Service,
    open: &mut Open,
    next: &StepMessage,
) -> Result<Option<StepAnswer>, Failure> {
    let before = open.before.clone();
    let service = before.as_deref().unwrap_or(service);
    let step_id = next.metadata.step_id.as_deref();
    if next.was_pushed && !can_take(service, &open.session, next) {
        return Ok(None);
    }
    if !open.session.is_new_step(step_id) {
        if next.was_pushed {
            service.telemetry.pushed(PushedStep::Late);
        } else if let Some(pushed) = open.unconfirmed.take(step_id)
            && !is_same(&pushed, next, open.structure.as_ref(), service.facts.dtype).await?
        {
            service.telemetry.pushed(PushedStep::Differs);
            return Err(overwritten());
        }
        return Ok(None);
    }
    let began = open.session.tables.prefix();
    match compute_step(service, open, next).await {
        Ok(Computed { output, times, tokens, is_reordered }) => {
            let wants_times = next.metadata.wants_times;
            let metadata = if wants_times { told(next, times) } else { Bytes::new() };
            let response = ExpertResponse { tensors: vec![output], metadata };
            let start = next.metadata.start_from_position;
            let is_appended = start.is_none_or(|start| start == u64::from(began));
            let undo = (is_appended && !is_reordered).then_some(began);
            Ok(Some(StepAnswer { response, times, tokens, undo }))
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

/// Ends a session whose cache holds a step that its client did not send.
pub(super) fn overwritten() -> Failure {
    Failure::bad(
        "the server before this one pushed other values for a step than the client sent, and they \
         cannot be taken back; open a new session",
    )
}

/// Whether a pushed step may stand for the client's copy. Clients compress their copies as this
/// server announces, and a push has other values unless nothing is lost by that. Petals servers
/// push the beam order of the first step with every step.
fn can_take(service: &Service, session: &Session, pushed: &StepMessage) -> bool {
    let is_exact = service.compression == Compression::None;
    is_exact && (session.batch == 1 || pushed.metadata.exact_push)
}

/// What came of one step.
struct Computed {
    output: Tensor,
    times: JobTimes,
    /// Per row; 0 if nothing was computed.
    tokens: u32,
    /// Whether the rows of the cache have another order than before.
    is_reordered: bool,
}

async fn compute_step(
    service: &Service,
    open: &mut Open,
    next: &StepMessage,
) -> Result<Computed, Failure> {
    let StepMessage { request, metadata, .. } = next;
    let session = &mut open.session;
    let start = metadata.start_from_position;
    let arguments = Arguments::of(&request.tensors, open.structure.as_ref(), true)?;
    if arguments.hidden.is_dummy() && next.was_pushed {
        return Err(Failure::bad("a pushed step must have hidden states"));
    }
    if arguments.hidden.is_dummy() {
        let position = session.tables.check(start, 0)?;
        session.tables.roll_back(position);
        session.computed(None);
        let output = service.echo(&arguments.hidden)?;
        return Ok(Computed { output, times: JobTimes::default(), tokens: 0, is_reordered: false });
    }
    let blocks = session.blocks.clone();
    let mut job =
        service.job(WorkKind::of_step, blocks, session.adapter, &arguments, open.caller)?;
    let (batch, tokens) = (job.body.batch, job.body.tokens);
    if batch != session.batch {
        let text = format!("batch of {batch} sequences in a session of {}", session.batch);
        return Err(Failure::bad(text));
    }
    check_kv(service, session)?;
    service.push_client.prepare(&mut open.next_hop, open.caller.peer, metadata);
    // A step that comes again finds the rows in its order.
    let step_id = metadata.step_id.as_deref();
    let hypo_ids = arguments.hypo_ids.as_deref().filter(|_| !session.was_last(step_id));
    let prefix = session.tables.prefix();
    job.body.pages = session.tables.begin(start, tokens, hypo_ids)?;
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
                service.push_client.push(
                    open.next_hop.as_ref(),
                    metadata,
                    &output,
                    &request.tensors,
                );
            }
            Ok(Computed { output, times, tokens, is_reordered: hypo_ids.is_some() })
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
fn told(next: &StepMessage, spent: JobTimes) -> Bytes {
    let server_ns = u64::try_from(next.arrived.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let JobTimes { queue_ns, compute_ns } = spent;
    StepTimes { queue_ns, compute_ns, server_ns }.encode().into()
}
