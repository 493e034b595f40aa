//! Yamux over a connection whose writes are limited. `libp2p::yamux` sets no window but that of the
//! protocol; here what a connection may leave unread is bounded: each stream that a peer opens counts
//! with its first window in the pools of the peer, its net and the process ([`super::memory`]), and
//! all windows of a connection together grow by no more than [`MAX_WINDOW_GROWTH_BYTES`].

use std::{
    collections::VecDeque,
    future::{Ready, ready},
    io, iter,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use futures::io::{AsyncRead, AsyncWrite};
use libp2p::{
    PeerId,
    core::{
        UpgradeInfo,
        muxing::{StreamMuxer, StreamMuxerEvent},
        upgrade::{InboundConnectionUpgrade, OutboundConnectionUpgrade},
    },
};
use yamux::{Connection, ConnectionError, Mode};

use super::{
    limits::{InboundLimits, MAX_STREAMS_PER_CONNECTION, MAX_WINDOW_GROWTH_BYTES},
    memory::{FIRST_WINDOW_BYTES, Purpose},
    nets::Net,
    pools::Reservation,
    upload::{Limited, UploadLimit},
};

/// The name under which it is negotiated.
const NAME: &str = "/yamux/1.0.0";
/// Streams that have arrived and that nobody has taken yet; more are reset.
const MAX_ARRIVED: usize = 256;

/// What connections become when they are upgraded.
#[derive(Clone, Debug)]
pub(super) struct Multiplexing {
    /// Of what all connections send.
    pub upload: Option<UploadLimit>,
    /// Where the streams of the peer count.
    pub quota: Option<Quota>,
}

/// Where the streams that a peer opens count.
#[derive(Clone, Debug)]
pub(super) struct Quota {
    pub limits: Arc<InboundLimits>,
    pub peer: PeerId,
    pub net: Net,
}

impl Quota {
    fn admit(&self) -> Option<Reservation> {
        let pools = self.limits.memory().of(Purpose::Window);
        let admitted = pools.try_reserve(self.peer, self.net, FIRST_WINDOW_BYTES);
        if admitted.is_none() {
            self.limits.count(|figures| figures.too_many += 1);
        }
        admitted
    }
}

impl Multiplexing {
    fn over<C>(self, socket: C, mode: Mode) -> Muxer<Limited<C>>
    where
        C: AsyncRead + AsyncWrite + Unpin,
    {
        let mut config = yamux::Config::default();
        let first_windows = MAX_STREAMS_PER_CONNECTION * FIRST_WINDOW_BYTES;
        config.set_max_num_streams(MAX_STREAMS_PER_CONNECTION);
        config.set_max_connection_receive_window(Some(first_windows + MAX_WINDOW_GROWTH_BYTES));
        Muxer {
            connection: Connection::new(Limited::over(socket, self.upload), config, mode),
            quota: self.quota,
            arrived: VecDeque::new(),
            taker: None,
        }
    }
}

impl UpgradeInfo for Multiplexing {
    type Info = &'static str;
    type InfoIter = iter::Once<&'static str>;

    fn protocol_info(&self) -> Self::InfoIter {
        iter::once(NAME)
    }
}

impl<C> InboundConnectionUpgrade<C> for Multiplexing
where
    C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    type Output = Muxer<Limited<C>>;
    type Error = io::Error;
    type Future = Ready<io::Result<Self::Output>>;

    fn upgrade_inbound(self, socket: C, _: Self::Info) -> Self::Future {
        ready(Ok(self.over(socket, Mode::Server)))
    }
}

impl<C> OutboundConnectionUpgrade<C> for Multiplexing
where
    C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    type Output = Muxer<Limited<C>>;
    type Error = io::Error;
    type Future = Ready<io::Result<Self::Output>>;

    fn upgrade_outbound(self, socket: C, _: Self::Info) -> Self::Future {
        ready(Ok(self.over(socket, Mode::Client)))
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct Muxer<C> {
    connection: Connection<C>,
    quota: Option<Quota>,
    /// Streams of the peer that came while nobody asked for one.
    arrived: VecDeque<Substream>,
    /// Who asked for one in vain.
    taker: Option<Waker>,
}

impl<C: AsyncRead + AsyncWrite + Unpin> Muxer<C> {
    /// Drives the connection until the peer opens a stream; `None` for one that is reset because there
    /// is no room.
    fn poll_arrival(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Substream>>> {
        self.connection.poll_next_inbound(cx).map(|next| {
            let inner = next.unwrap_or(Err(ConnectionError::Closed)).map_err(io_error)?;
            let window = match &self.quota {
                None => None,
                Some(quota) => match quota.admit() {
                    Some(window) => Some(window),
                    None => return Ok(None),
                },
            };
            Ok(Some(Substream { inner, _window: window }))
        })
    }
}

impl<C: AsyncRead + AsyncWrite + Unpin> StreamMuxer for Muxer<C> {
    type Substream = Substream;
    type Error = io::Error;

    fn poll_inbound(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<Substream>> {
        if let Some(stream) = self.arrived.pop_front() {
            return Poll::Ready(Ok(stream));
        }
        match self.poll_arrival(cx)? {
            Poll::Ready(Some(stream)) => return Poll::Ready(Ok(stream)),
            // Others have their turn before the next is refused.
            Poll::Ready(None) => cx.waker().wake_by_ref(),
            Poll::Pending => self.taker = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    fn poll_outbound(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Substream>> {
        let opened = self.connection.poll_new_outbound(cx);
        opened.map(|opened| match opened {
            Ok(inner) => Ok(Substream { inner, _window: None }),
            Err(error) => Err(io_error(error)),
        })
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.poll_close(cx).map_err(io_error)
    }

    /// Streams go on only while the connection is driven, and that may bring new ones.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<StreamMuxerEvent>> {
        if let Poll::Ready(arrived) = self.poll_arrival(cx)? {
            if let Some(stream) = arrived.filter(|_| self.arrived.len() < MAX_ARRIVED) {
                self.arrived.push_back(stream);
                self.taker.take().inspect(Waker::wake_by_ref);
            }
            // There may be more; other streams have their turn first.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

fn io_error(error: ConnectionError) -> io::Error {
    match error {
        ConnectionError::Io(error) => error,
        other => io::Error::other(other),
    }
}

/// One stream of a connection.
#[derive(Debug)]
pub(super) struct Substream {
    inner: yamux::Stream,
    /// What the peer may send on it unread.
    _window: Option<Reservation>,
}

impl AsyncRead for Substream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Substream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_close(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures::{
        AsyncWriteExt,
        future::{Either, select},
    };
    use libp2p::core::muxing::StreamMuxerExt;
    use tokio_util::compat::TokioAsyncReadCompatExt;

    use super::*;
    use crate::p2p::tests::block_on;

    /// Opens `count` streams from one end to the other, which knows the peer as `quota` says, and says a
    /// byte on each; the streams that arrived.
    async fn arrivals(quota: &Quota, count: usize) -> Vec<Substream> {
        let (near, far) = tokio::io::duplex(1 << 20);
        let free = Multiplexing { upload: None, quota: None };
        let counted = Multiplexing { upload: None, quota: Some(quota.clone()) };
        let mut caller = free.over(near.compat(), Mode::Client);
        let mut callee = counted.over(far.compat(), Mode::Server);
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
                let limit = std::time::Duration::from_millis(200);
                match tokio::time::timeout(limit, next).await {
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
            let pools = limits.memory().of(Purpose::Window);
            let most = crate::p2p::memory::WINDOW_BYTES.peer / FIRST_WINDOW_BYTES;
            let held: Vec<_> = (0..most - 3).filter_map(|_| quota.admit()).collect();
            assert_eq!(held.len(), most - 3);
            let arrived = arrivals(&quota, 8).await;
            assert_eq!(arrived.len(), 3);
            assert_eq!(limits.figures().too_many, 5);
            drop(arrived);
            assert!(pools.try_reserve(quota.peer, net, 3 * FIRST_WINDOW_BYTES).is_some());
        });
    }
}
