//! Sixty-four sessions at once on one server, for a while: no error, the same bits as alone, and
//! memory that does not grow. `tests/soak load` runs the same for five minutes.

use std::time::Duration;

use crate::harness::demo::demo_model;
use crate::harness::rights::may_look_into_children;
use crate::harness::{Sepal, children_of, wait_for};
use client::load::{LoadConfig, LoadReport, run};
use nix::unistd::Pid;

/// Seconds of load; without it a number of steps.
const SECONDS_VARIABLE: &str = "SEPAL_SOAK_SECONDS";
/// Load goes on in rounds of so long until it has done its steps.
const ROUND: Duration = Duration::from_secs(1);
/// Steps of all sessions before memory counts: every thread, page and buffer is touched once.
const WARM_UP_STEPS: u64 = 800;
/// Steps of the short form after that.
const STEPS: u64 = 800;
/// Memory may still grow by this much after that: allocators keep what threads gave back, about 55
/// MB in all.
const SLACK_BYTES: u64 = 48 << 20;

fn processes(sepal: &Sepal) -> impl Iterator<Item = Pid> {
    children_of(sepal.pid()).into_iter().chain([sepal.pid()])
}

/// Private memory of the server's processes. The weights and the caches are shared memory, of fixed
/// size.
fn private_bytes(sepal: &Sepal) -> u64 {
    let of = |pid: Pid| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        1024 * kib.expect("RssAnon")
    };
    processes(sepal).map(of).sum()
}

fn descriptors(sepal: &Sepal) -> usize {
    let of = |pid| std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").count();
    processes(sepal).map(of).sum()
}

async fn load(sepal: &Sepal, duration: Duration) -> LoadReport {
    let config = LoadConfig {
        server: sepal.addr().parse().unwrap(),
        prefix: "demo".to_owned(),
        blocks: 0..8,
        sessions: 64,
        peers: 4,
        duration,
        prompt_tokens: 8,
        steps: 100,
    };
    let report = run(&config).await.unwrap();
    println!("{}", report.line());
    assert_eq!(report.texts, Vec::<String>::new());
    assert_eq!((report.errors, report.differing), (0, 0));
    report
}

/// Load until so many steps are done.
async fn load_steps(sepal: &Sepal, steps: u64) {
    let mut done = 0;
    while done < steps {
        done += load(sepal, ROUND).await.steps;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a soak: .ci/long soak"]
async fn sixty_four_sessions_run_without_an_error_and_memory_stays_flat() {
    let asked = std::env::var(SECONDS_VARIABLE).ok();
    let asked = asked.map(|text| Duration::from_secs(text.parse().expect("a number of seconds")));
    let sepal = Sepal::serve(&demo_model(), "demo", &["--torch_dtype", "float32"]);
    let all = children_of(sepal.pid());
    load_steps(&sepal, WARM_UP_STEPS).await;
    if asked.is_some() {
        load(&sepal, Duration::from_secs(10)).await;
    }
    let may_look = may_look_into_children("descriptors of netd and the worker");
    let files = |sepal: &Sepal| if may_look { descriptors(sepal) } else { 0 };
    let (memory, files_before) = (private_bytes(&sepal), files(&sepal));
    assert!(memory > 0);
    match asked {
        None => load_steps(&sepal, STEPS).await,
        Some(duration) => assert!(load(&sepal, duration).await.steps > 0),
    }
    println!(
        "private memory {:.1} MB, then {:.1} MB; {files_before} descriptors, then {}",
        memory as f64 / 1e6,
        private_bytes(&sepal) as f64 / 1e6,
        files(&sepal)
    );
    assert!(private_bytes(&sepal) < memory + SLACK_BYTES, "memory grew");
    // Connections of the peers that left are closed a moment later.
    wait_for("descriptors to be closed", || (files(&sepal) <= files_before + 16).then_some(()));
    assert_eq!(children_of(sepal.pid()), all, "no process was replaced");
    let netd = &sepal.status()[0]["children"][0];
    let troubles = netd["troubles"].as_object().unwrap();
    let failed = troubles.iter().filter(|(name, _)| *name != "abandoned");
    for (name, count) in failed {
        assert_eq!(count, 0, "{name}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}
