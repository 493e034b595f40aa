//! What this server offers to the swarm: which blocks under which names, and the records that say so.

use std::time::Duration;

use shared::block::{BlockIndex, Span, is_prefix};
use shared::config::{Limits, NetdConfig, SpanChoice, Throughput};
use shared::control::{Capacity, NetdInit, Rating, WorkerUp};
use shared::model::ModelFacts;
use shared::network::{Link, NetworkRate, RateFile};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;
use tracing::{info, warn};

use crate::dht::driver::unix_now;
use crate::join::Joined;
use crate::pings::{self, Neighbourhood};
use crate::rpc::PETALS_VERSION;
use crate::run::Fatal;
use crate::swarm::announce::{self, AnnounceConfig, Announcer, ServerStatus};
use crate::swarm::rebalance::{self, common, without};
use crate::swarm::throughput::{Rates, Reach, combine, network_rps};
use crate::swarm::{placement, view};
use crate::wire::records::{ModelInfo, ServerInfo, ServerState};

/// How long a move waits for the announcement of the new place before it counts as done; the announcer goes on.
const MOVE_PATIENCE: Duration = Duration::from_secs(20);
/// Longest wait of a newcomer before it chooses blocks: twice the mean of Petals' servers, so that those who were started together
/// see one another (`server.py`, `mean_block_selection_delay`).
const MAX_CHOICE_DELAY: Duration = Duration::from_secs(10);

/// What is offered.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The blocks.
    pub span: Span,
    /// Prefix of their uids.
    pub prefix: String,
    /// Bounds on requests.
    pub limits: Limits,
    config: AnnounceConfig,
    throughput: Throughput,
    standing: Standing,
    /// What workers measured at an earlier start.
    kept: Capacity,
    hidden_size: u32,
}

/// What of a record may change while the blocks stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standing {
    /// What the network carries.
    pub network: NetworkRate,
    /// Whether others reach this server through relays only.
    pub using_relay: bool,
}

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
    };
    Ok(Offer {
        span,
        prefix,
        limits: init.config.limits(facts),
        config,
        throughput: init.config.throughput,
        standing: Standing {
            network: known_rate(&init.config),
            using_relay: joined.relayed_now(),
        },
        kept: Capacity::default(),
        hidden_size: facts.hidden_size,
    })
}

/// What is known of the network without asking anybody.
fn known_rate(config: &NetdConfig) -> NetworkRate {
    let link = Link::of_system();
    let file = config.rates_dir.as_deref().map(RateFile::new);
    let takes_kept = config.throughput == Throughput::Measure;
    let kept = file
        .filter(|_| takes_kept)
        .and_then(|file| file.kept(&link));
    NetworkRate::of(config.link_bits_per_s, kept, &link)
}

fn prefix(init: &NetdInit, facts: &ModelFacts) -> Result<String, Fatal> {
    let prefix = init
        .config
        .dht_prefix
        .as_ref()
        .or(facts.dht_prefix.as_ref());
    let prefix = prefix.ok_or_else(|| {
        Fatal::bad_config(format!(
            "model {} comes from a local folder and has no name in the swarm; \
             give one with --dht_prefix NAME, the same on every server and client",
            facts.name
        ))
    })?;
    if !is_prefix(prefix) {
        return Err(Fatal::bad_config(format!(
            "DHT prefix {prefix:?} must not be empty or hold dots or white space; give another with --dht_prefix NAME"
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
        "blocks {span} are not in model {}, which has blocks 0:{}; give a range inside it with --block_indices START:END",
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
        warn!(%error, "cannot read who serves this model, taking its first blocks");
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

impl Offer {
    /// How this server looks after better places.
    pub fn balance(&self, init: &NetdInit) -> rebalance::Settings {
        let fixed = matches!(init.config.span, SpanChoice::Fixed(_));
        rebalance::Settings {
            prefix: self.prefix.clone(),
            own: self.config.peer_id.clone(),
            blocks: u32::try_from(self.config.model.num_blocks).unwrap_or(u32::MAX),
            quality: if fixed {
                0.0
            } else {
                init.config.balance_quality
            },
            period: init.config.mean_balance_check_period,
        }
    }

    /// Keeps JOINING records alive under the blocks that `present` does not serve, until the task is aborted. The blocks in both
    /// stay what they are. What the workers of the present blocks measured stands for the new ones until those have come.
    pub fn announce_coming(&self, joined: &Joined, present: Span, ups: &[WorkerUp]) -> AbortHandle {
        let (dht, period) = (joined.dht.clone(), self.config.update_period);
        let config = AnnounceConfig {
            info: self.record(ups),
            ..self.config.clone()
        };
        let under = without(self.span, present);
        let joining = async move {
            let status = status(ServerState::Joining, None);
            loop {
                if !announce::store_under(&dht, &config, &status, &under).await {
                    warn!(blocks = ?config.blocks, "cannot announce where this server is about to move");
                }
                tokio::time::sleep(period).await;
            }
        };
        tokio::spawn(joining).abort_handle()
    }

    /// Takes back the records under the blocks of this offer that `present` does not serve, in the background.
    pub fn take_back(&self, joined: &Joined, present: Span) -> JoinHandle<()> {
        let under = without(self.span, present);
        tokio::spawn(announce::take_back(
            joined.dht.clone(),
            self.config.clone(),
            under,
        ))
    }

    /// Keeps JOINING records alive until the server goes online or ends.
    pub fn announce_joining(&self, joined: &Joined) -> Announced {
        let dht = joined.dht.clone();
        let config = AnnounceConfig {
            info: self.record(&[]),
            ..self.config.clone()
        };
        let (offline, dht_again) = (config.clone(), dht.clone());
        let joining = tokio::spawn(async move {
            let status = status(ServerState::Joining, None);
            loop {
                let items = announce::records(&config, &status, unix_now());
                match dht.store_many(items).await {
                    Ok(_) => info!(blocks = ?config.blocks, "announced JOINING"),
                    Err(error) => warn!(%error, "cannot announce this server"),
                }
                tokio::time::sleep(config.update_period).await;
            }
        });
        Announced {
            state: State::Joining {
                task: joining,
                config: Box::new(offline),
                dht: dht_again,
            },
        }
    }

    /// The same for other blocks.
    pub fn at(&self, span: Span) -> Offer {
        let mut narrowed = self.clone();
        narrowed.span = span;
        narrowed.config.blocks = span.start().0..span.end().0;
        narrowed
    }

    fn neighbourhood(&self) -> Neighbourhood {
        let (start, end) = (self.span.start().0, self.span.end().0);
        let total = u32::try_from(self.config.model.num_blocks).unwrap_or(u32::MAX);
        Neighbourhood {
            prefix: self.prefix.clone(),
            blocks: start + 1..(end + 1).min(total).max(start + 1),
            own: self.config.peer_id.clone(),
            period: self.config.update_period,
        }
    }

    /// What workers measured at an earlier start stands for those that are not up yet.
    pub fn keeping(mut self, kept: Capacity) -> Offer {
        self.kept = kept;
        self
    }

    /// What may change of the record.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Changes it; what is announced stays until it is announced again.
    pub fn set_standing(&mut self, standing: Standing) {
        self.standing = standing;
    }

    /// Whether the network's rate is part of the record: not beside a throughput that the operator gives, as in Petals.
    pub fn tells_network(&self) -> bool {
        !matches!(self.throughput, Throughput::Fixed(_))
    }

    /// Whether nobody is to see this server: it measures and ends.
    pub fn is_dry_run(&self) -> bool {
        self.throughput == Throughput::DryRun
    }

    /// The speed that a server with these workers announces.
    pub fn rating(&self, ups: &[WorkerUp]) -> Rating {
        let record = self.record(ups);
        Rating {
            capacity: Capacity {
                inference_rps: record.inference_rps.unwrap_or(0.0),
                forward_rps: record.forward_rps.unwrap_or(0.0),
            },
            network: self.standing.network,
            network_rps: record.network_rps.unwrap_or(0.0),
            throughput: record.throughput,
            blocks: self.span.end().0 - self.span.start().0,
        }
    }

    /// The record of a server with these workers. Without any it is that of one that joins: with what was measured earlier, or as
    /// fast as its network alone, so that the others see that its blocks are taken.
    fn record(&self, ups: &[WorkerUp]) -> ServerInfo {
        // A chain of workers is as fast as its slowest; 0 means not measured.
        let slowest = |of: fn(&Capacity) -> f64| {
            let measured = ups.iter().map(|up| &up.capacity);
            let kept = ups.is_empty().then_some(&self.kept);
            let least = measured.chain(kept).map(of).fold(f64::INFINITY, f64::min);
            Some(least).filter(|rps| rps.is_finite() && *rps > 0.0)
        };
        let forward_rps = slowest(|capacity| capacity.forward_rps);
        let inference_rps = slowest(|capacity| capacity.inference_rps);
        let bits_per_s = self.standing.network.bits_per_s;
        let network_rps = network_rps(bits_per_s, bits_per_s, self.hidden_size);
        let rates = Rates {
            inference_rps: inference_rps.unwrap_or(0.0),
            forward_rps: forward_rps.unwrap_or(f64::INFINITY),
            network_rps,
        };
        let reach = match self.standing.using_relay {
            true => Reach::Relayed,
            false => Reach::Direct,
        };
        let blocks = self.span.end().0 - self.span.start().0;
        let throughput = match self.throughput {
            Throughput::Fixed(throughput) => throughput,
            Throughput::Measure | Throughput::Anew | Throughput::DryRun => {
                combine(&rates, blocks, reach)
            }
        };
        ServerInfo {
            throughput,
            forward_rps,
            inference_rps,
            network_rps: self.tells_network().then_some(network_rps),
            using_relay: Some(self.standing.using_relay),
            ..self.config.info.clone()
        }
    }
}

fn status(state: ServerState, cache_tokens_left: Option<u64>) -> ServerStatus {
    ServerStatus {
        state,
        cache_tokens_left,
        next_pings: Vec::new(),
    }
}

/// This server's records, as long as they are kept alive.
#[derive(Debug)]
pub struct Announced {
    state: State,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one")]
enum State {
    Joining {
        task: JoinHandle<()>,
        config: Box<AnnounceConfig>,
        dht: crate::dht::driver::Dht,
    },
    Announcing {
        status: watch::Sender<ServerStatus>,
        announcer: Announcer,
        pings: Option<AbortHandle>,
    },
    Ended,
}

impl Announced {
    /// From JOINING to ONLINE.
    pub fn online(
        &mut self,
        offer: &Offer,
        joined: &Joined,
        ups: &[WorkerUp],
        cache_tokens_left: u64,
    ) {
        if let State::Joining { task, .. } = &self.state {
            task.abort();
        }
        let config = AnnounceConfig {
            info: offer.record(ups),
            ..offer.config.clone()
        };
        let first = status(ServerState::Online, Some(cache_tokens_left));
        let (status, receiver) = watch::channel(first);
        let announcer = Announcer::start(joined.dht.clone(), config, receiver);
        let pings = pings::keep(joined.dht.clone(), offer.neighbourhood(), status.clone());
        let pings = Some(tokio::spawn(pings).abort_handle());
        self.state = State::Announcing {
            status,
            announcer,
            pings,
        };
    }

    /// Announces the same blocks in the same state with a record that has changed.
    pub fn renew(&mut self, offer: &Offer, joined: &Joined, ups: &[WorkerUp]) {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Joining { task, .. } => {
                task.abort();
                *self = offer.announce_joining(joined);
            }
            State::Announcing {
                status,
                announcer,
                pings,
            } => {
                announcer.stop();
                let config = AnnounceConfig {
                    info: offer.record(ups),
                    ..offer.config.clone()
                };
                let announcer = Announcer::start(joined.dht.clone(), config, status.subscribe());
                self.state = State::Announcing {
                    status,
                    announcer,
                    pings,
                };
            }
            State::Ended => {}
        }
    }

    /// From ONLINE at `from` to ONLINE at `to`, both of which are served now. In an order in which no reader sees blocks between the
    /// two (readers join the records of a peer into one span): what is left goes OFFLINE first, then the blocks in both change
    /// their record, then the new ones go ONLINE. The order is checked in [`crate::swarm::rebalance`].
    pub async fn move_to(
        &mut self,
        from: &Offer,
        to: &Offer,
        joined: &Joined,
        ups: &[WorkerUp],
        cache_tokens_left: u64,
    ) {
        self.stop();
        let (dht, gone) = (&joined.dht, without(from.span, to.span));
        let offline = status(ServerState::Offline, None);
        if !announce::store_under(dht, &from.config, &offline, &gone).await {
            warn!(blocks = %from.span, "clients were not told in time that these blocks are left; trying again");
            from.take_back(joined, to.span);
        }
        let config = AnnounceConfig {
            info: to.record(ups),
            ..to.config.clone()
        };
        let online = status(ServerState::Online, Some(cache_tokens_left));
        let both = common(from.span, to.span);
        announce::store_under(dht, &config, &online, &both).await;
        self.online(to, joined, ups, cache_tokens_left);
        if let State::Announcing { announcer, .. } = &self.state {
            let mut announced = announcer.announced();
            let there = announced.wait_for(|state| *state == Some(ServerState::Online));
            if tokio::time::timeout(MOVE_PATIENCE, there).await.is_err() {
                warn!(blocks = %to.span, "the new place is not announced yet; trying on");
            }
        }
    }

    /// Announces nothing more, and does not say so: what follows replaces it.
    pub fn stop(&mut self) {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Announcing {
                announcer, pings, ..
            } => {
                pings.iter().for_each(AbortHandle::abort);
                announcer.stop();
            }
            State::Joining { task, .. } => task.abort(),
            State::Ended => {}
        }
    }

    /// Records that nobody keeps alive.
    pub fn none() -> Announced {
        Announced {
            state: State::Ended,
        }
    }

    /// The free cache of the next announcement.
    pub fn cache_tokens_left(&self, tokens: u64) {
        if let State::Announcing { status, .. } = &self.state {
            status.send_if_modified(|status| {
                let changed = status.cache_tokens_left != Some(tokens);
                status.cache_tokens_left = Some(tokens);
                changed
            });
        }
    }

    /// Announces OFFLINE, in the background.
    pub fn offline(&mut self) {
        match &self.state {
            State::Announcing { status, pings, .. } => {
                // The announcer ends with the last sender of its status.
                pings.iter().for_each(AbortHandle::abort);
                status.send_modify(|status| status.state = ServerState::Offline);
            }
            State::Joining { .. } => {
                if let State::Joining { task, config, dht } =
                    std::mem::replace(&mut self.state, State::Ended)
                {
                    task.abort();
                    let (sender, receiver) = watch::channel(status(ServerState::Offline, None));
                    let announcer = Announcer::start(dht, *config, receiver);
                    self.state = State::Announcing {
                        status: sender,
                        announcer,
                        pings: None,
                    };
                }
            }
            State::Ended => {}
        }
    }

    /// Announces OFFLINE and waits until that is done, at most until `deadline`.
    pub async fn end(&mut self, deadline: Instant) {
        self.offline();
        let ended = match std::mem::replace(&mut self.state, State::Ended) {
            State::Announcing { announcer, .. } => announcer.finished(deadline).await,
            _ => true,
        };
        if !ended {
            let late = Duration::as_secs_f64(&deadline.elapsed());
            warn!(late, "clients were not told in time that this server ends");
        }
    }
}
