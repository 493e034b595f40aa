//! `sepal upgrade`: another executable takes a running server over, in the same process. Sessions go on
//! with the same bits while the workers are replaced; netd comes last. What cannot be taken over is
//! refused, and the running server goes on.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::harness::demo::{BLOCKS, HIDDEN, copy_of_demo_model, demo_model, run_session};
use crate::harness::peer::{Peer, noise};
use crate::harness::rights::may_look_into_children;
use crate::harness::session::{SHAPES, serve};
use crate::harness::{
    self, DEADLINE, SEPAL, Sepal, another_build, children_of, pid_of, serve_args, wait_for,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A program that is no sepal, or not quite.
fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("write a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("make it executable");
    path
}

fn upgraded(server: &Sepal, to: &Path, more: &[&str]) {
    let output = server.upgrade(Some(to), more);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}\n{}", server.log());
    assert!(String::from_utf8_lossy(&output.stdout).contains("every process is of build"));
}

/// The file that a process runs.
fn executable(pid: Pid) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/exe")).expect("a running process")
}

fn all_run(server: &Sepal, build: &Path) {
    let processes = children_of(server.pid());
    assert!(processes.len() >= 2, "{processes:?}");
    assert_eq!(executable(server.pid()), build);
    if may_look_into_children("which build children are of") {
        for pid in processes {
            assert_eq!(executable(pid), build, "{}", harness::command_line(pid));
        }
    }
}

/// Waits until all workers are of another process than `before`, and ready.
fn wait_for_new_workers(server: &Sepal, before: &[Pid]) {
    wait_for("the workers to be replaced", || {
        let workers = server.workers();
        let is_new = |child: &serde_json::Value| {
            child["state"] == "ready" && pid_of(child).is_some_and(|pid| !before.contains(&pid))
        };
        (!workers.is_empty() && workers.iter().all(is_new)).then_some(())
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_go_on_with_the_same_bits_while_every_process_is_replaced() {
    let shapes: [&[&str]; 3] = [SHAPES[0], SHAPES[1], &["--device", "cpu,cpu"]];
    for devices in shapes {
        let server = serve(devices);
        let (pid, addr, netd) = (server.pid(), server.addr(), server.netd());
        let expected = run_session(&addr, 12, |_| ()).await;
        let before = children_of(pid);
        let build = another_build(server.dir.path(), "sepal-next");
        let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
        let outputs = run_session(&addr, 12, |step| {
            longest = longest.max(last.elapsed());
            match step {
                4 => {
                    let output = server.upgrade(Some(&build), &["--no_wait", "--patience", "600"]);
                    assert!(output.status.success());
                }
                10 => wait_for_new_workers(&server, &before),
                _ => {}
            }
            last = Instant::now();
        });
        assert_eq!(outputs.await, expected, "{devices:?}");
        println!("{devices:?}: longest step during the upgrade {longest:?}");
        // The session has ended: nothing keeps netd.
        wait_for("netd to be replaced", || (server.netd() != netd).then_some(()));
        server.wait_line("upgraded: every process", 1);
        assert_eq!(server.pid(), pid);
        all_run(&server, &build);
        assert_eq!(server.addr(), addr, "the same PeerID and port");
        wait_for_step(&server).await;
        assert_eq!(run_session(&addr, 12, |_| ()).await, expected);
        // And once more, to yet another one.
        if devices != SHAPES[0] {
            assert_eq!(server.terminate().code(), Some(0));
            continue;
        }
        let build = another_build(server.dir.path(), "sepal-after-next");
        upgraded(&server, &build, &[]);
        all_run(&server, &build);
        wait_for_step(&server).await;
        assert_eq!(run_session(&addr, 12, |_| ()).await, expected);
        assert_eq!(server.status()[0]["upgrade_failure"], serde_json::Value::Null);
        assert_eq!(server.terminate().code(), Some(0));
    }
}

/// Waits until the server that was just online serves again.
async fn wait_for_step(server: &Sepal) {
    let serves = async {
        loop {
            let peer = Peer::try_connect(&server.addr(), "demo").await;
            if let Ok(peer) = peer
                && peer.forward(BLOCKS, noise(&[1, 1, HIDDEN], 1)).await.is_ok()
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, serves).await.expect("the server serves");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_end_with_netd_are_told_why_and_what_to_do() {
    let server = serve(&[]);
    let peer = Peer::connect(&server.addr(), "demo").await;
    let mut session = peer.session(BLOCKS, 64).await;
    session.step(noise(&[1, 4, HIDDEN], 1), None).await.expect("a step");
    let waiting = tokio::spawn(async move { session.answer().await });
    upgraded(&server, &another_build(server.dir.path(), "sepal-next"), &["--patience", "0"]);
    let end = waiting.await.expect("a task").expect_err("an end").to_string();
    assert!(end.contains("is being replaced: connect again"), "{end}");
    assert!(!server.log().contains("state=OFFLINE"), "{}", server.log());
    assert_eq!(server.terminate().code(), Some(0));
}

/// Who is killed when which line has come, in the order of the lines. A round is an upgrade.
const ROUNDS: [&[(&str, &str)]; 3] = [
    &[("asking the new executable", "gpu-worker"), ("taken over child=netd", "netd")],
    &[("upgrade: executable found", "netd"), ("replaced by the new build", "gpu-worker")],
    &[("handing over", "gpu-worker"), ("draining child=netd", "netd")],
];

#[tokio::test(flavor = "multi_thread")]
async fn whoever_dies_during_an_upgrade_it_comes_to_its_end() {
    let server = serve(&["--device", "cpu,cpu", "--max_restarts", "1000"]);
    let expected = run_session(&server.addr(), 3, |_| ()).await;
    for (round, kills) in ROUNDS.iter().enumerate() {
        let build = another_build(server.dir.path(), &format!("sepal-{round}"));
        let mut from = server.lines();
        let command = std::thread::spawn({
            let (dir, build) = (server.dir.path().to_owned(), build.clone());
            move || {
                let mut command = Command::new(SEPAL);
                command.args(["upgrade", "--patience", "0", "--to"]).arg(build);
                command.env("XDG_RUNTIME_DIR", dir).output().expect("run sepal upgrade")
            }
        });
        for (line, role) in *kills {
            from = server.wait_from(from, &[line]) + 1;
            kill_one(&server, role);
        }
        let output = command.join().expect("a thread");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "round {round}: {errors}\n{}", server.log());
        assert_eq!(executable(server.pid()), build);
        wait_for_step(&server).await;
        all_run(&server, &build);
        assert_eq!(run_session(&server.addr(), 3, |_| ()).await, expected);
    }
    assert_eq!(server.terminate().code(), Some(0));
}

/// Kills a child of the role as soon as there is one.
fn kill_one(server: &Sepal, role: &str) {
    // Not the new executable, which says what it is.
    let is_of_role = |pid: &Pid| {
        let line = harness::command_line(*pid);
        line.contains(" gen ") && line.contains(role)
    };
    wait_for(role, || {
        let victim = children_of(server.pid()).into_iter().find(is_of_role)?;
        kill(victim, Signal::SIGKILL).ok()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_build_of_sepal_is_refused_and_the_server_goes_on() {
    let server = serve(&[]);
    let dir = server.dir.path();
    let processes = children_of(server.pid());
    let peer = Peer::connect(&server.addr(), "demo").await;
    let mut session = peer.session(BLOCKS, 64).await;
    session.step(noise(&[1, 4, HIDDEN], 1), None).await.expect("a step");
    let unexecutable = dir.join("text");
    fs::write(&unexecutable, "no program").expect("write a file");
    for (to, wanted) in [
        (dir.join("nowhere"), "No such file"),
        (unexecutable, "Permission denied"),
        (script(dir, "empty", ""), "is it a sepal?"),
        (script(dir, "fails", "echo broken >&2; exit 1"), "broken"),
        (script(dir, "babbles", "echo '{\"build\":1}'"), "is it a sepal?"),
    ] {
        let output = server.upgrade(Some(&to), &[]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(wanted), "{}: {errors}", to.display());
        assert_eq!(errors.trim().lines().count(), 1, "one sentence: {errors}");
        session.step(noise(&[1, 1, HIDDEN], 2), None).await.expect("the session goes on");
    }
    assert_eq!(children_of(server.pid()), processes, "nobody was replaced");
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
#[ignore = "waits for 10 s: .ci/long"]
fn a_build_that_does_not_say_what_it_is_is_refused() {
    let server = serve(&[]);
    let output = server.upgrade(Some(&script(server.dir.path(), "hangs", "exec sleep 600")), &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("did not end in time"), "{errors}");
    assert_eq!(server.terminate().code(), Some(0));
}

/// A build that says what `sed` makes of what this one says, and is this one.
fn pretends(folder: &Path, name: &str, sed: &str) -> PathBuf {
    let text = format!(
        "if [ \"$2\" = --describe ]; then {SEPAL} \"$@\" | sed '{sed}'; else exec {SEPAL} \"$@\"; fi"
    );
    script(folder, name, &text)
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_end_before_a_build_that_computes_other_bits_serves() {
    let server = serve(&[]);
    let (pid, addr) = (server.pid(), server.addr());
    let expected = run_session(&addr, 3, |_| ()).await;
    let peer = Peer::connect(&addr, "demo").await;
    let mut session = peer.session(BLOCKS, 64).await;
    session.step(noise(&[1, 4, HIDDEN], 1), None).await.expect("a step");
    let build =
        pretends(server.dir.path(), "other-bits", "s/\"numerics\":[0-9]*/\"numerics\":9999/");
    let output = server.upgrade(Some(&build), &["--no_wait", "--patience", "600"]);
    assert!(output.status.success());
    server.wait_line("computes other bits", 1);
    session.step(noise(&[1, 1, HIDDEN], 2), None).await.expect("the session may end in peace");
    let refused = async {
        // The order is on its way to netd.
        while peer.forward(BLOCKS, noise(&[1, 1, HIDDEN], 1)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, refused).await.expect("nothing new begins");
    session.close().await;
    server.wait_line("upgraded: every process", 1);
    server.wait_line("state=ONLINE", 2);
    assert_eq!((server.pid(), server.addr()), (pid, addr.clone()));
    wait_for_step(&server).await;
    assert_eq!(run_session(&addr, 3, |_| ()).await, expected);
    assert_eq!(server.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_of_another_format_starts_anew_in_the_same_process() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let key = dir.path().join("key");
    let key = key.to_str().expect("UTF-8");
    let identities: [&[&str]; 2] = [&[], &["--identity_path", key]];
    for identity in identities {
        let server = serve(identity);
        let (pid, peer) = (server.pid(), server.peer_id());
        let format = "s/\"format\":[0-9]*/\"format\":9999/";
        let build = pretends(server.dir.path(), "other-format", format);
        let output = server.upgrade(Some(&build), &["--patience", "0"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}\n{}", server.log());
        server.wait_line("starts anew", 1);
        let line = server.wait_line("state=ONLINE", 2);
        assert!(line.contains(&peer), "the same PeerID: {line}");
        assert_eq!(server.pid(), pid);
        assert_eq!(server.terminate().code(), Some(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_upgrades_once_another_executable_was_installed() {
    let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
    let installed = another_build(dir.path(), "installed");
    let model = demo_model();
    let arguments = serve_args(&model, "demo", &["--new_swarm", "--device", "cpu"]);
    let server = Sepal::start_by(Command::new(&installed), dir.clone(), &arguments);
    server.wait_online();
    let (pid, processes) = (server.pid(), children_of(server.pid()));
    server.signal(Signal::SIGHUP);
    server.wait_line("settings read again", 1);
    assert_eq!(children_of(pid), processes, "nothing else was installed");

    // As a package manager does it: a new file takes the name of the old one.
    let next = dir.path().join("installed.dpkg-new");
    fs::copy(SEPAL, &next).expect("copy sepal");
    fs::rename(&next, &installed).expect("install");
    server.signal(Signal::SIGHUP);
    server.wait_line("upgraded: every process", 1);
    assert_eq!(server.pid(), pid);
    all_run(&server, &installed);
    assert_eq!(server.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_of_the_next_build_load_weights_whose_folder_is_gone() {
    let place = tempfile::tempdir().expect("a folder");
    let folder = copy_of_demo_model(place.path());
    let server = Sepal::serve(&folder, "demo", &["--torch_dtype", "float32"]);
    let (addr, worker) = (server.addr(), server.worker());
    let expected = run_session(&addr, 3, |_| ()).await;
    fs::remove_dir_all(&folder).expect("remove the model");
    fs::remove_dir_all(server.dir.path().join("cache")).expect("remove the cache");
    let build = another_build(server.dir.path(), "sepal-next");
    upgraded(&server, &build, &[]);
    all_run(&server, &build);
    wait_for_step(&server).await;
    assert_ne!(server.worker(), worker);
    assert_eq!(run_session(&addr, 3, |_| ()).await, expected);
    // A worker that dies later is started by the new executable.
    kill(server.worker(), Signal::SIGKILL).expect("kill");
    wait_for_step(&server).await;
    assert_eq!(run_session(&addr, 3, |_| ()).await, expected);
    assert_eq!(server.terminate().code(), Some(0));
}
