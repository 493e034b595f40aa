//! Effects of flags that are seen from outside alone: addresses, limits, lines of the log, files.

use std::net::TcpStream;
use std::path::Path;

use crate::harness::demo::demo_model;
use crate::harness::rights::ignored;
use crate::harness::{Sepal, children_of, command_line, free_port, own_loopback, wait_for};
use nix::sys::resource::{Resource, getrlimit};
use shared::processor::{Processor, numbers};

/// `sepal serve` of the demo model with these flags alone.
fn start(more: &[&str]) -> Sepal {
    let model = demo_model();
    let model = model.to_str().expect("UTF-8");
    let always = ["serve", model, "--dht_prefix", "demo", "--threads", "1", "--no_upnp"];
    Sepal::start(&[&always, more].concat())
}

#[test]
fn address_port_file_limit_and_statistics_are_as_asked_for() {
    let port = free_port().to_string();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limits");
    let files = (soft + 1).min(hard).to_string();
    let sepal = start(&[
        "--new_swarm",
        "--throughput",
        "1",
        "--port",
        &port,
        "--public_ip",
        "203.0.113.7",
        "--increase_file_limit",
        &files,
        "--stats_report_interval",
        "0.2",
    ]);
    let online = sepal.wait_line("state=ONLINE", 1);
    let announced = format!("/ip4/203.0.113.7/tcp/{port}/p2p/");
    assert!(online.contains(&announced), "{online}");
    assert!(!online.contains("127.0.0.1"), "{online}");
    TcpStream::connect(format!("127.0.0.1:{port}")).expect("it listens on all addresses");
    sepal.wait_line("Processed 0 batches in last 0.2 seconds", 2);
    let netd = wait_for("netd", || {
        let mut children = children_of(sepal.pid()).into_iter();
        children.find(|child| command_line(*child).contains("netd"))
    });
    let limits = std::fs::read_to_string(format!("/proc/{netd}/limits")).expect("limits");
    let line = limits.lines().find(|line| line.starts_with("Max open files"));
    let allowed = line.and_then(|line| line.split_whitespace().nth(3)?.parse::<u64>().ok());
    assert!(allowed >= files.parse().ok(), "{line:?}, wanted {files}");
}

#[test]
fn announced_addresses_replace_those_listened_on() {
    let announced = "/ip4/203.0.113.8/tcp/4321";
    let listened = format!("/ip4/{}/tcp/4321", own_loopback());
    let sepal = start(&[
        "--new_swarm",
        "--throughput",
        "1",
        "--host_maddrs",
        &listened,
        "--announce_maddrs",
        announced,
    ]);
    let online = sepal.wait_line("state=ONLINE", 1);
    assert!(online.contains(&format!("{announced}/p2p/")), "{online}");
    assert!(!online.contains(&listened), "{online}");
    let log = sepal.log();
    assert!(log.contains(&listened), "{log}");
}

#[test]
fn a_dry_run_prints_what_would_be_announced_keeps_it_and_ends() {
    let first = Sepal::serve(&demo_model(), "demo", &["--no_upnp"]);
    let cache = tempfile::tempdir().expect("folder");
    let folder = cache.path().to_str().expect("UTF-8");
    let peer = first.addr();
    let mut dry =
        start(&["--throughput", "dry_run", "--cache_dir", folder, "--initial_peers", &peer]);
    assert_eq!(dry.wait().code(), Some(0), "{}", dry.log());
    let line = dry.wait_line("ending the dry run", 1);
    let value = |name: &str| {
        let rest = line.split(&format!(" {name}=")).nth(1);
        let word = rest.and_then(|rest| rest.split_whitespace().next());
        word.and_then(|word| word.parse::<f64>().ok())
    };
    let (forward, network) = (value("forward_rps"), value("network_rps"));
    let least = forward.zip(network).map(|(forward, network)| (forward / 4.5).min(network));
    // All figures are rounded to a tenth.
    let near = |one: f64, other: f64| (one - other).abs() <= 0.1;
    let agree = value("throughput").zip(least).is_some_and(|(one, other)| near(one, other));
    assert!(agree && value("blocks") == Some(8.0), "{line}");
    let known = ["measured with servers of the swarm", "the speed of the link"];
    assert!(known.iter().any(|how| line.contains(how)), "{line}");
    for file in ["sepal_throughput_v1.json", "sepal_network_v1.json"] {
        assert!(Path::new(folder).join("rates").join(file).exists(), "{file} is kept");
    }
    assert!(!dry.log().contains("state=ONLINE"));

    // The next start announces from its first record on what was measured.
    let second = start(&["--cache_dir", folder, "--initial_peers", &peer]);
    let line = second.wait_line("network rate", 1);
    assert!(known.iter().any(|how| line.contains(how)), "{line}");
}

/// The CPUs on which each computing thread of a worker may run, the first thread first.
fn seats_of(worker: nix::unistd::Pid) -> Vec<Vec<u32>> {
    let field = |status: &str, name: &str| {
        let rest = status.lines().find_map(|line| line.strip_prefix(name));
        rest.map(|rest| rest.trim().to_owned()).unwrap_or_default()
    };
    let folders = std::fs::read_dir(format!("/proc/{worker}/task")).expect("its threads");
    let mut threads: Vec<(String, Vec<u32>)> = folders
        .filter_map(|folder| {
            let folder = folder.ok()?;
            let status = std::fs::read_to_string(folder.path().join("status")).ok()?;
            let is_first = folder.file_name().to_str() == Some(&worker.to_string());
            let name = if is_first { String::new() } else { field(&status, "Name:") };
            let cpus = numbers(&field(&status, "Cpus_allowed_list:"))?;
            (is_first || name.starts_with("kernel-")).then_some((name, cpus))
        })
        .collect();
    threads.sort();
    threads.into_iter().map(|(_, cpus)| cpus).collect()
}

#[test]
fn compute_threads_stay_on_the_cpus_that_were_given() {
    let machine = Processor::of_this_machine();
    let (Some(first), Some(last)) = (machine.cores().first(), machine.cores().last()) else {
        panic!("a machine without cores");
    };
    if machine.cpus().len() == 1 {
        return ignored("CPUs of threads", "two CPUs");
    }
    let given = last.cpus[0];
    let given_text = given.to_string();
    let always = ["--device", "cpu", "--new_swarm", "--throughput", "1"];
    let sepal = start(&[&always[..], &["--cpus", &given_text]].concat());
    sepal.wait_online();
    assert_eq!(seats_of(sepal.worker()), [[given]]);
    sepal.wait_line(&format!("one thread on each of CPUs {given}"), 1);
    assert!(sepal.terminate().success());

    // Without --threads there is one for each core.
    let two = [first.cpus[0], given];
    let list = format!("{},{}", two[0], two[1]);
    let model = demo_model();
    let serve = ["serve", model.to_str().expect("UTF-8"), "--dht_prefix", "demo", "--no_upnp"];
    let sepal = Sepal::start(&[&serve, &always[..], &["--cpus", &list]].concat());
    sepal.wait_online();
    let expected: Vec<Vec<u32>> = match machine.cores().len() {
        1 => vec![vec![given]],
        _ => two.into_iter().map(|cpu| vec![cpu]).collect(),
    };
    assert_eq!(seats_of(sepal.worker()), expected, "{}", sepal.log());
}

#[test]
fn a_bootstrap_node_listens_joins_and_reports_as_asked_for() {
    let listen = format!("/ip4/{}/tcp/4321", own_loopback());
    let flags = ["dht", "--no_upnp", "--refresh_period", "0.2", "--host_maddrs"];
    let first = Sepal::start(&[&flags[..], &[&listen]].concat());
    // As many lines as would take longer than any wait if the period were the default.
    first.wait_line("known=0", 6);
    let line = first.wait_line("network node started", 1);
    let mut words = line.split(|c: char| !c.is_ascii_alphanumeric());
    let peer = words.rfind(|word| word.starts_with("12D3"));
    let addr = format!("{listen}/p2p/{}", peer.expect("a PeerID"));
    let other = ["/ip4/127.0.0.1/tcp/0", "--initial_peers", &addr];
    let second = Sepal::start(&[&flags[..], &other].concat());
    second.wait_line("known=1", 1);
}
