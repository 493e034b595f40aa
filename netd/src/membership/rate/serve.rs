//! Answers servers that measure their network. What they may take is bounded in every direction,
//! since bytes cost both sides.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use p2p::{InboundReader, InboundStream, InboundWriter, P2p, PeerId};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, info};

use super::{ACK_BYTES, AGREED, CHUNK_BYTES, DOWN, GO, MAX_BYTES, MAX_TIME, UP};

/// Transfers at once.
pub(crate) const MAX_AT_ONCE: usize = 4;
/// Transfers of one peer in [`PEER_PERIOD`]: one each way, and one more try.
pub(crate) const MAX_PER_PEER: usize = 4;
/// A peer's transfers are counted over this time.
pub(crate) const PEER_PERIOD: Duration = Duration::from_secs(600);
/// Transfers in an hour: 1 GiB, or 2.4 Mbit/s on average, whatever is asked.
pub(crate) const MAX_PER_HOUR: usize = 32;
const HOUR: Duration = Duration::from_secs(3600);
/// How long a caller may take to say what it wants, and to start.
const PATIENCE: Duration = Duration::from_secs(12);
/// How long a caller may take to say where it is.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(4);

/// What was asked of a [`Counterpart`] so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterpartFigures {
    /// Transfers.
    pub served: u64,
    /// Refused: too many, too often, or through a relay.
    pub refused: u64,
}

/// The other end of a measurement. Clones are handles of the same.
#[derive(Clone, Debug)]
pub struct Counterpart {
    p2p: P2p,
    slots: Arc<Semaphore>,
    lent: Arc<Mutex<Lent>>,
}

/// What was lent in the last hour.
#[derive(Debug, Default)]
struct Lent {
    transfers: VecDeque<(Instant, PeerId)>,
    figures: CounterpartFigures,
}

impl Lent {
    /// Whether the peer may have a transfer now; if so it is counted.
    fn admit(&mut self, peer: PeerId, now: Instant) -> bool {
        while let Some((at, _)) = self.transfers.front()
            && now.duration_since(*at) >= HOUR
        {
            self.transfers.pop_front();
        }
        let recent = |(at, other): &&(Instant, PeerId)| {
            *other == peer && now.duration_since(*at) < PEER_PERIOD
        };
        let admitted = self.transfers.len() < MAX_PER_HOUR
            && self.transfers.iter().filter(recent).count() < MAX_PER_PEER;
        if admitted {
            self.transfers.push_back((now, peer));
        }
        admitted
    }
}

impl Counterpart {
    /// Answers for the node `p2p`.
    #[must_use]
    pub fn new(p2p: P2p) -> Self {
        Self { p2p, slots: Arc::new(Semaphore::new(MAX_AT_ONCE)), lent: Arc::default() }
    }

    /// What was asked so far.
    #[must_use]
    pub fn figures(&self) -> CounterpartFigures {
        self.with(|lent| lent.figures)
    }

    /// Serves one stream of `peer`.
    pub async fn serve(&self, peer: PeerId, stream: InboundStream) {
        let permit = self.slots.try_acquire();
        let admitted = permit.is_ok()
            && self.is_direct(peer).await
            && self.with(|lent| lent.admit(peer, Instant::now()));
        self.with(|lent| match admitted {
            true => lent.figures.served += 1,
            false => lent.figures.refused += 1,
        });
        if !admitted {
            return stream.fail("no more measurements for now").await;
        }
        let limit = PATIENCE + 2 * MAX_TIME;
        match timeout(limit, exchange(stream)).await {
            Ok(Some(bytes)) => info!(%peer, bytes, "served a network measurement"),
            Ok(None) | Err(_) => debug!(%peer, "network measurement aborted"),
        }
    }

    /// Whether the peer is connected without a relay: relays lend their bytes for better things.
    async fn is_direct(&self, peer: PeerId) -> bool {
        let introduction = timeout(INTRODUCTION_TIMEOUT, self.p2p.introduction(peer)).await;
        matches!(introduction, Ok(Ok(introduction)) if !introduction.seen_at.is_empty())
    }

    fn with<T>(&self, access: impl FnOnce(&mut Lent) -> T) -> T {
        access(&mut self.lent.lock())
    }
}

/// One transfer; its bytes, unless the caller breaks the protocol or goes away.
async fn exchange(stream: InboundStream) -> Option<u64> {
    let (mut reader, mut writer) = stream.into_split();
    reader.set_max_frame_bytes(CHUNK_BYTES as u64);
    let mut word = async || match timeout(PATIENCE, reader.recv()).await {
        Ok(Ok(Some(frame))) if frame.bytes.len() == 1 => frame.bytes.first().copied(),
        _ => None,
    };
    let way = word().await.filter(|way| [DOWN, UP].contains(way))?;
    writer.send(Bytes::from_static(&[AGREED])).await.ok()?;
    word().await.filter(|go| *go == GO)?;
    let bytes = match way {
        DOWN => send(&mut writer).await?,
        _ => receive(&mut reader, &mut writer).await?,
    };
    writer.finish(reader).await;
    Some(bytes)
}

async fn send(writer: &mut InboundWriter) -> Option<u64> {
    let chunk = chunk();
    let deadline = Instant::now() + MAX_TIME;
    let mut sent = 0;
    while sent < MAX_BYTES && Instant::now() < deadline {
        writer.send(chunk.clone()).await.ok()?;
        sent += chunk.len() as u64;
    }
    Some(sent)
}

async fn receive(reader: &mut InboundReader, writer: &mut InboundWriter) -> Option<u64> {
    let deadline = Instant::now() + MAX_TIME;
    let (mut received, mut told) = (0u64, 0);
    while received < MAX_BYTES {
        match timeout_at(deadline, reader.recv()).await {
            Ok(Ok(Some(frame))) => received += frame.bytes.len() as u64,
            Ok(Ok(None)) | Err(_) => break,
            Ok(Err(_)) => return None,
        }
        if received - told >= ACK_BYTES {
            told = received;
            let count = Bytes::copy_from_slice(&received.to_le_bytes());
            writer.send(count).await.ok()?;
        }
    }
    let count = Bytes::copy_from_slice(&received.to_le_bytes());
    writer.send(count).await.ok()?;
    Some(received)
}

/// Bytes that nothing on the way can make shorter.
pub(super) fn chunk() -> Bytes {
    let mut bytes = vec![0; CHUNK_BYTES];
    rand::fill(&mut bytes[..]);
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_bounded_per_peer_and_per_hour() {
        let (start, peer) = (Instant::now(), PeerId::random());
        let mut lent = Lent::default();
        for _ in 0..MAX_PER_PEER {
            assert!(lent.admit(peer, start));
        }
        assert!(!lent.admit(peer, start), "enough for this peer");
        assert!(lent.admit(peer, start + PEER_PERIOD));
        while lent.transfers.len() < MAX_PER_HOUR {
            assert!(lent.admit(PeerId::random(), start + PEER_PERIOD));
        }
        let stranger = PeerId::random();
        assert!(!lent.admit(stranger, start + PEER_PERIOD), "enough for all");
        assert!(lent.admit(stranger, start + HOUR), "the first are forgotten");
        assert!(lent.transfers.len() <= MAX_PER_HOUR);
    }
}
