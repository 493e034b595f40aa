//! TCP with security and a multiplexer, behind the [`DialGate`].

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{
    FutureExt, TryFutureExt,
    future::{BoxFuture, Either},
    io::{AsyncRead, AsyncWrite},
};
use libp2p::{
    Multiaddr, PeerId, Transport,
    core::{
        UpgradeInfo,
        muxing::StreamMuxerBox,
        transport::{Boxed, DialOpts, ListenerId, TransportError, TransportEvent},
        upgrade::{InboundConnectionUpgrade, OutboundConnectionUpgrade, Version},
    },
    identity::Keypair,
    noise, tcp, tls,
};
use tokio::time::Instant;

use super::{
    addresses::ip_of,
    dials::DialGate,
    error::P2pError,
    first_byte::FirstByte,
    limits::InboundLimits,
    muxer::{Multiplexing, Quota},
    nets::Net,
    upload::UploadLimit,
};

type Made = (PeerId, StreamMuxerBox);

/// The transport of a node.
pub(super) fn transport(
    keypair: &Keypair,
    upload: Option<UploadLimit>,
    limits: Arc<InboundLimits>,
    gate: Arc<DialGate>,
) -> Result<GatedTransport, P2pError> {
    let failed = |error: &dyn std::fmt::Display| P2pError::Transport(error.to_string());
    let security = Security {
        noise: noise::Config::new(keypair).map_err(|error| failed(&error))?,
        tls: tls::Config::new(keypair).map_err(|error| failed(&error))?,
    };
    let sockets = tcp::tokio::Transport::new(tcp::Config::default().nodelay(true));
    // Sockets know nothing of a clock that jumps: nodes of tests also talk within their process.
    #[cfg(test)]
    let sockets = sockets.or_transport(libp2p::core::transport::MemoryTransport::new());
    let inner = sockets
        .map(|socket, endpoint| FirstByte::of(socket, &endpoint))
        .upgrade(Version::V1Lazy)
        .authenticate(security)
        .multiplex_ext(move |peer, endpoint| {
            let net = ip_of(endpoint.get_remote_address()).map_or(Net::Unknown, Net::of);
            Multiplexing { upload, quota: Some(Quota { limits, peer: *peer, net }) }
        })
        .boxed();
    Ok(GatedTransport { inner, gate })
}

/// Dials what the gate admits.
pub(super) struct GatedTransport {
    inner: Boxed<Made>,
    gate: Arc<DialGate>,
}

impl Transport for GatedTransport {
    type Output = Made;
    type Error = io::Error;
    type ListenerUpgrade = <Boxed<Made> as Transport>::ListenerUpgrade;
    type Dial = BoxFuture<'static, io::Result<Made>>;

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

/// Noise or TLS, Noise offered first.
#[derive(Clone)]
struct Security {
    noise: noise::Config,
    tls: tls::Config,
}

/// Upgrades as the `$way` of the protocol that was agreed on.
macro_rules! secure {
    ($self:ident, $socket:ident, $protocol:ident, $way:ident) => {
        if $self.tls.protocol_info().any(|tls| tls == $protocol) {
            let secured = $self.tls.$way($socket, $protocol).map_err(io::Error::other);
            secured.map_ok(|(peer, stream)| (peer, Either::Right(stream))).boxed()
        } else {
            let secured = $self.noise.$way($socket, $protocol).map_err(io::Error::other);
            secured.map_ok(|(peer, stream)| (peer, Either::Left(stream))).boxed()
        }
    };
}

impl UpgradeInfo for Security {
    type Info = &'static str;
    type InfoIter = std::vec::IntoIter<&'static str>;

    fn protocol_info(&self) -> Self::InfoIter {
        let all: Vec<_> = self.noise.protocol_info().chain(self.tls.protocol_info()).collect();
        all.into_iter()
    }
}

impl<C> InboundConnectionUpgrade<C> for Security
where
    C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    type Output = (PeerId, Either<noise::Output<C>, tls::TlsStream<C>>);
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Output>>;

    fn upgrade_inbound(self, socket: C, protocol: Self::Info) -> Self::Future {
        secure!(self, socket, protocol, upgrade_inbound)
    }
}

impl<C> OutboundConnectionUpgrade<C> for Security
where
    C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    type Output = (PeerId, Either<noise::Output<C>, tls::TlsStream<C>>);
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Output>>;

    fn upgrade_outbound(self, socket: C, protocol: Self::Info) -> Self::Future {
        secure!(self, socket, protocol, upgrade_outbound)
    }
}
