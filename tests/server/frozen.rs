//! Processes that are stopped (SIGSTOP) and say nothing. A child without a sign of life for
//! `--hang_timeout` is replaced, idle or not; when the supervisor itself stood still, nobody is.

use std::net::TcpListener;
use std::time::Duration;

use crate::harness::demo::{demo_model, run_session};
use crate::harness::{self, Sepal, alive, children_of, serve_args, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const STEPS: usize = 4;

/// What the servers here are given as `--hang_timeout`.
const HANG_TIMEOUT: Duration = Duration::from_secs(2);

fn serve() -> Sepal {
    Sepal::serve(&demo_model(), "demo", &["--torch_dtype", "float32", "--hang_timeout", "2"])
}

/// Waits until `role` is another process than `old`, which is dead.
fn replaced(role: fn(&Sepal) -> Pid, sepal: &Sepal, old: Pid) {
    wait_for("another process", || (role(sepal) != old && !alive(old)).then_some(()));
}

fn signal(pids: &[Pid], signal: Signal) {
    pids.iter().for_each(|pid| kill(*pid, signal).expect("the process is there"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_stopped_while_idle_is_replaced_and_the_session_goes_on() {
    let sepal = serve();
    let (netd, worker, addr) = (sepal.netd(), sepal.worker(), sepal.addr());
    let expected = run_session(&addr, STEPS, |_| ()).await;
    let got = run_session(&addr, STEPS, |step| {
        if step == 2 {
            kill(worker, Signal::SIGSTOP).unwrap();
            replaced(Sepal::worker, &sepal, worker);
        }
    })
    .await;
    assert!(got == expected, "results differ from an undisturbed run");
    assert_eq!(sepal.netd(), netd);
    assert_eq!(sepal.log().matches("hangs: no progress").count(), 1, "{}", sepal.log());
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_stopped_with_a_job_in_its_ring_is_replaced_and_the_job_is_done() {
    let sepal = serve();
    let (netd, worker, addr) = (sepal.netd(), sepal.worker(), sepal.addr());
    let expected = run_session(&addr, STEPS, |_| ()).await;
    let got = run_session(&addr, STEPS, |step| {
        if step == 2 {
            kill(worker, Signal::SIGSTOP).unwrap();
        }
    })
    .await;
    assert!(got == expected, "results differ from an undisturbed run");
    assert!(!alive(worker) && sepal.worker() != worker, "the worker was replaced");
    assert_eq!(sepal.netd(), netd);
    assert_eq!(sepal.log().matches("hangs: no progress").count(), 1, "{}", sepal.log());
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_netd_stopped_while_idle_is_replaced_at_its_address_and_the_worker_stays() {
    let sepal = serve();
    let (netd, worker, addr) = (sepal.netd(), sepal.worker(), sepal.addr());
    let expected = run_session(&addr, STEPS, |_| ()).await;
    kill(netd, Signal::SIGSTOP).unwrap();
    let line = sepal.wait_line("state=ONLINE", 2);
    assert!(line.contains(&addr), "same PeerID and port {addr}: {line}");
    replaced(Sepal::netd, &sepal, netd);
    assert!(run_session(&addr, STEPS, |_| ()).await == expected, "results differ");
    assert_eq!(sepal.worker(), worker, "weights stay loaded");
    assert_eq!(sepal.log().matches("hangs: no progress").count(), 1, "{}", sepal.log());
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_prepare_stopped_while_it_waits_for_its_blocks_is_replaced() {
    // The first peer never answers, so netd does not join and prepare waits for it.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let peer =
        format!("/ip4/127.0.0.1/tcp/{port}/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N");
    let model = demo_model();
    let more = ["--initial_peers", &peer, "--hang_timeout", "2"];
    let sepal = Sepal::start(&serve_args(&model, "demo", &more));
    sepal.wait_line("ready child=prepare", 1);
    let prepare = wait_for("prepare", || {
        let is_prepare = |pid: &Pid| harness::command_line(*pid).contains("prepare");
        children_of(sepal.pid()).into_iter().find(is_prepare)
    });
    kill(prepare, Signal::SIGSTOP).unwrap();
    sepal.wait_line("hangs: no progress", 1);
    sepal.wait_line("inspected", 2);
    assert!(!alive(prepare));
}

/// Stops processes in the middle of a session for much longer than children may be silent, lets
/// them go on one after the other, and checks that all are there.
async fn stop_and_go_on(stopped: fn(&Sepal) -> Vec<Pid>) {
    let sepal = serve();
    let (netd, worker, addr) = (sepal.netd(), sepal.worker(), sepal.addr());
    let expected = run_session(&addr, STEPS, |_| ()).await;
    let got = run_session(&addr, STEPS, |step| {
        if step == 2 {
            let pids = stopped(&sepal);
            signal(&pids, Signal::SIGSTOP);
            std::thread::sleep(3 * HANG_TIMEOUT);
            for pid in &pids {
                signal(&[*pid], Signal::SIGCONT);
                std::thread::sleep(HANG_TIMEOUT / 10);
            }
            // Long enough for a verdict.
            std::thread::sleep(2 * HANG_TIMEOUT);
        }
    })
    .await;
    assert!(got == expected, "results differ from an undisturbed run");
    assert_eq!((sepal.netd(), sepal.worker()), (netd, worker));
    assert!(!sepal.log().contains("hangs"), "{}", sepal.log());
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_supervisor_that_was_stopped_kills_nobody() {
    stop_and_go_on(|sepal| vec![sepal.pid()]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_that_was_stopped_goes_on_as_it_was() {
    stop_and_go_on(|sepal| vec![sepal.pid(), sepal.netd(), sepal.worker()]).await;
}
