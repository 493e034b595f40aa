//! What the pages say: [`Figures`](shared::figures::Figures) and what workers and the supervisor show
//! on the board, in the text format of OpenMetrics. A scrape takes no lock that a step needs.
//!
//! Names follow the conventions of Prometheus: `sepal_` first, base units, `_total` behind counters.
//! Labels are workers, roles and kinds, whose numbers are bounded; a PeerID is none of them.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};
use shared::figures::{Export, Family, MetricKind, Page, Value};
use tokio::sync::watch;

use crate::figures;
use crate::rpc::Service;
use crate::telemetry::Telemetry;

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
}

impl Pages {
    pub(super) fn new(
        telemetry: Arc<Telemetry>,
        service: watch::Receiver<Option<Arc<Service>>>,
    ) -> Pages {
        let sources = Arc::new(Sources { telemetry, service });
        let mut registry = Registry::default();
        registry.register_collector(Box::new(MetricsWriter(sources.clone())));
        Pages { registry, sources }
    }

    pub(super) fn metrics(&self) -> Result<String, fmt::Error> {
        let began = Instant::now();
        let mut text = String::with_capacity(32 << 10);
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        self.sources.telemetry.scraped(began.elapsed());
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

impl Sources {
    /// All metrics now.
    fn page(&self) -> Page {
        let service = self.service.borrow().clone();
        let mut page = Page::of(&figures::read(&self.telemetry, service.as_deref()));
        if let Some(board) = self.telemetry.board() {
            board.view().server_figures().export(&mut page);
        }
        page
    }
}

/// Writes the metrics of [`Sources`].
#[derive(Debug)]
struct MetricsWriter(Arc<Sources>);

impl Collector for MetricsWriter {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.page().families().iter().try_for_each(|family| write(family, &mut encoder))
    }
}

fn write(family: &Family, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let Family { metric, samples } = family;
    let unit = Some(Unit::Other(metric.unit.to_owned())).filter(|_| !metric.unit.is_empty());
    let kind = match metric.kind {
        MetricKind::Counter => MetricType::Counter,
        MetricKind::Gauge => MetricType::Gauge,
        MetricKind::Histogram => MetricType::Histogram,
    };
    let mut out = encoder.encode_descriptor(metric.name, metric.help(), unit.as_ref(), kind)?;
    for sample in samples {
        match sample.labels.is_empty() {
            true => write_value(&mut out, metric.kind, &sample.value)?,
            false => {
                write_value(&mut out.encode_family(&sample.labels)?, metric.kind, &sample.value)?;
            }
        }
    }
    Ok(())
}

fn write_value(out: &mut MetricEncoder<'_>, kind: MetricKind, value: &Value) -> fmt::Result {
    const NO_EXEMPLAR: Option<&Exemplar<NoLabelSet, f64>> = None;
    match (kind, value) {
        (MetricKind::Counter, Value::Number(number)) => out.encode_counter(number, NO_EXEMPLAR),
        (_, Value::Number(number)) => out.encode_gauge(number),
        (_, Value::Histogram(of)) => {
            let count = of.buckets.iter().map(|(_, count)| count).sum();
            out.encode_histogram::<NoLabelSet>(of.sum, count, &of.buckets, None)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shared::control::{BoardSeat, Role};
    use shared::figures::Metric;
    use shared::ids::{Generation, GroupId, WorkerId};
    use shared::shm::board::{Board, BoardWriter, Occupant};

    use super::*;

    #[test]
    fn every_figure_has_its_help_and_its_type_on_the_page() {
        let board = Board::create("x", 0).unwrap();
        let generation = Generation(1);
        let worker = Some(WorkerId::solo(GroupId(0)));
        board.assign(0, &Occupant { role: Role::Netd, generation, worker: None }).unwrap();
        board.assign(1, &Occupant { role: Role::Worker, generation, worker }).unwrap();
        let seat = BoardSeat { slot: 0, heartbeat: Duration::from_secs(1) };
        let writer = BoardWriter::open(board.try_clone().unwrap(), &seat, generation).unwrap();
        let telemetry = Arc::new(Telemetry::on(Arc::new(writer)));
        let (_sender, service) = watch::channel(None);
        let pages = Pages::new(telemetry, service);
        let text = pages.metrics().unwrap();
        let page = pages.sources.page();
        assert!(page.families().len() > 40, "{text}");
        for Family { metric: Metric { name, unit, .. }, .. } in page.families() {
            let name = [name, unit].into_iter().filter(|part| !part.is_empty());
            let name = name.copied().collect::<Vec<_>>().join("_");
            for line in [format!("# HELP {name} "), format!("# TYPE {name} ")] {
                assert_eq!(text.matches(&line).count(), 1, "{line}\n{text}");
            }
        }
        let jobs = "sepal_worker_jobs_total{worker=\"0.0\",kind=\"decode\"} 0.0";
        assert!(text.lines().any(|line| line == jobs), "{text}");
    }

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
