//! The figures of netd, gathered from where they are counted: once a second for the board, and for each
//! scrape of [`crate::metrics`].

use std::sync::Arc;
use std::time::Duration;

use shared::figures::{
    ClientFigures, DhtNodeFigures, Figures, KvFigures, Latency, NetworkFigures, RpcBytes, Trouble,
};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::rpc::Service;
use crate::telemetry::Telemetry;
use crate::telemetry::minute::{Counters, LastMinute, SessionRates};

/// Time between two looks at what the daemon shows and announces of itself.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// Shows on the board what the service does, for ever.
pub async fn show(telemetry: Arc<Telemetry>, service: watch::Receiver<Option<Arc<Service>>>) {
    let (began, mut interval) = (Instant::now(), tokio::time::interval(INTERVAL));
    let (mut minute, mut rates) = (LastMinute::default(), SessionRates::default());
    let mut steps = 0;
    loop {
        interval.tick().await;
        let Some(board) = telemetry.board() else { return };
        let service = service.borrow().clone();
        let mut figures = read(&telemetry, service.as_deref());
        figures.minute = minute.tick(began.elapsed(), counters(&telemetry));
        rates.tick(began.elapsed(), &mut figures.sessions);
        if let Err(error) = board.set_figures(&figures) {
            warn!(%error, "cannot show the figures of netd");
        }
        if service.is_some() && figures.minute.steps != steps {
            steps = figures.minute.steps;
            if let Some(Latency { p50_ms, p99_ms, .. }) = figures.minute.latency.first() {
                let [p50, p99] = [p50_ms, p99_ms].map(|ms| Duration::from_secs_f64(ms / 1e3));
                debug!(steps, ?p50, ?p99, "steps in this server, last minute");
            }
        }
    }
}

/// Figures now, but those of the last minute.
pub fn read(telemetry: &Telemetry, service: Option<&Service>) -> Figures {
    let kv = service.map_or_else(KvFigures::default, |service| KvFigures {
        parked: service.resumption.parked(),
        ..service.kv.figures()
    });
    let (network, peers, dht) = swarm(telemetry);
    Figures {
        scrape_s: telemetry.scrape_time().as_secs_f64(),
        served: telemetry.served(),
        sessions: telemetry.open_sessions(),
        clients: clients(telemetry, service),
        resumption: service.map(|service| service.resumption.figures()).unwrap_or_default(),
        kv,
        peers,
        announced: telemetry.announced(),
        network,
        dht,
        coverage: telemetry.coverage(),
        ..Figures::default()
    }
}

fn clients(telemetry: &Telemetry, service: Option<&Service>) -> ClientFigures {
    let troubles = service.map(Service::all_troubles).unwrap_or_default();
    ClientFigures {
        sessions: service.map_or(0, Service::open_sessions) as u64,
        opened: telemetry.sessions_opened(),
        ready: service.is_some_and(|service| service.ready().is_ok()),
        refused: Trouble::ALL.into_iter().zip(troubles).collect(),
    }
}

/// libp2p, its peers, and the DHT.
fn swarm(telemetry: &Telemetry) -> (NetworkFigures, u64, DhtNodeFigures) {
    let Some((p2p, dht)) = telemetry.swarm() else { return Default::default() };
    let (p2p, dht) = (p2p.figures(), dht.figures());
    let direct = RpcBytes { received: p2p.direct.received, sent: p2p.direct.sent };
    let relayed = RpcBytes { received: p2p.relayed.received, sent: p2p.relayed.sent };
    let (circuits, circuit_bytes) = (p2p.circuits, p2p.circuit_bytes);
    let network = NetworkFigures { direct, relayed, circuits, circuit_bytes };
    let dht = DhtNodeFigures {
        nodes: dht.nodes,
        records: dht.records,
        record_bytes: dht.record_bytes,
        lookups: dht.lookups,
        stores: dht.stores,
        calls: dht.calls,
        failed_calls: dht.failed_calls,
        refused_renewals: dht.refused_renewals,
        evicted: dht.evicted,
    };
    (network, p2p.peers, dht)
}

fn counters(telemetry: &Telemetry) -> Counters {
    let children = telemetry.board().map(|board| board.view().children());
    let (mut units, mut rows) = (0, 0);
    for batches in children.iter().flatten().filter_map(|child| child.work.batches) {
        units += batches.all_units();
        rows += batches.rows;
    }
    Counters { parts: telemetry.histograms(), tokens: telemetry.step_tokens(), units, rows }
}
