//! Opening a session, or going on with one that was parked.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use p2p::PeerId;
use shared::job::MAX_ROWS;
use swarm::wire::messages::Tensor;
use swarm::wire::resumption::Secret;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tracing::debug;

use super::Open;
use super::copies::Unconfirmed;
use crate::rpc::request::StepMessage;
use crate::rpc::{Failure, Service};
use crate::sessions::admission::{Lease, NoMemory};
use crate::sessions::pool::KvRequest;
use crate::sessions::session::Session;
use crate::sessions::table::SessionTables;
use crate::workers::job::Caller;

/// Goes on with a session that was parked here.
async fn resume(
    service: &Service,
    peer: PeerId,
    first: &StepMessage,
    secret: &Secret,
    takeover: &Arc<Notify>,
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
        unconfirmed: Unconfirmed::default(),
        next_hop: None,
        _mark: service.push_client.p2p().mark_session(peer),
        ends: Instant::now() + left,
    })
}

/// How long a session that was told to end has for it.
const CLEARING: Duration = Duration::from_secs(2);

/// How often one that waits looks for sessions that fell silent meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// KV memory for a session that opens. Parked sessions give way, those of the peer itself where it
/// has its share; then silent ones.
async fn take_kv(
    service: &Service,
    peer: PeerId,
    kv: KvRequest,
    wait: Duration,
) -> Result<Lease, NoMemory> {
    while service.resumption.parked() > 0 {
        let evicted = match service.kv.take(peer, kv.clone(), Duration::ZERO).await {
            Err(NoMemory::Immediately { .. }) => service.resumption.evict(None),
            Err(NoMemory::OverShare { .. }) => service.resumption.evict(Some(peer)),
            taken => return taken,
        };
        if !evicted {
            break;
        }
    }
    let make_room = || service.kv.make_room(peer, &kv);
    let wait = if make_room() { wait.max(CLEARING) } else { wait };
    let mut taking = pin!(service.kv.take(peer, kv.clone(), wait));
    loop {
        match timeout(LOOK_AGAIN, &mut taking).await {
            Ok(taken) => return taken,
            Err(_) => drop(make_room()),
        }
    }
}

/// Admits the session that a first message asks for.
///
/// # Errors
/// With the text for the client.
pub(super) async fn admit(
    service: &Service,
    peer: PeerId,
    first: &StepMessage,
    takeover: &Arc<Notify>,
) -> Result<Open, Failure> {
    let StepMessage { request, metadata, .. } = first;
    if let Some(secret) = &metadata.resume {
        return resume(service, peer, first, secret, takeover).await;
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
        unconfirmed: Unconfirmed::default(),
        next_hop: None,
        _mark: service.push_client.p2p().mark_session(peer),
        ends: Instant::now() + lasts,
    })
}
