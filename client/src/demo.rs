//! `sepal demo`: a private swarm of two servers on this machine, each with half of a small model
//! that the executable carries, and text generated through the whole path.
//!
//! The servers are real `sepal serve` processes with their own supervisors; what ran is read back
//! from their boards and from the swarm. They never outlive the demo: Ctrl-C and SIGTERM drain them
//! and remove the folder, and when the demo is killed the kernel tells them (`serve --end_with`);
//! only the folder is left then.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use p2p::task;
use serde::Deserialize;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::sanitize_text::escaped;
use tokio::sync::watch;

use crate::config::{ClientConfig, LocalConfig, SamplingConfig};
use crate::generate::{GenerateConfig, GenerateError, generate};
use crate::report::GenerationReport;

/// Settings of `sepal demo`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct DemoConfig {
    /// Text to continue
    // `None` = one that suits the model.
    #[arg(long, short)]
    pub prompt: Option<String>,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_new_tokens: u32,
    /// Keep the swarm running until Ctrl-C
    #[arg(long)]
    pub keep: bool,
}

/// The model: config.json, tokenizer.json and weights, carried in the executable.
const MODEL: [(&str, &[u8]); 3] = [
    ("config.json", include_bytes!("../model/config.json")),
    ("tokenizer.json", include_bytes!("../model/tokenizer.json")),
    ("model.safetensors", include_bytes!("../model/model.safetensors")),
];
/// The prefix starts with an underscore, which keeps the model out of model indexes.
const PREFIX: &str = "_sepal-demo";
/// The halves of the model.
const SPANS: [&str; 2] = ["0:4", "4:8"];
const PROMPT: &str = "Once upon a time";
/// Time for a server to start; two seconds are usual in debug builds.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for a server to drain before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Lines of a server's log that wait to be read.
const LOG_QUEUE: usize = 256;
/// Time between two looks for Ctrl-C while a server starts.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// Why the demo did not work.
#[derive(Debug, thiserror::Error)]
enum DemoError {
    #[error("cannot prepare the demo in a temporary folder")]
    Io(#[from] std::io::Error),
    #[error("a server of the demo ended before it was ready:\n{0}")]
    Ended(String),
    #[error("a server of the demo was not ready within {START_TIMEOUT:?}:\n{0}")]
    Slow(String),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error("cannot read the state of a server: {0}")]
    Status(String),
    #[error("stopped before the text was complete")]
    Interrupted,
}

/// Whether Ctrl-C, SIGTERM or SIGHUP came.
#[derive(Clone)]
struct Interrupt(watch::Receiver<bool>);

impl Interrupt {
    /// Takes the signals from here on. To be called within a runtime.
    fn listen() -> std::io::Result<Interrupt> {
        use tokio::signal::unix::{SignalKind, signal};
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        let (came, receiver) = watch::channel(false);
        task::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hang_up.recv() => {}
            }
            came.send_replace(true);
        });
        Ok(Interrupt(receiver))
    }

    fn came(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits for it.
    async fn wait(&mut self) {
        // The sender goes away only after it sent, or with the runtime.
        let _ = self.0.wait_for(|came| *came).await;
    }
}

/// The servers, told to end together when dropped.
struct Servers(Vec<DemoServer>);

impl Drop for Servers {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(DemoServer::terminate);
    }
}

/// A `sepal serve` process, ended when dropped. It is in a process group of its own: Ctrl-C reaches
/// the demo alone, which tells it.
struct DemoServer {
    child: Child,
    addr: String,
    runtime_dir: std::path::PathBuf,
    /// Whether it was asked to drain: a second request would kill.
    told: bool,
    /// The log's reader; ends with the process.
    log: Receiver<String>,
}

/// Line of the log that tells that clients can come.
#[derive(Deserialize)]
struct Online {
    state: String,
    addrs: String,
}

impl DemoServer {
    fn start(
        folder: &Path,
        number: usize,
        span: &str,
        first: Option<&DemoServer>,
        interrupt: &Interrupt,
    ) -> Result<DemoServer, DemoError> {
        let runtime_dir = folder.join(format!("run{number}"));
        let mut command = Command::new("/proc/self/exe");
        command
            .arg("serve")
            .arg(folder.join("model"))
            .args([
                "--dht_prefix",
                PREFIX,
                "--block_indices",
                span,
                "--host_maddrs",
                "/ip4/127.0.0.1/tcp/0",
            ])
            .args(["--device", "cpu", "--throughput", "1", "--log_format", "json", "--log", "info"])
            .arg("--runtime_dir")
            .arg(&runtime_dir)
            .arg("--cache_dir")
            .arg(folder.join("cache"))
            .args(["--end_with", &std::process::id().to_string()])
            .process_group(0);
        match first {
            Some(first) => command.args(["--initial_peers", &first.addr]),
            None => command.arg("--new_swarm"),
        };
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let (lines, log) = sync_channel(LOG_QUEUE);
        if let Some(stderr) = child.stderr.take() {
            std::thread::spawn(move || read_log(stderr, &lines));
        }
        let mut server = DemoServer { child, addr: String::new(), runtime_dir, told: false, log };
        server.addr = server.wait_online(interrupt)?;
        Ok(server)
    }

    /// The server's address, once it tells that clients can come.
    fn wait_online(&self, interrupt: &Interrupt) -> Result<String, DemoError> {
        let end = Instant::now() + START_TIMEOUT;
        let mut seen = Vec::new();
        loop {
            if interrupt.came() {
                return Err(DemoError::Interrupted);
            }
            match self.log.recv_timeout(LOOK_PERIOD) {
                Ok(line) => {
                    if let Some(addr) = online_addr(&line) {
                        return Ok(addr);
                    }
                    seen.push(line);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(RecvTimeoutError::Timeout) => return Err(DemoError::Slow(seen.join("\n"))),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(DemoError::Ended(seen.join("\n")));
                }
            }
        }
    }

    /// Asks it to drain, once.
    fn terminate(&mut self) {
        if let (false, Ok(pid)) = (self.told, i32::try_from(self.child.id())) {
            self.told = true;
            // The process may have ended already; it is ours until it is waited for.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
    }

    /// What the server's board says, as `sepal status` shows it.
    fn status(&self) -> Result<String, DemoError> {
        let out = Command::new("/proc/self/exe")
            .arg("status")
            .arg("--runtime_dir")
            .arg(&self.runtime_dir)
            .output()?;
        match out.status.success() {
            true => Ok(String::from_utf8_lossy(&out.stdout).into_owned()),
            false => Err(DemoError::Status(String::from_utf8_lossy(&out.stderr).into_owned())),
        }
    }
}

impl Drop for DemoServer {
    fn drop(&mut self) {
        self.terminate();
        let end = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < end {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Keeps the pipe of a server's log empty; lines are dropped once nobody waits for them.
fn read_log(stderr: ChildStderr, lines: &std::sync::mpsc::SyncSender<String>) {
    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
        let _ = lines.try_send(line);
    }
}

fn online_addr(line: &str) -> Option<String> {
    let online: Online = serde_json::from_str(line).ok()?;
    let addr = online.addrs.split_whitespace().find(|a| a.contains("/p2p/"))?;
    (online.state == "ONLINE").then(|| addr.to_owned())
}

/// Runs the demo and prints to standard output.
pub fn run_command(config: &DemoConfig) -> ExitReason {
    match run(config, &mut std::io::stdout()) {
        Ok(()) => ExitReason::Clean,
        Err(error) => {
            // Standard error may have gone with the terminal.
            let _ = writeln!(io::stderr(), "sepal: {}", escaped(&with_causes(&error)));
            ExitReason::Failed
        }
    }
}

fn run(config: &DemoConfig, out: &mut (impl Write + Send)) -> Result<(), DemoError> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut interrupt = runtime.block_on(async { Interrupt::listen() })?;
    let folder = tempfile::tempdir()?;
    let model = write_model(folder.path())?;
    let servers = start(folder.path(), &interrupt, out)?;
    let Some(first) = servers.0.first() else {
        return Ok(());
    };
    let prompt = config.prompt.as_deref().unwrap_or(PROMPT);
    write!(out, "{prompt}")?;
    out.flush()?;
    let generation = GenerateConfig {
        model,
        prompt: prompt.to_owned(),
        client: ClientConfig {
            initial_peers: vec![first.addr.clone()],
            dht_prefix: Some(PREFIX.to_owned()),
            local: LocalConfig::default(),
            draft: None,
            startup_timeout: START_TIMEOUT,
        },
        max_new_tokens: config.max_new_tokens,
        sampling: SamplingConfig::default(),
        stop: Vec::new(),
        stats: false,
    };
    let report = runtime.block_on(async {
        let mut print = |text: &str| {
            write!(out, "{text}")?;
            out.flush()
        };
        let text = generate(&generation, &mut print);
        tokio::select! {
            report = text => Ok(report?),
            () = interrupt.wait() => Err(DemoError::Interrupted),
        }
    })?;
    print_report(out, &report, &servers.0)?;
    if config.keep {
        print_invitation(out, first, &generation.model)?;
        runtime.block_on(interrupt.wait());
    }
    Ok(())
}

/// Writes the model's files into a folder below `folder`, which it returns.
fn write_model(folder: &Path) -> Result<std::path::PathBuf, DemoError> {
    let model = folder.join("model");
    std::fs::create_dir(&model)?;
    for (name, bytes) in MODEL {
        std::fs::write(model.join(name), bytes)?;
    }
    Ok(model)
}

/// Starts all servers, each when the one before is ready.
fn start(folder: &Path, interrupt: &Interrupt, out: &mut impl Write) -> Result<Servers, DemoError> {
    let began = Instant::now();
    writeln!(out, "starting two servers, each with half of a small Llama ...")?;
    out.flush()?;
    let mut servers = Servers(Vec::new());
    for (number, span) in (1..).zip(SPANS) {
        let server = DemoServer::start(folder, number, span, servers.0.first(), interrupt)?;
        servers.0.push(server);
    }
    writeln!(out, "both are ONLINE after {:.1} s\n", began.elapsed().as_secs_f64())?;
    out.flush()?;
    Ok(servers)
}

fn print_invitation(out: &mut impl Write, first: &DemoServer, model: &Path) -> std::io::Result<()> {
    writeln!(out, "\nThe swarm stays until Ctrl-C. Another shell can use it:")?;
    writeln!(
        out,
        "  sepal generate --initial_peers {} --dht_prefix {PREFIX} --prompt \"There was once a fox\" {}",
        first.addr,
        model.display()
    )?;
    out.flush()
}

fn print_report(
    out: &mut impl Write,
    report: &GenerationReport,
    servers: &[DemoServer],
) -> Result<(), DemoError> {
    writeln!(out, "\n\nwhat ran (from the boards of the servers):")?;
    for server in servers {
        write!(out, "{}", server.status()?)?;
    }
    writeln!(out, "\nthe route (from the records in the DHT), and where the time went:")?;
    for line in report.lines() {
        writeln!(out, "{line}")?;
    }
    Ok(())
}
