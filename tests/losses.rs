//! What may be lost: a worker for good, after which the rest goes on being served, by the same
//! netd, to the sessions that are open; and files of the cache, but not those that a worker maps.

mod harness;

use std::collections::BTreeSet;
use std::path::PathBuf;

use harness::demo::demo_model;
use harness::peer::{Peer, noise};
use harness::{Sepal, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use prepare::disk_cache::DiskCache;

const HIDDEN: usize = 192;

/// The worker that serves `span`, once it is ready.
fn worker_with(sepal: &Sepal, span: &str) -> Pid {
    wait_for("a worker", || {
        let status = sepal.status();
        let children = status.pointer("/0/children")?.as_array()?;
        let worker =
            children.iter().find(|child| child["span"] == span && child["state"] == "ready")?;
        i32::try_from(worker["pid"].as_i64()?).ok().map(Pid::from_raw)
    })
}

fn serve(more: &[&str]) -> Sepal {
    Sepal::serve(&demo_model(), "demo", &[&["--torch_dtype", "float32"], more].concat())
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_worker_is_lost_for_good_the_rest_stays_served_with_its_sessions() {
    let sepal = serve(&["--device", "cpu,cpu", "--max_restarts", "0"]);
    let (netd, lost) = (sepal.netd(), worker_with(&sepal, "4:8"));
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let prompt = || noise(&[1, 5, HIDDEN], 1);
    let next = || noise(&[1, 1, HIDDEN], 2);
    let mut undisturbed = peer.session(0..4, 16).await;
    let expected = [
        undisturbed.step(prompt(), None).await.unwrap(),
        undisturbed.step(next(), None).await.unwrap(),
    ];
    let mut on_rest = peer.session(0..4, 16).await;
    let mut on_both = peer.session(0..8, 16).await;
    assert_eq!(on_rest.step(prompt(), None).await.unwrap(), expected[0]);
    on_both.step(prompt(), None).await.unwrap();

    kill(lost, Signal::SIGKILL).unwrap();
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

/// Files below `folder` that `pid` maps.
fn mapped(pid: Pid, folder: &std::path::Path) -> BTreeSet<PathBuf> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let paths = paths.map(PathBuf::from);
    paths.filter(|path| path.starts_with(folder)).collect()
}

/// Another process makes room in the cache folder of a server, as far as it can.
#[test]
fn weights_that_a_worker_maps_are_not_deleted_to_make_room() {
    let sepal = serve(&["--quant_type", "int8", "--block_indices", "0:2"]);
    let folder = sepal.dir.path().join("cache").canonicalize().unwrap();
    let evict = || {
        let cache = DiskCache::new(&folder, Some(0));
        let refused = cache.make_room(1 << 60, &mut |_| Ok(()));
        assert!(refused.unwrap_err().to_string().contains("--max_disk_space"));
    };
    let worker = worker_with(&sepal, "0:2");
    let files = mapped(worker, &folder);
    assert!(files.len() >= 2, "{files:?}");
    let unused = folder.join("prepared/of-nobody");
    std::fs::write(&unused, "x").unwrap();
    evict();
    assert!(!unused.exists(), "what nobody uses goes");
    assert!(files.iter().all(|file| file.exists()), "{files:?}");

    kill(worker, Signal::SIGKILL).unwrap();
    let next = wait_for("the next worker", || {
        Some(worker_with(&sepal, "0:2")).filter(|pid| *pid != worker)
    });
    assert_eq!(mapped(next, &folder), files);
    evict();
    assert!(files.iter().all(|file| file.exists()), "{files:?}");
    let dir = sepal.dir.clone();
    assert_eq!(sepal.terminate().code(), Some(0));
    evict();
    assert!(files.iter().all(|file| !file.exists()), "{files:?}");
    drop(dir);
}
