//! Callers that break the protocol or take their time: each is refused within its bound and
//! counted, and nobody else notices.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use futures::io::AsyncWriteExt as _;
use libp2p::core::{
    Endpoint, Transport as _,
    transport::{DialOpts, MemoryTransport, PortUse},
};
use resource_manager::first_byte::FIRST_BYTE_TIMEOUT;

use super::super::limits::{UNARY_REQUEST_TIMEOUT, UNARY_STALL_TIMEOUT, WRITE_STALL_TIMEOUT};
use super::*;

/// A connected pair whose callee answers unary calls and hands out streams.
async fn attacked() -> (P2p, P2p, mpsc::Receiver<Inbound>) {
    let ((attacker, _), (callee, inbound)) = pair().await;
    (attacker, callee, inbound)
}

/// A unary stream on which `bytes` were written.
async fn unary_with(attacker: &P2p, callee: &P2p, bytes: &[u8]) -> impl futures::AsyncWrite {
    let stream = attacker.raw_stream(callee.peer_id(), UNARY).await;
    let mut stream = stream.expect("negotiated");
    stream.write_all(bytes).await.expect("write");
    stream.flush().await.expect("flush");
    stream
}

/// The callee still answers somebody else.
async fn others_are_served(callee: &P2p, mut inbound: mpsc::Receiver<Inbound>) {
    let (other, _inbound) = start(vec![full_address(callee).await]).await;
    let (answer, ()) = tokio::join!(
        other.call_unary(callee.peer_id(), UNARY, Bytes::from_static(b"x"), CALL),
        async {
            let (_, request, responder) = next_unary(&mut inbound).await;
            responder.respond(Ok(request)).await.expect("caller waits");
        }
    );
    assert_eq!(answer, Ok(Bytes::from_static(b"x")));
}

/// A port that hangs up on everybody, and whether anybody came.
async fn closing_port() -> (Arc<AtomicBool>, Multiaddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let was_dialled = Arc::<AtomicBool>::default();
    let dialled = was_dialled.clone();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            dialled.store(true, Ordering::SeqCst);
            drop(socket);
        }
    });
    (was_dialled, format!("/ip4/127.0.0.1/tcp/{port}").parse().expect("an address"))
}

#[test]
fn a_peer_that_announces_many_ports_aims_dials_at_few() {
    block_on_sockets(async {
        let (callee, _inbound) = start_on_socket(Vec::new()).await;
        let (ports, announce): (Vec<_>, Vec<_>) =
            futures::future::join_all((0..16).map(|_| closing_port())).await.into_iter().unzip();
        let initial_peers = vec![full_address(&callee).await];
        let liar = P2pConfig { announce: announce.clone(), ..socket_config(initial_peers) };
        let (liar, _inbound_of_liar) = P2p::start(liar).await.expect("a node");
        let peer = liar.peer_id();
        until(|| async { !callee.known_addresses(peer).await.is_empty() }).await;
        let known = callee.known_addresses(peer).await;
        assert!(known.iter().filter(|addr| announce.contains(addr)).count() > 8, "{known:?}");
        liar.shutdown().await;
        until(|| async { !callee.connected_peers().await.contains(&peer) }).await;
        for _ in 0..3 {
            let call = callee.call_unary(peer, UNARY, Bytes::new(), CALL);
            assert!(call.await.is_err());
        }
        let aimed = ports.iter().filter(|was_dialled| was_dialled.load(Ordering::SeqCst)).count();
        assert!((1..=3).contains(&aimed), "{aimed} of 16 ports were dialled");
    });
}

#[test]
fn an_inbound_connection_that_says_nothing_is_closed_after_three_seconds() {
    use futures::io::AsyncReadExt as _;
    block_on(async {
        let (callee, inbound) = start(Vec::new()).await;
        let addr = callee.listen_addrs().await.pop().expect("listens");
        let connect = || {
            let opts = DialOpts { role: Endpoint::Dialer, port_use: PortUse::New };
            MemoryTransport::new().dial(addr.clone(), opts).expect("an address in memory")
        };
        let begin = Instant::now();
        let mut silent = connect().await.expect("connect");
        let mut slow = connect().await.expect("connect");
        slow.write_all(&[19]).await.expect("the first byte of a negotiation");
        slow.flush().await.expect("the first byte of a negotiation");
        let ended = timeout(CALL, silent.read(&mut [0; 64])).await.expect("closed in time");
        assert!(!matches!(ended, Ok(1..)), "{ended:?}");
        assert!(is_just_after(begin, FIRST_BYTE_TIMEOUT), "{:?}", begin.elapsed());
        // Who has begun has the time of a handshake.
        let more = timeout(Duration::from_secs(1), slow.read(&mut [0; 64])).await;
        assert!(!matches!(more, Ok(Ok(0) | Err(_))), "{more:?}");
        others_are_served(&callee, inbound).await;
    });
}

/// Whether it is so long after `begin`, and hardly more.
fn is_just_after(begin: Instant, time: Duration) -> bool {
    (time..time + Duration::from_millis(100)).contains(&begin.elapsed())
}

#[test]
fn a_unary_request_beyond_the_cap_is_dropped_at_its_length_and_counted() {
    block_on(async {
        let (attacker, callee, inbound) = attacked().await;
        // A varint of 5 MiB: not one byte of it is waited for.
        let _stream = unary_with(&attacker, &callee, &[0x80, 0x80, 0xc0, 0x02]).await;
        until(|| async { callee.inbound_figures().too_large == 1 }).await;
        others_are_served(&callee, inbound).await;
    });
}

#[test]
fn a_unary_request_that_is_not_one_is_dropped_and_counted() {
    block_on(async {
        let (attacker, callee, inbound) = attacked().await;
        let _stream = unary_with(&attacker, &callee, &[3, 0xff, 0xff, 0xff]).await;
        until(|| async { callee.inbound_figures().malformed == 1 }).await;
        others_are_served(&callee, inbound).await;
    });
}

#[test]
fn a_unary_request_that_trickles_is_given_up_and_counted() {
    block_on(async {
        let (attacker, callee, inbound) = attacked().await;
        let begin = Instant::now();
        // A megabyte is announced; a byte comes now and then, so that the connection never idles.
        let mut stream = unary_with(&attacker, &callee, &[0x80, 0x80, 0x40]).await;
        while callee.inbound_figures().too_slow == 0 {
            _ = stream.write_all(&[0]).await;
            _ = stream.flush().await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(is_just_after(begin, UNARY_REQUEST_TIMEOUT), "{:?}", begin.elapsed());
        others_are_served(&callee, inbound).await;
    });
}

#[test]
fn a_unary_request_that_stops_in_the_middle_is_given_up_before_its_time() {
    block_on(async {
        let (attacker, callee, inbound) = attacked().await;
        let begin = Instant::now();
        let _stream = unary_with(&attacker, &callee, &[0x80, 0x80, 0x40, 1, 2, 3]).await;
        until(|| async { callee.inbound_figures().too_slow == 1 }).await;
        assert!(is_just_after(begin, UNARY_STALL_TIMEOUT), "{:?}", begin.elapsed());
        others_are_served(&callee, inbound).await;
    });
}

#[test]
fn a_caller_that_never_reads_its_answer_is_left_and_counted() {
    block_on(async {
        let (attacker, callee, mut inbound) = attacked().await;
        let stream =
            attacker.open_stream(callee.peer_id(), STREAM, CALL).await.expect("negotiated");
        let mut served = next_stream(&mut inbound).await;
        let begin = Instant::now();
        // More than the windows of the connection hold, and nobody reads.
        let error = loop {
            if let Err(error) = served.send(vec![0; 1 << 20].into()).await {
                break error;
            }
        };
        assert_eq!(error, CallError::Closed);
        assert!(is_just_after(begin, WRITE_STALL_TIMEOUT), "{:?}", begin.elapsed());
        assert_eq!(callee.inbound_figures().stalled, 1);
        others_are_served(&callee, inbound).await;
        drop(stream);
    });
}

#[test]
fn streams_with_unknown_frames_or_frames_beyond_the_bound_are_counted() {
    block_on(async {
        let (attacker, callee, mut inbound) = attacked().await;
        for (bytes, malformed) in
            [(vec![7; 9], true), ([&[0][..], &u64::MAX.to_be_bytes()].concat(), false)]
        {
            let mut stream =
                attacker.raw_stream(callee.peer_id(), STREAM).await.expect("negotiated");
            stream.write_all(&bytes).await.expect("write");
            stream.flush().await.expect("flush");
            let mut served = next_stream(&mut inbound).await;
            match served.recv().await {
                Err(InboundError::Malformed(_)) => assert!(malformed),
                Err(InboundError::TooLarge { .. }) => assert!(!malformed),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(callee.inbound_figures().bad_frames, 2);
        others_are_served(&callee, inbound).await;
    });
}
