//! What the pages say. A scrape reads counters and the board; it takes no lock that a step needs.
//!
//! Names follow the conventions of Prometheus: `sepal_` first, base units, `_total` behind counters.
//! Labels are workers, roles and kinds, whose numbers are bounded; a PeerID is none of them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};
use shared::control::Role;
use shared::ids::Rank;
use shared::job::WorkKind;
use shared::shm::board::{
    Announcement, BATCH_BOUNDS, BoardSnapshot, ChildSnapshot, ChildState, RestartReason, StepPart,
    Trouble, WorkCounts,
};
use tokio::sync::watch;

use crate::rpc::Service;
use crate::telemetry::{PushedStep, Telemetry};

/// Of the OpenMetrics text format.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Where the pages come from.
#[derive(Debug)]
pub(super) struct Pages {
    registry: Registry,
    sources: Arc<Sources>,
}

#[derive(Debug)]
struct Sources {
    telemetry: Arc<Telemetry>,
    service: watch::Receiver<Option<Arc<Service>>>,
    /// How long the last scrape took; 0 before the first.
    scrape_ns: AtomicU64,
}

impl Pages {
    pub(super) fn new(
        telemetry: Arc<Telemetry>,
        service: watch::Receiver<Option<Arc<Service>>>,
    ) -> Pages {
        let scrape_ns = AtomicU64::new(0);
        let sources = Arc::new(Sources { telemetry, service, scrape_ns });
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Writer(sources.clone())));
        Pages { registry, sources }
    }

    pub(super) fn metrics(&self) -> Result<String, fmt::Error> {
        let began = Instant::now();
        let mut text = String::with_capacity(32 << 10);
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.sources.scrape_ns.store(nanos, Ordering::Relaxed);
        Ok(text)
    }

    /// Whether clients can come; if not, why.
    pub(super) fn ready(&self) -> Result<(), &'static str> {
        match self.sources.service.borrow().as_ref() {
            Some(service) => service.ready(),
            None => Err("the server is not online yet"),
        }
    }
}

/// A name of a label and its value.
type Label = (&'static str, String);

/// Writes the metrics of [`Sources`].
#[derive(Debug)]
struct Writer(Arc<Sources>);

impl Collector for Writer {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let telemetry = &self.0.telemetry;
        let service = self.0.service.borrow().clone();
        let mut out = Output { encoder };
        let scrape = Duration::from_nanos(self.0.scrape_ns.load(Ordering::Relaxed));
        out.gauge(
            "sepal_scrape_duration",
            "Time that the last scrape took",
            SECONDS,
            scrape.as_secs_f64(),
        )?;
        steps(telemetry, &mut out)?;
        requests(telemetry, service.as_deref(), &mut out)?;
        memory(service.as_deref(), &mut out)?;
        announcement(telemetry, &mut out)?;
        network(telemetry, &mut out)?;
        if let Some(board) = telemetry.board() {
            let board = board.view().snapshot();
            supervision(&board, &mut out)?;
            workers(&board, &mut out)?;
            devices(&board, &mut out)?;
        }
        Ok(())
    }
}

const SECONDS: Option<&Unit> = Some(&Unit::Seconds);
const BYTES: Option<&Unit> = Some(&Unit::Bytes);
const CELSIUS: Option<&Unit> = Some(&Unit::Celsius);

/// Steps, tokens, and times of steps.
fn steps(telemetry: &Telemetry, out: &mut Output<'_>) -> fmt::Result {
    let answered = || WorkKind::ALL.into_iter().zip(telemetry.all_answered());
    let label = |kind: WorkKind| vec![("kind", kind.name().to_owned())];
    let help = "Requests answered: steps of sessions, forward and backward passes";
    out.counters(
        "sepal_requests",
        help,
        None,
        answered().map(|(kind, of)| (label(kind), of.requests as f64)),
    )?;
    let help = "Tokens of answered requests, all sequences";
    out.counters(
        "sepal_tokens",
        help,
        None,
        answered().map(|(kind, of)| (label(kind), of.tokens as f64)),
    )?;
    let help = "Steps pushed by the server before: first (answered before the client's copy came), late (dropped), differs (from the client's copy)";
    let pushed = PushedStep::ALL.into_iter().zip(telemetry.all_pushed());
    let label = |outcome: PushedStep| vec![("outcome", outcome.name().to_owned())];
    out.counters(
        "sepal_pushed_steps",
        help,
        None,
        pushed.map(|(outcome, count)| (label(outcome), count as f64)),
    )?;
    let help = "Time of a step in this server from its request to its answer, and its parts: network (messages and hand-over in netd), queue and compute (workers)";
    let mut family = out.family("sepal_step_duration", help, SECONDS, MetricType::Histogram)?;
    for (part, times) in StepPart::ALL.into_iter().zip(telemetry.histograms()) {
        let (sum, bounded) = (times.sum().as_secs_f64(), times.bounded());
        let count = bounded.iter().map(|(_, count)| count).sum();
        let label = vec![("part", part.name().to_owned())];
        histogram(&mut family.encode_family(&label)?, sum, count, &bounded)?;
    }
    Ok(())
}

/// Sessions, and requests that were not served.
fn requests(telemetry: &Telemetry, service: Option<&Service>, out: &mut Output<'_>) -> fmt::Result {
    let open = service.map_or(0, Service::open_sessions);
    out.gauge("sepal_sessions", "Inference sessions that are open", None, open as f64)?;
    let opened = telemetry.sessions_opened() as f64;
    out.counter("sepal_sessions_opened", "Inference sessions that were admitted", opened)?;
    let kept = service.map(|service| service.resumption.figures()).unwrap_or_default();
    let help = "Sessions without a stream that are kept for their clients";
    out.gauge("sepal_sessions_parked", help, None, kept.parked as f64)?;
    let help = "Sessions that their clients resumed";
    out.counter("sepal_sessions_resumed", help, kept.resumed as f64)?;
    let help = "Sessions taken over from a network daemon that died";
    out.counter("sepal_sessions_restored", help, kept.restored as f64)?;
    let help = "Parked sessions that were freed before their clients came";
    out.counter("sepal_sessions_expired", help, kept.expired as f64)?;
    let ready = service.is_some_and(|service| service.ready().is_ok());
    out.gauge(
        "sepal_ready",
        "1 while clients can come, as /readyz says",
        None,
        f64::from(u8::from(ready)),
    )?;
    let troubles = service.map(Service::all_troubles).unwrap_or_default();
    let samples = Trouble::ALL.into_iter().zip(troubles);
    let label = |kind: Trouble| vec![("kind", kind.name().to_owned())];
    let help = "Requests of peers that were not served as asked, and records dropped";
    let samples = samples.map(|(kind, count)| (label(kind), count as f64));
    out.counters("sepal_refused_requests", help, None, samples)
}

/// The KV cache.
fn memory(service: Option<&Service>, out: &mut Output<'_>) -> fmt::Result {
    let kv = service.map(|service| service.kv.figures());
    let figure = |of: fn(crate::sessions::admission::KvFigures) -> u64| kv.map_or(0, of) as f64;
    let help = "Size of the KV cache in tokens times blocks";
    out.gauge("sepal_kv_cache_tokens", help, None, figure(|kv| kv.tokens_total))?;
    let help = "Tokens times blocks of the KV cache that no session holds";
    out.gauge("sepal_kv_cache_free_tokens", help, None, figure(|kv| kv.tokens_available))?;
    let help = "Sessions that wait for KV cache";
    out.gauge("sepal_kv_cache_waiting_sessions", help, None, figure(|kv| kv.waiting as u64))?;
    let waits = service.map(|service| service.kv.waits()).unwrap_or_default();
    let help = "Sessions that had to wait for KV cache";
    out.counter("sepal_kv_cache_waits", help, waits.count as f64)?;
    let help = "Time that sessions waited for KV cache";
    let waited = [(Vec::new(), waits.time.as_secs_f64())];
    out.counters("sepal_kv_cache_wait", help, SECONDS, waited.into_iter())
}

/// What the swarm is told.
fn announcement(telemetry: &Telemetry, out: &mut Output<'_>) -> fmt::Result {
    let announced = telemetry.announced();
    let blocks = announced.span.map_or(0, |span| span.block_count());
    let help = "Blocks that this server announces";
    out.gauge("sepal_announced_blocks", help, None, blocks as f64)?;
    let help = "First block that this server announces";
    let first = announced.span.map_or(0, |span| span.start().0);
    out.gauge("sepal_announced_first_block", help, None, f64::from(first))?;
    let help = "1 for the state that this server announces";
    let states = Announcement::ALL.into_iter().map(|state| {
        let is_it = u8::from(state == announced.state);
        (vec![("state", state.name().to_owned())], f64::from(is_it))
    });
    out.gauges("sepal_announced_state", help, None, states)?;
    let help = "Throughput that this server announces, in tokens per second: of all it serves, of one block (inference, forward), of its network; 0 = not announced";
    let rates = [
        ("total", announced.throughput),
        ("inference", announced.inference_rps),
        ("forward", announced.forward_rps),
        ("network", announced.network_rps),
    ];
    let rates = rates.into_iter().map(|(of, rate)| (vec![("of", of.to_owned())], rate));
    out.gauges("sepal_announced_throughput", help, None, rates)
}

/// libp2p and the DHT.
fn network(telemetry: &Telemetry, out: &mut Output<'_>) -> fmt::Result {
    let swarm = telemetry.swarm();
    let (p2p, dht) = match swarm {
        Some((p2p, dht)) => (p2p.figures(), dht.figures()),
        None => Default::default(),
    };
    out.gauge("sepal_peers", "Peers that are connected", None, p2p.peers as f64)?;
    let help = "Bytes of RPCs, by whether they pass a relay";
    let label = |direction: &str, path: &str| {
        vec![("direction", direction.to_owned()), ("path", path.to_owned())]
    };
    let bytes = [
        (label("in", "direct"), p2p.direct.received),
        (label("out", "direct"), p2p.direct.sent),
        (label("in", "relay"), p2p.relayed.received),
        (label("out", "relay"), p2p.relayed.sent),
    ];
    let bytes = bytes.into_iter().map(|(label, bytes)| (label, bytes as f64));
    out.counters("sepal_network", help, BYTES, bytes)?;
    let help = "Circuits that peers opened through this server as their relay";
    out.counter("sepal_relayed_circuits", help, p2p.circuits as f64)?;
    let help = "Bytes that these circuits carried, both directions together";
    let bytes = [(Vec::new(), p2p.circuit_bytes as f64)];
    out.counters("sepal_relayed", help, BYTES, bytes.into_iter())?;
    out.gauge("sepal_dht_nodes", "Nodes in the routing table of the DHT", None, dht.nodes as f64)?;
    let help = "Records of the DHT that this server keeps for the swarm";
    out.gauge("sepal_dht_records", help, None, dht.records as f64)?;
    let help = "Size of these records";
    out.gauge("sepal_dht_records_size", help, BYTES, dht.record_bytes as f64)?;
    out.counter("sepal_dht_lookups", "Lookups of keys in the DHT", dht.lookups as f64)?;
    out.counter(
        "sepal_dht_stores",
        "Records that this server wrote to the DHT",
        dht.stores as f64,
    )?;
    let help = "Calls to other nodes of the DHT";
    out.counter("sepal_dht_calls", help, dht.calls as f64)?;
    let help = "Calls to other nodes of the DHT that came to nothing";
    out.counter("sepal_dht_failed_calls", help, dht.failed_calls as f64)?;
    let help = "Records of this server that a DHT node refused, since somebody else wrote a later one in its name";
    out.counter("sepal_dht_refused_renewals", help, dht.refused_renewals as f64)?;
    let help = "Records of others that were dropped to make room in the DHT store";
    out.counter("sepal_dht_evicted_records", help, dht.evicted as f64)
}

/// The supervisor's part.
fn supervision(board: &BoardSnapshot, out: &mut Output<'_>) -> fmt::Result {
    let started = board.started_unix_s as f64;
    out.gauge("sepal_start_time", "When this server was started, since 1970", SECONDS, started)?;
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    let build = [(version, 1.0)];
    out.gauges("sepal_build_info", "The build of this server; always 1", None, build.into_iter())?;
    let roles = [Role::Netd, Role::Worker, Role::Prepare];
    let pairs = roles.into_iter().flat_map(|role| RestartReason::ALL.map(|reason| (role, reason)));
    let samples = pairs.map(|(role, reason)| {
        let label = vec![("role", role.name().to_owned()), ("reason", reason.name().to_owned())];
        (label, board.restarts.of(role, reason) as f64)
    });
    out.counters("sepal_restarts", "Processes that were started again", None, samples)
}

/// The workers of a board, each with its label.
fn each_worker(board: &BoardSnapshot) -> impl Iterator<Item = (Vec<Label>, &ChildSnapshot)> {
    let workers = board.children.iter().filter(|child| child.role == Some(Role::Worker));
    workers.filter_map(|child| Some((vec![("worker", child.worker?.to_string())], child)))
}

/// What workers did since each was started.
fn workers(board: &BoardSnapshot, out: &mut Output<'_>) -> fmt::Result {
    let ready = each_worker(board)
        .map(|(label, child)| (label, f64::from(u8::from(child.state == ChildState::Ready))));
    out.gauges("sepal_worker_ready", "1 for a worker that serves", None, ready)?;
    let by_kind = |value: fn(&WorkCounts) -> f64| {
        each_worker(board).flat_map(move |(label, child)| {
            let kinds = WorkKind::ALL.into_iter().zip(child.work.kinds);
            kinds.map(move |(kind, counts)| {
                let mut label = label.clone();
                label.push(("kind", kind.name().to_owned()));
                (label, value(&counts))
            })
        })
    };
    let help = "Jobs that a worker answered since it was started";
    out.counters("sepal_worker_jobs", help, None, by_kind(|of| of.jobs as f64))?;
    let help = "Tokens in these jobs, all sequences";
    out.counters("sepal_worker_tokens", help, None, by_kind(|of| of.tokens as f64))?;
    let help = "Time that these jobs waited in the worker, each counted by itself";
    out.counters("sepal_worker_queue", help, SECONDS, by_kind(|of| of.queued.as_secs_f64()))?;
    let help = "Time that these jobs were computed, each counted by itself";
    out.counters("sepal_worker_compute", help, SECONDS, by_kind(|of| of.computed.as_secs_f64()))?;
    let help = "Sequences in each unit of decode steps that a worker computed together";
    let mut family = out.family("sepal_worker_batch_rows", help, None, MetricType::Histogram)?;
    // Rank 0 of a group speaks for all of its ranks.
    for (label, child) in each_worker(board) {
        let is_first = child.worker.is_some_and(|worker| worker.rank == Rank(0));
        let bounds = BATCH_BOUNDS.iter().map(|bound| *bound as f64).chain([f64::INFINITY]);
        let bounded: Vec<(f64, u64)> = bounds.zip(child.work.batches).collect();
        if is_first {
            let rows = child.work.batch_rows as f64;
            let units = child.work.decode_units();
            histogram(&mut family.encode_family(&label)?, rows, units, &bounded)?;
        }
    }
    Ok(())
}

/// Devices, where NVML knows them.
fn devices(board: &BoardSnapshot, out: &mut Output<'_>) -> fmt::Result {
    let known = |value: fn(&ChildSnapshot) -> Option<f64>| {
        each_worker(board).filter_map(move |(label, child)| Some((label, value(child)?)))
    };
    let help = "Memory of a worker's device that is in use, by any process";
    let used = known(|child| child.work.device.memory.map(|(used, _)| used as f64));
    out.gauges("sepal_device_memory_used", help, BYTES, used)?;
    let all = known(|child| child.work.device.memory.map(|(_, all)| all as f64));
    out.gauges("sepal_device_memory", "Memory of a worker's device", BYTES, all)?;
    let celsius = known(|child| child.work.device.celsius.map(f64::from));
    out.gauges("sepal_device_temperature", "Temperature of a worker's device", CELSIUS, celsius)?;
    let watts = known(|child| child.work.device.milliwatts.map(|mw| mw as f64 / 1e3));
    let unit = Unit::Other("watts".to_owned());
    out.gauges("sepal_device_power", "Power draw of a worker's device", Some(&unit), watts)
}

/// Writes families of metrics.
struct Output<'a> {
    encoder: DescriptorEncoder<'a>,
}

impl Output<'_> {
    fn family<'s>(
        &'s mut self,
        name: &'s str,
        help: &'s str,
        unit: Option<&'s Unit>,
        kind: MetricType,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.encoder.encode_descriptor(name, help, unit, kind)
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.counters(name, help, None, std::iter::once((Vec::new(), value)))
    }

    fn gauge(&mut self, name: &str, help: &str, unit: Option<&Unit>, value: f64) -> fmt::Result {
        self.gauges(name, help, unit, std::iter::once((Vec::new(), value)))
    }

    fn counters(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        samples: impl Iterator<Item = (Vec<Label>, f64)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, unit, MetricType::Counter)?;
        const NO_EXEMPLAR: Option<&Exemplar<NoLabelSet, f64>> = None;
        for (labels, value) in samples {
            match labels.is_empty() {
                true => family.encode_counter(&value, NO_EXEMPLAR)?,
                false => family.encode_family(&labels)?.encode_counter(&value, NO_EXEMPLAR)?,
            }
        }
        Ok(())
    }

    fn gauges(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        samples: impl Iterator<Item = (Vec<Label>, f64)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, unit, MetricType::Gauge)?;
        for (labels, value) in samples {
            match labels.is_empty() {
                true => family.encode_gauge(&value)?,
                false => family.encode_family(&labels)?.encode_gauge(&value)?,
            }
        }
        Ok(())
    }
}

fn histogram(
    encoder: &mut MetricEncoder<'_>,
    sum: f64,
    count: u64,
    bounded: &[(f64, u64)],
) -> fmt::Result {
    encoder.encode_histogram::<NoLabelSet>(sum, count, bounded, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_not_online_shows_all_families_and_says_why_it_is_not_ready() {
        let telemetry = Arc::new(Telemetry::default());
        telemetry.step(Duration::from_millis(3), Default::default(), 5, 1);
        let (_sender, service) = watch::channel(None);
        let pages = Pages::new(telemetry, service);
        let text = pages.metrics().unwrap();
        assert!(text.ends_with("# EOF\n"), "{text}");
        for line in [
            "# TYPE sepal_tokens counter",
            "sepal_tokens_total{kind=\"decode\"} 5.0",
            "# TYPE sepal_step_duration_seconds histogram",
            "sepal_step_duration_seconds_bucket{le=\"+Inf\",part=\"total\"} 1",
            "sepal_sessions 0.0",
            "sepal_ready 0.0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert_eq!(pages.ready(), Err("the server is not online yet"));
    }
}
