//! Processes that are stopped (SIGSTOP) and say nothing. A child without a sign of life for
//! `--hang_timeout` is replaced, idle or not; when the supervisor itself stood still, nobody is.

use std::net::TcpListener;
use std::time::Duration;

use crate::harness::demo::{demo_model, run_session};
use crate::harness::session::SHAPES;
use crate::harness::{
    self, Sepal, alive, all_at_once, block_on, children_of, rank, serve_args, wait_for,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const STEPS: usize = 4;
/// The step before which harm is done.
const HARM: usize = 2;

/// What the servers here are given as `--hang_timeout`: a process that only waits for its time on a
/// busy machine is never silent for so long.
const HANG_TIMEOUT: &str = "20";
/// Longer than that.
const STANDSTILL: Duration = Duration::from_secs(21);

fn serve(more: &[&str]) -> Sepal {
    let always = ["--torch_dtype", "float32", "--hang_timeout", HANG_TIMEOUT];
    Sepal::serve(&demo_model(), "demo", &[&always, more].concat())
}

/// Checks that the first process of `child` was killed because it was silent.
fn assert_hung(sepal: &Sepal, child: &str) {
    sepal.line_from(0, &[&format!("killing child={child} generation=1 why=\"hangs: no progress")]);
}

/// Waits until `role` is another process than `old`, which is dead.
fn replaced(role: fn(&Sepal) -> Pid, sepal: &Sepal, old: Pid) {
    wait_for("another process", || (role(sepal) != old && !alive(old)).then_some(()));
}

/// Runs a session twice, the second time with `harm` in its middle, which costs it no bit.
async fn survives(sepal: &Sepal, mut harm: impl FnMut()) {
    let addr = sepal.addr();
    let expected = run_session(&addr, STEPS, |_| ()).await;
    let got = run_session(&addr, STEPS, |step| {
        if step == HARM {
            harm()
        }
    })
    .await;
    assert!(got == expected, "results differ from an undisturbed run");
}

/// Each case waits for `--hang_timeout`, all of them at once.
#[test]
fn what_is_silent_is_replaced_and_after_a_standstill_nobody_is() {
    all_at_once(&[
        ("a worker that is stopped while idle", || block_on(a_worker_stopped_while_idle())),
        ("a worker that is stopped with a job", || block_on(a_worker_stopped_with_a_job())),
        ("a worker that hangs in a job", || block_on(a_worker_that_hangs_in_a_job())),
        ("rank 0 stopped", || block_on(a_stopped_rank_is_to_blame(0))),
        ("rank 1 stopped", || block_on(a_stopped_rank_is_to_blame(1))),
        ("netd stopped", || block_on(a_netd_stopped_while_idle())),
        ("prepare stopped", a_prepare_stopped_while_it_waits_for_its_blocks),
        ("the supervisor stopped", || {
            block_on(stop_and_go_on(|sepal| vec![sepal.pid()]));
        }),
        ("all processes stopped", || {
            block_on(stop_and_go_on(|sepal| vec![sepal.pid(), sepal.netd(), sepal.worker()]));
        }),
    ]);
}

async fn a_worker_stopped_while_idle() {
    let sepal = serve(&[]);
    let (netd, worker) = (sepal.netd(), sepal.worker());
    survives(&sepal, || {
        kill(worker, Signal::SIGSTOP).unwrap();
        replaced(Sepal::worker, &sepal, worker);
    })
    .await;
    assert_eq!(sepal.netd(), netd);
    assert_hung(&sepal, "gpu-worker 0.0");
    assert_eq!(sepal.terminate().code(), Some(0));
}

async fn a_worker_stopped_with_a_job() {
    let sepal = serve(&[]);
    let (netd, worker) = (sepal.netd(), sepal.worker());
    survives(&sepal, || kill(worker, Signal::SIGSTOP).unwrap()).await;
    assert!(!alive(worker) && sepal.worker() != worker, "the worker was replaced");
    assert_eq!(sepal.netd(), netd);
    assert_hung(&sepal, "gpu-worker 0.0");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// The process runs, and the thread that computes does not come back.
async fn a_worker_that_hangs_in_a_job() {
    let calm = serve(&[]);
    let expected = run_session(&calm.addr(), STEPS, |_| ()).await;
    assert_eq!(calm.terminate().code(), Some(0));
    // The throughput measurement counts as no job; the fault is armed in the first generation.
    let sepal = serve(&["--inject_fault", "hang@block:0#2"]);
    let (netd, worker) = (sepal.netd(), sepal.worker());
    assert!(run_session(&sepal.addr(), STEPS, |_| ()).await == expected, "results differ");
    assert_ne!(sepal.worker(), worker);
    assert_eq!(sepal.netd(), netd);
    assert_hung(&sepal, "gpu-worker 0.0");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// The other rank waits for it, and is silent no less.
async fn a_stopped_rank_is_to_blame(stopped: usize) {
    let sepal = serve(SHAPES[1]);
    let victim = rank(&sepal, stopped);
    survives(&sepal, || kill(victim, Signal::SIGSTOP).unwrap()).await;
    assert!(!alive(victim));
    assert_hung(&sepal, &format!("gpu-worker 0.{stopped}"));
    let other = format!("killing child=gpu-worker 0.{} generation=1 why=\"hangs", 1 - stopped);
    assert!(!sepal.log().contains(&other), "{}", sepal.log());
    assert_eq!(sepal.terminate().code(), Some(0));
}

async fn a_netd_stopped_while_idle() {
    let sepal = serve(&[]);
    let (netd, worker, addr) = (sepal.netd(), sepal.worker(), sepal.addr());
    let expected = run_session(&addr, STEPS, |_| ()).await;
    kill(netd, Signal::SIGSTOP).unwrap();
    let line = sepal.wait_line("state=ONLINE", 2);
    assert!(line.contains(&addr), "same PeerID and port {addr}: {line}");
    replaced(Sepal::netd, &sepal, netd);
    assert!(run_session(&addr, STEPS, |_| ()).await == expected, "results differ");
    assert_eq!(sepal.worker(), worker, "weights stay loaded");
    assert_hung(&sepal, "netd");
    assert_eq!(sepal.terminate().code(), Some(0));
}

fn a_prepare_stopped_while_it_waits_for_its_blocks() {
    // A first peer that never answers, so that prepare waits for netd. Each netd is stopped once it dials
    // that peer, after 10 s it would give up; not before, when it would outlive its parent.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let peer =
        format!("/ip4/127.0.0.1/tcp/{port}/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N");
    let model = demo_model();
    let more = [
        &["--initial_peers", &peer, "--hang_timeout", HANG_TIMEOUT][..],
        &["--max_restarts", "1000"],
    ];
    let sepal = Sepal::start(&serve_args(&model, "demo", &more.concat()));
    let stopped = |role: &str| {
        let is_of_role = |pid: &Pid| harness::command_line(*pid).contains(role);
        let pid = children_of(sepal.pid()).into_iter().find(is_of_role)?;
        kill(pid, Signal::SIGSTOP).ok().map(|()| pid)
    };
    sepal.wait_line("ready child=prepare", 1);
    let prepare = wait_for("prepare", || stopped("sepal: prepare"));
    let mut generation = 1;
    wait_for("another prepare that has looked at the model", || {
        let log = sepal.log();
        let started = format!("starting child=netd generation={generation} pid=");
        let started = log.split_once(&started).and_then(|(_, rest)| rest.split_whitespace().next());
        let is_there = log.contains(&format!("netd #{generation} p2p::driver: listening"));
        if let Some(pid) = started.filter(|_| is_there) {
            kill(Pid::from_raw(pid.parse().expect("a number")), Signal::SIGSTOP)
                .expect("it is there");
            generation += 1;
        }
        (log.matches("model inspected").count() == 2).then_some(())
    });
    assert_hung(&sepal, "prepare");
    assert!(!alive(prepare));
}

/// Stops processes in the middle of a session for longer than children may be silent, lets them go
/// on one after the other, the supervisor first, and checks that all are there.
async fn stop_and_go_on(stopped: fn(&Sepal) -> Vec<Pid>) {
    let sepal = serve(&[]);
    let (netd, worker) = (sepal.netd(), sepal.worker());
    survives(&sepal, || {
        let pids = stopped(&sepal);
        pids.iter().for_each(|pid| kill(*pid, Signal::SIGSTOP).expect("it is there"));
        std::thread::sleep(STANDSTILL);
        for pid in &pids {
            kill(*pid, Signal::SIGCONT).expect("it is there");
            // It answers after it has looked at its children, which was due long ago.
            sepal.status();
            sepal.status();
        }
    })
    .await;
    assert_eq!((sepal.netd(), sepal.worker()), (netd, worker));
    assert!(!sepal.log().contains("hangs"), "{}", sepal.log());
    assert_eq!(sepal.terminate().code(), Some(0));
}
