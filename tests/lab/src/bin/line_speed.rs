//! Moves hidden states between two nodes and prints how long they took: `tests/swarm/line` runs it at both ends of a delayed line.
//!
//! `line_speed serve IP PORT` prints its address and serves until it is killed. `line_speed ask ADDRESS FRAMES BYTES WARM up|down` prints
//! one line for each transfer: its name, bytes, nanoseconds, and the processor time that the two processes took in microseconds.
//!
//! A transfer is so many frames of so many bytes, one after the other on one RPC stream. It takes from the moment at which its sender
//! begins to the moment at which its receiver has the last frame: both read the clock of the same machine. The delay of the line is
//! still in it. `token` is the median of frames of 16 KiB, `slowest-token` the worst of them, that travel on a stream of their own while
//! another transfer fills the line.

#![forbid(unsafe_code)]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use p2p::{Inbound, InboundStream, P2p, P2pConfig, PeerId, ProtocolKind, ProtocolSpec, RpcStream};
use tokio::sync::mpsc;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The name of the RPC.
const NAME: &str = "Line.states";
const PATIENCE: Duration = Duration::from_secs(60);
/// One token of a model that is 8,192 wide.
const TOKEN_BYTES: u32 = 16 << 10;
const TOKEN_PAUSE: Duration = Duration::from_millis(30);
/// Until tokens begin beside a transfer.
const FILLING: Duration = Duration::from_millis(500);
/// What requests may hold: the server's own bound is far from being reached by frames that are dropped at once.
const REQUEST_MEMORY: u64 = 2 << 30;

/// What the asker wants next on a stream.
#[derive(Clone, Copy, Debug)]
struct Order {
    /// Whether the server is to receive.
    is_up: bool,
    frames: u32,
    bytes: u32,
}

/// When something happened, and what processor time the process had taken by then.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at_ns: u64,
    cpu_us: u64,
}

impl Order {
    fn encode(self) -> Bytes {
        let mut bytes = vec![u8::from(self.is_up)];
        bytes.extend_from_slice(&self.frames.to_le_bytes());
        bytes.extend_from_slice(&self.bytes.to_le_bytes());
        bytes.into()
    }

    fn decode(bytes: &[u8]) -> Result<Order, Failure> {
        match bytes {
            &[is_up, a, b, c, d, e, f, g, h] => Ok(Order {
                is_up: is_up == 1,
                frames: u32::from_le_bytes([a, b, c, d]),
                bytes: u32::from_le_bytes([e, f, g, h]),
            }),
            _ => Err("no order".into()),
        }
    }
}

impl Mark {
    fn now() -> Result<Mark, Failure> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let usage = getrusage(UsageWho::RUSAGE_SELF)?;
        let cpu = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
        Ok(Mark { at_ns: u64::try_from(since.as_nanos())?, cpu_us: u64::try_from(cpu)? })
    }

    /// Two marks as one message.
    fn encode(first: Mark, last: Mark) -> Bytes {
        let numbers = [first.at_ns, first.cpu_us, last.at_ns, last.cpu_us];
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    fn decode(bytes: &[u8]) -> Result<(Mark, Mark), Failure> {
        let (numbers, _) = bytes.as_chunks::<8>();
        match numbers {
            &[a, b, c, d] => {
                let mark = |at, cpu| Mark {
                    at_ns: u64::from_le_bytes(at),
                    cpu_us: u64::from_le_bytes(cpu),
                };
                Ok((mark(a, b), mark(c, d)))
            }
            _ => Err("no marks".into()),
        }
    }
}

fn main() -> Result<(), Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(run())
}

async fn run() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve", ip, port] => serve(&format!("/ip4/{ip}/tcp/{port}")).await,
        ["ask", address, frames, bytes, warm, way] => {
            let order =
                Order { is_up: *way == "up", frames: frames.parse()?, bytes: bytes.parse()? };
            ask(address, order, warm.parse()?).await
        }
        _ => Err("expected serve IP PORT, or ask ADDRESS FRAMES BYTES WARM up|down".into()),
    }
}

async fn node(listen: Option<&str>) -> Result<(P2p, mpsc::Receiver<Inbound>), Failure> {
    let config = P2pConfig {
        listen: listen.map(str::parse).into_iter().collect::<Result<_, _>>()?,
        protocols: vec![ProtocolSpec {
            name: NAME,
            kind: ProtocolKind::Stream,
            max_inbound_per_peer: 16,
            max_inbound_total: 16,
        }],
        request_memory: REQUEST_MEMORY,
        ..P2pConfig::of_caller(Vec::new(), PATIENCE)
    };
    Ok(P2p::start(config).await?)
}

async fn serve(listen: &str) -> Result<(), Failure> {
    let (node, mut inbound) = node(Some(listen)).await?;
    println!("{listen}/p2p/{}", node.peer_id());
    while let Some(rpc) = inbound.recv().await {
        if let Inbound::Stream { stream, .. } = rpc {
            tokio::spawn(async move {
                if let Err(error) = answer(stream).await {
                    eprintln!("a stream ended: {error}");
                }
            });
        }
    }
    Ok(())
}

/// Carries out the orders of one stream.
async fn answer(mut stream: InboundStream) -> Result<(), Failure> {
    while let Some(order) = stream.recv().await? {
        let order = Order::decode(&order.bytes)?;
        let frame = if order.is_up { Bytes::new() } else { states(order) };
        let first = Mark::now()?;
        for _ in 0..order.frames {
            if order.is_up {
                stream.recv().await?.ok_or("the stream ended")?;
            } else {
                stream.send(frame.clone()).await?;
            }
        }
        stream.send(Mark::encode(first, Mark::now()?)).await?;
    }
    stream.finish().await;
    Ok(())
}

async fn ask(address: &str, order: Order, warm: u32) -> Result<(), Failure> {
    let (node, _inbound) = node(None).await?;
    let peer = node.connect(address.parse()?).await?;
    // The first exchanges of a new connection are not part of a prefill.
    tokio::time::sleep(Duration::from_millis(800)).await;
    let mut stream = open(&node, peer).await?;
    print("cold", &transfer(Order { frames: 1, ..order }, &mut stream).await?);
    print("warm-up", &transfer(Order { frames: warm, ..order }, &mut stream).await?);
    print("same-stream", &transfer(order, &mut stream).await?);
    let mut fresh = open(&node, peer).await?;
    print("new-stream", &transfer(order, &mut fresh).await?);
    let mut prefill = open(&node, peer).await?;
    print("prefill-on-new-stream", &transfer(Order { frames: 1, ..order }, &mut prefill).await?);
    let mut beside = tokens_beside(order, &mut stream, &mut fresh).await?;
    beside.sort_by_key(|found| found.nanoseconds);
    let slowest = beside.last().ok_or("the transfer ended before the first token")?;
    print("token", &beside[beside.len() / 2]);
    print("slowest-token", slowest);
    Ok(())
}

/// Tokens in the direction of a transfer, from when it has filled the line until it ends.
async fn tokens_beside(
    order: Order,
    bulk: &mut RpcStream,
    light: &mut RpcStream,
) -> Result<Vec<Found>, Failure> {
    let token = Order { frames: 1, bytes: TOKEN_BYTES, ..order };
    let mut found = Vec::new();
    let tokens = async {
        tokio::time::sleep(FILLING).await;
        loop {
            found.push(transfer(token, light).await?);
            tokio::time::sleep(TOKEN_PAUSE).await;
        }
    };
    tokio::select! {
        ended = transfer(order, bulk) => ended.map(drop)?,
        failed = tokens => return failed,
    }
    Ok(found)
}

async fn open(node: &P2p, peer: PeerId) -> Result<RpcStream, Failure> {
    Ok(node.open_stream(peer, NAME, PATIENCE).await?)
}

/// What a transfer took.
#[derive(Clone, Copy, Debug)]
struct Found {
    bytes: u64,
    nanoseconds: u64,
    sender_us: u64,
    receiver_us: u64,
}

fn print(name: &str, found: &Found) {
    let Found { bytes, nanoseconds, sender_us, receiver_us } = found;
    println!("{name} {bytes} {nanoseconds} {sender_us} {receiver_us}");
}

async fn transfer(order: Order, stream: &mut RpcStream) -> Result<Found, Failure> {
    let frame = if order.is_up { states(order) } else { Bytes::new() };
    stream.send(order.encode()).await?;
    let first = Mark::now()?;
    for _ in 0..order.frames {
        if order.is_up {
            stream.send(frame.clone()).await?;
        } else {
            stream.recv().await?.ok_or("the stream ended")?;
        }
    }
    let last = Mark::now()?;
    let theirs = Mark::decode(&stream.recv().await?.ok_or("the stream ended")?)?;
    let (sender, receiver) =
        if order.is_up { ((first, last), theirs) } else { (theirs, (first, last)) };
    let cpu = |(first, last): (Mark, Mark)| last.cpu_us - first.cpu_us;
    Ok(Found {
        bytes: u64::from(order.frames) * u64::from(order.bytes),
        nanoseconds: receiver.1.at_ns.saturating_sub(sender.0.at_ns),
        sender_us: cpu(sender),
        receiver_us: cpu(receiver),
    })
}

/// A frame in the size of an order.
fn states(order: Order) -> Bytes {
    (0..order.bytes).map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect()
}
