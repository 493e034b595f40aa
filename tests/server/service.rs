//! What a service manager hears of a server, through a socket that stands in for systemd's
//! (man 3 sd_notify): every datagram is read and checked.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::harness::demo::{demo_model, run_session};
use crate::harness::{DEADLINE, SEPAL, Sepal, children_of, serve_args, wait_for};
use nix::sys::signal::{Signal, kill};

/// The manager's end.
struct Manager {
    socket: UnixDatagram,
    heard: Vec<(Instant, String)>,
}

impl Manager {
    fn at(path: &Path) -> Manager {
        let socket = UnixDatagram::bind(path).expect("bind the manager's socket");
        // Shorter than the time between two signs of life, or `listen` does not end.
        socket.set_read_timeout(Some(Duration::from_millis(10))).expect("a timeout");
        Manager { socket, heard: Vec::new() }
    }

    /// Reads what has come. Each line is a variable that sd_notify(3) names.
    fn listen(&mut self) {
        let mut bytes = [0; 4096];
        while let Ok(len) = self.socket.recv(&mut bytes) {
            let text = std::str::from_utf8(&bytes[..len]).expect("messages are UTF-8");
            for line in text.lines() {
                let (name, value) = line.split_once('=').expect("NAME=VALUE");
                let known =
                    ["READY", "STATUS", "STOPPING", "WATCHDOG", "RELOADING", "MONOTONIC_USEC"]
                        .contains(&name);
                assert!(known && !value.is_empty(), "{line:?}");
                self.heard.push((Instant::now(), line.to_owned()));
            }
        }
    }

    /// Waits for a message.
    fn wait(&mut self, wanted: &str) -> Instant {
        let start = Instant::now();
        loop {
            self.listen();
            if let Some((at, _)) = self.heard.iter().find(|(_, line)| line.starts_with(wanted)) {
                return *at;
            }
            assert!(start.elapsed() < DEADLINE, "no {wanted}: {:?}", self.heard);
        }
    }

    fn count(&self, line: &str) -> usize {
        self.heard.iter().filter(|(_, heard)| heard == line).count()
    }
}

fn start(dir: Arc<tempfile::TempDir>, socket: &Path, watchdog: Option<Duration>) -> Sepal {
    let mut command = Command::new(SEPAL);
    command.env("NOTIFY_SOCKET", socket);
    if let Some(watchdog) = watchdog {
        command.env("WATCHDOG_USEC", watchdog.as_micros().to_string());
    }
    let more = ["--new_swarm", "--torch_dtype", "float32"];
    Sepal::start_by(command, dir, &serve_args(&demo_model(), "demo", &more))
}

#[tokio::test(flavor = "multi_thread")]
async fn ready_comes_after_a_step_and_signs_of_life_while_the_server_goes_on() {
    let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
    let path = dir.path().join("notify");
    let mut manager = Manager::at(&path);
    let sepal = start(dir.clone(), &path, Some(Duration::from_millis(200)));
    let ready = manager.wait("READY=1");
    // A step went through before: the worker has answered a job.
    assert!(sepal.log().contains("ready: a step went through"), "{}", sepal.log());
    manager.wait("STATUS=1 of 1 workers ready, netd ready, 0 sessions, 0 restarts");
    run_session(&sepal.addr(), 2, |_| ()).await;
    manager.listen();
    let signs = |manager: &Manager| manager.count("WATCHDOG=1");
    let before = signs(&manager);
    wait_for("more signs of life", || {
        manager.listen();
        (signs(&manager) > before + 2).then_some(())
    });
    // A dead worker is restarted, told, and not the manager's business.
    kill(sepal.worker(), Signal::SIGKILL).expect("the worker is there");
    manager.wait("STATUS=1 of 1 workers ready, netd ready, 0 sessions, 1 restarts");
    assert_eq!(manager.count("READY=1"), 1);
    assert_eq!(sepal.terminate().code(), Some(0));
    let stopping = manager.wait("STOPPING=1");
    assert!(stopping > ready);
    // Only the supervisor speaks to the manager.
    drop(dir);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_supervisor_that_stands_still_gives_no_sign_of_life() {
    let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
    let path = dir.path().join("notify");
    let mut manager = Manager::at(&path);
    const WATCHDOG: Duration = Duration::from_millis(200);
    let sepal = start(dir, &path, Some(WATCHDOG));
    manager.wait("READY=1");
    kill(sepal.pid(), Signal::SIGSTOP).expect("the supervisor is there");
    let is_stopped = || std::fs::read_to_string(format!("/proc/{}/stat", sepal.pid()));
    wait_for("the supervisor to stand still", || {
        is_stopped().is_ok_and(|stat| stat.contains(") T ")).then_some(())
    });
    manager.listen();
    let signs = manager.count("WATCHDOG=1");
    // Some were due in this time, and no other process gives one.
    std::thread::sleep(3 * WATCHDOG);
    manager.listen();
    assert_eq!(manager.count("WATCHDOG=1"), signs);
    kill(sepal.pid(), Signal::SIGCONT).expect("the supervisor is there");
    wait_for("signs of life", || {
        manager.listen();
        (manager.count("WATCHDOG=1") > signs).then_some(())
    });
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_that_is_gone_costs_a_warning() {
    let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
    let path = dir.path().join("nobody");
    let sepal = start(dir, &path, Some(Duration::from_millis(500)));
    sepal.wait_online();
    run_session(&sepal.addr(), 2, |_| ()).await;
    wait_for("the step", || sepal.log().contains("ready: a step went through").then_some(()));
    let log = sepal.log();
    assert_eq!(log.matches("the service manager does not listen").count(), 1, "{log}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_the_step() {
    let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
    let path = dir.path().join("notify");
    let mut manager = Manager::at(&path);
    let sepal = start(dir, &path, None);
    manager.wait("READY=1");
    manager.wait("STATUS=1 of 1 workers ready, netd ready, 0 sessions");
    assert_eq!(manager.count("WATCHDOG=1"), 0, "nobody asked for signs of life");
    let names = |pid: &nix::unistd::Pid| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
    };
    let children: Vec<String> = children_of(sepal.pid()).iter().map(names).collect();
    assert!(!children.iter().any(|name| name.contains("probe")), "{children:?}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn settings_are_read_again_on_sighup_and_what_needs_a_restart_is_named() {
    let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
    let path = dir.path().join("notify");
    let mut manager = Manager::at(&path);
    let file = dir.path().join("server.toml");
    let write = |text: &str| std::fs::write(&file, text).expect("write the settings");
    write("max_restarts = 0\n");
    let mut command = Command::new(SEPAL);
    command.env("NOTIFY_SOCKET", &path);
    let config = file.display().to_string();
    let more = ["--new_swarm", "--torch_dtype", "float32", "--config", &config];
    let sepal = Sepal::start_by(command, dir.clone(), &serve_args(&demo_model(), "demo", &more));
    manager.wait("READY=1");

    write("max_restarts = 7\nnum_blocks = 2\n");
    sepal.signal(Signal::SIGHUP);
    manager.wait("RELOADING=1");
    let line = sepal.wait_line("settings read again", 1);
    assert!(line.contains("max_restarts") && !line.contains("num_blocks"), "{line}");
    let line = sepal.wait_line("need a restart", 1);
    assert!(line.contains("num_blocks"), "{line}");
    wait_for("READY again", || {
        manager.listen();
        (manager.count("READY=1") == 2).then_some(())
    });
    // It may fail now: with the limit of the start the run would end.
    let before = sepal.worker();
    kill(before, Signal::SIGABRT).expect("kill the worker");
    wait_for("another worker", || (sepal.worker() != before).then_some(()));

    write("max_restart = 7\n");
    sepal.signal(Signal::SIGHUP);
    let line = sepal.wait_line("cannot read the settings again", 1);
    assert!(line.contains("max_restart") && line.contains("keeps its own"), "{line}");
    assert_eq!(sepal.terminate().code(), Some(0));
}
