//! Workers die at every point of a job and at random times; no client sees more than a pause, and
//! every result has the same bits as an undisturbed run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::harness::demo::{BLOCKS, HIDDEN, copy_of_demo_model, run_session_with};
use crate::harness::peer::{Peer, Session, noise};
use crate::harness::rights::may_look_into_children;
use crate::harness::session::{SHAPES, rank, run_session, serve};
use crate::harness::{self, Sepal, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

async fn run_sessions(addr: &str, count: u32, steps: usize) -> Vec<Vec<Vec<f32>>> {
    let tasks: Vec<_> = (0..count)
        .map(|seed| {
            let addr = addr.to_owned();
            tokio::spawn(async move {
                run_session(&Peer::connect(&addr, "demo").await, seed, steps).await
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.push(task.await.expect("a session"));
    }
    all
}

// Job 3 and later are decode steps of two sessions, most of them with page copies.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_in_a_job_changes_nothing() {
    a_fault_changes_nothing(&["kill@copies#5", "abort@completion#4", "kill@block:3#1"]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: .ci/long"]
async fn a_worker_killed_at_any_point_of_a_job_changes_nothing() {
    a_fault_changes_nothing(&[
        "kill@taken#5",
        "kill@copies#5",
        "kill@block:0#5",
        "kill@block:4#6",
        "kill@block:7#5",
        "kill@output#6",
        "kill@completion#5",
        "kill@copies#0",
        "kill@block:3#1",
        "abort@block:2#5",
        "abort@completion#4",
    ])
    .await;
}

async fn a_fault_changes_nothing(faults: &[&str]) {
    let calm = serve(&[]);
    let expected = run_sessions(&calm.addr(), 2, 6).await;
    assert_eq!(calm.terminate().code(), Some(0));
    for fault in faults {
        let sepal = serve(&["--inject_fault", fault]);
        let (netd, worker) = (sepal.netd(), sepal.worker());
        let got = run_sessions(&sepal.addr(), 2, 6).await;
        assert!(got == expected, "{fault}: results differ from an undisturbed run");
        assert_ne!(sepal.worker(), worker, "{fault}: the fault never struck");
        assert_eq!(sepal.netd(), netd, "{fault}");
        assert_eq!(sepal.terminate().code(), Some(0), "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_killed_at_random_times_change_nothing() {
    const SESSIONS: u32 = 6;
    const STEPS: usize = 60;
    const KILLS_DURING_JOBS: usize = 6;
    let sepal = serve(&["--max_restarts", "1000"]);
    let addr = sepal.addr();
    let expected = run_sessions(&addr, SESSIONS, STEPS).await;
    let netd = sepal.netd();
    let harm_is_done = Arc::new(AtomicBool::new(false));
    let running = tokio::spawn({
        let harm_is_done = harm_is_done.clone();
        async move {
            let mut runs = Vec::new();
            while !harm_is_done.load(Relaxed) {
                runs.push(run_sessions(&addr, SESSIONS, STEPS).await);
            }
            runs
        }
    });
    let (mut kills, mut hits, mut seed) = (0, 0, 12345u64);
    while hits < KILLS_DURING_JOBS && !running.is_finished() {
        // A worker that dies again before it serves is started later and later.
        tokio::task::block_in_place(|| {
            wait_for("a worker that serves", || phase_of_worker(&sepal));
        });
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        tokio::time::sleep(Duration::from_millis(20 + (seed >> 33) % 120)).await;
        let worker = sepal.worker();
        // A stopped worker shows on the board what it was doing.
        if kill(worker, Signal::SIGSTOP).is_err() {
            continue;
        }
        let phase = phase_of_worker(&sepal);
        kill(worker, Signal::SIGKILL).unwrap();
        if let Some(phase) = phase {
            kills += 1;
            hits += usize::from(phase == "unit");
        }
        tokio::task::spawn_blocking({
            let pid = worker;
            move || wait_for("the worker to die", || (!harness::alive(pid)).then_some(()))
        })
        .await
        .unwrap();
    }
    harm_is_done.store(true, Relaxed);
    for got in running.await.unwrap() {
        assert!(got == expected, "results differ from an undisturbed run");
    }
    println!("{kills} kills, {hits} of them during a job");
    assert_eq!(sepal.netd(), netd);
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// What the worker was doing, if it serves.
fn phase_of_worker(sepal: &Sepal) -> Option<String> {
    let worker = sepal.workers().into_iter().find(|worker| worker["state"] == "ready")?;
    worker["phase"].as_str().map(str::to_owned)
}

/// Stops the worker while it computes, unless `is_over` comes first; whether it did.
fn stop_in_a_unit(sepal: &Sepal, worker: Pid, is_over: impl Fn() -> bool) -> bool {
    while !is_over() {
        kill(worker, Signal::SIGSTOP).unwrap();
        // A stopped worker shows on the board what it was doing.
        if phase_of_worker(sepal).as_deref() == Some("unit") {
            return true;
        }
        kill(worker, Signal::SIGCONT).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn a_netd_killed_during_a_prefill_costs_its_connections_and_nothing_else() {
    let sepal = serve(&["--inference_max_length", "4096"]);
    let addr = sepal.addr();
    let expected = run_session(&Peer::connect(&addr, "demo").await, 11, 6).await;
    let (netd, worker) = (sepal.netd(), sepal.worker());

    let peer = Arc::new(Peer::connect(&addr, "demo").await);
    let prefill = loop {
        let peer = peer.clone();
        let prefill = tokio::spawn(async move {
            let mut session = peer.session(BLOCKS, 4096).await;
            let outcome = session.step(noise(&[1, 4000, HIDDEN], 1), None).await;
            outcome.map(|_| ())
        });
        if tokio::task::block_in_place(|| stop_in_a_unit(&sepal, worker, || prefill.is_finished()))
        {
            break prefill;
        }
        prefill.await.expect("no panic").expect("a prefill that nothing happened to");
    };
    kill(netd, Signal::SIGKILL).unwrap();
    let outcome = prefill.await.expect("the client goes on");
    assert!(outcome.is_err(), "netd died before it could answer");
    kill(worker, Signal::SIGCONT).unwrap();

    let line = sepal.wait_line("state=ONLINE", 2);
    assert!(line.contains(&addr), "same PeerID and port {addr}: {line}");
    assert_eq!(sepal.worker(), worker, "weights stay loaded");
    assert_ne!(sepal.netd(), netd);
    // The worker has dropped the job of the dead netd; what comes after has the bits of an
    // undisturbed run.
    let again = run_session(&Peer::connect(&addr, "demo").await, 11, 6).await;
    assert_eq!(again, expected);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_crashes_every_worker_is_refused_to_its_client_alone() {
    // The fault strikes the first job of the first three generations: whoever sends it first.
    let sepal = serve(&["--inject_fault", "abort@block:1#0x3"]);
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let mut poison: Session = peer.session(BLOCKS, 8).await;
    let error = poison.step(noise(&[1, 2, HIDDEN], 1), None).await.unwrap_err().to_string();
    assert!(error.contains("crash"), "{error}");
    let outputs = run_session(&peer, 7, 3).await;
    assert_eq!(outputs.len(), 4);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_span_cut_among_two_workers_survives_the_death_of_either() {
    let calm = serve(&["--device", "cpu,cpu"]);
    let expected = run_sessions(&calm.addr(), 2, 6).await;
    assert_eq!(calm.terminate().code(), Some(0));
    let whole = serve(&[]);
    assert!(run_sessions(&whole.addr(), 2, 6).await == expected, "the cut changes no bit");
    assert_eq!(whole.terminate().code(), Some(0));
    let sepal = serve(&["--device", "cpu,cpu", "--inject_fault", "kill@block:1#4"]);
    assert!(run_sessions(&sepal.addr(), 2, 6).await == expected, "a death changes no bit");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// The files of weights that a process maps.
fn mapped_weights(pid: Pid) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let weights = maps.lines().filter(|line| line.contains(".safetensors"));
    weights.map(|line| line[line.find('/').unwrap()..].to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_comes_back_when_the_folder_of_its_weights_is_gone() {
    for (shape, ranks) in SHAPES.into_iter().zip(1..) {
        let place = tempfile::tempdir().unwrap();
        let folder = copy_of_demo_model(place.path());
        let more = [&["--torch_dtype", "float32"], shape].concat();
        let sepal = Sepal::serve(&folder, "demo", &more);
        let peer = Peer::connect(&sepal.addr(), "demo").await;
        let expected = run_session(&peer, 3, 8).await;

        let netd = sepal.netd();
        let got = run_session_with(&peer, 3, 8, |step| match step {
            2 => {
                std::fs::rename(&folder, place.path().join("elsewhere")).unwrap();
                kill_worker(&sepal, ranks);
            }
            5 => {
                std::fs::remove_dir_all(place.path().join("elsewhere")).unwrap();
                std::fs::remove_dir_all(sepal.dir.path().join("cache")).unwrap();
                kill_worker(&sepal, ranks);
            }
            _ => {}
        });
        assert!(got.await == expected, "{shape:?}: results differ from an undisturbed run");
        let worker = rank(&sepal, ["0.0", "0.1"][ranks as usize - 1], ranks);
        if may_look_into_children("a worker maps the deleted weights") {
            let mapped = mapped_weights(worker);
            assert!(!mapped.is_empty(), "{worker} maps no weights");
            assert!(mapped.iter().all(|path| path.ends_with("(deleted)")), "{mapped:?}");
        }
        assert_eq!(sepal.netd(), netd);
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}

/// Kills the last rank of the only group and waits until it is gone.
fn kill_worker(sepal: &Sepal, ranks: u64) {
    let worker = rank(sepal, ["0.0", "0.1"][ranks as usize - 1], ranks);
    kill(worker, Signal::SIGKILL).unwrap();
    wait_for("the worker to die", || (!harness::alive(worker)).then_some(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_posts_a_completion_twice_is_replaced_and_nothing_is_lost() {
    let calm = serve(&[]);
    let expected = run_sessions(&calm.addr(), 2, 6).await;
    assert_eq!(calm.terminate().code(), Some(0));
    let sepal = serve(&["--inject_fault", "repeat@completion#5"]);
    let (netd, worker) = (sepal.netd(), sepal.worker());
    let got = run_sessions(&sepal.addr(), 2, 6).await;
    assert!(got == expected, "results differ from an undisturbed run");
    wait_for("another worker", || (rank(&sepal, "0.0", 1) != worker).then_some(()));
    assert_eq!(sepal.netd(), netd);
    let death = sepal.workers()[0]["last_death"].to_string();
    assert!(death.contains("which is not in flight"), "{death}");
    assert_eq!(sepal.terminate().code(), Some(0));
}
