//! A connection whose every byte the attacker decides: real TCP, noise and yamux, nothing above.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll};

use futures::AsyncWriteExt;
use libp2p::Transport;
use libp2p::core::Endpoint;
use libp2p::core::muxing::{StreamMuxerBox, StreamMuxerExt, SubstreamBox};
use libp2p::core::transport::{DialOpts, PortUse};
use libp2p::core::upgrade::Version;
use libp2p::multiaddr::Protocol;
use libp2p::{noise, tcp, yamux};
use p2p::{Keypair, Multiaddr};
use tokio::sync::{mpsc, oneshot};

/// Streams that are asked for at once.
const ORDERS: usize = 1024;

type Order = oneshot::Sender<SubstreamBox>;

/// One connection; it ends when this is dropped.
pub struct Wire {
    orders: mpsc::Sender<Order>,
}

impl Wire {
    /// Connects as `keypair`. `None`: the server does not want us.
    pub async fn connect(addr: &str, keypair: &Keypair) -> Option<Wire> {
        let addr: Multiaddr = addr.parse().expect("multiaddr");
        let addr = addr.into_iter().filter(|part| !matches!(part, Protocol::P2p(_))).collect();
        let mut transport = tcp::tokio::Transport::new(tcp::Config::default())
            .upgrade(Version::V1)
            .authenticate(noise::Config::new(keypair).expect("noise"))
            .multiplex(yamux::Config::default())
            .boxed();
        let options = DialOpts { role: Endpoint::Dialer, port_use: PortUse::New };
        let (_, muxer) = transport.dial(addr, options).expect("an address of TCP").await.ok()?;
        let (orders, received) = mpsc::channel(ORDERS);
        tokio::spawn(drive(muxer, received));
        Some(Wire { orders })
    }

    /// A new stream on which nothing was said. `None`: the connection has ended.
    pub async fn stream(&self) -> Option<SubstreamBox> {
        let (order, made) = oneshot::channel();
        self.orders.send(order).await.ok()?;
        made.await.ok()
    }

    /// A stream on which `protocol` was proposed and `bytes` were sent, as far as the server takes them.
    pub async fn say(&self, protocol: &str, bytes: &[u8]) -> Option<SubstreamBox> {
        let mut stream = self.stream().await?;
        let mut said = Vec::new();
        for line in ["/multistream/1.0.0", protocol] {
            said.push(u8::try_from(line.len() + 1).expect("a short name"));
            said.extend_from_slice(line.as_bytes());
            said.push(b'\n');
        }
        stream.write_all(&said).await.ok()?;
        stream.write_all(bytes).await.ok()?;
        stream.flush().await.ok()?;
        Some(stream)
    }
}

async fn drive(mut muxer: StreamMuxerBox, mut orders: mpsc::Receiver<Order>) {
    let (mut waiting, mut theirs) = (VecDeque::new(), Vec::new());
    poll_fn(|cx| {
        loop {
            loop {
                match orders.poll_recv(cx) {
                    Poll::Ready(Some(order)) => waiting.push_back(order),
                    Poll::Ready(None) => return Poll::Ready(()),
                    Poll::Pending => break,
                }
            }
            match step(&mut muxer, &mut waiting, &mut theirs, cx) {
                Some(true) => {}
                Some(false) => return Poll::Pending,
                None => return Poll::Ready(()),
            }
        }
    })
    .await;
}

/// Whether anything happened; `None` when the connection has ended.
fn step(
    muxer: &mut StreamMuxerBox,
    waiting: &mut VecDeque<Order>,
    theirs: &mut Vec<SubstreamBox>,
    cx: &mut Context<'_>,
) -> Option<bool> {
    let mut happened = false;
    if !waiting.is_empty()
        && let Poll::Ready(made) = muxer.poll_outbound_unpin(cx)
    {
        // Whoever asked may be gone.
        let _ = waiting.pop_front()?.send(made.ok()?);
        happened = true;
    }
    if let Poll::Ready(opened) = muxer.poll_inbound_unpin(cx) {
        // Never answered.
        theirs.push(opened.ok()?);
        happened = true;
    }
    match muxer.poll_unpin(cx) {
        Poll::Ready(Err(_)) => None,
        _ => Some(happened),
    }
}
