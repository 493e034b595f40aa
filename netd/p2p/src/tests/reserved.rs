//! Frames of streams count before they are read.

use super::super::limits::FRAME_STALL_TIMEOUT;
use super::*;

/// Two of these are more than a peer may hold of [`memory`].
const LARGE: usize = 700 << 10;

/// Memory of which a peer may hold a MiB for each purpose.
fn memory(initial_peers: Vec<Multiaddr>) -> P2pConfig {
    P2pConfig { request_memory: 16 << 20, ..config(initial_peers) }
}

/// A caller that sends so many bytes per second, and a callee.
async fn pair_at(bytes_per_s: Option<u64>) -> (Node, Node) {
    let callee = P2p::start(memory(Vec::new())).await.expect("start");
    let initial_peers = vec![full_address(&callee.0).await];
    let caller = P2pConfig { max_upload_bytes_per_s: bytes_per_s, ..memory(initial_peers) };
    (P2p::start(caller).await.expect("start"), callee)
}

/// Sends a large frame on a stream of its own.
async fn send_large(caller: &P2p, callee: &P2p) -> tokio::task::JoinHandle<RpcStream> {
    let mut stream = caller.open_stream(callee.peer_id(), STREAM, CALL).await.expect("open");
    stream.send(Bytes::from_static(b"first")).await.expect("send");
    tokio::spawn(async move {
        drop(stream.send(vec![7; LARGE].into()).await);
        stream
    })
}

/// The callee's end, after the small frame before the large one.
async fn next_reader(
    inbound: &mut mpsc::Receiver<Inbound>,
    purpose: MemoryPurpose,
) -> (InboundReader, InboundWriter) {
    let (mut reader, writer) = next_stream(inbound).await.into_split();
    reader.set_purpose(purpose);
    assert_eq!(bytes(reader.recv().await), Ok(Some(Bytes::from_static(b"first"))));
    (reader, writer)
}

#[test]
fn a_frame_waits_until_its_peer_has_room_and_other_purposes_do_not() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair_at(None).await;
        let mut sent = Vec::new();
        let mut readers = Vec::new();
        for purpose in [MemoryPurpose::Step, MemoryPurpose::Step, MemoryPurpose::Opening] {
            sent.push(send_large(&caller, &callee).await);
            readers.push(next_reader(&mut inbound, purpose).await);
        }
        let first = readers[0].0.recv().await.expect("read").expect("a frame");
        assert!(first.held.is_some());
        for _ in 0..2 {
            let waiting = timeout(2 * FRAME_STALL_TIMEOUT, readers[1].0.recv()).await;
            assert!(waiting.is_err(), "read before there is room: {waiting:?}");
        }
        let other = readers[2].0.recv().await.expect("read").expect("a frame");
        assert_eq!(other.bytes.len(), LARGE);
        drop(first);
        let second = readers[1].0.recv().await.expect("read").expect("a frame");
        assert_eq!((second.bytes.len(), second.bytes[LARGE - 1]), (LARGE, 7));
    });
}

#[test]
fn what_was_reserved_at_once_is_not_counted_again() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair_at(None).await;
        let _sent = send_large(&caller, &callee).await;
        let (mut reader, _writer) = next_reader(&mut inbound, MemoryPurpose::Whole).await;
        let whole = reader.reserve(1 << 20).await;
        let frame = reader.recv().await.expect("read").expect("a frame");
        assert!(frame.held.is_none());
        let _more = send_large(&caller, &callee).await;
        let (mut another, _writer) = next_reader(&mut inbound, MemoryPurpose::Whole).await;
        assert!(timeout(2 * FRAME_STALL_TIMEOUT, another.recv()).await.is_err());
        drop(whole);
        another.recv().await.expect("read").expect("a frame");
    });
}

#[test]
fn a_slow_frame_is_given_up_only_while_others_wait() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair_at(Some(10_000)).await;
        let _slow = send_large(&caller, &callee).await;
        let (mut slow, _writer) = next_reader(&mut inbound, MemoryPurpose::Opening).await;
        let alone = timeout(FRAME_STALL_TIMEOUT * 5 / 2, slow.recv()).await;
        assert!(alone.is_err(), "nobody waits: {alone:?}");
        let _waits = send_large(&caller, &callee).await;
        let (mut waits, _writer) = next_reader(&mut inbound, MemoryPurpose::Opening).await;
        let waiting = tokio::spawn(async move { waits.recv().await.is_ok() });
        let error = slow.recv().await.expect_err("too slow");
        assert!(matches!(error, InboundError::TooSlow { .. }), "{error}");
        assert_eq!(callee.inbound_figures().too_slow, 1);
        waiting.abort();
    });
}
