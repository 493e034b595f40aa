//! Servers that move to where the swarm lacks them: a hole is filled and whole chains work again, sessions on the old blocks go on
//! with the same bits, and no kill on the way takes a server down.

mod harness;

use std::ops::Range;

use harness::demo::demo_model;
use harness::peer::{Peer, Session, noise};
use harness::{Sepal, children_of, command_line, generate, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const HIDDEN: usize = 192;
const FIRST: Range<u32> = 0..4;
const PROMPT: &str = "Once upon a time";

/// Looks every second, announces every two.
const EAGER: [&str; 8] = [
    "--torch_dtype",
    "float32",
    "--update_period",
    "2",
    "--mean_balance_check_period",
    "1",
    "--max_restarts",
    "1000",
];

/// One server for each half of the model, and one that chose its blocks itself: the first half, of which there are two then.
struct Swarm {
    first: Sepal,
    second: Sepal,
    spare: Sepal,
}

impl Swarm {
    fn start() -> Swarm {
        let model = demo_model();
        let with = |more: &[&'static str]| [&EAGER, more].concat();
        let first = Sepal::serve(&model, "demo", &with(&["--block_indices", "0:4"]));
        let second = Sepal::join(&first, &model, "demo", &with(&["--block_indices", "4:8"]));
        let spare = Sepal::join(&first, &model, "demo", &with(&["--num_blocks", "4"]));
        let line = spare.wait_line("state=ONLINE", 1);
        assert!(line.contains("span=0:4"), "{line}");
        Swarm {
            first,
            second,
            spare,
        }
    }

    fn text(&self) -> String {
        generate(&self.first, &demo_model(), "demo", "float32", PROMPT, 12)
    }

    /// Kills all of the second server at once; its records stay until they expire.
    fn lose_second(&self) {
        let children = children_of(self.second.pid());
        self.second.signal(Signal::SIGKILL);
        for child in children {
            let _ = kill(child, Signal::SIGKILL);
        }
    }

    fn wait_moved(&self) {
        wait_for("the spare server to serve the second half", || {
            self.spare.log().contains("span=4:8").then_some(())
        });
    }
}

fn workers_of(sepal: &Sepal) -> Vec<Pid> {
    let is_worker = |p: &Pid| command_line(*p).contains("gpu-worker");
    children_of(sepal.pid())
        .into_iter()
        .filter(is_worker)
        .collect()
}

fn netd_of(sepal: &Sepal) -> Pid {
    wait_for("netd", || {
        children_of(sepal.pid())
            .into_iter()
            .find(|p| command_line(*p).contains("netd"))
    })
}

/// The new worker of a move that is under way.
fn coming_worker(sepal: &Sepal, before: &[Pid]) -> Pid {
    wait_for("a second worker", || {
        workers_of(sepal)
            .into_iter()
            .find(|pid| !before.contains(pid))
    })
}

/// Step `number` of a session; the numbers alone say what goes in.
async fn step(session: &mut Session, number: u32) -> Vec<f32> {
    let tokens = if number == 0 { 5 } else { 1 };
    let hidden = noise(&[1, tokens, HIDDEN], number);
    session.step(hidden, None).await.expect("a step")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spare_server_fills_a_hole_and_its_sessions_go_on() {
    let swarm = Swarm::start();
    let expected_text = swarm.text();
    let calm = Peer::connect(&swarm.first.addr(), "demo").await;
    let peer = Peer::connect(&swarm.spare.addr(), "demo").await;
    let mut undisturbed = calm.session(FIRST, 200).await;
    let mut session = peer.session(FIRST, 200).await;
    let mut number = 0;
    for _ in 0..3 {
        assert_eq!(
            step(&mut session, number).await,
            step(&mut undisturbed, number).await
        );
        number += 1;
    }
    let old = workers_of(&swarm.spare);
    let netd = netd_of(&swarm.spare);
    swarm.lose_second();
    while !swarm.spare.log().contains("span=4:8") {
        assert!(
            number < 190,
            "the spare server does not move:\n{}",
            swarm.spare.log()
        );
        assert_eq!(
            step(&mut session, number).await,
            step(&mut undisturbed, number).await
        );
        number += 1;
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    // A kill of the worker that was left changes nothing for its session either.
    kill(old[0], Signal::SIGKILL).unwrap();
    for _ in 0..3 {
        assert_eq!(
            step(&mut session, number).await,
            step(&mut undisturbed, number).await
        );
        number += 1;
    }
    assert_eq!(netd_of(&swarm.spare), netd, "the same netd");
    assert_eq!(swarm.text(), expected_text, "the chain is whole again");
    session.close().await;
    swarm
        .spare
        .wait_line("the blocks that were left are gone", 1);
    wait_for("the old worker to end", || {
        (workers_of(&swarm.spare).len() == 1).then_some(())
    });
    let error = peer
        .forward(FIRST, noise(&[1, 1, HIDDEN], 1))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("does not serve"), "{error}");
    assert_eq!(swarm.spare.terminate().code(), Some(0));
    assert_eq!(swarm.first.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_killed_during_a_move_do_not_stop_it() {
    let swarm = Swarm::start();
    let expected_text = swarm.text();
    let old = workers_of(&swarm.spare);
    swarm.lose_second();
    let new = coming_worker(&swarm.spare, &old);
    kill(new, Signal::SIGKILL).unwrap();
    kill(old[0], Signal::SIGKILL).unwrap();
    swarm.wait_moved();
    assert_eq!(swarm.text(), expected_text);
    assert_eq!(swarm.spare.terminate().code(), Some(0));
    assert_eq!(swarm.first.terminate().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn netd_killed_during_a_move_comes_back_and_the_hole_is_filled() {
    let swarm = Swarm::start();
    let expected_text = swarm.text();
    let (old, netd) = (workers_of(&swarm.spare), netd_of(&swarm.spare));
    swarm.lose_second();
    coming_worker(&swarm.spare, &old);
    kill(netd, Signal::SIGKILL).unwrap();
    let peer = swarm.spare.peer_id();
    swarm.spare.wait_line("state=ONLINE", 2);
    assert_eq!(swarm.spare.peer_id(), peer);
    swarm.wait_moved();
    assert_eq!(swarm.text(), expected_text);
    assert_eq!(swarm.spare.terminate().code(), Some(0));
    assert_eq!(swarm.first.terminate().code(), Some(0));
}
