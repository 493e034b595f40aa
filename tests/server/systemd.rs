//! The units of `deploy/systemd` under a real systemd, which `tests/systemd/boot` starts in namespaces. Ignored
//! unless `tests/systemd/run` runs them, which says so where the machine does not allow that.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};

use crate::harness::demo::{demo_model, run_session};
use crate::harness::{self, SEPAL, alive, children_of, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A machine that runs systemd.
struct Machine {
    unshare: Child,
    init: Pid,
    _folder: tempfile::TempDir,
}

impl Machine {
    fn boot() -> Machine {
        let folder = tempfile::tempdir().expect("temporary folder");
        let boot = harness::root().join("tests/systemd/boot");
        let namespaces = ["--mount", "--pid", "--fork", "--cgroup", "--uts", "--ipc"];
        let unshare = Command::new("unshare")
            .args(namespaces)
            .arg("--kill-child")
            .arg(boot)
            .arg(folder.path())
            .args([SEPAL.as_ref(), demo_model().as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("start unshare");
        wait_for("process 1", || folder.path().join("ready").exists().then_some(()));
        let parent = Pid::from_raw(i32::try_from(unshare.id()).expect("a process id"));
        let init = wait_for("process 1", || children_of(parent).first().copied());
        let machine = Machine { unshare, init, _folder: folder };
        wait_for("systemd", || {
            let state = machine.run(&["systemctl", "is-active", "try.target"]);
            state.status.success().then_some(())
        });
        machine
    }

    /// Runs a command in the machine.
    fn run(&self, command: &[&str]) -> Output {
        let mut enter = Command::new("nsenter");
        enter.args(["--target", &self.init.to_string(), "--mount", "--pid", "--cgroup", "--uts"]);
        enter.args(["--ipc", "--root", "--wd"]).arg("--").args(command);
        enter.stdin(Stdio::null()).output().expect("nsenter")
    }

    fn systemctl(&self, args: &[&str]) -> Result<String, String> {
        let output = self.run(&[&["systemctl"], args].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stdout) + &text(&output.stderr)),
        }
    }

    /// A property of a unit.
    fn show(&self, unit: &str, property: &str) -> String {
        self.systemctl(&["show", unit, "--value", "--property", property]).expect("show")
    }

    /// What the instance tells of its processes.
    fn status(&self) -> serde_json::Value {
        let output = self.run(&["sepal", "status", "--json", "--runtime_dir", "/run/sepal"]);
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// Address and PeerID.
    fn addr(&self) -> (String, String) {
        wait_for("a port", || {
            let status = self.status();
            let netd =
                status.pointer("/0/children")?.as_array()?.iter().find(|c| c["role"] == "netd")?;
            let (port, peer) = (netd["port"].as_u64()?, netd["peer_id"].as_str()?);
            Some((format!("/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"), peer.to_owned()))
        })
    }

    /// Processes of a unit, as numbered outside, by a part of their command lines.
    fn processes(&self, part: &str) -> Vec<Pid> {
        let mut found = vec![self.init];
        let mut next = 0;
        while let Some(pid) = found.get(next).copied() {
            found.extend(children_of(pid));
            next += 1;
        }
        found.retain(|pid| harness::command_line(*pid).contains(part));
        found
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Process 1 takes everything in its namespace with it.
        let _ = kill(self.init, Signal::SIGKILL);
        let _ = self.unshare.wait();
    }
}

const UNIT: &str = "sepal@demo.service";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "tests/systemd/run"]
async fn an_instance_starts_serves_survives_and_stops() {
    let machine = Machine::boot();
    machine.systemctl(&["start", UNIT]).expect("start returns once the server is ready");
    assert_eq!(machine.show(UNIT, "ActiveState"), "active");
    let (addr, peer) = machine.addr();
    let expected = run_session(&addr, 3, |_| ()).await;
    wait_for("a status", || {
        machine.show(UNIT, "StatusText").starts_with("1 of 1 workers ready").then_some(())
    });

    // Root sees it; the folder belongs to the service's user.
    assert_eq!(
        machine.status().pointer("/0/instance").and_then(|name| name.as_str()),
        Some("demo")
    );

    // A worker's death is not systemd's business.
    let worker = machine.processes("gpu-worker");
    let [worker] = worker[..] else { panic!("{worker:?}") };
    let got = run_session(&addr, 3, |step| {
        if step == 1 {
            kill(worker, Signal::SIGKILL).expect("the worker is there");
        }
    })
    .await;
    assert!(got == expected, "results differ from an undisturbed run");
    assert_eq!(machine.show(UNIT, "NRestarts"), "0");

    // The supervisor's death is. Its children die with it, and the PeerID stays.
    let main = machine.processes("sepal serve");
    let [supervisor] = main[..] else { panic!("{main:?}") };
    let netd = machine.processes("netd");
    kill(supervisor, Signal::SIGKILL).expect("the supervisor is there");
    wait_for("another supervisor", || (machine.show(UNIT, "NRestarts") == "1").then_some(()));
    wait_for("ready", || (machine.show(UNIT, "ActiveState") == "active").then_some(()));
    assert_eq!(netd.len(), 1, "{netd:?}");
    assert!(netd.iter().all(|pid| !alive(*pid)), "a child outlived its supervisor");
    let (addr, again) = machine.addr();
    assert_eq!(again, peer);
    assert!(run_session(&addr, 3, |_| ()).await == expected);

    machine.systemctl(&["stop", UNIT]).expect("stop");
    assert_eq!(machine.show(UNIT, "Result"), "success");
    assert_eq!(machine.processes("sepal"), [], "processes are left");
}

#[test]
#[ignore = "tests/systemd/run"]
fn a_supervisor_that_stands_still_is_replaced_by_the_watchdog() {
    let machine = Machine::boot();
    // The unit waits for minutes; a drop-in of this test for seconds.
    let text = "mkdir -p /run/systemd/system/sepal@demo.service.d && \
                printf '[Service]\\nWatchdogSec=20s\\nRestartSec=100ms\\nTimeoutAbortSec=1s\\n' > \
                /run/systemd/system/sepal@demo.service.d/fast.conf && systemctl daemon-reload";
    assert!(machine.run(&["sh", "-c", text]).status.success());
    machine.systemctl(&["start", UNIT]).expect("start");
    let main = machine.processes("sepal serve");
    let [supervisor] = main[..] else { panic!("{main:?}") };
    // An idle server gives signs of life.
    let sign = || machine.show(UNIT, "WatchdogTimestampMonotonic");
    for _ in 0..2 {
        let last = sign();
        wait_for("a sign of life", || (sign() != last).then_some(()));
    }
    assert_eq!(machine.show(UNIT, "NRestarts"), "0");
    kill(supervisor, Signal::SIGSTOP).expect("the supervisor is there");
    wait_for("another supervisor", || (machine.show(UNIT, "NRestarts") == "1").then_some(()));
    wait_for("ready", || (machine.show(UNIT, "ActiveState") == "active").then_some(()));
    assert!(!alive(supervisor));
}

#[test]
#[ignore = "tests/systemd/run"]
fn wrong_settings_are_not_tried_again() {
    let machine = Machine::boot();
    let refused = machine.systemctl(&["start", "sepal@wrong.service"]);
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(machine.show("sepal@wrong.service", "ExecMainStatus"), "2");
    assert_eq!(machine.show("sepal@wrong.service", "NRestarts"), "0");
    let unknown = machine.systemctl(&["start", "sepal@unknown.service"]);
    assert!(unknown.is_err_and(|why| why.contains("Assertion failed")), "no configuration");
}

#[test]
#[ignore = "tests/systemd/run"]
fn a_bootstrap_node_runs_as_a_user_of_its_own() {
    let machine = Machine::boot();
    machine.systemctl(&["start", "sepal-dht.service"]).expect("start");
    let node = wait_for("the node", || machine.processes("sepal dht").first().copied());
    let status = std::fs::read_to_string(format!("/proc/{node}/status")).expect("its status");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("a field");
        line.split_whitespace().nth(1).expect("a value").to_owned()
    };
    assert_ne!(field("Uid:"), "0");
    assert_eq!(
        (field("CapEff:"), field("NoNewPrivs:")),
        ("0000000000000000".to_owned(), "1".to_owned())
    );
    machine.systemctl(&["stop", "sepal-dht.service"]).expect("stop");
    assert_eq!(machine.show("sepal-dht.service", "Result"), "success");
}
