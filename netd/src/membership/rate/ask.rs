//! Measures with peers: who is asked, and the two transfers.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt};
use p2p::{CallError, P2p, PeerId, RpcStream, Scope};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, info};

use super::meter::Meter;
use super::serve::chunk;
use super::{AGREED, CHUNK_BYTES, DOWN, GO, MAX_BYTES, MAX_TIME, PROTOCOL, UP};

/// Peers that transfer at once.
const WANTED: usize = 4;
/// Peers asked at most in one direction.
const MAX_ASKED: usize = 24;
/// Connected peers whose addresses are looked at.
const MAX_LOOKED_AT: usize = 128;
/// How long one peer may take to agree, its dialling included.
const AGREE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long looking for peers may take. Less than the patience of those who have agreed.
const SEARCH_LIMIT: Duration = Duration::from_secs(8);
/// How long a connected peer may take to say where it is.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the last answers may be under way.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Bits per second that came from and went to peers, the slower way; `known` are peers that may not
/// be connected. `None` if there is nobody to measure with.
pub async fn with_peers(p2p: &P2p, known: Vec<PeerId>) -> Option<f64> {
    let (scope, candidates) = candidates(p2p, known).await?;
    let down = one_way(p2p, DOWN, scope, &candidates).await?;
    let up = one_way(p2p, UP, scope, &candidates).await?;
    info!(
        download_mbps = down / 1e6,
        upload_mbps = up / 1e6,
        "measured the network with servers of the swarm"
    );
    Some(down.min(up))
}

/// Whom to ask, connected peers of the widest scope first, and that scope.
async fn candidates(p2p: &P2p, known: Vec<PeerId>) -> Option<(Scope, Vec<PeerId>)> {
    let own = own_ips(p2p).await;
    let connected = p2p.connected_peers().await;
    let looks = connected.iter().take(MAX_LOOKED_AT).map(|peer| async {
        let scope = scope_of(p2p, *peer, &own).await;
        Some((scope?, *peer))
    });
    let looked_at: Vec<(Scope, PeerId)> = join_all(looks).await.into_iter().flatten().collect();
    let widest = looked_at.iter().map(|(scope, _)| *scope).max();
    let scope = widest.unwrap_or(Scope::Machine);
    let mut candidates: Vec<PeerId> = looked_at
        .into_iter()
        .filter(|(of_peer, _)| *of_peer == scope)
        .map(|(_, peer)| peer)
        .collect();
    let own = p2p.peer_id();
    let others = known.into_iter();
    candidates.extend(others.filter(|peer| !connected.contains(peer) && *peer != own));
    candidates.truncate(MAX_ASKED);
    (!candidates.is_empty()).then_some((scope, candidates))
}

async fn own_ips(p2p: &P2p) -> Vec<std::net::IpAddr> {
    let addrs = p2p.listen_addrs().await;
    addrs.iter().filter_map(p2p::ip_of).collect()
}

/// Where a connected peer is seen at; `None` if it is not connected directly. Another process of
/// this machine is near, whatever address it has.
async fn scope_of(p2p: &P2p, peer: PeerId, own: &[std::net::IpAddr]) -> Option<Scope> {
    let introduction = timeout(INTRODUCTION_TIMEOUT, p2p.introduction(peer)).await;
    let seen_at = introduction.ok()?.ok()?.seen_at;
    let scopes = seen_at.iter().map(|ip| match own.contains(ip) {
        true => Scope::Machine,
        false => Scope::of(*ip),
    });
    // The nearest way is the one that streams take, or may take.
    scopes.min()
}

/// One direction: finds peers, lets them all start at once, and measures.
async fn one_way(p2p: &P2p, way: u8, scope: Scope, candidates: &[PeerId]) -> Option<f64> {
    let streams = agreed(p2p, way, scope, candidates).await;
    let peers = streams.len();
    let meter = Arrivals { start: Instant::now(), meter: Arc::default() };
    let transfers = streams.into_iter().map(|stream| async {
        let transfer = async {
            match way {
                DOWN => download(stream, &meter).await,
                _ => upload(stream, &meter).await,
            }
        };
        match timeout(MAX_TIME + LAST_ANSWERS, transfer).await {
            Ok(Ok(())) | Err(_) => {}
            Ok(Err(error)) => debug!(%error, "transfer aborted"),
        }
    });
    join_all(transfers).await;
    let rate = meter.meter.lock().bits_per_s(meter.start.elapsed());
    debug!(way = %char::from(way), peers, ?rate, "measured one direction");
    rate
}

/// When a measurement began, and what has arrived since.
struct Arrivals {
    start: Instant,
    meter: Arc<Mutex<Meter>>,
}

impl Arrivals {
    fn add(&self, bytes: u64) {
        self.meter.lock().add(self.start.elapsed(), bytes);
    }
}

/// Streams to peers that are ready to start, at most [`WANTED`].
async fn agreed(p2p: &P2p, way: u8, scope: Scope, candidates: &[PeerId]) -> Vec<RpcStream> {
    let own = own_ips(p2p).await;
    let deadline = Instant::now() + SEARCH_LIMIT;
    let mut rest = candidates.iter().copied();
    let question = |peer| {
        let own = &own;
        async move {
            let asked = timeout(AGREE_TIMEOUT, propose(p2p, peer, way)).await;
            let stream = match asked {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => {
                    debug!(%peer, %error, "peer refused to measure");
                    return None;
                }
                Err(_) => return None,
            };
            // One that was not connected when the others were looked at.
            let at = scope_of(p2p, peer, own).await;
            at.is_some_and(|at| at >= scope).then_some(stream)
        }
    };
    let mut asked: FuturesUnordered<_> = rest.by_ref().take(WANTED).map(question).collect();
    let mut streams = Vec::new();
    while streams.len() < WANTED
        && let Ok(Some(answer)) = timeout_at(deadline, asked.next()).await
    {
        match answer {
            Some(stream) => streams.push(stream),
            None => asked.extend(rest.next().map(question)),
        }
    }
    streams
}

async fn propose(p2p: &P2p, peer: PeerId, way: u8) -> Result<RpcStream, CallError> {
    let mut stream = p2p.open_stream(peer, PROTOCOL, AGREE_TIMEOUT).await?;
    stream.set_max_frame_bytes(CHUNK_BYTES as u64);
    stream.send(Bytes::copy_from_slice(&[way])).await?;
    match stream.recv().await? {
        Some(answer) if *answer == [AGREED] => Ok(stream),
        _ => Err(CallError::Malformed("neither agreed nor refused")),
    }
}

async fn download(mut stream: RpcStream, meter: &Arrivals) -> Result<(), CallError> {
    stream.send(Bytes::from_static(&[GO])).await?;
    let deadline = meter.start + MAX_TIME;
    let mut received = 0;
    while received < MAX_BYTES {
        match timeout_at(deadline, stream.recv()).await {
            Ok(Ok(Some(frame))) => {
                received += frame.len() as u64;
                meter.add(frame.len() as u64);
            }
            Ok(Ok(None)) | Err(_) => break,
            Ok(Err(error)) => return Err(error),
        }
    }
    Ok(())
}

/// Sends, and counts what the peer says has arrived: what lies in buffers on the way does not
/// count.
async fn upload(mut stream: RpcStream, meter: &Arrivals) -> Result<(), CallError> {
    stream.send(Bytes::from_static(&[GO])).await?;
    let chunk = chunk();
    let deadline = meter.start + MAX_TIME;
    let (mut sent, mut arrived) = (0, 0);
    while sent < MAX_BYTES && Instant::now() < deadline {
        match timeout_at(deadline, stream.send(chunk.clone())).await {
            Ok(done) => done?,
            Err(_) => break,
        }
        sent += chunk.len() as u64;
        while let Some(answer) = stream.recv().now_or_never() {
            if !note(answer?, sent, &mut arrived, meter)? {
                return Ok(());
            }
        }
    }
    let late = deadline + LAST_ANSWERS;
    while arrived < sent
        && let Ok(answer) = timeout_at(late, stream.recv()).await
        && note(answer?, sent, &mut arrived, meter)?
    {}
    Ok(())
}

/// Takes in how much has arrived; false at the end. A peer cannot have got what was not sent.
fn note(
    answer: Option<Bytes>,
    sent: u64,
    arrived: &mut u64,
    meter: &Arrivals,
) -> Result<bool, CallError> {
    let Some(answer) = answer else {
        return Ok(false);
    };
    let count = <[u8; 8]>::try_from(&answer[..]).map(u64::from_le_bytes);
    match count {
        Ok(count) if (*arrived..=sent).contains(&count) => {
            meter.add(count - *arrived);
            *arrived = count;
            Ok(true)
        }
        _ => Err(CallError::Malformed("reports more bytes than were sent")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_cannot_have_got_what_was_not_sent() {
        let meter = Arrivals { start: Instant::now(), meter: Arc::default() };
        let mut arrived = 0;
        let mut say = |count: u64, sent| {
            let answer = Bytes::copy_from_slice(&count.to_le_bytes());
            note(Some(answer), sent, &mut arrived, &meter)
        };
        assert_eq!(say(65_536, 131_072), Ok(true));
        assert!(say(131_073, 131_072).is_err(), "more than was sent");
        assert!(say(65_535, 131_072).is_err(), "less than before");
        assert_eq!(say(131_072, 131_072), Ok(true));
        let mut none = 0;
        assert_eq!(note(None, 1, &mut none, &meter), Ok(false));
        assert!(note(Some(Bytes::from_static(b"1")), 1, &mut none, &meter).is_err());
    }
}
