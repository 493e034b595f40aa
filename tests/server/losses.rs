//! What may be lost: a worker for good, after which the rest goes on being served, by the same
//! netd, to the sessions that are open; a rank of a group for good, whose blocks the other ranks serve
//! then; and files of the cache, but not those that a worker maps.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::harness::demo::HIDDEN;
use crate::harness::peer::{Peer, noise};
use crate::harness::rights::may_look_into_children;
use crate::harness::session::{assert_close, rank, serve};
use crate::harness::{Sepal, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use prepare::disk_cache::DiskCache;
use swarm::wire::messages::Tensor;

/// The worker that serves `span`, once it is ready.
fn worker_with(sepal: &Sepal, span: &str) -> Pid {
    sepal.ready_worker(|child| child["span"] == span)
}

/// Hidden states of five tokens.
fn prompt() -> Tensor {
    noise(&[1, 5, HIDDEN], 1)
}

/// Those of the next.
fn next() -> Tensor {
    noise(&[1, 1, HIDDEN], 2)
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_worker_is_lost_for_good_the_rest_stays_served_with_its_sessions() {
    let sepal = serve(&["--device", "cpu,cpu", "--max_restarts", "0"]);
    let (netd, lost) = (sepal.netd(), worker_with(&sepal, "4:8"));
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let mut undisturbed = peer.session(0..4, 16).await;
    let expected = [
        undisturbed.step(prompt(), None).await.unwrap(),
        undisturbed.step(next(), None).await.unwrap(),
    ];
    let mut on_rest = peer.session(0..4, 16).await;
    let mut on_both = peer.session(0..8, 16).await;
    assert_eq!(on_rest.step(prompt(), None).await.unwrap(), expected[0]);
    on_both.step(prompt(), None).await.unwrap();

    kill(lost, Signal::SIGABRT).unwrap();
    let line = sepal.wait_line("state=ONLINE", 2);
    assert!(line.contains("span=0:4"), "{line}");

    assert_eq!(on_rest.step(next(), None).await.unwrap(), expected[1]);
    let error = on_both.step(next(), None).await.unwrap_err().to_string();
    assert!(error.contains("will not be restarted"), "{error}");
    let error = peer.forward(4..5, next()).await.unwrap_err().to_string();
    assert!(error.contains("does not serve"), "{error}");
    assert!(peer.forward(0..4, next()).await.is_ok());
    assert_eq!(sepal.netd(), netd, "the same netd");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_was_put_aside_is_tried_again_while_sessions_on_the_rest_go_on() {
    let sepal = serve(&["--device", "cpu,cpu", "--max_restarts", "0", "--retry_after", "1"]);
    let (netd, lost) = (sepal.netd(), worker_with(&sepal, "4:8"));
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let mut whole = peer.session(0..8, 16).await;
    let expected =
        [whole.step(prompt(), None).await.unwrap(), whole.step(next(), None).await.unwrap()];
    whole.close().await;
    let mut on_rest = peer.session(0..4, 16).await;
    let first = on_rest.step(prompt(), None).await.unwrap();

    kill(lost, Signal::SIGABRT).unwrap();
    let line = sepal.wait_line("state=ONLINE", 2);
    assert!(line.contains("span=0:4"), "{line}");
    let line = sepal.wait_line("state=ONLINE", 3);
    assert!(line.contains("span=0:8"), "{line}");
    assert!(sepal.log().contains("its device is tried again in 1 s"), "{}", sepal.log());

    assert_eq!(sepal.netd(), netd, "the same netd");
    on_rest.step(next(), None).await.unwrap();
    let mut whole = peer.session(0..8, 16).await;
    assert_eq!(whole.step(prompt(), None).await.unwrap(), expected[0]);
    assert_eq!(whole.step(next(), None).await.unwrap(), expected[1]);
    let mut again = peer.session(0..4, 16).await;
    assert_eq!(again.step(prompt(), None).await.unwrap(), first);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_of_a_group_serves_its_blocks_until_nothing_is_left() {
    let three = ["--tensor_parallel_devices", "cpu", "cpu", "cpu", "--max_restarts", "0"];
    let mut sepal = serve(&three);
    let netd = sepal.netd();
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let input = || noise(&[2, 7, HIDDEN], 3);
    let next = || noise(&[2, 1, HIDDEN], 4);
    let mut outputs = Vec::new();
    for (size, online) in [(3, 1), (2, 2), (1, 3)] {
        sepal.wait_line("state=ONLINE", online);
        let mut session = peer.session(0..8, 16).await;
        outputs.push(session.step(input(), None).await.unwrap());
        kill(rank(&sepal, if size == 3 { "0.1" } else { "0.0" }, size), Signal::SIGABRT).unwrap();
        if size > 1 {
            sepal.wait_line("state=ONLINE", online + 1);
            let error = session.step(next(), None).await.unwrap_err().to_string();
            assert!(error.contains("open a new session"), "{error}");
            assert_eq!(sepal.netd(), netd, "the same netd");
        }
    }
    for output in &outputs[1..] {
        assert_close(output, &outputs[0]);
    }
    let log = sepal.log();
    for sentence in [
        "rank 1 of group 0 (cpu) is not restarted: SIGABRT; cpu + cpu share blocks 0:8 from now on",
        "rank 0 of group 0 (cpu) is not restarted: SIGABRT; cpu serves blocks 0:8 from now on",
    ] {
        assert!(log.contains(sentence), "{log}");
    }
    assert_eq!(sepal.wait().code(), Some(15), "{log}");
    let log = sepal.log();
    assert!(log.contains("gpu-worker 0.0 is not restarted: SIGABRT"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_loses_a_rank_does_not_disturb_the_others() {
    let devices = ["--device", "cpu,cpu,cpu,cpu", "--tensor_parallel_size", "2"];
    let sepal = serve(&[&devices[..], &["--max_restarts", "0"]].concat());
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let mut undisturbed = peer.session(0..4, 16).await;
    let mut on_both = peer.session(0..8, 16).await;
    let (first, both) = (
        undisturbed.step(prompt(), None).await.unwrap(),
        on_both.step(prompt(), None).await.unwrap(),
    );
    let ranks = [rank(&sepal, "0.0", 2), rank(&sepal, "0.1", 2)];
    kill(rank(&sepal, "1.1", 2), Signal::SIGABRT).unwrap();
    let line = sepal.wait_line("state=ONLINE", 2);
    assert!(line.contains("span=0:8"), "{line}");
    let second = undisturbed.step(next(), None).await.unwrap();
    assert!(on_both.step(next(), None).await.is_err());
    assert_eq!([rank(&sepal, "0.0", 2), rank(&sepal, "0.1", 2)], ranks);
    let mut again = peer.session(0..4, 16).await;
    assert_eq!(again.step(prompt(), None).await.unwrap(), first);
    assert_eq!(again.step(next(), None).await.unwrap(), second);
    let mut again = peer.session(0..8, 16).await;
    assert_close(&again.step(prompt(), None).await.unwrap(), &both);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_fails_at_every_start_is_left_out() {
    let devices = ["--tensor_parallel_devices", "cpu", "cpu", "--max_restarts", "2"];
    let fault = ["--inject_fault", "abort@start#0x100r1"];
    let sepal = serve(&[&devices[..], &fault].concat());
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    assert!(peer.forward(0..8, noise(&[1, 5, HIDDEN], 1)).await.is_ok());
    let log = sepal.log();
    assert!(log.contains("rank 1 of group 0 (cpu) is not restarted: SIGABRT"), "{log}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// Files below `folder` that `pid` maps.
fn mapped(pid: Pid, folder: &std::path::Path) -> BTreeSet<PathBuf> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let paths = paths.map(PathBuf::from);
    paths.filter(|path| path.starts_with(folder)).collect()
}

/// The files of weights in the cache.
fn prepared(folder: &std::path::Path) -> BTreeSet<PathBuf> {
    let weights = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors");
    let files = DiskCache::new(folder, None).files().into_iter().map(|file| file.path);
    files.filter(weights).collect()
}

/// Another process makes room in the cache folder of a server, as far as it can.
#[test]
fn weights_that_a_worker_maps_are_not_deleted_to_make_room() {
    let sepal = serve(&["--quant_type", "int8", "--block_indices", "0:2"]);
    let folder = sepal.dir.path().join("cache").canonicalize().unwrap();
    // The cache is full, and then wants to hold so many bytes more.
    let cached =
        || DiskCache::new(&folder, None).files().iter().map(|file| file.bytes).sum::<u64>();
    let evict = |more| DiskCache::new(&folder, Some(cached())).make_room(more, &mut |_| Ok(()));
    let worker = worker_with(&sepal, "0:2");
    let may_look = may_look_into_children("which files a worker maps");
    let mapped = |pid| if may_look { mapped(pid, &folder) } else { prepared(&folder) };
    let files = mapped(worker);
    assert!(files.len() >= 2, "{files:?}");
    let unused = folder.join("prepared/of-nobody");
    std::fs::write(&unused, "x").unwrap();
    evict(1).expect("room for a byte");
    assert!(!unused.exists(), "what nobody uses goes");
    assert!(files.iter().all(|file| file.exists()), "{files:?}");

    kill(worker, Signal::SIGKILL).unwrap();
    let next = wait_for("the next worker", || {
        Some(worker_with(&sepal, "0:2")).filter(|pid| *pid != worker)
    });
    assert_eq!(mapped(next), files);
    let refused = evict(1).expect_err("all that is left is in use").to_string();
    assert!(refused.contains("--max_disk_space"), "{refused}");
    assert!(files.iter().all(|file| file.exists()), "{files:?}");
    let dir = sepal.dir.clone();
    assert_eq!(sepal.terminate().code(), Some(0));
    evict(cached()).expect("nobody uses anything");
    assert!(files.iter().all(|file| !file.exists()), "{files:?}");
    drop(dir);
}
