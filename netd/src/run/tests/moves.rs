//! Moves: what other nodes read at each step, and what becomes of sessions.

use std::ops::Range;

use swarm::wire::messages::ExpertRequest;
use swarm::wire::records::ModelInfo;
use testkit::span;

use super::*;
use crate::membership::announce::{self, AnnounceConfig, ServerStatus};

/// Publishes a server of blocks 0:2 that does not exist.
async fn publish_other(node: &Joined, peer_id: &str, state: ServerState) {
    let config = AnnounceConfig {
        prefix: rig::PREFIX.into(),
        blocks: 0..2,
        peer_id: peer_id.into(),
        model: ModelInfo { num_blocks: BLOCKS.into(), repository: None },
        info: ServerInfo::new(state, 10.0),
        update_period: DEADLINE,
        expiration: 10 * DEADLINE,
        session_tokens: 1,
    };
    let status = ServerStatus { state, cache_tokens_left: None, next_pings: Vec::new() };
    assert!(announce::store_under(&node.dht, &config, &status, &[0, 1]).await);
}

/// A server of blocks 0:2, which another serves too, up to its wish to serve 2:4: a node beside
/// them, the id of the other, the server's supervisor and the server's id.
async fn until_wish() -> (Joined, String, Supervisor, String) {
    let node = bootstrap_node().await;
    let other = p2p::PeerId::random().to_base58();
    publish_other(&node, &other, ServerState::Online).await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |init| {
        init.config.span = SpanChoice::Count(2);
        init.config.balance_quality = 0.75;
        init.config.mean_balance_check_period = Duration::from_millis(200);
        init.config.update_period = Duration::from_secs(3);
        init.served = Some(span(0, 2));
    });
    let (peer_id, proposed) = supervisor.proposed(None).await;
    assert_eq!(proposed, span(0, 2));
    supervisor.start_worker(0, 1, span(0, 2)).await;
    supervisor.online().await;
    (node, other, supervisor, peer_id)
}

/// State and range of the record under each block.
async fn until_records(node: &Joined, peer_id: &str, expected: [(ServerState, u64); 4]) {
    let mut seen = Vec::new();
    let look = async {
        loop {
            let blocks = view::read_blocks(&node.dht, rig::PREFIX, 0..BLOCKS).await;
            let of = |servers: &view::BlockServers| {
                let info = servers.get(peer_id)?;
                Some((info.state, info.start_block?))
            };
            seen = blocks.unwrap().iter().map(of).collect();
            if seen == expected.map(Some) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ended = tokio::time::timeout(DEADLINE, look).await;
    assert!(ended.is_ok(), "{seen:?} instead of {expected:?}");
}

async fn serves(node: &Joined, peer_id: &str, block: u32) -> bool {
    let uid = format!("{}.{block}", rig::PREFIX);
    let request = ExpertUid { uid }.encode_to_vec().into();
    let peer = peer_id.parse().unwrap();
    let answer = node.p2p.call_unary(peer, names::INFO, request, DEADLINE).await;
    answer.is_ok()
}

async fn session(node: &Joined, peer_id: &str) -> rig::Client {
    let peer = peer_id.parse().unwrap();
    let stream = node.p2p.open_stream(peer, names::INFERENCE, DEADLINE).await;
    rig::Client::of(stream.unwrap())
}

/// Opens a session over `blocks` with a token of that value.
async fn first_step(session: &mut rig::Client, blocks: Range<u32>, first: f32) -> Vec<f32> {
    let message = session.message(hidden(1, &[first]), Some(30), Some(0), None);
    step_over(session, blocks, message).await
}

/// Goes on with it.
async fn next_step(session: &mut rig::Client, blocks: Range<u32>, first: f32) -> Vec<f32> {
    let message = session.message(hidden(1, &[first]), None, None, None);
    step_over(session, blocks, message).await
}

async fn step_over(
    session: &mut rig::Client,
    blocks: Range<u32>,
    message: ExpertRequest,
) -> Vec<f32> {
    let message = ExpertRequest { uid: rig::uids(blocks), ..message };
    rig::firsts(&session.ask(&message).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hole_is_filled_while_sessions_on_the_old_blocks_go_on() {
    use ServerState::{Joining, Offline, Online};
    let (node, _, mut supervisor, peer_id) = until_wish().await;
    let mut old = session(&node, &peer_id).await;
    assert_eq!(first_step(&mut old, 0..2, 1.0).await, [3.0]);

    assert!(matches!(supervisor.hear().await, FromNetd::Move(to) if to == span(2, 4)));
    let joining = [(Online, 0), (Online, 0), (Joining, 2), (Joining, 2)];
    until_records(&node, &peer_id, joining).await;
    assert!(!serves(&node, &peer_id, 2).await);

    supervisor.start_worker(1, 1, span(2, 4)).await;
    assert!(matches!(supervisor.hear().await, FromNetd::Moved(to) if to == span(2, 4)));
    let moved = [(Offline, 0), (Offline, 0), (Online, 2), (Online, 2)];
    until_records(&node, &peer_id, moved).await;
    assert!(serves(&node, &peer_id, 2).await);
    let mut new = session(&node, &peer_id).await;
    assert_eq!(first_step(&mut new, 2..4, 5.0).await, [7.0]);
    assert_eq!(next_step(&mut old, 0..2, 2.0).await, [5.0]);

    old.close().await;
    assert!(matches!(supervisor.hear().await, FromNetd::Vacated));
    assert!(!serves(&node, &peer_id, 0).await);
    supervisor.tell_down(1, false).await;
    assert_eq!(next_step(&mut new, 2..4, 1.0).await, [8.0]);
    supervisor.drained().await;
    let ended = [(Offline, 0), (Offline, 0), (Offline, 2), (Offline, 2)];
    until_records(&node, &peer_id, ended).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_that_fails_is_taken_back_and_nothing_else_changes() {
    use ServerState::{Offline, Online};
    let (node, _, mut supervisor, peer_id) = until_wish().await;
    assert!(matches!(supervisor.hear().await, FromNetd::Move(_)));
    let failed = ToNetd::MoveFailed { to: span(2, 4), why: "no room".into() };
    supervisor.tell(failed).await;
    let stays = [(Online, 0), (Online, 0), (Offline, 2), (Offline, 2)];
    until_records(&node, &peer_id, stays).await;
    assert!(serves(&node, &peer_id, 0).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_room_for_both_sessions_end_before_the_new_workers_come() {
    use ServerState::{Joining, Offline, Online};
    let (node, _, mut supervisor, peer_id) = until_wish().await;
    let mut old = session(&node, &peer_id).await;
    first_step(&mut old, 0..2, 1.0).await;
    assert!(matches!(supervisor.hear().await, FromNetd::Move(_)));
    supervisor.tell(ToNetd::MakeRoom(span(2, 4))).await;
    let leaving = [(Offline, 0), (Offline, 0), (Joining, 2), (Joining, 2)];
    until_records(&node, &peer_id, leaving).await;
    assert_eq!(next_step(&mut old, 0..2, 2.0).await, [5.0]);
    old.close().await;
    assert!(matches!(supervisor.hear().await, FromNetd::Vacated));
    supervisor.tell_down(1, false).await;
    supervisor.start_worker(1, 1, span(2, 4)).await;
    supervisor.online().await;
    let there = [(Offline, 0), (Offline, 0), (Online, 2), (Online, 2)];
    until_records(&node, &peer_id, there).await;
    assert!(serves(&node, &peer_id, 2).await && !serves(&node, &peer_id, 0).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_is_called_off_when_the_old_blocks_have_lost_their_other_server() {
    let (node, other, mut supervisor, peer_id) = until_wish().await;
    assert!(matches!(supervisor.hear().await, FromNetd::Move(_)));
    publish_other(&node, &other, ServerState::Offline).await;
    supervisor.start_worker(1, 1, span(2, 4)).await;
    assert!(matches!(supervisor.hear().await, FromNetd::Stays));
    assert!(serves(&node, &peer_id, 0).await && !serves(&node, &peer_id, 2).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_earlier_generations_left_behind_is_taken_back() {
    use ServerState::{Joining, Offline};
    let node = bootstrap_node().await;
    let mut supervisor = Supervisor::new(node.addrs.clone(), |init| {
        init.generation = Generation(2);
        init.served = Some(span(1, 3));
        init.retired = vec![span(0, 2), span(3, 4)];
    });
    let (peer_id, _) = supervisor.proposed(None).await;
    let records = [(Offline, 0), (Joining, 1), (Joining, 1), (Offline, 3)];
    until_records(&node, &peer_id, records).await;
}
