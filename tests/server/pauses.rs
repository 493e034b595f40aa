//! `sepal pause`, `resume` and `restart`: the devices are free during a pause, the server stays in the
//! swarm and says so, and comes back with the same bits.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::harness::demo::{BLOCKS, HIDDEN, run_session, run_session_with};
use crate::harness::peer::{Peer, noise};
use crate::harness::session::{SHAPES, serve};
use crate::harness::{self, DEADLINE, Sepal, children_of, command_line, wait_for};
use nix::sys::signal::{Signal, kill};

/// `sepal ARGS...` for the instances in `dir`.
fn sepal(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sepal"));
    command.args(args).env("XDG_RUNTIME_DIR", dir).output().expect("run sepal")
}

fn ordered(server: &Sepal, args: &[&str]) -> String {
    let output = sepal(server.dir.path(), args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn refused(server: &Sepal, args: &[&str]) -> String {
    let output = sepal(server.dir.path(), args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    String::from_utf8(output.stderr).expect("text")
}

fn has_workers(server: &Sepal) -> bool {
    children_of(server.pid()).into_iter().any(|pid| command_line(pid).contains("gpu-worker"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_server_frees_its_devices_and_comes_back_with_the_same_bits() {
    for devices in SHAPES {
        pauses(devices).await;
    }
}

async fn pauses(devices: &[&str]) {
    let server = serve(devices);
    ordered(&server, &["status", "--ready"]);
    let expected = run_session(&server.addr(), 6, |_| ()).await;
    let peer = Peer::connect(&server.addr(), "demo").await;
    let mut session = peer.session(BLOCKS, 64).await;
    session.step(noise(&[1, 4, HIDDEN], 1), None).await.expect("a step");
    let (netd, port) = (server.netd(), server.addr());

    // An open session goes on for as long as it may.
    let text = ordered(&server, &["pause", "--patience", "600", "--no_wait"]);
    assert!(text.contains("pausing"), "{text}");
    session.step(noise(&[1, 1, HIDDEN], 2), None).await.expect("a step of an open session");
    let refused_now = async {
        loop {
            match peer.forward(BLOCKS, noise(&[1, 1, HIDDEN], 1)).await {
                // The order is on its way to netd.
                Ok(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                Err(error) => return error.to_string(),
            }
        }
    };
    let error = tokio::time::timeout(DEADLINE, refused_now).await.expect("a refusal");
    assert!(error.contains("paused"), "{error}");
    assert_eq!(server.status()[0]["pause"], "draining");
    session.close().await;
    wait_for("the pause to begin", || (server.status()[0]["pause"] == "paused").then_some(()));
    assert!(!has_workers(&server));
    assert!(refused(&server, &["status", "--ready"]).contains("not ready: paused"));

    // Whoever dies in between, the pause lasts.
    kill(netd, Signal::SIGKILL).expect("kill netd");
    wait_for("a new netd", || (server.netd() != netd).then_some(()));
    server.wait_line("listening as", 2);
    assert_eq!(server.status()[0]["pause"], "paused");
    assert!(!has_workers(&server));

    ordered(&server, &["resume"]);
    server.wait_line("state=ONLINE", 2);
    assert_eq!(server.addr(), port, "the same PeerID and port");
    assert_eq!(run_session(&server.addr(), 6, |_| ()).await, expected);

    // A session that has no time is ended, with a text.
    let peer = Peer::connect(&server.addr(), "demo").await;
    let mut session = peer.session(BLOCKS, 64).await;
    session.step(noise(&[1, 4, HIDDEN], 1), None).await.expect("a step");
    let text = ordered(&server, &["pause", "--patience", "0"]);
    assert!(text.contains("devices are free"), "{text}");
    assert!(!has_workers(&server));
    session.step(noise(&[1, 1, HIDDEN], 2), None).await.expect_err("the session has ended");
    ordered(&server, &["resume"]);
    server.wait_line("state=ONLINE", 3);
    assert_eq!(server.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_restarted_on_request_costs_no_session_a_bit() {
    let server = serve(&[]);
    let expected = run_session(&server.addr(), 12, |_| ()).await;
    let peer = Peer::connect(&server.addr(), "demo").await;
    let outputs = run_session_with(&peer, 5, 12, |step| {
        if step % 4 == 1 {
            let before = server.worker();
            ordered(&server, &["restart", "0.0"]);
            wait_for("a new worker", || {
                let status = server.status();
                let mut children = status[0]["children"].as_array()?.iter();
                let worker = children.find(|child| child["role"] == "gpu-worker")?;
                let is_new = worker["pid"] != before.as_raw() && worker["state"] == "ready";
                is_new.then_some(())
            });
        }
    });
    assert_eq!(outputs.await, expected);
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn orders_name_what_is_wrong() {
    let server = serve(&[]);
    for (args, said) in [
        (&["restart", "3.0"][..], "no worker 3.0 exists: expected one of 0.0"),
        (&["restart", "x"], "invalid worker \"x\": expected group and rank, such as 0.0"),
        (&["pause", "--instance", "other"], "no instance other runs"),
    ] {
        let error = refused(&server, args);
        assert!(error.contains(said), "{args:?}: {error}");
    }
    let more = ["--new_swarm", "--torch_dtype", "float32"];
    let model = harness::demo::demo_model();
    let second = harness::serve_args(&model, "demo", &more);
    let second = Sepal::start_in(server.dir.clone(), &second);
    second.wait_online();
    let error = refused(&server, &["resume"]);
    assert!(error.contains("several instances run") && error.contains("--instance"), "{error}");
    assert_eq!(second.terminate().code(), Some(0));
    let dir = server.dir.clone();
    assert_eq!(server.terminate().code(), Some(0));
    let output = sepal(dir.path(), &["pause"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("no instance runs in"), "{error}");
}
