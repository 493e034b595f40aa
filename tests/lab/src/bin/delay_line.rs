//! Carries IP packets between TUN devices like long lines: each device has a rate in each direction and a queue that drops what it cannot
//! hold, each pair of devices a one-way delay. TCP at all ends is that of the kernel.
//!
//! `delay_line PLAN`, where PLAN is JSON: `{"ports": [{"address": "5.6.7.1", "mbps": 100, "queue_bytes": 1250000}, ...],
//! "delay_us": [[0, 50000], [50000, 0]]}`. Standard input is a socket that brings the devices in one packet, in the order of the ports
//! ([`DescriptorSocket`], tag 0). A line for each device goes to standard error once a second. `tests/swarm/line` and `tests/swarm/lab` make the devices and their namespaces.
//!
//! The devices give each packet behind a header of virtio (`IFF_VNET_HDR`), with segmentation left to the receiver (`TUN_F_TSO4`). A packet
//! of 64 KiB then stands for 45 packets of an MTU of 1,500: the rate counts the bytes of those 45, with their headers.
//!
//! ```text
//!   device ── reader: uplink's rate and queue ── delay ──> heap of packets by arrival ── writer: downlink's rate and queue ── device
//! ```

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::Value;
use shared::bootstrap::DescriptorSocket;
use shared::control::FdTag;

type Failure = Box<dyn std::error::Error>;

/// The header of virtio before each packet.
const VIRTIO_BYTES: usize = 10;
/// The largest packet and its header.
const LARGEST_BYTES: usize = VIRTIO_BYTES + 65_536;
/// Where an IPv4 packet has its destination.
const DESTINATION: usize = VIRTIO_BYTES + 16;
/// Time for the devices to come.
const DEVICES_TIMEOUT: Duration = Duration::from_secs(10);
/// Waits that are shorter are left out: a thread wakes about so late.
const LEAST_SLEEP: Duration = Duration::from_micros(60);

/// A device and its line to all others.
#[derive(Debug)]
struct Port {
    device: OwnedFd,
    address: Ipv4Addr,
    line: Line,
    counts: Counts,
    arriving: Mutex<BinaryHeap<Reverse<Packet>>>,
    arrived: Condvar,
}

/// What a device's line is like in each direction.
#[derive(Clone, Copy, Debug)]
struct Line {
    bytes_per_s: f64,
    queue_bytes: f64,
}

/// Counts of what came to and from a device.
#[derive(Debug, Default)]
struct Counts {
    packets: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    /// Packets to addresses that no device has.
    lost: AtomicU64,
    /// The longest that a packet left after its time, in microseconds.
    late_us: AtomicU64,
}

/// A packet on its way; ordered by its arrival, then as it was sent.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Packet {
    /// When its first byte is at the other side, behind the uplink and the delay.
    arrival: Instant,
    /// When its last byte is there.
    complete: Instant,
    number: u64,
    bytes: Vec<u8>,
}

/// One direction of a line, as time: when it has passed on all that it holds.
#[derive(Debug)]
struct Clock {
    line: Line,
    free_at: Instant,
}

impl Clock {
    fn new(line: Line) -> Clock {
        Clock { line, free_at: Instant::now() }
    }

    /// When the first and the last of so many bytes have passed that come at `now`. `None`: the queue is full.
    fn pass(&mut self, now: Instant, bytes: f64) -> Option<(Instant, Instant)> {
        let start = self.free_at.max(now);
        let queued = start.duration_since(now).as_secs_f64() * self.line.bytes_per_s;
        if queued > self.line.queue_bytes {
            return None;
        }
        self.free_at = start + Duration::from_secs_f64(bytes / self.line.bytes_per_s);
        Some((start, self.free_at))
    }
}

fn main() -> Result<(), Failure> {
    let plan = std::env::args().nth(1).ok_or("expected a plan")?;
    let devices = DescriptorSocket::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let (ports, delays) = parse(&serde_json::from_str(&plan)?, &devices)?;
    let ports: &'static [Port] = Vec::leak(ports);
    // One message of each thread.
    let (told, failures) = sync_channel(2 * ports.len());
    for (index, delays) in delays.into_iter().enumerate() {
        spawn(&told, move || read(ports, index, &delays));
        spawn(&told, move || write(&ports[index]));
    }
    loop {
        match failures.recv_timeout(Duration::from_secs(1)) {
            Err(RecvTimeoutError::Timeout) => {}
            ended => return Err(format!("a device failed: {ended:?}").into()),
        }
        ports.iter().for_each(report);
    }
}

fn report(port: &Port) {
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let Counts { packets, bytes, dropped, lost, late_us } = &port.counts;
    eprintln!(
        "{} packets={} bytes={} dropped={} lost={} late_us={}",
        port.address,
        of(packets),
        of(bytes),
        of(dropped),
        of(lost),
        of(late_us)
    );
}

/// Ports, and the delays from each to all.
fn parse(
    plan: &Value,
    devices: &DescriptorSocket,
) -> Result<(Vec<Port>, Vec<Vec<Duration>>), Failure> {
    let list = |value: &'_ Value| value.as_array().cloned().ok_or("expected a list");
    let mut ports = Vec::new();
    let planned = list(&plan["ports"])?;
    let devices = devices.recv(FdTag(0), planned.len(), DEVICES_TIMEOUT)?;
    for (port, device) in planned.into_iter().zip(devices) {
        let number = |name: &str| {
            let value = port[name].as_f64().filter(|n| n.is_finite() && *n >= 0.0);
            value.ok_or_else(|| format!("{name} of {port} is no number"))
        };
        let line =
            Line { bytes_per_s: number("mbps")? * 1e6 / 8.0, queue_bytes: number("queue_bytes")? };
        if line.bytes_per_s <= 0.0 {
            return Err(format!("{port} has no rate").into());
        }
        ports.push(Port {
            device,
            address: port["address"].as_str().unwrap_or_default().parse()?,
            line,
            counts: Counts::default(),
            arriving: Mutex::default(),
            arrived: Condvar::new(),
        });
    }
    let mut delays = Vec::new();
    for row in list(&plan["delay_us"])? {
        let row: Option<Vec<u64>> = list(&row)?.iter().map(Value::as_u64).collect();
        let row =
            row.filter(|row| row.len() == ports.len()).ok_or("expected a delay for each port")?;
        delays.push(row.into_iter().map(Duration::from_micros).collect());
    }
    match delays.len() == ports.len() {
        true => Ok((ports, delays)),
        false => Err("expected delays of each port".into()),
    }
}

/// A thread that fails ends the program.
fn spawn(told: &SyncSender<String>, work: impl FnOnce() -> Result<(), Failure> + Send + 'static) {
    let told = told.clone();
    thread::spawn(move || drop(told.send(format!("{:?}", work()))));
}

/// Reads packets and sends each on its way: behind those before it at the uplink's rate, and after the delay.
fn read(ports: &[Port], index: usize, delays: &[Duration]) -> Result<(), Failure> {
    let port = &ports[index];
    let (mut uplink, mut buffer, mut number) = (Clock::new(port.line), vec![0; LARGEST_BYTES], 0);
    loop {
        let count = nix::unistd::read(&port.device, &mut buffer)?;
        let bytes = buffer.get(..count).unwrap_or_default();
        let Some(to) =
            destination(bytes).and_then(|to| ports.iter().position(|port| port.address == to))
        else {
            port.counts.lost.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        let on_line = bytes_on_line(bytes);
        let Some((first, last)) = uplink.pass(Instant::now(), on_line) else {
            port.counts.dropped.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        port.counts.packets.fetch_add(1, Ordering::Relaxed);
        port.counts.bytes.fetch_add(on_line as u64, Ordering::Relaxed);
        number += 1;
        let delay = delays[to];
        let packet = Packet {
            arrival: first + delay,
            complete: last + delay,
            number,
            bytes: bytes.to_vec(),
        };
        ports[to].arriving.lock().push(Reverse(packet));
        ports[to].arrived.notify_one();
    }
}

/// Gives packets to the device in the order of their arrival, at the downlink's rate.
fn write(port: &Port) -> Result<(), Failure> {
    let mut downlink = Clock::new(port.line);
    loop {
        let packet = next(port);
        let Some((_, passed)) = downlink.pass(packet.arrival, bytes_on_line(&packet.bytes)) else {
            port.counts.dropped.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        let due = passed.max(packet.complete);
        let wait = due.saturating_duration_since(Instant::now());
        if wait > LEAST_SLEEP {
            thread::sleep(wait);
        }
        let late = Instant::now().saturating_duration_since(due);
        port.counts.late_us.fetch_max(late.as_micros() as u64, Ordering::Relaxed);
        nix::unistd::write(&port.device, &packet.bytes)?;
    }
}

/// Waits for the first packet to arrive.
fn next(port: &Port) -> Packet {
    let mut arriving = port.arriving.lock();
    loop {
        let wait = arriving
            .peek()
            .map(|Reverse(packet)| packet.arrival.saturating_duration_since(Instant::now()));
        match wait {
            Some(wait) if wait <= LEAST_SLEEP => {
                if let Some(Reverse(packet)) = arriving.pop() {
                    return packet;
                }
            }
            Some(wait) => drop(port.arrived.wait_for(&mut arriving, wait)),
            None => port.arrived.wait(&mut arriving),
        }
    }
}

fn destination(packet: &[u8]) -> Option<Ipv4Addr> {
    let octets = packet.get(DESTINATION..DESTINATION + 4)?;
    Some(Ipv4Addr::from(<[u8; 4]>::try_from(octets).ok()?))
}

/// Bytes of the IP packets that a packet stands for.
fn bytes_on_line(packet: &[u8]) -> f64 {
    let field = |at: usize| match packet.get(at..at + 2) {
        Some(&[low, high]) => usize::from(u16::from_le_bytes([low, high])),
        _ => 0,
    };
    let length = packet.len().saturating_sub(VIRTIO_BYTES);
    let is_whole = packet.get(1).is_none_or(|&kind| kind == 0);
    let (headers, segment) = (field(2), field(4));
    if is_whole || segment == 0 {
        return length as f64;
    }
    let segments = length.saturating_sub(headers).div_ceil(segment).max(1);
    (length + (segments - 1) * headers) as f64
}
