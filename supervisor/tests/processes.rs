//! The process tree with real processes and fake roles. This program plays every part: started by
//! `cargo test` it runs the tests; each test starts it again as `serve CONFIG`, whose supervisor
//! starts it as `netd`, `prepare` and `gpu-worker`.

#[path = "processes/fake.rs"]
mod fake;
#[path = "processes/harness.rs"]
mod harness;

use std::panic::catch_unwind;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use shared::exit::ExitReason;
use supervisor::instance::live_instances;

use harness::{Server, alive, config, descriptors, segments_of, wait_for};

type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    (
        "a_server_comes_online_and_a_stop_leaves_nothing",
        a_server_comes_online_and_a_stop_leaves_nothing,
    ),
    (
        "a_killed_worker_comes_back_with_its_kv_segment_and_nobody_else_notices",
        a_killed_worker_comes_back,
    ),
    (
        "a_group_of_which_a_rank_is_killed_comes_back_as_one",
        a_group_of_which_a_rank_is_killed_comes_back_as_one,
    ),
    ("a_killed_netd_comes_back_at_its_address_and_workers_stay", a_killed_netd_comes_back),
    (
        "a_worker_without_progress_is_killed_and_restarted",
        a_worker_without_progress_is_killed_and_restarted,
    ),
    ("ctrl_c_to_the_whole_group_is_a_clean_stop", ctrl_c_to_the_whole_group_is_a_clean_stop),
    ("a_second_stop_kills_and_is_not_clean", a_second_stop_kills_and_is_not_clean),
    ("who_does_not_drain_in_time_is_killed", who_does_not_drain_in_time_is_killed),
    (
        "nothing_outlives_a_killed_supervisor_and_the_next_start_cleans_up",
        nothing_outlives_a_killed_supervisor,
    ),
    ("a_child_that_talks_without_end_is_replaced", a_child_that_talks_without_end_is_replaced),
    (
        "a_child_that_sends_a_huge_message_is_replaced",
        a_child_that_sends_a_huge_message_is_replaced,
    ),
    (
        "a_mistake_in_the_configuration_is_said_once_and_ends_the_run",
        a_mistake_in_the_configuration_is_said_once,
    ),
    ("a_worker_that_keeps_crashing_ends_the_run", a_worker_that_keeps_crashing_ends_the_run),
    (
        "a_child_that_never_connects_ends_the_run_in_time",
        a_child_that_never_connects_ends_the_run_in_time,
    ),
    ("a_live_instance_cannot_be_started_twice", a_live_instance_cannot_be_started_twice),
    ("restarts_leak_no_descriptor_thread_or_segment", restarts_leak_nothing),
    ("a_role_started_by_hand_refuses", a_role_started_by_hand_refuses),
    (
        "a_cache_larger_than_the_machine_is_refused_once",
        a_cache_larger_than_the_machine_is_refused_once,
    ),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("serve") => harness::serve(&args),
        Some("netd" | "prepare" | "gpu-worker") => fake::run(&args),
        _ => run_tests(&args),
    }
}

/// Tests that run at once. Each has several processes of its own, in a folder of its own, which mostly
/// wait for each other.
const AT_ONCE: usize = 4;

/// Runs the tests whose names contain a given text. One that panics does not keep the others from running.
fn run_tests(args: &[String]) -> ExitCode {
    let filters: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let wanted = |name: &str| {
        filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()))
    };
    let tests: Vec<&Test> = TESTS.iter().filter(|(name, _)| wanted(name)).collect();
    if args.iter().any(|arg| arg == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some((name, test)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            if !passes(name, *test) {
                failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner();
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {result}. {} passed; {failed} failed; 0 ignored; 0 measured; {} filtered out",
        tests.len() - failed,
        TESTS.len() - tests.len()
    );
    ExitCode::from(u8::from(failed > 0))
}

/// Runs a test in a thread of its name, which the message of a panic shows.
fn passes(name: &str, test: fn()) -> bool {
    let start = Instant::now();
    let thread = Builder::new().name(name.to_owned()).spawn(move || catch_unwind(test).is_ok());
    let passed = thread.unwrap().join().unwrap_or(false);
    let outcome = if passed { "ok" } else { "FAILED" };
    println!("test {name} ... {outcome} ({:.1} s)", start.elapsed().as_secs_f32());
    passed
}

fn a_server_comes_online_and_a_stop_leaves_nothing() {
    let mut server = Server::start(&config("plain"));
    server.wait_online();
    let children = server.children();
    assert_eq!(
        children.iter().filter(|child| child.state == "ready").count(),
        3,
        "netd, two workers"
    );
    assert!(server.command_line(children[1].pid).starts_with("sepal: netd gen 1 "));
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
    assert!(children.iter().all(|child| !alive(child.pid)));
    assert_eq!(server.names_in_shm(), [""; 0]);
    assert_eq!(server.files(), ["lock"]);
}

fn a_killed_worker_comes_back() {
    let server = Server::start(&config("plain"));
    server.wait_online();
    let before = server.children();
    server.kill_child("gpu-worker 0.0");
    let after = server.wait_generation("gpu-worker 0.0", 2);
    server.wait_line("told up worker=0.0 generation=2");
    server.wait_line("told down worker=0.0 generation=1 cause=Outside restarting=true");
    server.wait_line("kv held the mark of generation 1");
    for (before, after) in
        before.iter().zip(&after).filter(|(before, _)| before.worker.as_deref() != Some("0.0"))
    {
        assert_eq!(before.pid, after.pid, "only the killed worker is new");
    }
}

fn a_group_of_which_a_rank_is_killed_comes_back_as_one() {
    let mut config = config("plain");
    config.world_size = 2;
    let mut server = Server::start(&config);
    server.wait_online();
    server.wait_line("gone child=prepare");
    let before_kills = descriptors(server.pid());
    for (rank, generation) in [(0, 1), (1, 2), (1, 3)] {
        let before = server.children();
        server.kill_child(&format!("gpu-worker 0.{rank}"));
        let after = server.wait_generation("gpu-worker 0.0", generation + 1);
        server.wait_line(&format!("told up worker=0.0 generation={}", generation + 1));
        server.wait_line(&format!(
            "told down worker=0.0 generation={generation} cause=Outside restarting=true"
        ));
        server.wait_lines(&format!("met the other ranks, generation={}", generation + 1), 2);
        server.wait_lines(&format!("kv held the mark of generation {generation}"), 2);
        assert_eq!(before[1].pid, after[1].pid, "netd stays");
        for worker in [2, 3] {
            assert_ne!(before[worker].pid, after[worker].pid);
            assert_eq!(after[worker].world_size, Some(2));
        }
    }
    wait_for("as many descriptors as before", || {
        (descriptors(server.pid()) == before_kills).then_some(())
    });
    server.kill_child("netd");
    server.wait_line("got the arena of netd generation=2");
    server.wait_lines("state=ONLINE", 2);
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
    assert!(!server.log().contains("told up worker=0.1"), "netd knows the group by rank 0");
    assert_eq!((server.names_in_shm(), server.files()), (vec![], vec!["lock".to_owned()]));
}

fn a_killed_netd_comes_back() {
    let server = Server::start(&config("plain"));
    server.wait_online();
    let before = server.children();
    server.kill_child("netd");
    server.wait_generation("netd", 2);
    let line = server.wait_lines("state=ONLINE", 2).remove(1);
    assert!(line.contains("/ip4/127.0.0.1/tcp/4242/p2p/Fake"), "the address of before: {line}");
    let after = server.children();
    assert_eq!((before[2].pid, before[3].pid), (after[2].pid, after[3].pid), "weights stay loaded");
    server.wait_line("serves span 0:8 again");
}

fn a_worker_without_progress_is_killed_and_restarted() {
    let mut config = config("worker-hangs");
    // A machine that is busy for so long has a sound worker killed, too.
    config.restart.hang_timeout = Duration::from_secs(1);
    let server = Server::start(&config);
    server.wait_line("hangs: no progress for");
    server.wait_line("told up worker=0.0 generation=2");
    server.wait_online();
}

fn ctrl_c_to_the_whole_group_is_a_clean_stop() {
    let mut server = Server::start(&config("plain"));
    server.wait_online();
    killpg(server.pid(), Signal::SIGINT).unwrap();
    assert_eq!(server.wait(), Some(0));
}

fn a_second_stop_kills_and_is_not_clean() {
    let mut server = Server::start(&config("netd-is-deaf"));
    server.wait_online();
    server.signal(Signal::SIGTERM);
    server.wait_line("draining child=netd");
    let code = wait_for("the second stop to work", || {
        let _ = kill(server.pid(), Signal::SIGTERM);
        server.try_wait()
    });
    assert_eq!(code, Some(i32::from(ExitReason::Failed.code())));
    assert_eq!(server.names_in_shm(), [""; 0]);
}

fn who_does_not_drain_in_time_is_killed() {
    let mut config = config("netd-is-deaf");
    config.drain_timeout = Duration::from_millis(300);
    let mut server = Server::start(&config);
    server.wait_online();
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(i32::from(ExitReason::Failed.code())));
    server.wait_line("did not drain in time");
}

fn nothing_outlives_a_killed_supervisor() {
    let mut first = Server::start(&config("plain"));
    first.wait_online();
    let children = first.children();
    first.signal(Signal::SIGKILL);
    first.wait();
    wait_for("every child to die with its parent", || {
        children.iter().all(|child| child.pid == 0 || !alive(child.pid)).then_some(())
    });
    assert_eq!(live_instances(&first.runtime_dir()).unwrap(), []);
    assert_eq!(first.names_in_shm(), [""; 0]);

    let mut other = config("plain");
    other.instance = Some("other".into());
    let mut second = Server::start_in(first.dir.clone(), &other);
    second.wait_online();
    second.signal(Signal::SIGTERM);
    assert_eq!(second.wait(), Some(0));
    assert_eq!(second.files(), ["lock"]);
}

fn a_child_that_talks_without_end_is_replaced() {
    let mut server = Server::start(&config("netd-floods"));
    server.wait_line("floods its control channel");
    server.wait_generation("netd", 2);
    server.wait_online();
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
}

fn a_child_that_sends_a_huge_message_is_replaced() {
    let mut server = Server::start(&config("netd-rambles"));
    server.wait_line("expected at most 131072");
    server.wait_line("sent garbage on its control channel");
    server.wait_generation("netd", 2);
    server.wait_online();
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
}

fn a_mistake_in_the_configuration_is_said_once() {
    let mut server = Server::start(&config("prepare-refuses"));
    assert_eq!(server.wait(), Some(i32::from(ExitReason::BadConfig.code())));
    assert_eq!(server.log().matches("there is no such model").count(), 1, "{}", server.log());
    assert!(!server.log().contains("gen 2"), "{}", server.log());
}

fn a_worker_that_keeps_crashing_ends_the_run() {
    let mut config = config("worker-crashes");
    config.devices.truncate(1);
    config.restart.max_restarts = 2;
    let mut server = Server::start(&config);
    assert_eq!(server.wait(), Some(i32::from(ExitReason::RestartLimit.code())));
    server.wait_line("cause=SelfInflicted");
    assert_eq!(server.names_in_shm(), [""; 0]);
}

fn a_child_that_never_connects_ends_the_run_in_time() {
    let mut config = config("plain");
    config.restart.max_restarts = 1;
    config.restart.start_timeout = Duration::from_millis(200);
    config.log.filter = fake::SILENT.into();
    let mut server = Server::start(&config);
    assert_eq!(server.wait(), Some(i32::from(ExitReason::RestartLimit.code())));
    assert!(server.log().contains("see --start_timeout"), "{}", server.log());
}

fn a_live_instance_cannot_be_started_twice() {
    let mut named = config("plain");
    named.instance = Some("twin".into());
    let first = Server::start(&named);
    first.wait_online();
    let mut second = Server::start_in(first.dir.clone(), &named);
    assert_eq!(second.wait(), Some(i32::from(ExitReason::Busy.code())));
    assert!(second.log().contains(&format!("supervisor pid {}", first.pid())), "{}", second.log());
    assert!(first.children().iter().skip(1).all(|child| alive(child.pid)), "the first goes on");
}

fn restarts_leak_nothing() {
    let server = Server::start(&config("plain"));
    server.wait_online();
    server.wait_line("gone child=prepare");
    let settled =
        || (descriptors(server.pid()), harness::threads(server.pid()), segments_of(server.pid()));
    let before = wait_for("threads of prepare to end", || Some(settled()).filter(|now| now.1 == 7));
    for generation in 2..6 {
        server.kill_child("gpu-worker 1.0");
        server.wait_generation("gpu-worker 1.0", generation);
        server.wait_line(&format!("told up worker=1.0 generation={generation}"));
    }
    wait_for("everything as before", || (settled() == before).then_some(()));
}

fn a_role_started_by_hand_refuses() {
    let exe = std::env::current_exe().unwrap();
    let mut by_hand = Command::new(exe);
    let output = by_hand.args(["netd", "--bootstrap", "99"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(i32::from(ExitReason::BadConfig.code())));
    assert!(String::from_utf8_lossy(&output.stderr).contains("sepal serve"));
}

fn a_cache_larger_than_the_machine_is_refused_once() {
    let mut config = config("plain");
    config.netd.attn_cache_tokens = Some(u32::MAX);
    let mut server = Server::start(&config);
    assert_eq!(server.wait(), Some(i32::from(ExitReason::BadConfig.code())));
    assert_eq!(server.log().matches("lower --attn_cache_tokens").count(), 1, "{}", server.log());
}
