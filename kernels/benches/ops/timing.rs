//! Time of an operation beside the read bandwidth and beside its peers, interleaved, so that all
//! saw the same machine.

use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kernels::cases::{Row, Work};
use kernels::cpu::Isa;
use kernels::cpu::pool::ThreadPool;
use nix::time::{ClockId, clock_gettime};

/// Bytes that one measurement of the bandwidth reads.
const READ_BYTES: usize = 16 << 20;
/// Time for one row of the table.
const ROW_TIME: Duration = Duration::from_millis(700);

/// What was measured: the least of many each.
#[derive(Clone, Debug)]
pub struct Times {
    /// The operation, ns.
    pub own: f64,
    /// PyTorch's, in its fastest type.
    pub torch: Option<PeerTime>,
    /// ggml's.
    pub ggml: Option<PeerTime>,
    /// Read bandwidth, bytes per ns.
    pub bandwidth: f64,
}

/// What a peer answered.
#[derive(Clone, Debug)]
pub struct PeerTime {
    /// ns.
    time: f64,
    /// How it computed, where it had the choice.
    how: String,
}

/// What the peers are asked beside an operation; empty for nothing.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// See `torch_ops.py`.
    pub torch: String,
    /// See `ggml_ops.c`.
    pub ggml: String,
}

/// The clock, the reader and the peers of a run of the bench.
pub struct Bench<'r> {
    clock: ClockId,
    reader: ThreadPool,
    torch: Option<Peer>,
    ggml: Option<Peer>,
    ring: &'r [u8],
}

impl<'r> Bench<'r> {
    /// For `threads` threads; with one, times are CPU times, so that other processes cost nothing
    /// but cache. PyTorch has the instructions of `isa` alone. The bandwidth is that of reading
    /// `ring`.
    pub fn new(
        threads: usize,
        isa: Isa,
        python: Option<&str>,
        ggml: Option<&str>,
        ring: &'r [u8],
    ) -> Bench<'r> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/ops/torch_ops.py");
        Bench {
            clock: if threads == 1 {
                ClockId::CLOCK_THREAD_CPUTIME_ID
            } else {
                ClockId::CLOCK_MONOTONIC
            },
            reader: ThreadPool::new(threads),
            torch: python.and_then(|python| {
                Peer::start(python, &["-B", script], threads, &torch_limits(isa))
            }),
            ggml: ggml.and_then(|program| Peer::start(program, &[], threads, &[])),
            ring,
        }
    }

    fn now(clock: ClockId) -> Duration {
        Duration::from(clock_gettime(clock).expect("the clock exists"))
    }

    /// Least time of `run`, of the requests and of reading.
    pub fn measure(&mut self, requests: Requests, mut run: impl FnMut()) -> Times {
        let clock = self.clock;
        let mut parts = self.ring.chunks_exact(READ_BYTES).cycle();
        let (mut own, mut read) = (f64::MAX, f64::MAX);
        let (mut torch, mut ggml) = (None, None);
        run();
        let (began, mut rounds) = (Instant::now(), 0);
        while rounds < 3 || (began.elapsed() < ROW_TIME && rounds < 500) {
            for _ in 0..3 {
                let start = Bench::now(clock);
                run();
                own = own.min((Bench::now(clock) - start).as_nanos() as f64);
            }
            let start = Bench::now(clock);
            Bench::read(&mut self.reader, parts.next().expect("the ring is larger"));
            read = read.min((Bench::now(clock) - start).as_nanos() as f64);
            Peer::least(&mut self.torch, &requests.torch, &mut torch);
            Peer::least(&mut self.ggml, &requests.ggml, &mut ggml);
            rounds += 1;
        }
        Times { own, torch, ggml, bandwidth: READ_BYTES as f64 / read }
    }

    /// Reads `bytes` with all threads.
    fn read(pool: &mut ThreadPool, bytes: &[u8]) {
        let part = bytes.len().div_ceil(pool.threads() * 16);
        pool.run(bytes.len().div_ceil(part), |index| {
            let mut sums = [0u64; 32];
            let part = &bytes[index * part..bytes.len().min((index + 1) * part)];
            for line in part.as_chunks::<256>().0 {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                    *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
                }
            }
            black_box(sums);
        });
    }
}

impl Times {
    /// Prints the columns of a row, but for those without work.
    pub fn print(self, row: &Row) {
        let Row { name, work: Work { bytes, operations } } = row;
        let (bytes, flops) = (*bytes, *operations);
        let speed = bytes as f64 / self.own;
        let share = match bytes {
            0 => String::new(),
            _ => format!("{speed:6.1} GB/s = {:3.0} %", 100.0 * speed / self.bandwidth),
        };
        let rate = match flops {
            0 => String::new(),
            _ => format!("{:7.1} GFLOP/s", flops as f64 / self.own),
        };
        let beside = |peer: &str, answer: &Option<PeerTime>| {
            answer.as_ref().map_or_else(String::new, |PeerTime { time, how }| {
                format!("{peer} {how} {:9.1} {:5.2} x", time / 1e3, time / self.own)
            })
        };
        println!(
            "{name:44} {:11.1} µs {share:20} {rate:15} {:35} {}",
            self.own / 1e3,
            beside("torch", &self.torch),
            beside("ggml", &self.ggml)
        );
    }
}

/// Environment in which PyTorch's libraries keep to the instructions of `isa`.
fn torch_limits(isa: Isa) -> Vec<(&'static str, &'static str)> {
    let (onednn, mkl, own) = match isa {
        Isa::Avx512Bf16 => ("AVX512_CORE_BF16", "AVX512", "avx512"),
        Isa::Avx512 => ("AVX512_CORE_VNNI", "AVX512", "avx512"),
        Isa::Avx2 => ("AVX2", "AVX2", "avx2"),
        _ => return Vec::new(),
    };
    vec![
        ("ONEDNN_MAX_CPU_ISA", onednn),
        ("MKL_ENABLE_INSTRUCTIONS", mkl),
        ("ATEN_CPU_CAPABILITY", own),
    ]
}

/// A process that times an operation for each line.
struct Peer {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// None, and a line that says why, when the program does not start, or has not what it needs.
    fn start(
        program: &str,
        arguments: &[&str],
        threads: usize,
        environment: &[(&str, &str)],
    ) -> Option<Peer> {
        let mut child = Command::new(program)
            .args(arguments)
            .arg(threads.to_string())
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .inspect_err(|error| println!("no peer: {program}: {error}"))
            .ok()?;
        let requests = child.stdin.take()?;
        let mut answers = BufReader::new(child.stdout.take()?);
        let mut line = String::new();
        answers.read_line(&mut line).ok()?;
        if line.is_empty() {
            println!("no peer: {program} did not start {arguments:?}");
            return None;
        }
        println!("beside {}", line.trim());
        Some(Peer { child, requests, answers })
    }

    /// Asks the peer, if there is one and something to ask, and keeps the least time.
    fn least(peer: &mut Option<Peer>, request: &str, least: &mut Option<PeerTime>) {
        if let Some(peer) = peer
            && !request.is_empty()
        {
            let answer = peer.ask(request);
            if least.as_ref().is_none_or(|least| answer.time < least.time) {
                *least = Some(answer);
            }
        }
    }

    fn ask(&mut self, request: &str) -> PeerTime {
        let mut line = String::new();
        writeln!(self.requests, "{request}").expect("the helper lives");
        self.answers.read_line(&mut line).expect("the helper lives");
        let (time, how) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        PeerTime { time: time.parse().expect("nanoseconds, then how"), how: how.to_owned() }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It ends when its input does; killed, it ends now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
