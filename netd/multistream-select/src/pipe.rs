//! A duplex pipe in memory and a loop that drives futures to their end, for tests: no executor, no
//! clock, no threads, and a bound on the number of polls instead of a timeout.

use std::{
    collections::VecDeque,
    future::Future,
    io,
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
};

use futures::io::{AsyncRead, AsyncWrite};

/// One direction: the bytes under way, and whether the writer closed it.
#[derive(Debug, Default)]
struct Lane {
    bytes: VecDeque<u8>,
    closed: bool,
}

/// One end of a pipe. At most `chunk` bytes move per read or write, so that messages arrive in
/// pieces.
#[derive(Debug)]
pub(crate) struct PipeEnd {
    incoming: Arc<Mutex<Lane>>,
    outgoing: Arc<Mutex<Lane>>,
    chunk: usize,
}

/// Two connected ends.
pub(crate) fn pipe(chunk: usize) -> (PipeEnd, PipeEnd) {
    let (a, b) = (Arc::<Mutex<Lane>>::default(), Arc::<Mutex<Lane>>::default());
    let left = PipeEnd { incoming: a.clone(), outgoing: b.clone(), chunk };
    (left, PipeEnd { incoming: b, outgoing: a, chunk })
}

impl Drop for PipeEnd {
    fn drop(&mut self) {
        self.outgoing.lock().expect("one thread").closed = true;
    }
}

impl AsyncRead for PipeEnd {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let mut lane = self.incoming.lock().expect("one thread");
        if lane.bytes.is_empty() && !lane.closed {
            return Poll::Pending;
        }
        let count = buffer.len().min(lane.bytes.len()).min(self.chunk);
        for (to, from) in buffer.iter_mut().zip(lane.bytes.drain(..count)) {
            *to = from;
        }
        Poll::Ready(Ok(count))
    }
}

impl AsyncWrite for PipeEnd {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let count = data.len().min(self.chunk);
        let mut lane = self.outgoing.lock().expect("one thread");
        lane.bytes.extend(&data[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.outgoing.lock().expect("one thread").closed = true;
        Poll::Ready(Ok(()))
    }
}

/// Polls `future` until it ends.
///
/// # Panics
///
/// If it has not ended after 100,000 polls: it hangs.
pub(crate) fn drive<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..100_000 {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
    }
    panic!("the negotiation hangs");
}
