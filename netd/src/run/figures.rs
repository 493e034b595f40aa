//! Once a second: what the board shows of the service, summed up from its counters.

use std::sync::Arc;

use shared::shm::board::{Minute, NetdFigures};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;

use super::FIGURES_INTERVAL;
use crate::rpc::Service;
use crate::telemetry::Telemetry;
use crate::telemetry::minute::{Counters, LastMinute, Rates};

/// Shows on the board what the service does, for ever.
pub(super) async fn show(
    telemetry: Arc<Telemetry>,
    service: watch::Receiver<Option<Arc<Service>>>,
) {
    let (began, mut interval) = (Instant::now(), tokio::time::interval(FIGURES_INTERVAL));
    let (mut minute, mut rates) = (LastMinute::default(), Rates::default());
    let mut steps = 0;
    loop {
        interval.tick().await;
        let Some(board) = telemetry.board() else { return };
        let last = minute.tick(began.elapsed(), counters(&telemetry));
        let rates = rates.tick(began.elapsed(), &board.session_lengths());
        for (row, rate) in rates.into_iter().enumerate() {
            board.set_rate(row, rate);
        }
        let service = service.borrow().clone();
        board.set_figures(&figures(&telemetry, service.as_deref(), last));
        let Some(service) = service else {
            board.set_sessions_open(0);
            board.set_kv_tokens_free(0);
            continue;
        };
        board.set_sessions_open(service.open_sessions() as u64);
        board.set_kv_tokens_free(service.kv.figures().tokens_available);
        board.set_troubles(service.all_troubles());
        if last.steps != steps {
            steps = last.steps;
            let [total, ..] = last.quantiles;
            debug!(steps, p50 = ?total.p50, p99 = ?total.p99, "steps in this server, last minute");
        }
    }
}

fn counters(telemetry: &Telemetry) -> Counters {
    let [decode, prefill, ..] = telemetry.all_answered();
    let children = telemetry.board().map(|board| board.view().snapshot().children);
    let (mut units, mut rows) = (0, 0);
    for worker in children.iter().flatten() {
        units += worker.work.decode_units();
        rows += worker.work.batch_rows;
    }
    Counters { parts: telemetry.histograms(), tokens: decode.tokens + prefill.tokens, units, rows }
}

fn figures(telemetry: &Telemetry, service: Option<&Service>, minute: Minute) -> NetdFigures {
    let kv = service.map(|service| service.kv.figures());
    NetdFigures {
        minute,
        kv_tokens_total: kv.map_or(0, |kv| kv.tokens_total),
        kv_waiting: kv.map_or(0, |kv| kv.waiting as u64),
        sessions_parked: service.map_or(0, |service| service.resumption.figures().parked),
        peers: telemetry.swarm().map_or(0, |(p2p, _)| p2p.figures().peers),
        announced: telemetry.announced(),
    }
}
