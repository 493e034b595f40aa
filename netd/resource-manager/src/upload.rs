//! The limit of what a node sends to all its peers together (`--max_upload_mbps`): every byte of every
//! connection but the first hundreds of its handshake goes through one `Pacer`.
//!
//! ```text
//!   yamux of a connection ── poll_write ──> Limited ── ask ──> Pacer (one for the node)
//!                                              │  waits           │ release, at the time it names
//!                                              <── waker ──── task of the limit
//! ```
//!
//! The limit lies under the multiplexer, which cuts streams into frames of 16 KiB and chooses
//! among them, and over the encryption, so that a circuit through a relay is counted once, where it
//! leaves the machine.

mod pacer;

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::io::{AsyncRead, AsyncWrite};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

pub use pacer::UploadShare;
use pacer::{Grant, Pacer, Ticket};

/// The limit of a node; clones are the same limit.
#[derive(Clone, Debug)]
pub struct UploadLimit(Arc<UploadState>);

#[derive(Debug)]
struct UploadState {
    state: Mutex<Waiters>,
    /// Told when somebody begins to wait, and when the limit is dropped.
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct Waiters {
    pacer: Pacer,
    wakers: HashMap<Ticket, Waker>,
    /// Who need not wait any longer, with its bytes.
    served: HashMap<Ticket, usize>,
}

impl UploadLimit {
    /// A limit of so many bytes per second at any time. To be called within a tokio runtime.
    pub fn new(bytes_per_s: u64) -> UploadLimit {
        UploadLimit::saving(bytes_per_s, pacer::SLICE)
    }

    /// A limit of so many bytes per second on average: what was not used in so long a time may go out at
    /// once. To be called within a tokio runtime.
    pub fn saving(bytes_per_s: u64, saved: Duration) -> UploadLimit {
        let pacer = Pacer::new(bytes_per_s, saved, Instant::now());
        let state = Waiters { pacer, wakers: HashMap::new(), served: HashMap::new() };
        let changed = Arc::new(Notify::new());
        let shared = Arc::new(UploadState { state: Mutex::new(state), changed: changed.clone() });
        tokio::spawn(serve(Arc::downgrade(&shared), changed));
        UploadLimit(shared)
    }
}

impl UploadLimit {
    /// Another rate from now on, in bytes per second.
    pub fn set_rate(&self, bytes_per_s: u64) {
        self.0.with(|state| state.pacer.set_rate(bytes_per_s, Instant::now()));
        self.0.changed.notify_one();
    }

    /// Whether both are the same limit.
    #[cfg(test)]
    pub fn is(&self, other: &UploadLimit) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl UploadState {
    fn with<T>(&self, access: impl FnOnce(&mut Waiters) -> T) -> T {
        access(&mut self.state.lock())
    }
}

impl Drop for UploadState {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

/// Wakes those who waited when there is something for them; sleeps otherwise.
async fn serve(shared: Weak<UploadState>, changed: Arc<Notify>) {
    loop {
        let next = match shared.upgrade() {
            None => return,
            Some(shared) => shared.with(|state| {
                let (served, next) = state.pacer.release(Instant::now());
                for (ticket, bytes) in served {
                    state.served.insert(ticket, bytes);
                    if let Some(waker) = state.wakers.remove(&ticket) {
                        waker.wake();
                    }
                }
                next
            }),
        };
        match next {
            // Another rate may make it earlier.
            Some(at) => {
                tokio::select! {
                    () = tokio::time::sleep_until(at) => {}
                    () = changed.notified() => {}
                }
            }
            None => changed.notified().await,
        }
    }
}

/// What one connection, or one direction of a circuit, may send within a limit.
#[derive(Debug)]
pub struct Allowance {
    limit: Option<UploadLimit>,
    share: Arc<UploadShare>,
    /// Bytes that it may send now.
    granted: usize,
    /// Its place in the queue.
    ticket: Option<Ticket>,
}

impl Allowance {
    /// Of `limit`, if there is one.
    pub fn of(limit: Option<UploadLimit>) -> Allowance {
        Allowance::sharing(limit, Arc::default())
    }

    /// Of `limit`, if there is one; all that have this share are given as much as one.
    pub fn sharing(limit: Option<UploadLimit>, share: Arc<UploadShare>) -> Allowance {
        Allowance { limit, share, granted: 0, ticket: None }
    }

    /// Bytes that may be sent now, of `wanted`.
    pub fn poll_grant(&mut self, context: &Context<'_>, wanted: usize) -> Poll<usize> {
        let Some(UploadLimit(shared)) = &self.limit else {
            return Poll::Ready(wanted);
        };
        if self.granted == 0 {
            let (share, ticket) = (&self.share, &mut self.ticket);
            let granted = shared.with(|state| {
                let waits = match *ticket {
                    Some(ticket) => ticket,
                    None => match state.pacer.ask(share, wanted, Instant::now()) {
                        Grant::Now(bytes) => return Some(bytes),
                        Grant::Wait(ticket) => ticket,
                    },
                };
                let served = state.served.remove(&waits);
                *ticket = served.is_none().then_some(waits);
                if served.is_none() {
                    state.wakers.insert(waits, context.waker().clone());
                }
                served
            });
            match granted {
                Some(bytes) => self.granted = bytes,
                None => {
                    shared.changed.notify_one();
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(self.granted.min(wanted))
    }

    /// Of the bytes granted, so many were sent: the rest is for others.
    pub fn spend(&mut self, sent: usize) {
        let left = std::mem::take(&mut self.granted).saturating_sub(sent);
        if let Some(UploadLimit(shared)) = self.limit.as_ref().filter(|_| left > 0) {
            shared.with(|state| state.pacer.give_back(left));
        }
    }
}

impl Drop for Allowance {
    fn drop(&mut self) {
        self.spend(0);
        if let (Some(UploadLimit(shared)), Some(ticket)) = (&self.limit, self.ticket) {
            shared.with(|state| {
                state.wakers.remove(&ticket);
                match state.served.remove(&ticket) {
                    Some(bytes) => state.pacer.give_back(bytes),
                    None => state.pacer.forget(ticket),
                }
            });
        }
    }
}

/// A connection whose writes are limited.
#[derive(Debug)]
pub struct Limited<C> {
    inner: C,
    allowance: Allowance,
}

impl<C> Limited<C> {
    /// `inner`, within the limit if there is one.
    pub fn over(inner: C, limit: Option<UploadLimit>) -> Limited<C> {
        Limited { inner, allowance: Allowance::of(limit) }
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for Limited<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for Limited<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        if buffer.is_empty() {
            return Pin::new(&mut self.inner).poll_write(context, buffer);
        }
        let Poll::Ready(length) = self.allowance.poll_grant(context, buffer.len()) else {
            return Poll::Pending;
        };
        let part = buffer.get(..length).unwrap_or(buffer);
        let written = Pin::new(&mut self.inner).poll_write(context, part);
        // A connection that takes nothing now keeps its chunk until it does.
        if let Poll::Ready(outcome) = &written {
            let sent = outcome.as_ref().copied().unwrap_or(0);
            self.allowance.spend(sent);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_close(context)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::AsyncWriteExt;
    use futures::future::join_all;

    use super::*;

    fn limited(limit: &UploadLimit) -> Limited<Vec<u8>> {
        Limited::over(Vec::new(), Some(limit.clone()))
    }

    #[tokio::test(start_paused = true)]
    async fn connections_together_send_no_faster_than_the_limit() {
        let limit = UploadLimit::new(1_000_000);
        let start = Instant::now();
        let mut connections: Vec<_> = (0..4).map(|_| limited(&limit)).collect();
        let data: Vec<u8> = (0..50_000).map(|n| (n % 251) as u8).collect();
        join_all(connections.iter_mut().map(|connection| connection.write_all(&data))).await;
        // 200 kB, less what the bucket holds at first.
        let took = start.elapsed();
        let expected = Duration::from_millis(160)..Duration::from_millis(220);
        assert!(expected.contains(&took), "{took:?}");
        assert!(connections.iter().all(|connection| connection.inner == data));
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_dropped_while_it_waits_holds_nobody_up() {
        let limit = UploadLimit::new(100_000);
        let (mut gone, mut stays) = (limited(&limit), limited(&limit));
        let data = vec![7; 20_000];
        let given_up = tokio::time::timeout(Duration::from_millis(30), gone.write_all(&data));
        assert!(given_up.await.is_err(), "20 kB take 200 ms");
        drop(gone);
        stays.write_all(&data).await.unwrap();
        assert_eq!(stays.inner, data);
        limit.0.with(|state| assert!(state.wakers.is_empty() && state.served.is_empty()));
    }

    #[tokio::test]
    async fn without_a_limit_everything_goes_at_once() {
        let mut free = Limited::over(Vec::new(), None);
        let data = vec![1; 1 << 20];
        let context = &mut Context::from_waker(Waker::noop());
        let written = Pin::new(&mut free).poll_write(context, &data);
        assert!(matches!(written, Poll::Ready(Ok(length)) if length == data.len()));
    }
}
