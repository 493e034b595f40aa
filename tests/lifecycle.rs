//! Start, drain, death and clean-up of the whole process tree, with real processes and real signals.

mod harness;

use std::collections::HashSet;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use harness::demo::demo_model;
use harness::{SEPAL, Sepal, alive, children_of, serve_args, wait_for};

/// Exit codes that README documents.
const BAD_CONFIG: i32 = 2;
const BUSY: i32 = 14;

fn serve() -> Sepal {
    Sepal::serve(&demo_model(), "demo", &[])
}

/// Segments in /dev/shm that carry the id of a run started in `sepal`'s folder, by what its processes map.
fn segments_mapped_by(pids: &[Pid]) -> HashSet<String> {
    let maps = |pid: &Pid| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let names = pids.iter().flat_map(|pid| {
        maps(pid)
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5).map(str::to_owned))
            .filter(|name| name.starts_with("/dev/shm/sepal-"))
            .collect::<Vec<_>>()
    });
    names.collect()
}

#[test]
fn sigterm_drains_and_leaves_nothing_behind() {
    let sepal = serve();
    let children = children_of(sepal.pid());
    assert_eq!(
        children.len(),
        2,
        "prepare has ended, netd and one worker remain"
    );
    let segments = segments_mapped_by(&children);
    assert!(!segments.is_empty(), "board and rings are named segments");
    let status = sepal.terminate();
    assert_eq!(status.code(), Some(0));
    assert!(children.iter().all(|p| !alive(*p)));
    assert!(
        segments.iter().all(|s| !std::path::Path::new(s).exists()),
        "{segments:?}"
    );
}

#[test]
fn interrupt_of_the_whole_group_drains_too() {
    let dir = tempfile::tempdir().unwrap();
    let model = demo_model();
    let mut child = Command::new(SEPAL)
        .args(serve_args(&model, "demo", &["--new_swarm"]))
        .env("XDG_RUNTIME_DIR", dir.path())
        .env("SEPAL_CACHE", dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let group = Pid::from_raw(child.id() as i32);
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    assert!(
        lines.any(|l| l.unwrap().contains("state=ONLINE")),
        "the log ended before ONLINE"
    );
    let children = children_of(group);
    killpg(group, Signal::SIGINT).unwrap();
    // Reading on keeps the log pipe from filling up.
    let rest = std::thread::spawn(move || lines.count());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    rest.join().unwrap();
    assert!(children.iter().all(|p| !alive(*p)));
}

#[test]
fn children_die_with_a_killed_supervisor_and_the_next_start_cleans_up() {
    let mut sepal = serve();
    let children = children_of(sepal.pid());
    let segments = segments_mapped_by(&children);
    sepal.signal(Signal::SIGKILL);
    sepal.wait();
    for child in children {
        wait_for("a child to die with its parent", || {
            (!alive(child)).then_some(())
        });
    }
    assert!(
        segments.iter().any(|s| std::path::Path::new(s).exists()),
        "a killed run leaves its names"
    );
    let model = demo_model();
    let next = Sepal::start_in(
        sepal.dir.clone(),
        &serve_args(&model, "demo", &["--new_swarm"]),
    );
    next.wait_online();
    let in_use = segments_mapped_by(&children_of(next.pid()));
    let left: Vec<_> = segments
        .iter()
        .filter(|s| std::path::Path::new(s).exists() && !in_use.contains(*s))
        .collect();
    assert!(left.is_empty(), "left over: {left:?}");
    assert_eq!(next.terminate().code(), Some(0));
}

#[test]
fn a_killed_worker_is_replaced_and_netd_stays() {
    let sepal = serve();
    let (netd, worker) = (sepal.netd(), sepal.worker());
    kill(worker, Signal::SIGKILL).unwrap();
    let next = wait_for("a new worker", || {
        Some(sepal.worker()).filter(|p| *p != worker && alive(*p))
    });
    assert_ne!(next, worker);
    assert_eq!(sepal.netd(), netd);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_killed_netd_comes_back_with_the_same_peer_id_and_port() {
    let sepal = serve();
    let (netd, worker, addr) = (sepal.netd(), sepal.worker(), sepal.addr());
    kill(netd, Signal::SIGKILL).unwrap();
    let line = sepal.wait_line("state=ONLINE", 2);
    assert!(line.contains(&addr), "{line}");
    assert_eq!(sepal.worker(), worker, "weights stay loaded");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_hung_worker_is_killed_and_replaced() {
    // The throughput measurement counts as no job, so the first job is the first request of a client; the fault is armed
    // at the first job of the first generation.
    let model = demo_model();
    let more = ["--inject_fault", "hang@block:0#0", "--hang_timeout", "2"];
    let sepal = Sepal::serve(&model, "demo", &more);
    let worker = sepal.worker();
    let out = harness::generate(&sepal, &model, "demo", "auto", "Once upon a time", 3);
    assert!(!out.is_empty());
    assert_ne!(sepal.worker(), worker);
    sepal.wait_line("hangs", 1);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn an_instance_that_runs_is_not_started_twice() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--instance", "twice"]);
    let model = demo_model();
    let args = serve_args(&model, "demo", &["--new_swarm", "--instance", "twice"]);
    let mut second = Sepal::start_in(sepal.dir.clone(), &args);
    assert_eq!(second.wait().code(), Some(BUSY));
    assert!(second.log().contains("twice"), "{}", second.log());
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_bad_configuration_ends_the_run_once_and_is_not_retried() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("config.json"),
        r#"{"model_type": "gpt9"}"#,
    )
    .unwrap();
    let mut sepal = Sepal::start(&serve_args(folder.path(), "demo", &["--new_swarm"]));
    assert_eq!(sepal.wait().code(), Some(BAD_CONFIG));
    let log = sepal.log();
    assert_eq!(
        log.matches("gpt9").count(),
        1,
        "one clear sentence, once:\n{log}"
    );
}
