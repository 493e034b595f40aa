//! A transport whose every dial passes a [`DialGate`], whoever asked for it.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{FutureExt, TryFutureExt, future::BoxFuture};
use libp2p::{
    Multiaddr, Transport,
    core::transport::{Boxed, DialOpts, ListenerId, TransportError, TransportEvent},
};
use tokio::time::Instant;

use super::dials::DialGate;

/// Dials what the gate admits.
pub struct GatedTransport<O> {
    inner: Boxed<O>,
    gate: Arc<DialGate>,
}

impl<O: 'static> GatedTransport<O> {
    /// `inner` makes the connections.
    #[must_use]
    pub fn new(inner: Boxed<O>, gate: Arc<DialGate>) -> Self {
        Self { inner, gate }
    }
}

impl<O: 'static> Transport for GatedTransport<O> {
    type Output = O;
    type Error = io::Error;
    type ListenerUpgrade = <Boxed<O> as Transport>::ListenerUpgrade;
    type Dial = BoxFuture<'static, io::Result<O>>;

    fn listen_on(
        &mut self,
        id: ListenerId,
        addr: Multiaddr,
    ) -> Result<(), TransportError<io::Error>> {
        self.inner.listen_on(id, addr)
    }

    fn remove_listener(&mut self, id: ListenerId) -> bool {
        self.inner.remove_listener(id)
    }

    fn dial(
        &mut self,
        addr: Multiaddr,
        options: DialOpts,
    ) -> Result<Self::Dial, TransportError<io::Error>> {
        let admitted = self.gate.admit(&addr, Instant::now());
        let attempt =
            admitted.map_err(|refusal| TransportError::Other(io::Error::other(refusal)))?;
        let dial = self.inner.dial(addr, options)?;
        let dial = dial.inspect_ok(|_| {
            if let Some(attempt) = attempt {
                attempt.succeeded();
            }
        });
        Ok(dial.boxed())
    }

    fn poll(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<TransportEvent<Self::ListenerUpgrade, io::Error>> {
        Pin::new(&mut self.inner).poll(cx)
    }
}
