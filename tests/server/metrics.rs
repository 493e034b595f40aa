//! `--metrics` from outside: what a server counts while a session runs and its worker is killed,
//! whether it says it is ready, and what it answers to those who want it no good. The text is read by
//! a parser that takes nothing but the format of OpenMetrics.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::harness::demo::demo_model;
use crate::harness::rights::has_program;
use crate::harness::{Sepal, generate, http, own_loopback, root, serve_args, wait_for};
use crate::openmetrics::Metrics;
use client::load::{LoadConfig, run};
use nix::sys::signal::{Signal, kill};

/// Where `sepal` serves metrics, by its log.
fn endpoint(sepal: &Sepal) -> String {
    http::address_in(&sepal.wait_line("metrics at /metrics", 1))
}

/// Sends `request` and returns the status and the body of the answer.
fn ask(addr: &str, request: &str) -> (u16, String) {
    http::exchange(addr, request.as_bytes())
}

fn get(addr: &str, path: &str) -> (u16, String) {
    ask(addr, &format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\n\r\n"))
}

fn scrape(addr: &str) -> Metrics {
    let (status, text) = get(addr, "/metrics");
    assert_eq!(status, 200, "{text}");
    Metrics::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// A file of the repository.
fn file(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

#[test]
fn counters_move_with_sessions_and_survive_the_death_of_workers_and_netd() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--metrics", "0"]);
    let addr = endpoint(&sepal);
    wait_for("readiness", || (get(&addr, "/readyz").0 == 200).then_some(()));
    assert_eq!(get(&addr, "/livez"), (200, "alive\n".to_owned()));
    let before = scrape(&addr);
    generate(&sepal, &demo_model(), "demo", "float32", "The", 12);

    let decoded = [("kind", "decode")];
    let after = wait_for("all steps and jobs", || {
        let after = scrape(&addr);
        let grown = |name: &str, of: &[(&str, &str)]| after.sum(name, of) - before.sum(name, of);
        let steps = grown("sepal_requests_total", &decoded);
        (steps >= 11.0 && grown("sepal_worker_jobs_total", &[]) >= 12.0).then_some(after)
    });
    let grown = |name: &str| after.sum(name, &[]) - before.sum(name, &[]);
    assert!(grown("sepal_tokens_total") >= 12.0);
    assert!(grown("sepal_sessions_opened_total") >= 1.0);
    assert!(grown("sepal_worker_compute_seconds_total") > 0.0);
    assert!(grown("sepal_worker_batch_rows_count") >= 11.0);
    assert!(grown("sepal_network_bytes_total") > 1000.0);
    let total = after.sum("sepal_step_duration_seconds_sum", &[("part", "total")]);
    let parts = ["network", "queue", "compute"]
        .map(|part| after.sum("sepal_step_duration_seconds_sum", &[("part", part)]));
    // That they add up is proved beside `Telemetry::step`.
    assert!(total > 0.0 && parts.iter().all(|part| *part > 0.0), "{parts:?} {total}");
    assert_eq!(after.sum("sepal_announced_blocks", &[]), 8.0);
    assert_eq!(after.sum("sepal_ready", &[]), 1.0);
    let scrape_s = scrape(&addr).sum("sepal_scrape_duration_seconds", &[]);
    println!("a scrape took {:.0} us", scrape_s * 1e6);

    kill(sepal.worker(), Signal::SIGKILL).expect("kill the worker");
    wait_for("the restart to be counted", || {
        let reasons = [("role", "gpu-worker"), ("reason", "signal")];
        (scrape(&addr).sum("sepal_restarts_total", &reasons) == 1.0).then_some(())
    });
    wait_for("readiness", || (get(&addr, "/readyz").0 == 200).then_some(()));

    // The port stays; what the supervisor counted is still there.
    kill(sepal.netd(), Signal::SIGKILL).expect("kill netd");
    wait_for("the restart to be counted", || {
        let reasons = [("role", "netd"), ("reason", "signal")];
        (scrape(&addr).sum("sepal_restarts_total", &reasons) == 1.0).then_some(())
    });
    wait_for("readiness", || (get(&addr, "/readyz").0 == 200).then_some(()));
    let status = sepal.status();
    assert_eq!(status[0]["figures"]["metrics"], addr.as_str());
    let worker = status[0]["children"].as_array().unwrap().iter();
    let worker = worker.clone().find(|child| child["role"] == "gpu-worker").unwrap();
    assert_eq!(worker["last_death"], "SIGKILL");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_server_without_its_model_is_alive_and_not_ready() {
    let folder = tempfile::tempdir().expect("folder");
    // Waits for its peers: none of these answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = silent.local_addr().expect("address").port();
    let peer = format!(
        "/ip4/127.0.0.1/tcp/{port}/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    );
    let model = demo_model();
    let args = serve_args(&model, "demo", &["--initial_peers", &peer, "--metrics", "127.0.0.1:0"]);
    let sepal = Sepal::start_in(Arc::new(folder), &args);
    let addr = endpoint(&sepal);
    let (status, body) = get(&addr, "/readyz");
    assert_eq!((status, body.as_str()), (503, "not ready: the server is not online yet\n"));
    assert_eq!(get(&addr, "/livez").0, 200);
    assert_eq!(scrape(&addr).sum("sepal_ready", &[]), 0.0);
}

#[test]
fn hostile_requests_are_refused_and_disturb_nobody() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--metrics", "0"]);
    let addr = endpoint(&sepal);
    assert_eq!(get(&addr, "/").0, 404);
    assert_eq!(get(&addr, "/metrics/../secret").0, 404);
    let post = "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\nhello";
    assert_eq!(ask(&addr, post).0, 405);
    let huge = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "y".repeat(1 << 20));
    assert!([431, 0].contains(&ask(&addr, &huge).0));
    let many: String = (0..500).map(|n| format!("A{n}: b\r\n")).collect();
    assert_eq!(ask(&addr, &format!("GET /metrics HTTP/1.1\r\n{many}\r\n")).0, 431);
    let long = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "y".repeat(1 << 20));
    assert!([414, 431, 0].contains(&ask(&addr, &long).0));
    assert_eq!(ask(&addr, "\0\u{1}nonsense\r\n\r\n").0, 400);
    assert_eq!(ask(&addr, "HEAD /livez HTTP/1.1\r\nHost: x\r\n\r\n"), (200, String::new()));
    // As many connections as are served at once, all silent and of one address: a few of them are held
    // until their time is over, and the others are closed.
    let silent: Vec<TcpStream> =
        (0..32).map(|_| TcpStream::connect(&addr).expect("connect")).collect();
    for mut stream in &silent {
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ");
    }
    let answers = |path| (get(&addr, path).0 == 200).then_some(());
    wait_for("an answer after silent connections", || answers("/livez"));
    wait_for("metrics after silent connections", || answers("/metrics"));
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_port_in_use_is_told_in_one_sentence_and_the_server_goes_on() {
    let other = TcpListener::bind((own_loopback(), 0)).expect("bind");
    let addr = other.local_addr().expect("address").to_string();
    let sepal = Sepal::serve(&demo_model(), "demo", &["--metrics", &addr]);
    let line = sepal.wait_line("cannot listen on", 1);
    assert!(line.contains(&addr) && line.contains("give another --metrics"), "{line}");
    assert!(sepal.status()[0]["figures"]["metrics"].is_null());
    // netd takes the port as soon as it is free, when it is started again.
    drop(other);
    kill(sepal.netd(), Signal::SIGKILL).expect("kill netd");
    assert_eq!(endpoint(&sepal), addr);
    wait_for("readiness", || (get(&addr, "/readyz").0 == 200).then_some(()));
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_sessions_the_last_minute_and_the_swarm() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--torch_dtype", "float32"]);
    let config = LoadConfig {
        server: sepal.addr().parse().expect("an address"),
        prefix: "demo".to_owned(),
        blocks: 2..7,
        sessions: 3,
        peers: 1,
        duration: Duration::from_secs(2),
        prompt_tokens: 4,
        steps: 900,
    };
    let is_seen = Arc::new(AtomicBool::new(false));
    let load = tokio::spawn({
        let is_seen = is_seen.clone();
        async move {
            let mut reports = Vec::new();
            while !is_seen.load(Ordering::Relaxed) {
                reports.push(run(&config).await.expect("report"));
            }
            reports
        }
    });
    let look = tokio::task::spawn_blocking(move || {
        let figures = wait_for("figures of the load", || {
            let figures = sepal.status()[0]["figures"].clone();
            let sessions = figures["sessions"].as_array()?.clone();
            let is_busy = |of: &serde_json::Value| {
                of["span"] == "2:7" && of["tokens_per_s"].as_f64() > Some(0.0)
            };
            let has_all = sessions.iter().filter(|of| is_busy(of)).count() == 3;
            let minute = &figures["minute"];
            let has_steps = minute["steps_per_s"].as_f64() > Some(0.0)
                && minute["mean_batch"].as_f64() >= Some(1.0);
            (has_all && has_steps && !figures["coverage"].is_null()).then_some(figures)
        });
        (sepal, figures)
    });
    let (sepal, figures) = look.await.expect("figures");
    is_seen.store(true, Ordering::Relaxed);
    let session = &figures["sessions"][0];
    assert_eq!((session["rows"].as_u64(), session["max_length"].as_u64()), (Some(1), Some(904)));
    assert!(session["age_s"].as_f64() > Some(0.0) && session["length"].as_u64() >= Some(4));
    let latency = figures["minute"]["latency"].as_array().expect("latency");
    let total = &latency[0];
    assert_eq!((latency.len(), total["part"].as_str()), (4, Some("total")));
    assert!(
        total["p50_ms"].as_f64() > Some(0.0)
            && total["p99_ms"].as_f64() >= total["p50_ms"].as_f64()
    );
    let (all, free) = (&figures["kv"]["tokens_total"], &figures["kv"]["tokens_free"]);
    assert!(all.as_u64() >= free.as_u64().map(|free| free + 3 * 5 * 904), "{figures}");
    assert_eq!(figures["announced"]["state"], "online");
    let blocks = figures["coverage"]["blocks"].as_array().expect("coverage");
    let servers: BTreeSet<_> = blocks.iter().map(|block| block["servers"].as_u64()).collect();
    assert_eq!((blocks.len(), servers), (8, BTreeSet::from([Some(1)])), "we serve all of them");
    for report in load.await.expect("load") {
        assert_eq!((report.errors, report.differing), (0, 0), "{:?}", report.texts);
    }
    tokio::task::spawn_blocking(move || assert_eq!(sepal.terminate().code(), Some(0)))
        .await
        .expect("the end");
}

/// Names of metrics in an expression, a query or a text.
fn names_in(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !is_part(c)).filter(|word| word.starts_with("sepal_"));
    words.map(str::to_owned).collect()
}

/// Expressions of a dashboard: every value of a field `expr`.
fn expressions(value: &serde_json::Value) -> Vec<String> {
    match value {
        serde_json::Value::Array(items) => items.iter().flat_map(expressions).collect(),
        serde_json::Value::Object(fields) => {
            let own = fields.get("expr").and_then(|expr| expr.as_str()).map(str::to_owned);
            own.into_iter().chain(fields.values().flat_map(expressions)).collect()
        }
        _ => Vec::new(),
    }
}

#[test]
fn dashboard_and_alerts_use_only_what_the_server_exports() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--metrics", "0"]);
    let exported = scrape(&endpoint(&sepal)).names();
    let dashboard: serde_json::Value =
        serde_json::from_str(&file("deploy/grafana/sepal.json")).expect("the dashboard is JSON");
    let shown = expressions(&dashboard);
    assert!(shown.len() > 20, "{shown:?}");
    let alerts = file("deploy/grafana/alerts.yml");
    let used = names_in(&shown.join("\n")).into_iter().chain(names_in(&alerts));
    let unknown: Vec<String> = used.filter(|name| !exported.contains(name)).collect();
    assert_eq!(unknown, Vec::<String>::new(), "the server exports {exported:?}");
    // What nobody looks at is not worth a name.
    let seen: BTreeSet<String> =
        names_in(&shown.join("\n")).union(&names_in(&alerts)).cloned().collect();
    for family in [
        "sepal_step_duration_seconds_bucket",
        "sepal_restarts_total",
        "sepal_device_memory_used_bytes",
    ] {
        assert!(seen.contains(family), "{family}");
    }
}

/// Prometheus' own tool reads the rules.
#[test]
fn promtool_accepts_the_alerts() {
    if !has_program("alert rules as Prometheus reads them", "promtool") {
        return;
    }
    let rules = root().join("deploy/grafana/alerts.yml");
    let output = Command::new("promtool").args(["check", "rules"]).arg(&rules).output();
    let output = output.expect("run promtool");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
