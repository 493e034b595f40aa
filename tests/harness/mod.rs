//! Real `sepal` processes for the tests from outside: started with their own runtime folder,
//! watched through their log and the board, ended by their id. Every wait has a deadline.
#![allow(dead_code, reason = "each test file uses its own part of the harness")]

pub mod demo;
pub mod golden;
pub mod http;
pub mod lab;
pub mod peer;
pub mod pickled;
pub mod pipe;
pub mod rights;
pub mod session;

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use testkit::log::ProcessLog;
pub use testkit::log::wait_for;

/// Longest wait for anything.
pub const DEADLINE: Duration = testkit::log::PATIENCE;

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a package lies in the repository")
}

/// The executable under test.
pub const SEPAL: &str = env!("CARGO_BIN_EXE_sepal");

/// An address of loopback that this call alone gets: no other test, and no connection, uses its ports.
pub fn own_loopback() -> Ipv4Addr {
    static CALLS: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    // 127.0.x.x is left to others.
    Ipv4Addr::new(127, high | 0x80, low, CALLS.fetch_add(1, Ordering::Relaxed))
}

/// A port that is free on all addresses. The kernel gives it to nobody who asks for any port.
pub fn free_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let first = range.ok().and_then(|text| text.split_whitespace().next()?.parse().ok());
    let end: u16 = first.unwrap_or(32768).max(2048);
    let start = 1024 + std::process::id() % u32::from(end - 1024);
    let mut ports = (1024..end).cycle().skip(start as usize - 1024).take(usize::from(end - 1024));
    let is_free = |port: &u16| TcpListener::bind(("0.0.0.0", *port)).is_ok();
    ports.find(is_free).expect("a free port")
}

/// The process of a rank of the first group, once it is ready.
pub fn rank(sepal: &Sepal, rank: usize) -> Pid {
    let name = format!("0.{rank}");
    sepal.ready_worker(|child| child["worker"] == name.as_str())
}

/// The process of a child, as `sepal status` tells it.
pub fn pid_of(child: &Value) -> Option<Pid> {
    i32::try_from(child["pid"].as_i64()?).ok().map(Pid::from_raw)
}

/// Runs all cases at once, each with a name in a thread of its own, as cases can that mostly wait.
///
/// # Panics
/// If a case does, naming it.
pub fn all_at_once(cases: &[(&str, fn())]) {
    let failed: Vec<&str> = std::thread::scope(|scope| {
        let running: Vec<_> = cases.iter().map(|(name, case)| (*name, scope.spawn(case))).collect();
        let ended = running.into_iter().map(|(name, case)| (name, case.join()));
        ended.filter(|(_, end)| end.is_err()).map(|(name, _)| name).collect()
    });
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// Runs a case of [`all_at_once`] to its end.
pub fn block_on(case: impl Future<Output = ()>) {
    tokio::runtime::Runtime::new().expect("a runtime").block_on(case);
}

/// A running `sepal`.
pub struct Sepal {
    process: Child,
    log: ProcessLog,
    /// Runtime and cache folder of this process and of those started after it in its place.
    pub dir: Arc<tempfile::TempDir>,
}

impl Sepal {
    /// Starts `sepal ARGS...`; standard error is collected as the log, standard output with it.
    pub fn start(args: &[&str]) -> Sepal {
        Sepal::start_in(Arc::new(tempfile::tempdir().expect("temporary folder")), args)
    }

    /// Starts in the folder of an earlier process.
    pub fn start_in(dir: Arc<tempfile::TempDir>, args: &[&str]) -> Sepal {
        Sepal::start_by(Command::new(SEPAL), dir, args)
    }

    /// Starts in a host of the [`lab`].
    pub fn start_at(host: &str, dir: Arc<tempfile::TempDir>, args: &[&str]) -> Sepal {
        let [program, rest @ ..] = lab::at(host);
        let mut command = Command::new(program);
        command.args(rest).arg(SEPAL);
        Sepal::start_by(command, dir, args)
    }

    /// Starts what `command` names, in a folder.
    pub fn start_by(mut command: Command, dir: Arc<tempfile::TempDir>, args: &[&str]) -> Sepal {
        let mut child = command
            .args(args)
            .env("XDG_RUNTIME_DIR", dir.path())
            .env("SEPAL_CACHE", dir.path().join("cache"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start sepal");
        let log = ProcessLog::of(child.stderr.take().expect("stderr is piped"));
        Sepal { process: child, log, dir }
    }

    /// Runs `sepal upgrade` to the executable `to`, or to the one that lies where the running one was.
    pub fn upgrade(&self, to: Option<&Path>, more: &[&str]) -> Output {
        let mut command = Command::new(SEPAL);
        command.arg("upgrade").args(more).env("XDG_RUNTIME_DIR", self.dir.path());
        if let Some(path) = to {
            command.arg("--to").arg(path);
        }
        command.output().expect("run sepal upgrade")
    }

    /// Upgrades to [another build](another_build) that is called `name`.
    pub fn upgrade_to_copy(&self, name: &str, more: &[&str]) -> PathBuf {
        let copy = another_build(self.dir.path(), name);
        let output = self.upgrade(Some(&copy), more);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}\n{}", self.log());
        copy
    }

    /// Starts `sepal serve MODEL` as a new swarm on a free loopback port and waits until it is
    /// ONLINE.
    pub fn serve(model: &Path, prefix: &str, more: &[&str]) -> Sepal {
        let sepal = Sepal::start(&serve_args(model, prefix, &[&["--new_swarm"], more].concat()));
        sepal.wait_online();
        sepal
    }

    /// Starts another server in the swarm of `first` and waits until it is ONLINE.
    pub fn join(first: &Sepal, model: &Path, prefix: &str, more: &[&str]) -> Sepal {
        Sepal::join_at(&first.addr(), model, prefix, more)
    }

    /// Starts a server in the swarm of the peer at `addr` and waits until it is ONLINE.
    pub fn join_at(addr: &str, model: &Path, prefix: &str, more: &[&str]) -> Sepal {
        let sepal =
            Sepal::start(&serve_args(model, prefix, &[&["--initial_peers", addr], more].concat()));
        sepal.wait_online();
        sepal
    }

    /// Process id of the supervisor.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id() as i32)
    }

    /// Process id of netd, once there is one.
    pub fn netd(&self) -> Pid {
        self.child("netd")
    }

    /// Process id of a worker, once there is one.
    pub fn worker(&self) -> Pid {
        self.child("gpu-worker")
    }

    fn child(&self, role: &str) -> Pid {
        wait_for(role, || {
            children_of(self.pid()).into_iter().find(|p| command_line(*p).contains(role))
        })
    }

    /// Everything logged so far.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// Waits for the `count`-th line that contains `text`.
    pub fn wait_line(&self, text: &str, count: usize) -> String {
        self.log.wait_lines(text, count).swap_remove(count - 1)
    }

    /// Number of lines logged so far.
    pub fn lines(&self) -> usize {
        self.log.lines().len()
    }

    /// Index of the first line from `from` on that contains all of `words`.
    ///
    /// # Panics
    /// If there is none, with the log.
    pub fn line_from(&self, from: usize, words: &[&str]) -> usize {
        let found = self.find_from(from, words);
        found.unwrap_or_else(|| panic!("no {words:?} from line {from}:\n{}", self.log()))
    }

    /// Waits for the same line.
    pub fn wait_from(&self, from: usize, words: &[&str]) -> usize {
        wait_for(&format!("{words:?}"), || self.find_from(from, words))
    }

    fn find_from(&self, from: usize, words: &[&str]) -> Option<usize> {
        let lines = self.log.lines();
        let has_all = |line: &String| words.iter().all(|word| line.contains(word));
        Some(from + lines.iter().skip(from).position(has_all)?)
    }

    /// Waits until the server told that it is ONLINE, and until the process that prepared its blocks is gone.
    pub fn wait_online(&self) {
        self.wait_line("state=ONLINE", 1);
        let is_prepare = |pid: &Pid| command_line(*pid).starts_with("sepal: prepare");
        wait_for("the end of prepare", || {
            (!children_of(self.pid()).iter().any(is_prepare)).then_some(())
        });
    }

    /// A full multiaddr of this server on loopback, with its PeerID.
    pub fn addr(&self) -> String {
        let line = self.wait_line("state=ONLINE", 1);
        let addr = line
            .split(|c: char| c.is_whitespace() || "\",[]=".contains(c))
            .find(|w| w.starts_with("/ip4/127.0.0.1/tcp/") && w.contains("/p2p/"));
        addr.unwrap_or_else(|| panic!("no loopback address in {line:?}")).to_owned()
    }

    /// PeerID in base58.
    pub fn peer_id(&self) -> String {
        self.addr().rsplit('/').next().expect("an address has parts").to_owned()
    }

    /// What `sepal status --json` says of this instance.
    pub fn status(&self) -> Value {
        let out = Command::new(SEPAL)
            .args(["status", "--json"])
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .output()
            .expect("run sepal status");
        assert!(out.status.success(), "sepal status: {}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).expect("sepal status --json prints JSON")
    }

    /// The children of this role, as `sepal status` tells them.
    pub fn children(&self, role: &str) -> Vec<Value> {
        let status = self.status();
        let children = status.pointer("/0/children").and_then(Value::as_array);
        children.into_iter().flatten().filter(|child| child["role"] == role).cloned().collect()
    }

    /// All workers, likewise.
    pub fn workers(&self) -> Vec<Value> {
        self.children("gpu-worker")
    }

    /// The process of the first worker that is this one, once it is ready.
    pub fn ready_worker(&self, is_it: impl Fn(&Value) -> bool) -> Pid {
        wait_for("a ready worker", || {
            let workers = self.workers();
            let is_ready = |child: &&Value| child["state"] == "ready" && is_it(child);
            workers.iter().find(is_ready).and_then(pid_of)
        })
    }

    /// The blocks of each worker, as `sepal status` tells them.
    pub fn spans(&self) -> Vec<String> {
        self.workers().iter().filter_map(|one| one["span"].as_str()).map(str::to_owned).collect()
    }

    /// Sends a signal to the supervisor alone.
    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("signal the supervisor");
    }

    /// Kills the supervisor, and waits until its children are gone too.
    ///
    /// The kernel kills them when their parent ends, which may be a moment later: until then they
    /// answer peers.
    pub fn kill(&self) {
        let children = children_of(self.pid());
        self.signal(Signal::SIGKILL);
        wait_for("the server to die", || (!children.iter().any(|c| alive(*c))).then_some(()));
    }

    /// Waits for the end, and for the last line of the log.
    pub fn wait(&mut self) -> ExitStatus {
        let status = wait_for("sepal to exit", || self.process.try_wait().expect("wait for sepal"));
        // The children hold the log open until they are gone, which may be a moment after their
        // parent.
        wait_for("the log to end", || self.log.is_complete().then_some(()));
        status
    }

    /// SIGTERM, and the exit status.
    pub fn terminate(mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait()
    }
}

impl Drop for Sepal {
    fn drop(&mut self) {
        let children = children_of(self.pid());
        let _ = self.process.kill();
        let _ = self.process.wait();
        // One that was stopped before it had asked to die with its parent looks at who that is.
        for child in children {
            let _ = kill(child, Signal::SIGCONT);
        }
        // The children die with their parent, but not at once: they hold the log open until they
        // are gone, and may write to the folder that is removed next.
        let end = Instant::now() + DEADLINE;
        while !self.log.is_complete() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Another build: the same executable under the path of another file.
pub fn another_build(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    // A link where the file system lets it: the executable is large.
    if std::fs::hard_link(SEPAL, &path).is_err() {
        std::fs::copy(SEPAL, &path).expect("copy sepal");
    }
    path
}

/// A bootstrap node.
pub struct Dht {
    child: Child,
    /// Its multiaddr with its PeerID.
    pub addr: String,
}

impl Dht {
    /// Starts one on a free loopback port.
    pub fn start() -> Dht {
        let mut child = Command::new(SEPAL)
            .args(["dht", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let addr = lines.find_map(|line| {
            let line = line.ok()?;
            line.split_whitespace()
                .find(|w| w.contains("/tcp/") && w.contains("/p2p/"))
                .map(str::to_owned)
        });
        Dht { child, addr: addr.expect("sepal dht prints its address") }
    }
}

impl Drop for Dht {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.child.id() as i32);
        kill(pid, Signal::SIGTERM).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "sepal dht drains on SIGTERM");
    }
}

/// Arguments of a server on loopback that announces a fixed throughput.
pub fn serve_args<'a>(model: &'a Path, prefix: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["serve", model.to_str().expect("UTF-8 path"), "--dht_prefix", prefix];
    args.extend(["--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--throughput", "1", "--threads", "1"]);
    args.extend(more);
    // A slow machine is not to end what hangs nowhere.
    for flag in ["--drain_timeout", "--hang_timeout"] {
        if !more.contains(&flag) {
            args.extend([flag, "300"]);
        }
    }
    args
}

/// Processes whose parent is `parent`.
pub fn children_of(parent: Pid) -> Vec<Pid> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|p| p.parse().ok()).map(Pid::from_raw).collect()
}

/// Command line of a process as `ps` shows it.
pub fn command_line(pid: Pid) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Whether a process exists and is no zombie.
pub fn alive(pid: Pid) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit(')').next().map(|rest| !rest.trim_start().starts_with('Z')))
        .unwrap_or(false)
}

/// Text that `sepal generate` adds to `prompt` greedily, through the swarm of `sepal`.
pub fn generate(
    sepal: &Sepal,
    model: &Path,
    prefix: &str,
    dtype: &str,
    prompt: &str,
    tokens: u32,
) -> String {
    let out = Command::new(SEPAL)
        .args(["generate", "--initial_peers", &sepal.addr(), "--dht_prefix", prefix])
        .args(["--torch_dtype", dtype, "--prompt", prompt, "--max_new_tokens", &tokens.to_string()])
        .arg(model)
        .stdin(Stdio::null())
        .output()
        .expect("run sepal generate");
    assert!(out.status.success(), "sepal generate: {}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).expect("text is UTF-8");
    text.trim_end_matches('\n').strip_prefix(prompt).expect("the prompt comes first").to_owned()
}
