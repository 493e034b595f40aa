//! A reader that gives a peer up which stops in the middle of what it announced: until then, what was
//! reserved for it is missing to others.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::io::AsyncRead;
use tokio::time::{Instant, Sleep, sleep};

/// Fails with [`io::ErrorKind::TimedOut`] when nothing comes for `patience` while it is read from.
pub struct StallTimeout<'a, R> {
    inner: &'a mut R,
    patience: Duration,
    silence: Pin<Box<Sleep>>,
    is_silent: bool,
}

impl<'a, R> StallTimeout<'a, R> {
    pub fn new(inner: &'a mut R, patience: Duration) -> Self {
        Self { inner, patience, silence: Box::pin(sleep(patience)), is_silent: false }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for StallTimeout<'_, R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if let Poll::Ready(read) = Pin::new(&mut *this.inner).poll_read(cx, buffer) {
            this.is_silent = false;
            return Poll::Ready(read);
        }
        if !this.is_silent {
            this.is_silent = true;
            this.silence.as_mut().reset(Instant::now() + this.patience);
        }
        this.silence.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}
