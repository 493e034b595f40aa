//! Tests of admission.

use super::*;
use crate::sessions::pool::Pool;
use crate::sessions::shares::NetOf;
use shared::block::{BlockIndex, Span};

/// By a clock that jumps when nothing else can happen.
const DEADLINE: Duration = Duration::from_secs(30);

fn memory() -> KvMemory {
    KvMemory::new(
        WaitQueue::new(Pool::new(Span::new(0, 1).unwrap(), 4096, 1024), 1.0, NetOf::default()),
        4,
    )
}

fn request(tokens: u32) -> KvRequest {
    KvRequest { blocks: vec![BlockIndex(0)], rows: 1, max_length: tokens }
}

#[tokio::test(start_paused = true)]
async fn a_server_short_of_memory_takes_no_new_sessions_and_keeps_those_it_has() {
    let memory = memory();
    let held = memory.take(PeerId::random(), request(100), DEADLINE).await.unwrap();
    memory.close(true);
    let refused = memory.take(PeerId::random(), request(100), DEADLINE).await.unwrap_err();
    assert!(refused.to_string().contains("short of memory"), "{refused}");
    assert!(!held.pages().is_empty());
    memory.close(false);
    assert!(memory.take(PeerId::random(), request(100), DEADLINE).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn texts_name_bytes_as_petals_does() {
    let memory = memory();
    let _held = memory.take(PeerId::random(), request(1000), Duration::ZERO).await.unwrap();
    let text = |error: NoMemory| error.to_string();
    assert_eq!(
        text(memory.take(PeerId::random(), request(100), Duration::ZERO).await.unwrap_err()),
        "Could not allocate 400 bytes immediately: out of memory"
    );
    assert_eq!(
        text(
            memory
                .take(PeerId::random(), request(100), Duration::from_millis(5))
                .await
                .unwrap_err()
        ),
        "Server's attention cache is full, failed to allocate 400 bytes in 0.005 seconds"
    );
    assert_eq!(
        text(memory.take(PeerId::random(), request(2000), DEADLINE).await.unwrap_err()),
        "Could not allocate 8000 bytes, max cache size = 4096 bytes"
    );
    assert_eq!(memory.figures().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gets_what_a_dropped_lease_held() {
    let memory = memory();
    let held = memory.take(PeerId::random(), request(1000), Duration::ZERO).await.unwrap();
    let waiter = tokio::spawn({
        let memory = memory.clone();
        async move { memory.take(PeerId::random(), request(500), DEADLINE).await }
    });
    while memory.figures().waiting == 0 {
        tokio::task::yield_now().await;
    }
    drop(held);
    let lease = waiter.await.unwrap().unwrap();
    assert_eq!(memory.figures().tokens_free, 524);
    drop(lease);
    assert_eq!(memory.figures().tokens_free, 1024);
}

#[tokio::test(start_paused = true)]
async fn a_peer_over_its_share_is_told_what_it_holds_and_may_hold() {
    let memory = memory();
    let (greedy, modest) = (PeerId::random(), PeerId::random());
    let held = memory.take(greedy, request(600), Duration::ZERO).await.unwrap();
    let more = memory.take(greedy, request(400), Duration::ZERO).await.unwrap();
    assert!(memory.take(modest, request(300), Duration::ZERO).await.is_err());
    drop(more);
    let refused = memory.take(greedy, request(100), Duration::ZERO).await;
    assert_eq!(
        refused.unwrap_err().to_string(),
        "Could not allocate 400 bytes: this peer holds 2400 bytes of the server's attention cache, and may hold 2048 now"
    );
    let _modest = memory.take(modest, request(300), Duration::ZERO).await.unwrap();
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_waiter_leaves_nothing_behind() {
    let memory = memory();
    let held = memory.take(PeerId::random(), request(1000), Duration::ZERO).await.unwrap();
    let waiter = tokio::spawn({
        let memory = memory.clone();
        async move { memory.take(PeerId::random(), request(500), DEADLINE).await }
    });
    while memory.figures().waiting == 0 {
        tokio::task::yield_now().await;
    }
    waiter.abort();
    assert!(waiter.await.unwrap_err().is_cancelled());
    assert_eq!((memory.figures().waiting, memory.figures().waits), (0, 1));
    drop(held);
    assert_eq!(memory.figures().tokens_free, 1024);
}

#[tokio::test(start_paused = true)]
async fn one_that_waits_is_granted_nothing_while_memory_is_short() {
    let memory = memory();
    let held = memory.take(PeerId::random(), request(1000), Duration::ZERO).await.unwrap();
    let wait = |limit: Duration| {
        let memory = memory.clone();
        tokio::spawn(async move { memory.take(PeerId::random(), request(500), limit).await })
    };
    let (waiter, hasty) = (wait(DEADLINE), wait(Duration::from_millis(50)));
    while memory.figures().waiting < 2 {
        tokio::task::yield_now().await;
    }
    memory.close(true);
    drop(held);
    assert_eq!(hasty.await.unwrap().unwrap_err(), NoMemory::Pressure);
    assert_eq!(memory.figures().waiting, 1);
    assert_eq!(memory.figures().tokens_free, 1024);
    memory.close(false);
    let lease = waiter.await.unwrap().unwrap();
    assert_eq!(memory.figures().tokens_free, 524);
    assert_eq!(memory.figures().waits, 2);
    drop(lease);
}
