//! Start, drain, death and clean-up of the whole process tree, with real processes and real
//! signals.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::harness::demo::demo_model;
use crate::harness::rights::{ignored, may_look_into_children};
use crate::harness::{self, SEPAL, Sepal, alive, children_of, serve_args, wait_for};

/// Exit codes that README documents.
const BAD_CONFIG: i32 = 2;
const BUSY: i32 = 14;

fn serve() -> Sepal {
    Sepal::serve(&demo_model(), "demo", &[])
}

#[test]
fn sigterm_drains_and_leaves_nothing_behind() {
    let sepal = serve();
    let children = children_of(sepal.pid());
    assert_eq!(children.len(), 2, "prepare has ended, netd and one worker remain");
    let folder = sepal.dir.clone();
    let status = sepal.terminate();
    assert_eq!(status.code(), Some(0));
    assert!(children.iter().all(|p| !alive(*p)));
    let left: Vec<_> = std::fs::read_dir(folder.path().join("sepal")).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "the lock of the folder alone: {left:?}");
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
    assert!(lines.any(|l| l.unwrap().contains("state=ONLINE")), "the log ended before ONLINE");
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
    sepal.signal(Signal::SIGKILL);
    sepal.wait();
    for child in children {
        wait_for("a child to die with its parent", || (!alive(child)).then_some(()));
    }
    let folder = sepal.dir.path().join("sepal");
    assert!(folder.join("0.lock").exists(), "a killed run leaves its files");
    let model = demo_model();
    let next = Sepal::start_in(
        sepal.dir.clone(),
        &serve_args(&model, "demo", &["--new_swarm", "--instance", "next"]),
    );
    next.wait_online();
    assert!(!folder.join("0.lock").exists() && !folder.join("0.d").exists());
    assert_eq!(next.terminate().code(), Some(0));
}

#[test]
fn a_killed_worker_is_replaced_and_netd_stays() {
    let sepal = serve();
    let (netd, worker) = (sepal.netd(), sepal.worker());
    kill(worker, Signal::SIGKILL).unwrap();
    let next =
        wait_for("a new worker", || Some(sepal.worker()).filter(|p| *p != worker && alive(*p)));
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
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "gpt9"}"#).unwrap();
    let mut sepal = Sepal::start(&serve_args(folder.path(), "demo", &["--new_swarm"]));
    assert_eq!(sepal.wait().code(), Some(BAD_CONFIG));
    let log = sepal.log();
    assert_eq!(log.matches("gpt9").count(), 1, "one clear sentence, once:\n{log}");
}

/// All processes of a server.
fn tree(sepal: &Sepal) -> Vec<Pid> {
    let mut pids = children_of(sepal.pid());
    pids.push(sepal.pid());
    pids
}

/// Names in /dev/shm of segments that one of `pids` made.
fn names_in_shm(pids: &[Pid]) -> Vec<String> {
    let entries = std::fs::read_dir("/dev/shm").unwrap();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_of = |name: &str, pid: &Pid| name.starts_with(&format!("sepal-mapping-{pid}-"));
    names.filter(|name| pids.iter().any(|pid| is_of(name, pid))).collect()
}

/// Paths through which a process of this user reaches the segments of `pid`: its descriptors, and,
/// with the right to it, its mappings.
fn segments_within_reach(pid: Pid) -> Vec<PathBuf> {
    let links = ["fd", "map_files"].into_iter().flat_map(|folder| {
        std::fs::read_dir(format!("/proc/{pid}/{folder}")).into_iter().flatten().flatten()
    });
    let is_shared = |path: &PathBuf| {
        let target = std::fs::read_link(path).unwrap_or_default();
        ["/memfd:sepal-", "/dev/shm/"]
            .into_iter()
            .any(|kind| target.to_string_lossy().contains(kind))
    };
    links.map(|link| link.path()).filter(is_shared).collect()
}

/// What a child may do that was taken over: it runs as the same user as all others.
#[test]
fn nobody_can_cut_the_memory_of_others_short() {
    let sepal = serve();
    let (netd, worker, before) = (sepal.netd(), sepal.worker(), tree(&sepal));
    let text = || harness::generate(&sepal, &demo_model(), "demo", "auto", "Once upon a time", 3);
    let expected = text();
    let mut tried = 0;
    for path in before.iter().flat_map(|pid| segments_within_reach(*pid)) {
        for len in [0, 1 << 20] {
            let opened = std::fs::OpenOptions::new().read(true).write(true).open(&path);
            // What carries no segment any more may be cut.
            tried += usize::from(opened.is_ok_and(|file| file.set_len(len).is_err()));
        }
    }
    // The supervisor holds some of them, its children hold all.
    let least = if may_look_into_children("segments of netd and workers") { 10 } else { 1 };
    assert!(tried >= 2 * least, "only {tried} attempts at board, rings, arena and kv");
    assert_eq!(text(), expected);
    assert_eq!((sepal.netd(), sepal.worker()), (netd, worker));
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn shared_memory_has_no_names_and_ends_with_processes_that_are_killed() {
    let mut sepal = serve();
    let pids = tree(&sepal);
    assert_eq!(names_in_shm(&pids), [""; 0], "during a run");
    let may_look = may_look_into_children("mappings of segments have no names");
    for pid in pids.iter().filter(|_| may_look) {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(maps.contains("/memfd:sepal-") && !maps.contains("/dev/shm/"), "{maps}");
    }
    pids.iter().rev().for_each(|pid| kill(*pid, Signal::SIGKILL).unwrap_or_default());
    sepal.wait();
    assert_eq!(names_in_shm(&pids), [""; 0], "after SIGKILL");
}

#[test]
fn a_tiny_folder_for_shared_memory_is_enough() {
    let model = demo_model();
    let args = serve_args(&model, "demo", &["--new_swarm"]).join(" ");
    let tiny = "mount -t tmpfs -o size=4k tmpfs /dev/shm";
    let apart = |user: &[&str], script: &str| {
        let mut command = Command::new("unshare");
        command.args(user).args(["--mount", "--propagation", "private", "sh", "-c", script]);
        command
    };
    let users = [&["--user", "--map-root-user"][..], &[]];
    let is_let = |user: &&[&str]| apart(user, tiny).status().is_ok_and(|status| status.success());
    let Some(user) = users.into_iter().find(is_let) else {
        return ignored("a tiny /dev/shm", "a mount namespace");
    };
    let command = apart(user, &format!("{tiny} && exec {SEPAL} {args}"));
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let sepal = Sepal::start_by(command, folder, &[]);
    sepal.wait_online();
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn status_is_told_while_netd_is_down_and_while_it_is_stopped() {
    let sepal = serve();
    let netd_state = || {
        let netd = &sepal.children("netd")[0];
        (netd["state"].as_str().unwrap().to_owned(), netd["generation"].as_u64().unwrap())
    };
    let netd = sepal.netd();
    kill(netd, Signal::SIGSTOP).unwrap();
    assert_eq!(netd_state(), ("ready".to_owned(), 1));
    kill(netd, Signal::SIGKILL).unwrap();
    wait_for("another netd", || (netd_state().1 == 2).then_some(()));
    sepal.wait_line("state=ONLINE", 2);
    assert_eq!(netd_state(), ("ready".to_owned(), 2));
    let socket = sepal.dir.path().join("sepal/0.d/status");
    assert!(socket.exists(), "in the folder of the instance");
    assert_eq!(sepal.terminate().code(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn the_log_says_once_on_what_a_server_runs_that_was_told_nothing() {
    let sepal = serve();
    let log = sepal.log();
    let lines = log.lines().filter(|line| line.contains("no device was named"));
    assert_eq!(lines.count(), 1, "{log}");
    assert_eq!(sepal.terminate().code(), Some(0));
}
