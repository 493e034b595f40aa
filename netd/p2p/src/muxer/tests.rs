use std::future::poll_fn;

use futures::{
    AsyncReadExt, AsyncWriteExt,
    future::{Either, select},
};
use libp2p::core::muxing::StreamMuxerExt;
use tokio_util::compat::TokioAsyncReadCompatExt;

use super::{
    header::{FIN, FrameKind, Header, SYN},
    *,
};
use crate::tests::block_on;

/// Opens `count` streams from one end to the other, which knows the peer as `quota` says, and says a
/// byte on each; the streams that arrived.
async fn arrivals(quota: &Quota, count: usize) -> Vec<Substream> {
    let (near, far) = tokio::io::duplex(1 << 20);
    let free = Multiplexing { upload: None, quota: None };
    let counted = Multiplexing { upload: None, quota: Some(quota.clone()) };
    let mut caller = free.over(near.compat(), true);
    let mut callee = counted.over(far.compat(), false);
    let calling = async {
        let mut opened = Vec::new();
        for _ in 0..count {
            let mut stream = poll_fn(|cx| caller.poll_outbound_unpin(cx)).await.expect("open");
            let said = async {
                // A stream that was refused takes nothing.
                drop(stream.write_all(b"x").await);
                drop(stream.flush().await);
            };
            let driven = poll_fn(|cx| caller.poll_unpin(cx));
            drop(select(Box::pin(said), Box::pin(driven)).await);
            opened.push(stream);
        }
        poll_fn(|cx| caller.poll_unpin(cx)).await.expect("goes on");
    };
    let mut arrived = Vec::new();
    let answering = async {
        loop {
            let next = poll_fn(|cx| callee.poll_inbound_unpin(cx));
            // The clock jumps, once nothing moves any more.
            match tokio::time::timeout(std::time::Duration::from_secs(1), next).await {
                Ok(stream) => arrived.push(stream.expect("goes on")),
                Err(_) => return,
            }
        }
    };
    match select(Box::pin(calling), Box::pin(answering)).await {
        Either::Left(_) => panic!("the caller ended"),
        Either::Right(_) => {}
    }
    arrived
}

#[test]
fn streams_count_for_their_peer_until_they_are_dropped() {
    block_on(async {
        let limits = InboundLimits::new(Vec::new(), 1 << 20);
        let net = Net::of([5, 6, 7, 8].into());
        let quota = Quota { limits: Arc::clone(&limits), peer: PeerId::random(), net };
        let pools = limits.resources().memory().of(MemoryPurpose::Window);
        let most = resource_manager::memory::WINDOW_BYTES.peer / FIRST_WINDOW_BYTES;
        let held: Vec<_> = (0..most - 3).filter_map(|_| quota.admit()).collect();
        assert_eq!(held.len(), most - 3);
        let arrived = arrivals(&quota, 8).await;
        assert_eq!(arrived.len(), 3);
        assert_eq!(limits.figures().too_many, 5);
        drop(arrived);
        assert!(pools.try_reserve(quota.peer, net, 3 * FIRST_WINDOW_BYTES).is_some());
    });
}

/// Everything that a peer may hold of our memory for windows that grew.
fn quota() -> Quota {
    let limits = InboundLimits::new(Vec::new(), 1 << 20);
    Quota { limits, peer: PeerId::random(), net: Net::of([5, 6, 7, 8].into()) }
}

/// Drives a connection until it ends.
async fn driven<C: AsyncRead + AsyncWrite + Unpin>(mut muxer: Muxer<C>) {
    drop(poll_fn(|cx| muxer.poll_unpin(cx)).await);
}

/// Sends back what comes, on every stream that arrives.
async fn echo<C: AsyncRead + AsyncWrite + Unpin + Send + 'static>(mut muxer: Muxer<C>) {
    while let Ok(mut stream) = poll_fn(|cx| muxer.poll_inbound_unpin(cx)).await {
        tokio::spawn(async move {
            let mut bytes = vec![0; 50_000];
            while let Ok(count @ 1..) = stream.read(&mut bytes).await {
                if stream.write_all(&bytes[..count]).await.is_err() {
                    return;
                }
            }
            drop(stream.close().await);
            // The end is sent before the stream is forgotten.
            drop(stream.read(&mut bytes).await);
        });
    }
}

fn states(seed: u8, count: usize) -> Vec<u8> {
    (0..count).map(|at| (at / 7) as u8 ^ (at % 251) as u8 ^ seed).collect()
}

/// Writes on a stream, ends it, and reads until the other end's end.
async fn said<S: AsyncRead + AsyncWrite + Unpin>(stream: S, bytes: &[u8]) -> Vec<u8> {
    let (mut read, mut write) = stream.split();
    let saying = async {
        write.write_all(bytes).await.expect("write");
        write.close().await.expect("close");
    };
    let mut heard = Vec::new();
    let (_, outcome) = futures::join!(saying, read.read_to_end(&mut heard));
    outcome.expect("read");
    heard
}

#[test]
fn our_streams_carry_what_they_are_given() {
    block_on(async {
        let (near, far) = tokio::io::duplex(100_000);
        let mut caller = Muxer::new(near.compat(), Some(quota()), true);
        tokio::spawn(echo(Muxer::new(far.compat(), Some(quota()), false)));
        let mut streams = Vec::new();
        for _ in 0..5 {
            streams.push(poll_fn(|cx| caller.poll_outbound_unpin(cx)).await.expect("open"));
        }
        tokio::spawn(driven(caller));
        let talks = streams.into_iter().enumerate().map(|(seed, stream)| async move {
            let bytes = states(seed as u8, 3_000_000 + seed);
            assert!(said(stream, &bytes).await == bytes, "stream {seed}");
        });
        futures::future::join_all(talks).await;
    });
}

#[test]
fn the_stock_yamux_understands_us_and_we_understand_it() {
    block_on(async {
        // It calls.
        let (near, far) = tokio::io::duplex(100_000);
        tokio::spawn(echo(Muxer::new(far.compat(), Some(quota()), false)));
        let config = yamux::Config::default();
        let mut stock = yamux::Connection::new(near.compat(), config.clone(), yamux::Mode::Client);
        let stream = poll_fn(|cx| stock.poll_new_outbound(cx)).await.expect("open");
        tokio::spawn(async move { poll_fn(|cx| stock.poll_next_inbound(cx)).await });
        let bytes = states(9, 5_000_000);
        assert!(said(stream, &bytes).await == bytes, "it calls");

        // It is called.
        let (near, far) = tokio::io::duplex(100_000);
        let mut stock = yamux::Connection::new(far.compat(), config, yamux::Mode::Server);
        tokio::spawn(async move {
            while let Some(Ok(stream)) = poll_fn(|cx| stock.poll_next_inbound(cx)).await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    drop(futures::io::copy(&mut read, &mut write).await);
                    drop(write.close().await);
                });
            }
        });
        let mut caller = Muxer::new(near.compat(), Some(quota()), true);
        let stream = poll_fn(|cx| caller.poll_outbound_unpin(cx)).await.expect("open");
        tokio::spawn(driven(caller));
        assert!(said(stream, &bytes).await == bytes, "it is called");
    });
}

/// A frame of the peer.
type Sent<'a> = (Header, &'a [u8]);

/// Sends raw frames to a connection of ours: what it holds of the streams that arrived, and whether it goes on.
async fn after_frames(frames: &[Sent<'_>]) -> (Vec<Substream>, bool) {
    let (near, far) = tokio::io::duplex(8 << 20);
    let mut near = near.compat();
    for (header, data) in frames {
        near.write_all(&header.encode()).await.expect("write");
        near.write_all(data).await.expect("write");
    }
    let mut muxer = Muxer::new(far.compat(), Some(quota()), false);
    let mut arrived = Vec::new();
    loop {
        let next = poll_fn(|cx| muxer.poll_inbound_unpin(cx));
        // The clock jumps, once nothing moves any more.
        match tokio::time::timeout(std::time::Duration::from_secs(1), next).await {
            Ok(Ok(stream)) => arrived.push(stream),
            Ok(Err(_)) => return (arrived, false),
            Err(_) => return (arrived, true),
        }
    }
}

#[test]
fn a_peer_that_breaks_the_protocol_loses_its_connection() {
    let data = |flags, stream, length| Header::of(FrameKind::Data, flags, stream, length);
    let window = |flags, stream, length| Header::of(FrameKind::Window, flags, stream, length);
    let full = vec![0; FIRST_WINDOW_BYTES];
    let whole = (data(SYN, 1, full.len() as u32), full.as_slice());
    let cases: [(&str, Vec<Sent<'_>>, bool); 8] = [
        ("a full window", vec![whole], true),
        ("one byte more", vec![whole, (data(0, 1, 1), b"x")], false),
        ("a length far beyond", vec![(data(SYN, 1, u32::MAX), b"")], false),
        ("our own id", vec![(window(SYN, 2, 0), b"")], false),
        ("no id", vec![(window(SYN, 0, 0), b"")], false),
        ("an id twice", vec![(window(SYN, 1, 0), b""), (window(SYN, 1, 0), b"")], false),
        ("too much credit", vec![(window(SYN, 1, u32::MAX), b"")], false),
        ("a stream that is unknown", vec![(data(0, 7, 3), b"abc"), whole], true),
    ];
    for (name, frames, goes_on) in cases {
        block_on(async {
            assert_eq!(after_frames(&frames).await.1, goes_on, "{name}");
        });
    }
}

#[test]
fn single_bytes_cost_little_more_than_those() {
    block_on(async {
        let mut streams = Streams::new(false, Growth::new(None), Instant::now());
        let id =
            streams.begin(Header::of(FrameKind::Window, SYN, 1, 0)).expect("opens").expect("opens");
        let header = Header::of(FrameKind::Data, 0, id, 1);
        for _ in 0..200_000 {
            assert_eq!(streams.begin(header).expect("within the window"), None);
            streams.receive(header, vec![7], true);
        }
        assert!(streams.held_bytes(id) < 450_000, "{}", streams.held_bytes(id));
    });
}

#[test]
fn what_is_written_before_a_stream_is_dropped_arrives() {
    block_on(async {
        let (near, far) = tokio::io::duplex(10_000);
        let mut caller = Muxer::new(near.compat(), None, true);
        let mut callee = Muxer::new(far.compat(), None, false);
        let mut stream = poll_fn(|cx| caller.poll_outbound_unpin(cx)).await.expect("open");
        stream.write_all(&states(1, 100_000)).await.expect("queued");
        drop(stream);
        tokio::spawn(driven(caller));
        let mut arrived = poll_fn(|cx| callee.poll_inbound_unpin(cx)).await.expect("arrives");
        tokio::spawn(driven(callee));
        let mut heard = Vec::new();
        arrived.read_to_end(&mut heard).await.expect("read");
        assert!(heard == states(1, 100_000), "{} bytes", heard.len());
        assert!(arrived.write_all(b"x").await.is_err(), "it was reset");
    });
}

#[test]
fn pings_without_end_are_read_no_faster_than_they_are_answered() {
    block_on(async {
        let mut streams = Streams::new(false, Growth::new(None), Instant::now());
        let ping = Header::of(FrameKind::Ping, SYN, 0, 5);
        let mut count = 0;
        while !streams.is_choked() {
            assert_eq!(streams.begin(ping).expect("a ping"), None);
            count += 1;
        }
        assert!(count <= 512);
        let mut out = Vec::new();
        while streams.next_frame(&mut out) {}
        assert!(!streams.is_choked());
    });
}

#[test]
fn what_windows_grow_by_counts_for_the_peer_until_its_streams_end() {
    let quota = quota();
    let growth = quota.limits.resources().memory().of(MemoryPurpose::Growth);
    let all = resource_manager::memory::GROWTH_BYTES.peer;
    let held = growth.try_reserve(quota.peer, quota.net, all - (1 << 20)).expect("free");
    let mut of_connection = Growth::new(Some(quota.clone()));
    let mut window = window::Window::new(Instant::now());
    let round_trip = std::time::Duration::from_millis(100);
    for _ in 0..20 {
        assert!(window.receive(window::FIRST_WINDOW / 2));
        window.drain(
            window::FIRST_WINDOW / 2,
            Instant::now(),
            Some(round_trip),
            &mut of_connection,
        );
    }
    assert!(quota.grow(64 << 10).is_none(), "the window has taken what the peer had left");
    window.end(&mut of_connection);
    assert!(quota.grow(1 << 20).is_some());
    drop(held);
}

#[test]
fn what_is_queued_leaves_before_the_connection_is_closed() {
    block_on(async {
        let (near, far) = tokio::io::duplex(10_000);
        let mut caller = Muxer::new(near.compat(), None, true);
        let mut callee = Muxer::new(far.compat(), None, false);
        let mut stream = poll_fn(|cx| caller.poll_outbound_unpin(cx)).await.expect("open");
        stream.write_all(&states(1, 100_000)).await.expect("queued");
        stream.close().await.expect("finished");
        drop(stream);
        let closing = async move { poll_fn(|cx| caller.poll_close_unpin(cx)).await };
        let hearing = async move {
            let mut arrived = poll_fn(|cx| callee.poll_inbound_unpin(cx)).await.expect("arrives");
            let rest = tokio::spawn(driven(callee));
            let mut heard = Vec::new();
            arrived.read_to_end(&mut heard).await.expect("read");
            rest.await.expect("the connection ends");
            heard
        };
        let (closed, heard) = futures::join!(closing, hearing);
        closed.expect("close");
        assert!(heard == states(1, 100_000), "{} bytes", heard.len());
    });
}

#[test]
fn whoever_holds_a_stream_of_a_connection_that_was_dropped_sees_its_end() {
    block_on(async {
        let (near, _far) = tokio::io::duplex(10_000);
        let mut caller = Muxer::new(near.compat(), None, true);
        let mut stream = poll_fn(|cx| caller.poll_outbound_unpin(cx)).await.expect("open");
        let mut byte = [0];
        let dropped = async { drop(caller) };
        let (read, ()) = futures::join!(stream.read(&mut byte), dropped);
        assert_eq!(read.expect("the end"), 0);
        assert!(stream.write_all(b"x").await.is_err());
    });
}

#[test]
fn a_peer_that_waits_for_credit_of_a_stream_that_is_gone_is_told() {
    let mut streams = Streams::new(false, Growth::new(None), Instant::now());
    let mut end_of = |id: u32, sent: u32| {
        streams.begin(Header::of(FrameKind::Data, SYN, id, sent)).expect("within the window");
        streams.receive(Header::of(FrameKind::Data, 0, id, sent), vec![0; sent as usize], true);
        streams.finish(id);
        let mut out = Vec::new();
        while streams.next_frame(&mut out) {}
        streams.abandon(id);
        out.clear();
        while streams.next_frame(&mut out) {}
        out
    };
    assert!(end_of(1, 1000).is_empty(), "it may send on, and learns of the end");
    let told = end_of(3, FIRST_WINDOW_BYTES as u32);
    let header = Header::decode(told.try_into().expect("a header")).expect("a frame");
    assert!(header.has(super::header::RST) && header.stream == 3, "{header:?}");
}

#[test]
fn the_end_of_a_stream_never_comes_with_data() {
    let mut streams = Streams::new(false, Growth::new(None), Instant::now());
    streams.begin(Header::of(FrameKind::Data, SYN, 1, 0)).expect("a stream");
    let cx = Context::from_waker(Waker::noop());
    assert!(matches!(streams.poll_write(1, &cx, b"answer"), Poll::Ready(Ok(6))));
    streams.finish(1);
    let mut frames = Vec::new();
    let mut out = Vec::new();
    while streams.next_frame(&mut out) {
        let (header, data) = out.split_first_chunk().expect("a header");
        let header = Header::decode(*header).expect("a frame");
        frames.extend((header.stream == 1).then(|| (header.has(FIN), data.to_vec())));
        out.clear();
    }
    assert_eq!(frames, [(false, b"answer".to_vec()), (true, Vec::new())]);
    assert!(matches!(streams.poll_write(1, &cx, b"x"), Poll::Ready(Err(_))));
}

/// A socket with all that the peer will ever send, which takes all that we send.
struct Recorded<'a>(&'a [u8]);

impl AsyncRead for Recorded<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Recorded<'_> {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, b: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(b.len()))
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// What becomes of a connection whose peer sends `bytes`; every other stream is read, and all are answered.
pub(crate) fn heard_of(bytes: &[u8]) -> String {
    let mut cx = Context::from_waker(Waker::noop());
    let mut muxer = Muxer::new(Recorded(bytes), Some(quota()), false);
    let (mut streams, mut read) = (Vec::new(), 0);
    loop {
        match muxer.poll_inbound_unpin(&mut cx) {
            Poll::Ready(Ok(stream)) => streams.push(stream),
            Poll::Ready(Err(error)) => return format!("{} streams: {error}", streams.len()),
            Poll::Pending => {}
        }
        let mut buffer = [0; 4096];
        for stream in streams.iter_mut().step_by(2) {
            if let Poll::Ready(Ok(count)) = Pin::new(&mut *stream).poll_read(&mut cx, &mut buffer) {
                read += count;
            }
            let _ = Pin::new(stream).poll_write(&mut cx, &buffer[..16]);
        }
        if read % 3 == 2 {
            streams.pop();
        }
    }
}

/// Frames as peers send them.
pub(crate) fn frames() -> Vec<Vec<u8>> {
    let frame = |kind, flags, stream, length: u32, data: &[u8]| {
        [&Header::of(kind, flags, stream, length).encode()[..], data].concat()
    };
    let open = frame(FrameKind::Window, SYN, 1, 0, b"");
    let data = frame(FrameKind::Data, 0, 1, 5, b"hello");
    let (fin, reset) = (FIN, super::header::RST);
    let ended = frame(FrameKind::Data, fin, 1, 0, b"");
    let again = frame(FrameKind::Data, SYN, 3, 3, b"abc");
    let gone = frame(FrameKind::Window, reset, 3, 0, b"");
    let ping = frame(FrameKind::Ping, SYN, 0, 9, b"");
    let pong = frame(FrameKind::Ping, super::header::ACK, 0, 1, b"");
    let credit = frame(FrameKind::Window, 0, 1, 1 << 20, b"");
    let leave = frame(FrameKind::GoAway, 0, 0, 0, b"");
    let all = [open, data, credit, pong, ping, again, gone, ended, leave];
    let whole = all.concat();
    all.into_iter().chain([whole]).collect()
}
