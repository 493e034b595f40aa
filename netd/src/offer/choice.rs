//! Which blocks this server offers, and under which name.

use std::time::Duration;

use shared::block::{BlockIndex, Span, is_prefix};
use shared::config::SpanChoice;
use shared::control::NetdInit;
use shared::limits::Limits;
use shared::model::ModelFacts;
use shared::survey::Capacity;
use swarm::view;
use swarm::wire::records::{ModelInfo, ServerInfo, ServerState};
use tracing::{info, warn};

use super::{Offer, RecordUpdate};
use crate::fatal_error::Fatal;
use crate::join::Joined;
use crate::membership::announce::AnnounceConfig;
use crate::membership::placement;
use crate::network_rate;
use crate::rpc::PETALS_VERSION;

/// Longest wait of a newcomer before it chooses blocks: twice the mean of Petals' servers, so that
/// those who were started together see one another (`server.py`, `mean_block_selection_delay`).
const MAX_CHOICE_DELAY: Duration = Duration::from_secs(10);

/// Chooses span and names.
///
/// # Errors
/// [`Fatal`] when there is no prefix, or the blocks asked for are not in the model.
pub async fn choose(init: &NetdInit, facts: &ModelFacts, joined: &Joined) -> Result<Offer, Fatal> {
    let prefix = prefix(init, facts)?;
    let span = match init.served {
        Some(span) => within(span, facts)?,
        None => match init.config.span {
            SpanChoice::Fixed(span) => within(span, facts)?,
            SpanChoice::All => within(whole(facts)?, facts)?,
            SpanChoice::Count(count) => {
                if !init.config.initial_peers.is_empty() && count < facts.num_blocks {
                    let longest = MAX_CHOICE_DELAY.min(init.config.mean_balance_check_period);
                    tokio::time::sleep(longest.mul_f64(rand::random_range(0.0..1.0))).await;
                }
                weakest(count, facts, joined, &prefix).await?
            }
        },
    };
    let record = ServerInfo {
        public_name: init.config.public_name.clone(),
        version: Some(PETALS_VERSION.to_owned()),
        torch_dtype: Some(facts.dtype.name().to_owned()),
        quant_type: Some(facts.quant_type.name().to_owned()),
        adapters: facts.adapters.clone(),
        ..ServerInfo::new(ServerState::Joining, 0.0)
    };
    let limits = init.config.limits(facts);
    let config = AnnounceConfig {
        prefix: prefix.clone(),
        blocks: span.start().0..span.end().0,
        peer_id: joined.peer_id.clone(),
        model: ModelInfo {
            num_blocks: facts.num_blocks.into(),
            repository: facts.repository.clone(),
        },
        info: record,
        update_period: init.config.update_period,
        expiration: init.config.expiration,
        session_tokens: session_tokens(&limits, span),
    };
    Ok(Offer {
        span,
        prefix,
        limits,
        config,
        throughput: init.config.throughput,
        standing: RecordUpdate {
            network: network_rate::known(&init.config),
            using_relay: joined.relayed_now(),
        },
        kept: Capacity::default(),
        hidden_size: facts.hidden_size,
    })
}

/// What a session takes of the free cache that records tell: the longest one, or an eighth of the cache if
/// that is less.
fn session_tokens(limits: &Limits, span: Span) -> u64 {
    let tokens = limits.inference_max_length.min(limits.attn_cache_tokens / 8);
    2 * u64::from(tokens) * span.block_count() as u64
}

fn prefix(init: &NetdInit, facts: &ModelFacts) -> Result<String, Fatal> {
    let prefix = init.config.dht_prefix.as_ref().or(facts.dht_prefix.as_ref());
    let prefix = prefix.ok_or_else(|| {
        Fatal::bad_config(format!(
            "model {} comes from a local folder and has no name in the swarm; \
             give one with --dht_prefix NAME, the same on every server and client",
            facts.name
        ))
    })?;
    if !is_prefix(prefix) {
        return Err(Fatal::bad_config(format!(
            "invalid DHT prefix {prefix:?}: expected a name without dots and white space; give one with --dht_prefix NAME"
        )));
    }
    Ok(prefix.clone())
}

fn whole(facts: &ModelFacts) -> Result<Span, Fatal> {
    Span::new(0, facts.num_blocks).map_err(|error| Fatal::bad_config(error.to_string()))
}

fn within(span: Span, facts: &ModelFacts) -> Result<Span, Fatal> {
    if span.end() <= BlockIndex(facts.num_blocks) {
        return Ok(span);
    }
    Err(Fatal::bad_config(format!(
        "invalid blocks {span}: model {} has blocks 0:{}; give a range within them with --block_indices START:END",
        facts.name, facts.num_blocks
    )))
}

/// The `count` blocks that the swarm serves worst. A swarm that cannot be read counts as empty.
async fn weakest(
    count: u32,
    facts: &ModelFacts,
    joined: &Joined,
    prefix: &str,
) -> Result<Span, Fatal> {
    let total = facts.num_blocks;
    let count = count.clamp(1, total.max(1));
    let read = view::read_blocks(&joined.dht, prefix, 0..total).await;
    let blocks = read.unwrap_or_else(|error| {
        warn!(%error, "cannot read which servers serve this model, taking its first blocks");
        Vec::new()
    });
    let spans: Vec<_> = view::spans(&blocks, 0, ServerState::Joining)
        .into_iter()
        .filter(|span| span.peer_id != joined.peer_id)
        .collect();
    let throughput = placement::block_throughput(&spans, total as usize);
    let start = placement::best_start(&throughput, count as usize).unwrap_or(0);
    let start = u32::try_from(start).unwrap_or(0);
    info!(start, count, servers = spans.len(), "chose blocks");
    Span::new(start, start + count).map_err(|error| Fatal::bad_config(error.to_string()))
}
