//! What this server offers to the swarm: which blocks under which names, and the records that say
//! so.

mod announcement;
mod choice;

use p2p::task;
use shared::block::Span;
use shared::config::{SpanChoice, Throughput};
use shared::control::{NetdInit, Rating, WorkerUp};
use shared::figures::{AnnouncedFigures, Announcement};
use shared::limits::Limits;
use shared::network::NetworkRate;
use shared::survey::Capacity;
use swarm::dht::driver::unix_now;
use swarm::wire::records::{ServerInfo, ServerState};
use tokio::task::{AbortHandle, JoinHandle};
use tracing::{info, warn};

pub use announcement::Announced;
pub use choice::choose;

use crate::join::Joined;
use crate::membership::announce::{self, AnnounceConfig, ServerStatus};
use crate::membership::rebalance::{self, without};
use crate::pings::Neighbourhood;
use crate::throughput::{self, Rates, Reach, network_rps};

/// What is offered.
#[derive(Clone, Debug)]
pub struct Offer {
    pub span: Span,
    /// Prefix of their uids.
    pub prefix: String,
    /// Bounds on requests.
    pub limits: Limits,
    config: AnnounceConfig,
    throughput: Throughput,
    standing: RecordUpdate,
    /// What workers measured at an earlier start.
    kept: Capacity,
    hidden_size: u32,
}

/// What of a record may change while the blocks stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordUpdate {
    /// What the network carries.
    pub network: NetworkRate,
    /// Whether others reach this server through relays only.
    pub using_relay: bool,
}

impl Offer {
    /// How this server looks after better places.
    pub fn balance(&self, init: &NetdInit) -> rebalance::BalanceSettings {
        let fixed = matches!(init.config.span, SpanChoice::Fixed(_));
        rebalance::BalanceSettings {
            prefix: self.prefix.clone(),
            own: self.config.peer_id.clone(),
            blocks: u32::try_from(self.config.model.num_blocks).unwrap_or(u32::MAX),
            quality: if fixed { 0.0 } else { init.config.balance_quality },
            period: init.config.mean_balance_check_period,
        }
    }

    /// Keeps JOINING records alive under the blocks that `present` does not serve, until the task
    /// is aborted. The blocks in both stay what they are. What the workers of the present
    /// blocks measured stands for the new ones until those have come.
    pub fn announce_coming(&self, joined: &Joined, present: Span, ups: &[WorkerUp]) -> AbortHandle {
        let (dht, period) = (joined.dht.clone(), self.config.update_period);
        let config = AnnounceConfig { info: self.record(ups), ..self.config.clone() };
        let under = without(self.span, present);
        let joining = async move {
            let status = status(ServerState::Joining, None);
            loop {
                if !announce::store_under(&dht, &config, &status, &under).await {
                    warn!(blocks = ?config.blocks, "cannot announce the planned move");
                }
                tokio::time::sleep(period).await;
            }
        };
        task::spawn(joining).abort_handle()
    }

    /// Takes back the records under the blocks of this offer that `present` does not serve, in the
    /// background.
    pub fn take_back(&self, joined: &Joined, present: Span) -> JoinHandle<()> {
        let under = without(self.span, present);
        task::spawn(announce::take_back(joined.dht.clone(), self.config.clone(), under))
    }

    /// Keeps JOINING records alive until the server goes online or ends.
    pub fn announce_joining(&self, joined: &Joined) -> Announced {
        let dht = joined.dht.clone();
        let config = AnnounceConfig { info: self.record(&[]), ..self.config.clone() };
        let (offline, dht_again) = (config.clone(), dht.clone());
        let joining = task::spawn(async move {
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
        Announced::joining(joining, offline, dht_again)
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
            before: start.checked_sub(1),
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
    pub fn standing(&self) -> RecordUpdate {
        self.standing
    }

    /// Changes it; what is announced stays until it is announced again.
    pub fn set_standing(&mut self, standing: RecordUpdate) {
        self.standing = standing;
    }

    /// Whether the network's rate is part of the record: not beside a throughput that the operator
    /// gives, as in Petals.
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

    /// What the records of a server with these workers say.
    pub fn announced(&self, ups: &[WorkerUp], state: Announcement) -> AnnouncedFigures {
        let record = self.record(ups);
        // JSON has no other numbers.
        let rate = |rps: Option<f64>| rps.filter(|rps| rps.is_finite()).unwrap_or(0.0);
        AnnouncedFigures {
            state,
            span: Some(self.span.to_string()),
            blocks: self.span.block_count() as u64,
            first_block: self.span.start().0,
            throughput: rate(Some(record.throughput)),
            inference_rps: rate(record.inference_rps),
            forward_rps: rate(record.forward_rps),
            network_rps: rate(record.network_rps),
        }
    }

    /// The record of a server with these workers. Without any it is that of one that joins: with
    /// what was measured earlier, or as fast as its network alone, so that the others see that
    /// its blocks are taken.
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
        ServerInfo {
            throughput: throughput::announced(self.throughput, &rates, blocks, reach),
            forward_rps,
            inference_rps,
            network_rps: self.tells_network().then_some(network_rps),
            using_relay: Some(self.standing.using_relay),
            ..self.config.info.clone()
        }
    }
}

/// A status without neighbours.
fn status(state: ServerState, cache_tokens_left: Option<u64>) -> ServerStatus {
    ServerStatus { state, cache_tokens_left, next_pings: Vec::new() }
}
