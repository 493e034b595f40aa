//! Carries IP packets between two TUN devices like a long line: a one-way delay, a rate, and a queue that drops what it cannot hold.
//! TCP at both ends is that of the kernel.
//!
//! `delay_line --delay-us N --mbps N --queue-bytes N` finds the two devices open as its standard input and output, and writes a report to
//! its standard error once a second. `tests/swarm/line` makes the devices and their namespaces.
//!
//! The devices give each packet behind a header of virtio (`IFF_VNET_HDR`), with segmentation left to the receiver (`TUN_F_TSO4`). A packet
//! of 64 KiB then stands for 45 packets of an MTU of 1,500: the rate counts the bytes of those 45, with their headers.
//!
//! ```text
//!   device A ── reader ── queue of packets with their time of arrival ── writer ── device B      and the reverse
//! ```

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

/// The header of virtio before each packet.
const VIRTIO_BYTES: usize = 10;
/// The largest packet and its header.
const LARGEST_BYTES: usize = VIRTIO_BYTES + 65_536;
/// Waits that are shorter are left out: a thread wakes about so late.
const LEAST_SLEEP: Duration = Duration::from_micros(60);

/// Packets in one direction: 1 Gbit/s for 100 ms has 12,500 of an MTU of 1,500. A fuller line lets the device wait.
const MAX_PACKETS: usize = 1 << 16;

/// What a line is like.
#[derive(Clone, Copy, Debug)]
struct Line {
    delay: Duration,
    bytes_per_s: f64,
    queue_bytes: f64,
}

/// Counts of one direction.
#[derive(Debug, Default)]
struct Counts {
    packets: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    /// The longest that a packet left after its time, in microseconds.
    late_us: AtomicU64,
}

/// A packet and when it leaves the line.
#[derive(Debug)]
struct Packet {
    due: Instant,
    bytes: Vec<u8>,
}

fn main() -> Result<(), Failure> {
    let line = line_of(std::env::args().skip(1))?;
    let counts: &'static [Counts; 2] = Box::leak(Box::default());
    let [there, back] = counts;
    // One message of each thread.
    let (told, failures) = sync_channel(4);
    direction(line, there, io::stdin, io::stdout, &told);
    direction(line, back, io::stdout, io::stdin, &told);
    loop {
        match failures.recv_timeout(Duration::from_secs(1)) {
            Err(RecvTimeoutError::Timeout) => {}
            ended => return Err(format!("a device failed: {ended:?}").into()),
        }
        for (name, counts) in [("there", there), ("back", back)] {
            let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
            eprintln!(
                "{name} packets={} bytes={} dropped={} late_us={}",
                of(&counts.packets),
                of(&counts.bytes),
                of(&counts.dropped),
                of(&counts.late_us)
            );
        }
    }
}

fn line_of(mut words: impl Iterator<Item = String>) -> Result<Line, Failure> {
    let mut line = Line { delay: Duration::ZERO, bytes_per_s: 0.0, queue_bytes: 0.0 };
    while let Some(word) = words.next() {
        let value = words.next().ok_or(format!("{word} without a value"))?;
        match word.as_str() {
            "--delay-us" => line.delay = Duration::from_micros(value.parse()?),
            "--mbps" => line.bytes_per_s = value.parse::<f64>()? * 1e6 / 8.0,
            "--queue-bytes" => line.queue_bytes = value.parse()?,
            _ => return Err(format!("unknown flag {word}").into()),
        }
    }
    if line.bytes_per_s <= 0.0 || line.queue_bytes <= 0.0 {
        return Err("expected --delay-us N --mbps N --queue-bytes N".into());
    }
    Ok(line)
}

/// Starts the two threads of one direction. A device that fails ends the program.
fn direction<A, B>(
    line: Line,
    counts: &'static Counts,
    from: fn() -> A,
    to: fn() -> B,
    told: &SyncSender<String>,
) where
    A: AsFd + 'static,
    B: AsFd + 'static,
{
    let (sender, receiver) = sync_channel(MAX_PACKETS);
    let (reads, writes) = (told.clone(), told.clone());
    let tell = |told: SyncSender<String>, outcome: Result<(), Failure>| {
        drop(told.send(format!("{outcome:?}")));
    };
    thread::spawn(move || tell(reads, read(line, counts, &from(), &sender)));
    thread::spawn(move || tell(writes, write(counts, &to(), &receiver)));
}

/// Reads packets and gives each its time: behind those before it at the line's rate, and after the delay.
fn read(
    line: Line,
    counts: &Counts,
    device: &impl AsFd,
    sender: &SyncSender<Packet>,
) -> Result<(), Failure> {
    let mut buffer = vec![0; LARGEST_BYTES];
    let mut free_at = Instant::now();
    loop {
        let count = nix::unistd::read(device, &mut buffer)?;
        let bytes = buffer.get(..count).unwrap_or_default();
        let on_line = bytes_on_line(bytes);
        let now = Instant::now();
        free_at = free_at.max(now);
        let queued = free_at.duration_since(now).as_secs_f64() * line.bytes_per_s;
        if queued > line.queue_bytes {
            counts.dropped.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        free_at += Duration::from_secs_f64(on_line / line.bytes_per_s);
        counts.packets.fetch_add(1, Ordering::Relaxed);
        counts.bytes.fetch_add(on_line as u64, Ordering::Relaxed);
        sender.send(Packet { due: free_at + line.delay, bytes: bytes.to_vec() })?;
    }
}

fn write(counts: &Counts, device: &impl AsFd, receiver: &Receiver<Packet>) -> Result<(), Failure> {
    loop {
        let packet = receiver.recv()?;
        let wait = packet.due.saturating_duration_since(Instant::now());
        if wait > LEAST_SLEEP {
            thread::sleep(wait);
        }
        let late = Instant::now().saturating_duration_since(packet.due);
        counts.late_us.fetch_max(late.as_micros() as u64, Ordering::Relaxed);
        nix::unistd::write(device, &packet.bytes)?;
    }
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
