//! Nodes that talk to each other within this process, by a clock that jumps, or over loopback; and what the
//! tests of this module share.

use std::{future::Future, time::Duration};

use bytes::Bytes;
use libp2p::multiaddr::Protocol;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::mpsc,
    time::{Instant, timeout},
};

use super::{limits::CALLER_END_TIMEOUT, *};

mod crowded;
mod hostile;
mod relayed;
mod reserved;

/// No wait in a test is longer; nothing is asserted about it.
const DEADLINE: Duration = Duration::from_secs(120);
/// No test lasts longer by a clock that jumps.
const VIRTUAL_DEADLINE: Duration = Duration::from_secs(3600);
const CALL: Duration = Duration::from_secs(30);
const UNARY: &str = "Test.unary";
const STREAM: &str = "Test.stream";

/// Runs a future to its end. Whenever all tasks wait, the clock jumps to the next time that one of them
/// waits for: nothing may come from outside the process.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build().expect("runtime");
    runtime.block_on(async { timeout(VIRTUAL_DEADLINE, future).await.expect("hangs") })
}

/// The same with sockets, by the clock of the machine.
fn block_on_sockets<F: Future>(future: F) -> F::Output {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().expect("runtime");
    runtime.block_on(async { timeout(DEADLINE, future).await.expect("hangs") })
}

/// Bytes of a hexadecimal text.
pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().map(|digit| digit.to_digit(16).expect("hex digit") as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Golden bytes made by hivemind's own code.
pub(crate) fn framing_vector(section: &str, name: &str, field: &str) -> Vec<u8> {
    let json: serde_json::Value =
        serde_json::from_str(include_str!("testdata/framing.json")).expect("json");
    let vectors = json[section].as_array().expect("array");
    let vector = vectors.iter().find(|vector| vector["name"] == name).expect("known name");
    unhex(vector[field].as_str().expect("hex"))
}

fn config(initial_peers: Vec<Multiaddr>) -> P2pConfig {
    let spec =
        |name, kind| ProtocolSpec { name, kind, max_inbound_per_peer: 4, max_inbound_total: 16 };
    let protocols = vec![spec(UNARY, ProtocolKind::Unary), spec(STREAM, ProtocolKind::Stream)];
    let listen = vec!["/memory/0".parse().expect("address")];
    P2pConfig { listen, ..P2pConfig::on_loopback(initial_peers, protocols, CALL) }
}

/// The same for nodes that use sockets.
fn socket_config(initial_peers: Vec<Multiaddr>) -> P2pConfig {
    let listen = vec!["/ip4/127.0.0.1/tcp/0".parse().expect("address")];
    P2pConfig { listen, ..config(initial_peers) }
}

/// An address at which no other test listens: its port can be taken again.
fn own_address(number: u8) -> Multiaddr {
    format!("/ip4/127.77.0.{number}/tcp/0").parse().expect("address")
}

type Node = (P2p, mpsc::Receiver<Inbound>);

async fn start(initial_peers: Vec<Multiaddr>) -> Node {
    P2p::start(config(initial_peers)).await.expect("start")
}

async fn start_on_socket(initial_peers: Vec<Multiaddr>) -> Node {
    P2p::start(socket_config(initial_peers)).await.expect("start")
}

/// Two nodes, the first connected to the second.
async fn pair() -> (Node, Node) {
    let callee = start(Vec::new()).await;
    let caller = start(vec![full_address(&callee.0).await]).await;
    (caller, callee)
}

async fn full_address(node: &P2p) -> Multiaddr {
    let addr = node.listen_addrs().await.pop().expect("listens");
    addr.with(Protocol::P2p(node.peer_id()))
}

async fn next_unary(inbound: &mut mpsc::Receiver<Inbound>) -> (PeerId, Bytes, UnaryResponder) {
    match inbound.recv().await.expect("a call") {
        Inbound::Unary { peer, protocol: UNARY, request, responder } => (peer, request, responder),
        other => panic!("{other:?}"),
    }
}

/// The message of what a reader gave.
fn bytes(
    received: Result<Option<ReceivedRequest>, InboundError>,
) -> Result<Option<Bytes>, InboundError> {
    received.map(|received| received.map(|received| received.bytes))
}

async fn next_stream(inbound: &mut mpsc::Receiver<Inbound>) -> InboundStream {
    match inbound.recv().await.expect("a stream") {
        Inbound::Stream { protocol: STREAM, stream, .. } => stream,
        other => panic!("{other:?}"),
    }
}

/// Answers every unary call with its own request.
fn echo(mut inbound: mpsc::Receiver<Inbound>) {
    tokio::spawn(async move {
        while let Some(Inbound::Unary { request, responder, .. }) = inbound.recv().await {
            responder.respond(Ok(request)).await.expect("caller waits");
        }
    });
}

/// Waits until `check` holds.
async fn until<F: Future<Output = bool>>(check: impl Fn() -> F) {
    let deadline = Instant::now() + DEADLINE;
    while !check().await {
        assert!(Instant::now() < deadline, "never happens");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn unary_calls_are_answered_in_both_directions() {
    block_on(async {
        let ((caller, caller_inbound), (callee, mut inbound)) = pair().await;
        let request = Bytes::from_static(b"ping");
        let (answer, ()) = tokio::join!(
            caller.call_unary(callee.peer_id(), UNARY, request.clone(), CALL),
            async {
                let (peer, request, responder) = next_unary(&mut inbound).await;
                assert_eq!((peer, &request[..]), (caller.peer_id(), &b"ping"[..]));
                responder.respond(Ok(Bytes::from_static(b"pong"))).await.expect("caller waits");
            }
        );
        assert_eq!(answer, Ok(Bytes::from_static(b"pong")));

        echo(caller_inbound);
        let large = Bytes::from(vec![7; MAX_UNARY_BYTES - 200]);
        let answer = callee.call_unary(caller.peer_id(), UNARY, large.clone(), CALL).await;
        assert_eq!(answer, Ok(large));
    });
}

#[test]
fn a_node_sends_no_faster_than_it_may_and_receives_as_fast_as_it_can() {
    block_on(async {
        let slow = P2pConfig { max_upload_bytes_per_s: Some(1_000_000), ..config(Vec::new()) };
        let (callee, inbound) = P2p::start(slow).await.expect("start");
        echo(inbound);
        let (caller, _inbound) = start(vec![full_address(&callee).await]).await;
        let request = Bytes::from(vec![7; 300_000]);
        let started = Instant::now();
        let calls =
            [(); 2].map(|()| caller.call_unary(callee.peer_id(), UNARY, request.clone(), CALL));
        for answer in futures::future::join_all(calls).await {
            assert!(answer.expect("an answer") == request);
        }
        // 600 kB, less what the bucket holds at first.
        let took = started.elapsed();
        let expected = Duration::from_millis(550)..Duration::from_millis(650);
        assert!(expected.contains(&took), "{took:?}");
    });
}

#[test]
fn errors_of_unary_calls_are_told_apart() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair().await;
        let call = |protocol, timeout| {
            caller.call_unary(callee.peer_id(), protocol, Bytes::new(), timeout)
        };
        let (answer, ()) = tokio::join!(call(UNARY, CALL), async {
            let (_, _, responder) = next_unary(&mut inbound).await;
            responder.respond(Err("KeyError('x')".into())).await.expect("caller waits");
        });
        assert_eq!(answer, Err(CallError::Remote("KeyError('x')".into())));

        let (answer, ()) = tokio::join!(call(UNARY, CALL), async {
            let (_, _, responder) = next_unary(&mut inbound).await;
            let result = responder.respond(Ok(vec![0; MAX_UNARY_BYTES].into())).await;
            assert!(matches!(result, Err(CallError::TooLarge { .. })));
        });
        assert!(matches!(answer, Err(CallError::Remote(text)) if text.contains("exceeds")));

        let (answer, ()) = tokio::join!(call(UNARY, CALL), async {
            drop(next_unary(&mut inbound).await);
        });
        assert_eq!(answer, Err(CallError::Closed));

        let unknown = call("Test.unknown", CALL).await;
        assert_eq!(unknown, Err(CallError::NotSupported("Test.unknown")));
        let short = Duration::from_millis(50);
        assert_eq!(call(UNARY, short).await, Err(CallError::Timeout(short)));
        let large = Bytes::from(vec![0; MAX_UNARY_BYTES]);
        let refused = caller.call_unary(callee.peer_id(), UNARY, large, CALL).await;
        assert!(matches!(refused, Err(CallError::TooLarge { .. })));
        let nobody = caller.call_unary(PeerId::random(), UNARY, Bytes::new(), CALL).await;
        assert!(matches!(nobody, Err(CallError::Unreachable { .. })), "{nobody:?}");
        let itself = caller.call_unary(caller.peer_id(), UNARY, Bytes::new(), CALL).await;
        assert!(matches!(itself, Err(CallError::Unreachable { .. })), "{itself:?}");
    });
}

#[test]
fn a_caller_that_gives_up_is_noticed() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair().await;
        for patience in [Duration::from_millis(200), CALL] {
            let node = caller.clone();
            let peer = callee.peer_id();
            let call =
                tokio::spawn(
                    async move { node.call_unary(peer, UNARY, Bytes::new(), patience).await },
                );
            let (_, _, mut responder) = next_unary(&mut inbound).await;
            if patience == CALL {
                call.abort();
            }
            responder.cancelled().await;
        }
    });
}

#[test]
fn streams_carry_large_frames_both_ways() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair().await;
        let frames: Vec<Bytes> = [0, 1, 100, 16_375, 16_376, 70_000, 3_000_000, 9_000_000]
            .into_iter()
            .map(|size: usize| (0..size).map(|at| (at % 251) as u8).collect())
            .collect();
        let server = async {
            let mut stream = next_stream(&mut inbound).await;
            let mut count = 0;
            while let Some(frame) = stream.recv().await.expect("caller is there") {
                stream.send(frame.bytes).await.expect("caller reads");
                count += 1;
            }
            stream.finish().await;
            count
        };
        let client = async {
            let mut stream =
                caller.open_stream(callee.peer_id(), STREAM, CALL).await.expect("open");
            for frame in &frames {
                stream.send(frame.clone()).await.expect("send");
                assert_eq!(stream.recv().await.expect("answer").as_ref(), Some(frame));
            }
            stream.finish().await.expect("end");
            assert_eq!(stream.recv().await, Ok(None));
            stream.close().await;
        };
        assert_eq!(tokio::join!(server, client).0, frames.len());
    });
}

#[test]
fn an_error_frame_reaches_a_caller_that_is_still_writing() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair().await;
        let server = async {
            let mut stream = next_stream(&mut inbound).await;
            stream.recv().await.expect("first").expect("message");
            stream.fail("'adapter nope/x not found'").await;
        };
        let client = async {
            let mut stream =
                caller.open_stream(callee.peer_id(), STREAM, CALL).await.expect("open");
            stream.send(Bytes::from_static(b"first")).await.expect("send");
            stream.send(vec![1; 2_000_000].into()).await.expect("the callee keeps reading");
            stream.finish().await.expect("end");
            let error = stream.recv().await.expect_err("failed");
            assert_eq!(error, CallError::Remote("'adapter nope/x not found'".into()));
            assert_eq!(stream.recv().await, Ok(None), "closed after the error");
        };
        tokio::join!(server, client);
    });
}

#[test]
fn a_stream_is_closed_after_the_caller_has_ended_its_input() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair().await;
        let server = async {
            let mut stream = next_stream(&mut inbound).await;
            let last = stream.recv().await.expect("first").expect("message");
            stream.send(last.bytes).await.expect("caller reads");
            stream.finish().await;
        };
        let client = async {
            let mut stream =
                caller.open_stream(callee.peer_id(), STREAM, CALL).await.expect("open");
            let last = Bytes::from_static(b"last");
            stream.send(last.clone()).await.expect("send");
            assert_eq!(stream.recv().await, Ok(Some(last)));
            let early = timeout(CALLER_END_TIMEOUT * 9 / 10, stream.recv()).await;
            assert!(early.is_err(), "closed before the caller's end: {early:?}");
            stream.finish().await.expect("end");
            assert_eq!(stream.recv().await, Ok(None));
        };
        tokio::join!(server, client);
    });
}

#[test]
fn a_stream_that_its_caller_leaves_is_cancelled_even_while_it_computes() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair().await;
        for ended in [false, true] {
            let mut stream =
                caller.open_stream(callee.peer_id(), STREAM, CALL).await.expect("open");
            stream.send(Bytes::from_static(b"step")).await.expect("send");
            if ended {
                stream.finish().await.expect("end");
            }
            let (mut reader, writer) = next_stream(&mut inbound).await.into_split();
            assert_eq!(bytes(reader.recv().await), Ok(Some(Bytes::from_static(b"step"))));
            if ended {
                assert_eq!(bytes(reader.recv().await), Ok(None));
            }
            let computing = std::future::pending::<()>();
            tokio::select! {
                received = reader.recv() => assert_eq!(bytes(received), Err(InboundError::Cancelled)),
                () = computing => unreachable!("pending"),
                () = async { stream.close().await; std::future::pending().await } => {}
            }
            drop((reader, writer));
        }
    });
}

#[test]
fn frames_beyond_the_bound_are_refused_on_both_sides() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair().await;
        let mut stream = caller.open_stream(callee.peer_id(), STREAM, CALL).await.expect("open");
        stream.set_max_frame_bytes(10);
        stream.send(Bytes::from_static(b"eleven bytes")).await.expect("send");
        let (mut reader, mut writer) = next_stream(&mut inbound).await.into_split();
        reader.set_max_frame_bytes(11);
        let error = reader.recv().await.expect_err("12 bytes");
        assert_eq!(error, InboundError::TooLarge { bytes: 12, limit: 11 });
        writer.send(Bytes::from_static(b"also too long")).await.expect("send");
        let error = stream.recv().await.expect_err("13 bytes");
        assert_eq!(error, CallError::TooLarge { bytes: 13, limit: 10 });
    });
}

#[test]
fn a_peer_is_found_by_its_id_through_a_third_node() {
    block_on(async {
        for kad_server in [true, false] {
            let (router, _router_inbound) = start(Vec::new()).await;
            let initial = vec![full_address(&router).await];
            let mut target = config(initial.clone());
            target.kad_server = kad_server;
            let (target, inbound) = P2p::start(target).await.expect("start");
            echo(inbound);
            let (caller, _inbound) = start(initial).await;
            assert!(!caller.connected_peers().await.contains(&target.peer_id()));
            // The router knows the target's addresses once the target has identified itself.
            until(|| async {
                let call = caller.call_unary(target.peer_id(), UNARY, Bytes::new(), CALL);
                call.await.is_ok()
            })
            .await;
            assert!(caller.connected_peers().await.contains(&target.peer_id()));
        }
    });
}

#[test]
fn announced_addresses_replace_the_listen_addresses() {
    block_on(async {
        let (router, _router_inbound) = start(Vec::new()).await;
        let announced: Multiaddr = "/dns4/sepal.example/tcp/31337".parse().expect("address");
        let mut hidden = config(vec![full_address(&router).await]);
        hidden.announce = vec![announced.clone()];
        let (hidden, _inbound) = P2p::start(hidden).await.expect("start");
        until(|| async { router.known_addresses(hidden.peer_id()).await == [announced.clone()] })
            .await;

        let (open, _inbound) = start(vec![full_address(&router).await]).await;
        let listens = open.listen_addrs().await;
        until(|| async { router.known_addresses(open.peer_id()).await == listens }).await;
    });
}

#[test]
fn a_peer_is_called_at_an_address_that_was_added() {
    block_on(async {
        let (caller, _inbound) = start(Vec::new()).await;
        let (callee, inbound) = start(Vec::new()).await;
        echo(inbound);
        caller.add_address(callee.peer_id(), full_address(&callee).await).await;
        let answer = caller.call_unary(callee.peer_id(), UNARY, Bytes::new(), CALL).await;
        assert_eq!(answer, Ok(Bytes::new()));
    });
}

#[test]
fn a_peer_that_restarted_is_called_again() {
    block_on_sockets(async {
        let (caller, _inbound) = start(Vec::new()).await;
        let mut same = config(vec![full_address(&caller).await]);
        same.listen = vec![own_address(1)];
        let (first, inbound) = P2p::start(same.clone()).await.expect("start");
        echo(inbound);
        same.listen = first.listen_addrs().await;
        let peer = first.peer_id();
        let call = || caller.call_unary(peer, UNARY, Bytes::new(), CALL);
        call().await.expect("first life");
        until(|| async { caller.known_addresses(peer).await == same.listen }).await;
        first.shutdown().await;
        until(|| async { caller.connected_peers().await.is_empty() }).await;

        same.initial_peers.clear();
        let (_second, inbound) = P2p::start(same).await.expect("the address is free again");
        echo(inbound);
        call().await.expect("second life, dialled at the known address");
    });
}

#[test]
fn garbage_on_the_port_leaves_the_node_serving() {
    block_on_sockets(async {
        let (callee, inbound) = start_on_socket(Vec::new()).await;
        let (caller, _inbound) = start_on_socket(vec![full_address(&callee).await]).await;
        echo(inbound);
        let addr = callee.listen_addrs().await.pop().expect("listens");
        let port = addr.iter().find_map(|part| match part {
            Protocol::Tcp(port) => Some(port),
            _ => None,
        });
        let header = b"\x13/multistream/1.0.0\n";
        let noise = [&header[..], b"\x07/noise\n", &[0xff; 4000]].concat();
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 5000], &[0xff; 5000], header, &noise] {
            let mut socket =
                TcpStream::connect(("127.0.0.1", port.expect("tcp"))).await.expect("connect");
            // The node may hang up while we write.
            drop(socket.write_all(garbage).await);
            drop(socket.shutdown().await);
            drop(socket.read_to_end(&mut Vec::new()).await);
            let answer = caller.call_unary(callee.peer_id(), UNARY, Bytes::new(), CALL).await;
            assert_eq!(answer, Ok(Bytes::new()));
        }
    });
}

#[test]
fn a_port_in_use_is_named() {
    block_on_sockets(async {
        let occupant = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let port = occupant.local_addr().expect("bound").port();
        let (node, _inbound) = start_on_socket(Vec::new()).await;
        let ours = node.listen_addrs().await.pop().expect("listens");
        for addr in [format!("/ip4/127.0.0.1/tcp/{port}").parse().expect("address"), ours] {
            let mut taken = config(Vec::new());
            taken.listen = vec![addr.clone()];
            let error = P2p::start(taken).await.expect_err("in use");
            assert!(matches!(error, P2pError::PortInUse { .. }), "{error}");
            assert!(error.to_string().contains(&addr.to_string()), "{error}");
        }
        let mut strange = config(Vec::new());
        strange.listen = vec!["/ip4/127.0.0.1/udp/0".parse().expect("address")];
        assert!(matches!(P2p::start(strange).await, Err(P2pError::Listen { .. })));
    });
}

#[test]
fn initial_peers_that_do_not_answer_are_named() {
    block_on_sockets(async {
        // Nobody listens at a port that is only bound.
        let unused = TcpSocket::new_v4().expect("a socket");
        unused.bind("127.0.0.1:0".parse().expect("address")).expect("bind");
        let dead = format!("/ip4/127.0.0.1/tcp/{}", unused.local_addr().expect("bound").port());
        let (live, _inbound) = start_on_socket(Vec::new()).await;
        let other = live.listen_addrs().await.pop().expect("listens");
        let wrong = other.clone().with(Protocol::P2p(PeerId::random()));
        let peers = vec![dead.parse().expect("address"), wrong.clone()];
        let error = P2p::start(config(peers.clone())).await.expect_err("nobody there").to_string();
        assert!(error.contains(&dead) && error.contains("refused"), "{error}");
        assert!(error.contains(&wrong.to_string()) && error.contains("another peer"), "{error}");

        // A listener that never says a word.
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let mute = format!("/ip4/127.0.0.1/tcp/{}", silent.local_addr().expect("bound").port());
        let mut impatient = config(vec![mute.parse().expect("address")]);
        impatient.listen.clear();
        impatient.startup_timeout = Duration::from_millis(300);
        let error = P2p::start(impatient).await.expect_err("silence").to_string();
        assert!(error.contains(&mute), "{error}");

        // One that answers is enough.
        let mut mixed = peers;
        mixed.push(other);
        P2p::start(config(mixed)).await.expect("one answers");
    });
}

#[test]
fn one_peer_cannot_hold_more_streams_than_its_share() {
    block_on(async {
        let ((greedy, _), (callee, mut inbound)) = pair().await;
        let (modest, _inbound) = start(vec![full_address(&callee).await]).await;
        let open = |node: &P2p| {
            let (node, peer) = (node.clone(), callee.peer_id());
            async move { node.open_stream(peer, STREAM, CALL).await.expect("negotiated") }
        };
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push((open(&greedy).await, next_stream(&mut inbound).await));
        }
        let mut fifth = open(&greedy).await;
        assert_eq!(fifth.recv().await, Ok(None), "reset at once");
        let other = (open(&modest).await, next_stream(&mut inbound).await);
        let (stream, served) = held.pop().expect("four");
        stream.close().await;
        served.finish().await;
        until(|| async {
            let mut stream = open(&greedy).await;
            stream.send(Bytes::new()).await.is_ok()
                && timeout(Duration::from_millis(100), stream.recv()).await.is_err()
        })
        .await;
        drop(other);
    });
}

#[test]
fn a_node_that_was_shut_down_says_so() {
    block_on(async {
        let ((caller, _), (callee, mut inbound)) = pair().await;
        callee.shutdown().await;
        assert!(inbound.recv().await.is_none());
        assert!(callee.listen_addrs().await.is_empty());
        assert!(matches!(callee.connect(Multiaddr::empty()).await, Err(P2pError::Stopped)));
        let call = callee.call_unary(caller.peer_id(), UNARY, Bytes::new(), CALL).await;
        assert!(matches!(call, Err(CallError::Unreachable { .. })));
        let call = caller.call_unary(callee.peer_id(), UNARY, Bytes::new(), CALL).await;
        assert!(call.is_err());
    });
}

#[test]
fn a_call_does_not_dial_from_the_listening_port() {
    block_on_sockets(async {
        let (caller, _inbound) = start_on_socket(Vec::new()).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let callee = PeerId::random();
        let addr = format!("/ip4/127.0.0.1/tcp/{port}/p2p/{callee}");
        caller.add_address(callee, addr.parse().expect("an address")).await;
        let call = caller.call_unary(callee, UNARY, Bytes::new(), CALL);
        let accepted = async {
            let (_socket, from) = listener.accept().await.expect("a dial");
            from.port()
        };
        let from = tokio::select! {
            from = accepted => from,
            end = call => panic!("not dialled: {end:?}"),
        };
        let own = caller.listen_addrs().await;
        let is_own = |addr: &Multiaddr| addr.iter().any(|part| part == Protocol::Tcp(from));
        assert!(!own.iter().any(is_own), "dialled from {from}, of {own:?}");
    });
}
