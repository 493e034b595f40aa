//! Two ranks that share every block: they compute what one worker does, and the death of either
//! costs no session a bit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::harness::demo::{BLOCKS, Golden, HIDDEN, demo_model, golden};
use crate::harness::peer::{Peer, noise};
use crate::harness::rights::{ignored, may_look_into_children};
use crate::harness::session::{assert_close, serve};
use crate::harness::{Sepal, alive, generate, rank, root, session, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn serve_group(more: &[&str]) -> Sepal {
    serve(&[&["--tensor_parallel_devices", "cpu", "cpu"], more].concat())
}

async fn run_session(addr: &str, seed: u32, steps: usize) -> Vec<Vec<f32>> {
    session::run_session(&Peer::connect(addr, "demo").await, seed, steps).await
}

/// Names that this server has in /dev/shm.
fn names_in_shm(sepal: &Sepal) -> Vec<String> {
    let ours = format!("sepal-mapping-{}-", sepal.pid());
    let entries = std::fs::read_dir("/dev/shm").unwrap();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&ours)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_ranks_compute_what_one_worker_does() {
    let one = serve(&["--device", "cpu"]);
    let two = serve_group(&[]);
    let input = noise(&[3, 40, HIDDEN], 5);
    let (alone, shared) = (
        Peer::connect(&one.addr(), "demo").await.forward(BLOCKS, input.clone()).await.unwrap(),
        Peer::connect(&two.addr(), "demo").await.forward(BLOCKS, input).await.unwrap(),
    );
    assert_close(&shared, &alone);
    let (alone, shared) =
        (run_session(&one.addr(), 3, 0).await, run_session(&two.addr(), 3, 0).await);
    assert_close(&shared[0], &alone[0]);
    assert_ne!(rank(&two, 0), rank(&two, 1));
    assert!(names_in_shm(&two).is_empty());
    assert_eq!(one.terminate().code(), Some(0));
    assert_eq!(two.terminate().code(), Some(0));
}

#[test]
fn status_shows_what_each_rank_has_and_that_it_is_slow() {
    // Three heads of 32 on each rank: neither cut of the inputs of `o` is at a multiple of 64.
    let sepal = serve_group(&[]);
    let status = sepal.status();
    for rank in ["0.0", "0.1"] {
        let children = status[0]["children"].as_array().unwrap();
        let child = children.iter().find(|child| child["worker"] == rank).unwrap();
        let share = &child["share"];
        assert_eq!((&child["device"], &share["heads"]), (&"cpu".into(), &3.into()), "{status}");
        assert_eq!((&share["columns"], &share["is_slow"]), (&256.into(), &true.into()));
        assert!(child["note"].as_str().unwrap().contains("multiples of 64"), "{status}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn two_ranks_continue_texts_as_transformers_does() {
    // Its throughput is measured.
    let model = demo_model();
    let mut args = vec!["serve", model.to_str().expect("UTF-8"), "--dht_prefix", "demo"];
    args.extend(["--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--new_swarm", "--threads", "1"]);
    args.extend(["--torch_dtype", "float32", "--tensor_parallel_devices", "cpu", "cpu"]);
    let sepal = Sepal::start(&args);
    sepal.wait_online();
    for Golden { prompt, text, .. } in golden("float32") {
        assert_eq!(
            generate(&sepal, &demo_model(), "demo", "float32", &prompt, 200),
            text,
            "{prompt}"
        );
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_groups_serve_a_part_of_the_blocks_each() {
    let devices = ["--device", "cpu,cpu,cpu,cpu", "--tensor_parallel_size", "2"];
    let (two, one) = (serve(&devices), serve_group(&[]));
    let (apart, whole) =
        (run_session(&two.addr(), 4, 4).await, run_session(&one.addr(), 4, 4).await);
    assert!(apart == whole, "the bits depend on the cut of a block alone");
    assert_eq!(two.terminate().code(), Some(0));
    assert_eq!(one.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_killed_in_a_job_changes_nothing() {
    a_fault_changes_nothing(&["kill@copies#3r0", "abort@block:7#2r1", "kill@block:2#2"]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: .ci/long"]
async fn a_rank_killed_at_any_point_of_a_job_changes_nothing() {
    a_fault_changes_nothing(&[
        "kill@taken#2r1",
        "kill@copies#3r0",
        "kill@block:0#2r1",
        "kill@block:4#3r0",
        "abort@block:7#2r1",
        "kill@block:3#0r1",
        "kill@output#2r0",
        "kill@block:2#2",
    ])
    .await;
}

async fn a_fault_changes_nothing(faults: &[&str]) {
    let calm = serve_group(&[]);
    let expected = run_session(&calm.addr(), 1, 6).await;
    assert_eq!(calm.terminate().code(), Some(0));
    for fault in faults {
        let sepal = serve_group(&["--inject_fault", fault]);
        let (netd, ranks) = (sepal.netd(), [rank(&sepal, 0), rank(&sepal, 1)]);
        let got = run_session(&sepal.addr(), 1, 6).await;
        assert!(got == expected, "{fault}: results differ from an undisturbed run");
        assert_ne!([rank(&sepal, 0), rank(&sepal, 1)], ranks, "{fault}: the fault never struck");
        assert_eq!(sepal.netd(), netd, "{fault}");
        assert!(names_in_shm(&sepal).is_empty());
        assert_eq!(sepal.terminate().code(), Some(0), "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_killed_at_random_times_change_nothing() {
    const STEPS: usize = 120;
    let sepal = serve_group(&["--max_restarts", "1000"]);
    let addr = sepal.addr();
    let expected = run_session(&addr, 9, STEPS).await;
    let netd = sepal.netd();
    let harm_is_done = Arc::new(AtomicBool::new(false));
    let running = tokio::spawn({
        let harm_is_done = harm_is_done.clone();
        async move {
            let mut runs = Vec::new();
            while !harm_is_done.load(Relaxed) {
                runs.push(run_session(&addr, 9, STEPS).await);
            }
            runs
        }
    });
    let (mut kills, mut seed) = (0, 4711u64);
    while kills < 8 && !running.is_finished() {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        tokio::time::sleep(Duration::from_millis(20 + (seed >> 33) % 120)).await;
        let victim = rank(&sepal, kills % 2);
        let other = rank(&sepal, 1 - kills % 2);
        kills += usize::from(kill(victim, Signal::SIGKILL).is_ok());
        if kills.is_multiple_of(4) {
            // Two at once; the other may be dead by now.
            let _ = kill(other, Signal::SIGKILL);
        }
        tokio::task::spawn_blocking(move || {
            wait_for("the ranks to die", || (!alive(victim) && !alive(other)).then_some(()));
        })
        .await
        .unwrap();
    }
    harm_is_done.store(true, Relaxed);
    for got in running.await.unwrap() {
        assert!(got == expected, "results differ from an undisturbed run");
    }
    assert_eq!(sepal.netd(), netd);
    assert!(names_in_shm(&sepal).is_empty());
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// What `/proc` tells of the mappings of a process that contain `what`: their policy, and the number of
/// pages on each node, as `N0=12`.
fn placed(pid: Pid, what: &str) -> Vec<(String, Vec<String>)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/numa_maps")).expect("numa_maps");
    let lines = text.lines().filter(|line| line.contains(what));
    let of = |line: &str| {
        let mut words = line.split_whitespace().skip(1).map(str::to_owned);
        let policy = words.next().unwrap_or_default();
        (policy, words.filter(|word| word.starts_with('N')).collect())
    };
    lines.map(of).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_on_a_node_have_weights_and_pages_in_its_memory() {
    let node = shared::processor::Processor::of_this_machine().nodes()[0];
    let device = format!("cpu:{node}");
    let sepal = serve(&["--tensor_parallel_devices", &device, &device]);
    let plain = serve_group(&[]);
    let got = run_session(&sepal.addr(), 6, 3).await;
    assert!(got == run_session(&plain.addr(), 6, 3).await, "a copy has other bits");
    let log = sepal.log();
    let copies = |log: &str| -> Vec<u64> {
        let fields = log.lines().filter_map(|line| line.split(" copied=").nth(1));
        fields.map(|field| field.parse().expect("a number")).collect()
    };
    // Everything, not only what is cut by columns.
    assert!(copies(&log).iter().all(|bytes| *bytes > 6_000_000), "{log}");
    assert!(copies(&plain.log()).iter().all(|bytes| *bytes < 6_000_000), "{}", plain.log());
    let check = "where the pages of ranks lie";
    let has_maps = std::path::Path::new("/proc/self/numa_maps").exists();
    if !has_maps {
        ignored(check, "a kernel with NUMA");
    }
    for index in [0, 1] {
        if !has_maps || !may_look_into_children(check) {
            break;
        }
        let pages = placed(rank(&sepal, index), "kv.");
        let (policy, nodes) =
            pages.iter().find(|(_, nodes)| !nodes.is_empty()).expect("pages of the cache");
        assert!(policy.starts_with("prefer") && policy.ends_with(&format!(":{node}")), "{policy}");
        // The kernel takes memory of another node when this one has none left.
        let count = |of: &String| of.split('=').nth(1).and_then(|count| count.parse::<u64>().ok());
        let all: u64 = nodes.iter().filter_map(count).sum();
        let here = nodes.iter().filter(|of| of.starts_with(&format!("N{node}=")));
        let here: u64 = here.filter_map(count).sum();
        assert!(here > all / 2, "node {node}: {nodes:?}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
    assert_eq!(plain.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_may_be_asked_for_and_changes_nothing_on_processors() {
    for devices in session::SHAPES {
        let sepal = serve(devices);
        let expected = run_session(&sepal.addr(), 8, 3).await;
        assert_eq!(sepal.terminate().code(), Some(0));
        // `auto` is the default, with which every other test runs.
        for mirror in ["on", "off"] {
            let fault = ["--kv_mirror", mirror, "--inject_fault", "kill@block:2#3r1"];
            let sepal = serve(&[devices, &fault].concat());
            assert!(run_session(&sepal.addr(), 8, 3).await == expected, "{devices:?} {mirror}");
            let strikes = usize::from(devices.len() > 2);
            assert_eq!(sepal.log().matches("injecting a fault").count(), strikes);
            assert_eq!(sepal.terminate().code(), Some(0));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_are_cut_with_their_matrices() {
    const WIDTH: usize = 48;
    let golden = root().join("tests/golden");
    let (model, adapter) = (golden.join("blocks/llama"), golden.join("adapters/llama.all"));
    let adapter = adapter.to_str().expect("UTF-8 path");
    let more = ["--torch_dtype", "float32", "--adapters", adapter];
    let mut outputs = Vec::new();
    for devices in session::SHAPES {
        let sepal = Sepal::serve(&model, "golden", &[&more[..], devices].concat());
        let mut of_shape = Vec::new();
        for chosen in [None, Some(adapter)] {
            let peer = Peer::connect(&sepal.addr(), "golden").await.with_adapter(chosen);
            of_shape.push(peer.forward(0..2, noise(&[2, 9, WIDTH], 1)).await.expect("forward"));
            let mut session = peer.session(0..2, 16).await;
            of_shape.push(session.step(noise(&[1, 9, WIDTH], 2), None).await.expect("prefill"));
            if devices.len() > 2 {
                kill(rank(&sepal, usize::from(chosen.is_some())), Signal::SIGKILL).unwrap();
            }
            of_shape.push(session.step(noise(&[1, 1, WIDTH], 3), None).await.expect("a step"));
            session.close().await;
        }
        assert_ne!(of_shape[0], of_shape[3], "the adapter adds something");
        outputs.push(of_shape);
        assert_eq!(sepal.terminate().code(), Some(0));
    }
    for (group, single) in outputs[1].iter().zip(&outputs[0]) {
        assert_close(group, single);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn measure_the_time_from_a_death_to_the_next_token() {
    const KILLS: usize = 25;
    for devices in session::SHAPES {
        let sepal = serve(&[devices, &["--max_restarts", "100000"]].concat());
        let peer = Peer::connect(&sepal.addr(), "demo").await;
        let size = devices.len() - 1;
        for index in 0..size {
            let mut session = peer.session(BLOCKS, 2000).await;
            session.step(noise(&[1, 21, HIDDEN], 1), None).await.expect("prefill");
            let mut step = async || {
                let start = std::time::Instant::now();
                session.step(noise(&[1, 1, HIDDEN], 2), None).await.expect("a step");
                start.elapsed()
            };
            let (mut calm, mut killed) = (Vec::new(), Vec::new());
            for _ in 0..KILLS {
                let victim = session::rank(&sepal, &format!("0.{index}"), size as u64);
                tokio::time::sleep(Duration::from_millis(100)).await;
                calm.push(step().await);
                kill(victim, Signal::SIGKILL).expect("the rank is there");
                killed.push(step().await);
            }
            calm.sort();
            killed.sort();
            let (p50, most) = (killed[KILLS / 2], killed[KILLS - 1]);
            let calm = calm[KILLS / 2];
            println!(
                "rank {index} of {size}: {p50:.1?} from the death to the next token (p50), \
                 {most:.1?} (max of {KILLS}); {calm:.1?} for an undisturbed step (p50)"
            );
        }
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}
