//! Sixty-four sessions at once on one server, for a while: no error, the same bits as alone, and
//! memory that does not grow. `tests/soak load` runs the same for five minutes.

use std::time::Duration;

use crate::harness::demo::demo_model;
use crate::harness::{Sepal, children_of};
use client::load::{LoadConfig, LoadReport, run};

/// Seconds of load; in CI a few.
const SECONDS_VARIABLE: &str = "SEPAL_SOAK_SECONDS";
const SHORT: Duration = Duration::from_secs(6);
/// Load before memory counts: every thread, page and buffer is touched once. On a busy machine that
/// takes some steps.
const WARM_UP: Duration = Duration::from_secs(10);
/// Memory may still grow by this much after that: allocators keep what threads gave back, about 55
/// MB in all.
const SLACK_BYTES: u64 = 48 << 20;

/// Private memory of the server's processes. The weights and the caches are shared memory, of fixed
/// size.
fn private_bytes(sepal: &Sepal) -> u64 {
    let of = |pid: nix::unistd::Pid| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let kib = |key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
            number.unwrap_or(0)
        };
        1024 * (kib("Private_Dirty:") + kib("Private_Clean:"))
    };
    let children = children_of(sepal.pid());
    children.into_iter().chain([sepal.pid()]).map(of).sum()
}

fn descriptors(sepal: &Sepal) -> usize {
    let of = |pid| std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let children = children_of(sepal.pid());
    children.into_iter().chain([sepal.pid()]).map(of).sum()
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
    report
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_sessions_run_without_an_error_and_memory_stays_flat() {
    let asked = std::env::var(SECONDS_VARIABLE).ok();
    let duration =
        asked.map_or(SHORT, |text| Duration::from_secs(text.parse().expect("a number of seconds")));
    let sepal = Sepal::serve(&demo_model(), "demo", &["--torch_dtype", "float32"]);
    let processes = children_of(sepal.pid());
    let first = load(&sepal, WARM_UP).await;
    let (memory, files) = (private_bytes(&sepal), descriptors(&sepal));
    let report = load(&sepal, duration).await;
    let (after, files_after) = (private_bytes(&sepal), descriptors(&sepal));
    println!(
        "private memory {:.1} MB, then {:.1} MB; {files} descriptors, then {files_after}",
        memory as f64 / 1e6,
        after as f64 / 1e6
    );
    for report in [&first, &report] {
        assert_eq!(report.texts, Vec::<String>::new());
        assert_eq!((report.errors, report.differing), (0, 0));
        assert!(report.steps > 0);
    }
    assert!(after < memory + SLACK_BYTES, "memory grew");
    // Connections of the peers that left are closed a moment later.
    assert!(files_after <= files + 16, "descriptors are lost");
    assert_eq!(children_of(sepal.pid()), processes, "no process was replaced");
    let netd = &sepal.status()[0]["children"][0];
    let troubles = netd["troubles"].as_object().unwrap();
    let failed = troubles.iter().filter(|(name, _)| *name != "abandoned");
    for (name, count) in failed {
        assert_eq!(count, 0, "{name}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}
