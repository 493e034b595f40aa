//! Servers that move to where the swarm lacks them: a hole is filled and whole chains work again,
//! sessions on the old blocks go on with the same bits, and no kill on the way takes a server down.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::harness::demo::{HIDDEN, demo_model};
use crate::harness::peer::{Peer, Session, noise};
use crate::harness::session::{SHAPES, join};
use crate::harness::{
    DEADLINE, Sepal, all_at_once, block_on, children_of, command_line, generate, wait_for,
};
use client::chain::Chain;
use client::states::Hidden;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use swarm::dht::driver::{Dht, DhtConfig};
use swarm::dht::storage::StorageLimits;
use swarm::view;
use swarm::wire::records::ServerState;

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

/// One server for each half of the model, and one that chose its blocks itself: the first half, of
/// which there are two then.
struct Swarm {
    first: Sepal,
    second: Sepal,
    spare: Sepal,
}

impl Swarm {
    fn start() -> Swarm {
        Swarm::with_spare(SHAPES[0], &[])
    }

    /// All servers on `devices`, the spare one with `more`.
    fn with_spare(devices: &[&'static str], more: &[&'static str]) -> Swarm {
        let model = demo_model();
        let with = |more: &[&'static str]| [&EAGER, devices, more].concat();
        let first = Sepal::serve(&model, "demo", &with(&["--block_indices", "0:4"]));
        let second = Sepal::join(&first, &model, "demo", &with(&["--block_indices", "4:8"]));
        let spare =
            Sepal::join(&first, &model, "demo", &with(&[&["--num_blocks", "4"], more].concat()));
        let line = spare.wait_line("state=ONLINE", 1);
        assert!(line.contains("span=0:4"), "{line}");
        Swarm { first, second, spare }
    }

    fn text(&self) -> String {
        generate(&self.first, &demo_model(), "demo", "float32", PROMPT, 12)
    }

    fn wait_moved(&self) {
        wait_for("the spare server to serve the second half", || {
            self.spare.log().contains("span=4:8").then_some(())
        });
    }
}

fn workers_of(sepal: &Sepal) -> Vec<Pid> {
    let is_worker = |p: &Pid| command_line(*p).contains("gpu-worker");
    children_of(sepal.pid()).into_iter().filter(is_worker).collect()
}

/// The new worker of a move that is under way.
fn coming_worker(sepal: &Sepal, before: &[Pid]) -> Pid {
    wait_for("a second worker", || workers_of(sepal).into_iter().find(|pid| !before.contains(pid)))
}

/// Step `number` of a session; the numbers alone say what goes in.
async fn step(session: &mut Session, number: u32) -> Vec<f32> {
    let tokens = if number == 0 { 5 } else { 1 };
    let hidden = noise(&[1, tokens, HIDDEN], number);
    session.step(hidden, None).await.expect("a step")
}

/// Each case waits until its server has cooled down, all of them at once.
#[test]
fn servers_move_to_where_the_swarm_lacks_them() {
    all_at_once(&[
        ("a hole is filled", || block_on(fills_a_hole(SHAPES[0], 1))),
        ("netd is killed", || {
            block_on(netd_killed_during_a_move_comes_back_and_the_hole_is_filled())
        }),
        ("no memory for both", || {
            block_on(without_memory_for_both_the_old_blocks_are_left_first());
        }),
    ]);
}

#[test]
#[ignore = "more of the same: .ci/long server"]
fn groups_move_and_a_move_survives_its_workers() {
    all_at_once(&[
        ("a hole is filled by a group", || block_on(fills_a_hole(SHAPES[1], 2))),
        ("workers are killed", || block_on(workers_killed_during_a_move_do_not_stop_it())),
    ]);
}

/// All servers on `devices`, with so many workers each.
async fn fills_a_hole(devices: &[&'static str], workers: usize) {
    let swarm = Swarm::with_spare(devices, &[]);
    let expected_text = swarm.text();
    let calm = Peer::connect(&swarm.first.addr(), "demo").await;
    let peer = Peer::connect(&swarm.spare.addr(), "demo").await;
    // A step for each pause within the deadline.
    const STEPS: u32 = 1800;
    let (most, pause) = (STEPS + 20, DEADLINE / STEPS);
    let mut undisturbed = calm.session(FIRST, most).await;
    let mut session = peer.session(FIRST, most).await;
    let mut number = 0;
    for _ in 0..3 {
        assert_eq!(step(&mut session, number).await, step(&mut undisturbed, number).await);
        number += 1;
    }
    let old = workers_of(&swarm.spare);
    assert_eq!(old.len(), workers);
    let netd = swarm.spare.netd();
    swarm.second.kill();
    while !swarm.spare.log().contains("span=4:8") {
        assert!(number < most - 15, "the spare server does not move:\n{}", swarm.spare.log());
        assert_eq!(step(&mut session, number).await, step(&mut undisturbed, number).await);
        number += 1;
        tokio::time::sleep(pause).await;
    }
    // A kill of the worker that was left changes nothing for its session either.
    kill(old[workers - 1], Signal::SIGKILL).unwrap();
    for _ in 0..3 {
        assert_eq!(step(&mut session, number).await, step(&mut undisturbed, number).await);
        number += 1;
    }
    assert_eq!(swarm.spare.netd(), netd, "the same netd");
    assert_eq!(swarm.text(), expected_text, "the chain is whole again");
    session.close().await;
    swarm.spare.wait_line("previous blocks released", 1);
    wait_for("the old workers to end", || {
        (workers_of(&swarm.spare).len() == workers).then_some(())
    });
    let error = peer.forward(FIRST, noise(&[1, 1, HIDDEN], 1)).await.unwrap_err();
    assert!(error.to_string().contains("does not serve"), "{error}");
    assert_eq!(swarm.spare.terminate().code(), Some(0));
    assert_eq!(swarm.first.terminate().code(), Some(0));
}

async fn workers_killed_during_a_move_do_not_stop_it() {
    let swarm = Swarm::start();
    let expected_text = swarm.text();
    let old = workers_of(&swarm.spare);
    // It keeps the old worker, however quick the move is.
    let peer = Peer::connect(&swarm.spare.addr(), "demo").await;
    let mut session = peer.session(FIRST, 16).await;
    step(&mut session, 0).await;
    swarm.second.kill();
    let new = coming_worker(&swarm.spare, &old);
    kill(new, Signal::SIGKILL).unwrap();
    kill(old[0], Signal::SIGKILL).unwrap();
    swarm.wait_moved();
    step(&mut session, 1).await;
    session.close().await;
    assert_eq!(swarm.text(), expected_text);
    assert_eq!(swarm.spare.terminate().code(), Some(0));
    assert_eq!(swarm.first.terminate().code(), Some(0));
}

async fn netd_killed_during_a_move_comes_back_and_the_hole_is_filled() {
    let swarm = Swarm::start();
    let expected_text = swarm.text();
    let (old, netd) = (workers_of(&swarm.spare), swarm.spare.netd());
    swarm.second.kill();
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

/// What others read of one server: the state of its record under each block that has one.
type Claims = BTreeMap<u32, ServerState>;

/// Reads the records of `server` until it is told to stop, and once more.
async fn watch(
    peer: Arc<Peer>,
    entry: String,
    server: String,
    stop: Arc<AtomicBool>,
) -> Vec<Claims> {
    let config = DhtConfig {
        client_mode: true,
        initial_peers: vec![entry.parse().unwrap()],
        num_workers: 4,
        strict: false,
        limits: StorageLimits::default(),
    };
    let dht = Dht::start(peer.p2p.clone(), config);
    dht.join(DEADLINE).await.unwrap();
    let mut seen: Vec<Claims> = Vec::new();
    loop {
        let is_last = stop.load(Ordering::Relaxed);
        let blocks = view::read_blocks(&dht, "demo", 0..8).await.unwrap();
        let claim = |(block, servers): (usize, &view::BlockServers)| {
            Some((block as u32, servers.get(&server)?.state))
        };
        seen.push(blocks.iter().enumerate().filter_map(claim).collect());
        if is_last {
            return seen;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// There is memory for four blocks and not for eight. The old worker goes before the new one comes,
/// the records say so in an order that never claims what is not served, and a session whose first
/// half ran there goes on over the other server.
async fn without_memory_for_both_the_old_blocks_are_left_first() {
    const LIMITS: [&str; 8] = [
        "--max_memory",
        "468MiB",
        "--arena_size",
        "64MiB",
        "--attn_cache_tokens",
        "16384",
        "--session_timeout",
        "8",
    ];
    let swarm = Swarm::with_spare(SHAPES[0], &LIMITS);
    let expected_text = swarm.text();
    let client = join(&swarm.first.addr(), "demo", 8).await;
    let first: p2p::PeerId = swarm.first.peer_id().parse().unwrap();
    let spare: p2p::PeerId = swarm.spare.peer_id().parse().unwrap();
    client.refresh().await.unwrap();
    client.ban(first);
    let mut chain = Chain::open(&client, 200).await.unwrap();
    assert_eq!(chain.legs().next().map(|(peer, _)| peer), Some(spare));
    let states = |number: u32| Hidden {
        dtype: shared::dtype::DType::F32,
        rows: 1,
        tokens: if number == 0 { 5 } else { 1 },
        bytes: noise(&[1, if number == 0 { 5 } else { 1 }, HIDDEN], number).buffer,
    };
    let mut outputs = Vec::new();
    for number in 0..4 {
        outputs.push(chain.step(states(number)).await.unwrap().0);
    }

    let old = workers_of(&swarm.spare);
    let stop = Arc::new(AtomicBool::new(false));
    let watcher = Arc::new(Peer::connect(&swarm.first.addr(), "demo").await);
    let watched =
        tokio::spawn(watch(watcher, swarm.first.addr(), swarm.spare.peer_id(), stop.clone()));
    swarm.second.kill();
    // The first of these waits until the second half is served again, the next finds its first half
    // gone.
    for number in 4..10 {
        outputs.push(chain.step(states(number)).await.unwrap().0);
    }
    swarm.wait_moved();
    assert_eq!(chain.legs().map(|(peer, _)| peer).collect::<Vec<_>>(), [first, spare]);
    chain.close().await;
    assert_eq!(swarm.text(), expected_text, "the chain is whole again");
    stop.store(true, Ordering::Relaxed);
    assert!(!workers_of(&swarm.spare).contains(&old[0]));

    // Each line comes after the one before: one worker at a time, and what is coming is announced first.
    let mut line = 0;
    for words in [
        &["leaving the present blocks before loading blocks 4:8"][..],
        &["gone child=gpu-worker 0.0 generation=1"],
        &["starting child=gpu-worker 0.0 generation=2"],
        &["announced state=Online", "blocks=4..8"],
    ] {
        line = swarm.spare.line_from(line, words) + 1;
    }
    let leaving = swarm.spare.line_from(0, &["leaving the present blocks"]);
    let joining = swarm.spare.line_from(leaving, &["announced JOINING", "blocks=4..8"]);
    assert!(joining < line, "{}", swarm.spare.log());

    let seen = watched.await.unwrap();
    let online = |claims: &Claims, block| claims.get(&block) == Some(&ServerState::Online);
    assert!((4..8).all(|block| online(seen.last().expect("a look"), block)), "{seen:?}");
    let claims_all = |claims: &Claims| {
        (0..4).any(|block| online(claims, block)) && (4..8).any(|block| online(claims, block))
    };
    // One look takes a moment, in which the server may move; two do not both fall into it.
    let is_wrong = |looks: &[Claims]| looks.iter().all(claims_all);
    assert!(!seen.windows(2).any(is_wrong), "more is claimed than is served: {seen:?}");
    // The same steps on servers that nothing happened to have the same bits.
    let mut again = Chain::open(&client, 200).await.unwrap();
    for (number, output) in outputs.iter().enumerate() {
        let got = again.step(states(number as u32)).await.unwrap().0;
        assert!(got == *output, "step {number}");
    }
    again.close().await;
    client.leave().await;
    assert_eq!(swarm.spare.terminate().code(), Some(0));
    assert_eq!(swarm.first.terminate().code(), Some(0));
}
