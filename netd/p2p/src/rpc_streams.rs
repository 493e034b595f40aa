//! Streams of hivemind's protocols as a libp2p behaviour: names without a slash, counted inbound
//! streams, outbound streams on request.
//!
//! Runs in the swarm's task (behaviour) and in the task of each connection (handler). An admitted
//! inbound stream gets a task of its own at once; neither of the two ever reads or writes a stream.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    convert::Infallible,
    fmt,
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
};

use libp2p::{
    Multiaddr, PeerId, Stream,
    core::{
        Endpoint,
        transport::PortUse,
        upgrade::{InboundUpgrade, OutboundUpgrade, UpgradeInfo},
    },
    swarm::{
        ConnectionDenied, ConnectionHandler, ConnectionHandlerEvent, ConnectionId, FromSwarm,
        NetworkBehaviour, NotifyHandler, StreamUpgradeError, SubstreamProtocol, THandler,
        THandlerInEvent, THandlerOutEvent, ToSwarm,
        handler::{
            ConnectionEvent, DialUpgradeError, FullyNegotiatedInbound, FullyNegotiatedOutbound,
        },
    },
};
use tokio::sync::{mpsc, oneshot};
use tracing::debug;

use super::{
    addresses::is_relayed,
    error::CallError,
    limits::{InboundLimits, MAX_OPENING_STREAMS, NEGOTIATION_TIMEOUT},
    serve::{self, Inbound},
    traffic::{Path, Stream as Counted, Traffic},
};
use crate::task;

/// Asks a connection for a stream. A dropped `reply` means that the connection closed meanwhile.
pub(super) struct OpenStream {
    pub peer: PeerId,
    pub protocol: &'static str,
    pub reply: oneshot::Sender<Result<Counted, CallError>>,
}

impl fmt::Debug for OpenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenStream").field("protocol", &self.protocol).finish_non_exhaustive()
    }
}

/// Makes the handlers and passes requests for streams on to them.
#[derive(Debug)]
pub(super) struct Behaviour {
    limits: Arc<InboundLimits>,
    inbound: mpsc::Sender<Inbound>,
    requests: VecDeque<OpenStream>,
    /// Connections of each peer that do not go through a relay.
    direct: HashMap<PeerId, HashSet<ConnectionId>>,
    traffic: Arc<Traffic>,
}

impl Behaviour {
    pub(super) fn new(
        limits: Arc<InboundLimits>,
        inbound: mpsc::Sender<Inbound>,
        traffic: Arc<Traffic>,
    ) -> Self {
        Self { limits, inbound, requests: VecDeque::new(), direct: HashMap::new(), traffic }
    }

    /// Offers these protocols no more.
    pub(super) fn withdraw(&self, names: &[&'static str]) {
        self.limits.withdraw(names);
    }

    /// Opens a stream on a connection with the peer, which must be connected. The swarm has to be
    /// polled afterwards.
    pub(super) fn open(&mut self, request: OpenStream) {
        self.requests.push_back(request);
    }

    /// Whether any inbound stream of this peer is being served.
    pub(super) fn serves(&self, peer: &PeerId) -> bool {
        self.limits.resources().streams().has_any_of(peer)
    }

    fn handler(&self, peer: PeerId, is_relayed: bool) -> Handler {
        let path = match is_relayed {
            true => &self.traffic.relayed,
            false => &self.traffic.direct,
        };
        Handler {
            peer,
            path: Arc::clone(path),
            limits: Arc::clone(&self.limits),
            inbound: self.inbound.clone(),
            requests: VecDeque::new(),
            opening: 0,
        }
    }
}

impl NetworkBehaviour for Behaviour {
    type ConnectionHandler = Handler;
    type ToSwarm = Infallible;

    fn handle_established_inbound_connection(
        &mut self,
        _: ConnectionId,
        peer: PeerId,
        local: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(self.handler(peer, is_relayed(local) || is_relayed(remote)))
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        peer: PeerId,
        addr: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(self.handler(peer, is_relayed(addr)))
    }

    fn on_swarm_event(&mut self, event: FromSwarm) {
        match event {
            FromSwarm::ConnectionEstablished(made) if !made.endpoint.is_relayed() => {
                let of_peer = self.direct.entry(made.peer_id).or_default();
                of_peer.insert(made.connection_id);
            }
            FromSwarm::ConnectionClosed(closed) => {
                if let Some(of_peer) = self.direct.get_mut(&closed.peer_id) {
                    of_peer.remove(&closed.connection_id);
                    if of_peer.is_empty() {
                        self.direct.remove(&closed.peer_id);
                    }
                }
            }
            _ => {}
        }
    }

    fn on_connection_handler_event(
        &mut self,
        _: PeerId,
        _: ConnectionId,
        event: THandlerOutEvent<Self>,
    ) {
        match event {}
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        // Requests come from the task that polls the swarm: no waker is needed.
        let Some(request) = self.requests.pop_front() else {
            return Poll::Pending;
        };
        // A relay is slower and has limits: only where there is no other way.
        let direct = self.direct.get(&request.peer);
        let handler = match direct.and_then(|of_peer| of_peer.iter().min()) {
            Some(connection) => NotifyHandler::One(*connection),
            None => NotifyHandler::Any,
        };
        Poll::Ready(ToSwarm::NotifyHandler { peer_id: request.peer, handler, event: request })
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct Handler {
    peer: PeerId,
    /// Counts the bytes of its streams.
    path: Arc<Path>,
    limits: Arc<InboundLimits>,
    inbound: mpsc::Sender<Inbound>,
    requests: VecDeque<OpenStream>,
    /// Requests handed to the connection and not yet answered by it.
    opening: usize,
}

impl ConnectionHandler for Handler {
    type FromBehaviour = OpenStream;
    type ToBehaviour = Infallible;
    type InboundProtocol = Names;
    type OutboundProtocol = Names;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = OpenStream;

    fn listen_protocol(&self) -> SubstreamProtocol<Names> {
        SubstreamProtocol::new(Names(self.limits.names()), ()).with_timeout(NEGOTIATION_TIMEOUT)
    }

    fn poll(
        &mut self,
        _: &mut Context<'_>,
    ) -> Poll<ConnectionHandlerEvent<Names, OpenStream, Infallible>> {
        let Some(request) = self.requests.pop_front() else {
            return Poll::Pending;
        };
        self.opening += 1;
        let names = Names(vec![request.protocol]);
        let protocol = SubstreamProtocol::new(names, request).with_timeout(NEGOTIATION_TIMEOUT);
        Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest { protocol })
    }

    fn on_behaviour_event(&mut self, request: OpenStream) {
        if self.requests.len() + self.opening >= MAX_OPENING_STREAMS {
            let reason = format!("{MAX_OPENING_STREAMS} streams are being opened already");
            answer(request, |peer, _| Err(CallError::Unreachable { peer, reason }));
        } else if !request.reply.is_closed() {
            self.requests.push_back(request);
        }
    }

    fn on_connection_event(&mut self, event: ConnectionEvent<'_, Names, Names, (), OpenStream>) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound {
                protocol: (name, stream),
                ..
            }) => self.accept(name, stream),
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound {
                protocol: (_, stream),
                info,
            }) => {
                self.opening = self.opening.saturating_sub(1);
                let stream = Counted::counted(stream, Arc::clone(&self.path));
                answer(info, |_, _| Ok(stream));
            }
            ConnectionEvent::DialUpgradeError(DialUpgradeError { info, error }) => {
                self.opening = self.opening.saturating_sub(1);
                answer(info, |peer, protocol| Err(opening_failed(peer, protocol, error)));
            }
            _ => {}
        }
    }
}

impl Handler {
    /// Gives an inbound stream a task of its own, or resets it if its peer has too many.
    fn accept(&mut self, name: &'static str, stream: Stream) {
        let peer = self.peer;
        match self.limits.admit(peer, name) {
            Some((kind, permit)) => {
                let stream = Counted::counted(stream, Arc::clone(&self.path));
                let task = serve::accept(kind, peer, name, stream, permit, self.inbound.clone());
                task::spawn(task);
            }
            None => debug!(%peer, protocol = name, "too many streams, refusing one"),
        }
    }
}

/// Answers a request; nobody may be waiting any more.
fn answer(
    request: OpenStream,
    outcome: impl FnOnce(PeerId, &'static str) -> Result<Counted, CallError>,
) {
    let result = outcome(request.peer, request.protocol);
    drop(request.reply.send(result));
}

fn opening_failed(
    peer: PeerId,
    protocol: &'static str,
    error: StreamUpgradeError<Infallible>,
) -> CallError {
    match error {
        StreamUpgradeError::NegotiationFailed => CallError::NotSupported(protocol),
        StreamUpgradeError::Timeout => CallError::Timeout(NEGOTIATION_TIMEOUT),
        StreamUpgradeError::Io(error) => {
            CallError::Unreachable { peer, reason: format!("the connection broke: {error}") }
        }
        StreamUpgradeError::Apply(never) => match never {},
    }
}

/// Names to offer or to propose; the stream itself is the result of the upgrade.
#[derive(Clone, Debug)]
pub(super) struct Names(Vec<&'static str>);

impl UpgradeInfo for Names {
    type Info = &'static str;
    type InfoIter = Vec<&'static str>;

    fn protocol_info(&self) -> Self::InfoIter {
        self.0.clone()
    }
}

impl InboundUpgrade<Stream> for Names {
    type Output = (&'static str, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;

    fn upgrade_inbound(self, stream: Stream, name: &'static str) -> Self::Future {
        ready(Ok((name, stream)))
    }
}

impl OutboundUpgrade<Stream> for Names {
    type Output = (&'static str, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;

    fn upgrade_outbound(self, stream: Stream, name: &'static str) -> Self::Future {
        ready(Ok((name, stream)))
    }
}
