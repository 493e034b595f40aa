//! TCP with security and a multiplexer, behind a [`DialGate`].

use std::{io, sync::Arc};

use futures::{
    FutureExt, TryFutureExt,
    future::{BoxFuture, Either},
    io::{AsyncRead, AsyncWrite},
};
use libp2p::{
    PeerId, Transport,
    core::{
        UpgradeInfo,
        muxing::StreamMuxerBox,
        upgrade::{InboundConnectionUpgrade, OutboundConnectionUpgrade, Version},
    },
    identity::Keypair,
    noise, tcp, tls,
};
use resource_manager::{
    addresses::ip_of, dials::DialGate, first_byte::FirstByte, gated_transport::GatedTransport,
    nets::Net, upload::UploadLimit,
};

use super::{
    error::P2pError,
    limits::InboundLimits,
    muxer::{Multiplexing, Quota},
};

type Made = (PeerId, StreamMuxerBox);

/// The transport of a node.
pub(super) fn transport(
    keypair: &Keypair,
    upload: Option<UploadLimit>,
    limits: Arc<InboundLimits>,
    gate: Arc<DialGate>,
) -> Result<GatedTransport<Made>, P2pError> {
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
    Ok(GatedTransport::new(inner, gate))
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
