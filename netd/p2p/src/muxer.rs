//! Yamux over a connection whose writes are limited, with windows that fill a long line and are memory that somebody answers for.
//!
//! ```text
//!   Muxer ──── Link: the socket, frames in and out                       polled by the task of the connection
//!     └─ Streams (shared, no I/O) ── Stream ── Window: what the peer may leave unread
//!          │                    └── Turns: who sends the next frame
//!          └─ Substream, read and written by the tasks of the RPCs
//! ```
//!
//! `muxer/README.md` says why the stock crate does not serve.
//!
//! Each stream that a peer opens counts with its first window in the pools of the peer, its net and the process ([`resource_manager::memory`]).
//! What windows grow by counts there, too, and all windows of a connection together grow by no more than
//! [`MAX_WINDOW_GROWTH_BYTES`](super::limits::MAX_WINDOW_GROWTH_BYTES).

mod header;
mod link;
mod stream;
mod streams;
mod substream;
#[cfg(test)]
pub(super) mod tests;
mod turns;
mod window;

use std::{
    collections::VecDeque,
    future::{Ready, ready as now},
    io, iter,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Instant,
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
use parking_lot::Mutex;
use resource_manager::{
    circuits::{Pace, Relayed},
    memory::{FIRST_WINDOW_BYTES, MemoryPurpose},
    nets::Net,
    pools::Reservation,
    upload::{Limited, UploadLimit},
};

use super::limits::InboundLimits;
use link::{FramedSocket, ReceivedFrame};
use streams::Streams;
use substream::SharedStreams;
pub(super) use substream::Substream;
use window::Growth;

/// The name under which it is negotiated.
const NAME: &str = "/yamux/1.0.0";
/// Streams that have arrived and that nobody has taken yet; more are reset.
pub(super) const MAX_ARRIVED: usize = 256;
/// How often a connection that takes nothing any more is read from.
const MAX_LAST_ROUNDS: usize = 16;

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
        let pools = self.limits.resources().memory().of(MemoryPurpose::Window);
        let admitted = pools.try_reserve(self.peer, self.net, FIRST_WINDOW_BYTES);
        if admitted.is_none() {
            self.limits.count(|figures| figures.too_many += 1);
        }
        admitted
    }

    /// Circuits that the peer opens are paced.
    fn relayed(&self) -> Relayed {
        Relayed { rates: Arc::clone(self.limits.resources().circuits()), peer: self.peer }
    }

    /// Bytes by which a window may grow; `None` if there is no room.
    fn grow(&self, bytes: usize) -> Option<Reservation> {
        self.limits
            .resources()
            .memory()
            .of(MemoryPurpose::Growth)
            .try_reserve(self.peer, self.net, bytes)
    }
}

impl Multiplexing {
    fn over<C>(self, socket: C, is_client: bool) -> Muxer<Limited<C>>
    where
        C: AsyncRead + AsyncWrite + Unpin,
    {
        Muxer::new(Limited::over(socket, self.upload), self.quota, is_client)
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
        now(Ok(self.over(socket, false)))
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
        now(Ok(self.over(socket, true)))
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct Muxer<C> {
    link: FramedSocket<C>,
    streams: SharedStreams,
    quota: Option<Quota>,
    /// Streams of the peer that nobody has asked for yet.
    arrived: VecDeque<Substream>,
    /// Who asked for one in vain.
    taker: Option<Waker>,
}

impl<C: AsyncRead + AsyncWrite + Unpin> Muxer<C> {
    fn new(socket: C, quota: Option<Quota>, is_client: bool) -> Self {
        let streams = Streams::new(is_client, Growth::new(quota.clone()), Instant::now());
        Self {
            link: FramedSocket::new(socket),
            streams: Arc::new(Mutex::new(streams)),
            quota,
            arrived: VecDeque::new(),
            taker: None,
        }
    }

    /// Sends and receives as much as goes. Streams go on only while this is called.
    fn drive(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        self.streams.lock().drive_by(cx.waker());
        let outcome = self.exchange(cx);
        if outcome.is_err() {
            self.streams.lock().end();
        }
        outcome
    }

    fn exchange(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let sent = match self.send(cx) {
            Poll::Ready(Err(error)) => {
                // What the peer sent before it went away still counts.
                for _ in 0..MAX_LAST_ROUNDS {
                    if !matches!(self.receive(cx), Poll::Ready(Ok(()))) {
                        break;
                    }
                }
                return Err(error);
            }
            other => other,
        };
        if self.streams.lock().is_choked() {
            // Sending goes on first: its waker is registered, or there was no more to send.
            if sent.is_ready() {
                cx.waker().wake_by_ref();
            }
            return Ok(());
        }
        if self.receive(cx)?.is_ready() {
            cx.waker().wake_by_ref();
        }
        if !self.arrived.is_empty() {
            self.taker.take().inspect(Waker::wake_by_ref);
        }
        // Answers to what was received: credit, pongs, resets.
        let _ = self.send(cx)?;
        Ok(())
    }

    fn send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let streams = &self.streams;
        self.link.poll_send(cx, |out| streams.lock().next_frame(out))
    }

    /// Ready with `Ok` if there may be more.
    fn receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (streams, arrived, quota) = (&self.streams, &mut self.arrived, &self.quota);
        self.link.poll_receive(cx, |received| match received {
            ReceivedFrame::Header(header) => {
                let opened = streams.lock().begin(header)?;
                if let Some(id) = opened {
                    admit(id, streams, quota.as_ref(), arrived);
                }
                Ok(())
            }
            ReceivedFrame::Data(header, data, is_last) => {
                streams.lock().receive(header, data, is_last);
                Ok(())
            }
        })
    }
}

impl<C> Drop for Muxer<C> {
    /// Whoever still holds a stream of the connection sees its end.
    fn drop(&mut self) {
        self.streams.lock().end();
    }
}

/// Keeps a stream that the peer opened until it is asked for; resets it if there is no room.
fn admit(
    id: u32,
    streams: &SharedStreams,
    quota: Option<&Quota>,
    arrived: &mut VecDeque<Substream>,
) {
    let window = quota.map(Quota::admit);
    let pace = Pace::of(quota.map(Quota::relayed));
    let has_room = arrived.len() < MAX_ARRIVED && !matches!(window, Some(None));
    let stream = Substream::new(id, streams.clone(), window.flatten(), pace);
    if has_room {
        arrived.push_back(stream);
    }
}

impl<C: AsyncRead + AsyncWrite + Unpin> StreamMuxer for Muxer<C> {
    type Substream = Substream;
    type Error = io::Error;

    fn poll_inbound(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<Substream>> {
        if self.arrived.is_empty() {
            self.drive(cx)?;
        }
        let arrived = self.arrived.pop_front();
        match arrived {
            Some(stream) => Poll::Ready(Ok(stream)),
            None => {
                self.taker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn poll_outbound(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<Substream>> {
        let opened = self.streams.lock().poll_open(cx);
        opened.map_ok(|id| Substream::new(id, self.streams.clone(), None, Pace::Free))
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.streams.lock().say_goodbye();
        ready!(self.send(cx))?;
        self.link.poll_close(cx)
    }

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<StreamMuxerEvent>> {
        self.drive(cx)?;
        Poll::Pending
    }
}
