//! A worker that is lost for good: what is left goes on being served, by the same netd, to the sessions that are open.

mod harness;

use harness::demo::demo_model;
use harness::peer::{Peer, noise};
use harness::{Sepal, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const HIDDEN: usize = 192;

/// The worker that serves `span`, once it is ready.
fn worker_with(sepal: &Sepal, span: &str) -> Pid {
    wait_for("a worker", || {
        let status = sepal.status();
        let children = status.pointer("/0/children")?.as_array()?;
        let worker = children
            .iter()
            .find(|child| child["span"] == span && child["state"] == "ready")?;
        i32::try_from(worker["pid"].as_i64()?)
            .ok()
            .map(Pid::from_raw)
    })
}

fn serve(more: &[&str]) -> Sepal {
    Sepal::serve(
        &demo_model(),
        "demo",
        &[&["--torch_dtype", "float32"], more].concat(),
    )
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
