//! Starts and watches a supervisor in a process of its own. Every wait has a deadline.

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shared::config::{Device, NetdConfig, RestartConfig, ServeConfig, Throughput};
use supervisor::instance::live_instances;
use supervisor::report::ChildReport;
use supervisor::status;
use testkit::configs::{prepare_config, serve_config};
use testkit::log::ProcessLog;
pub use testkit::log::wait_for;

/// Far beyond what a loaded machine needs.
const DEADLINE: Duration = Duration::from_secs(120);

/// Between two looks at what wakes nobody.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// Settings of a server with two workers whose fakes follow `script`; the runtime folder is filled
/// in at the start.
pub fn config(script: &str) -> ServeConfig {
    let base = serve_config();
    ServeConfig {
        devices: vec![Device::Cpu, Device::Cpu],
        netd: NetdConfig {
            attn_cache_tokens: Some(64),
            throughput: Throughput::Fixed(1.0),
            arena_bytes: 1 << 20,
            ..base.netd
        },
        prepare: prepare_config(script, ""),
        restart: RestartConfig {
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(200),
            ..base.restart
        },
        ..base
    }
}

/// The part of this program that is the supervisor: `serve CONFIG`.
pub fn serve(args: &[String]) -> ExitCode {
    let text = std::fs::read_to_string(&args[1]).unwrap();
    let reason =
        supervisor::serve(serde_json::from_str(&text).unwrap(), &[], &|_| Err("no flags".into()));
    ExitCode::from(reason.code())
}

/// A supervisor in a process group of its own.
pub struct Server {
    child: Child,
    log: ProcessLog,
    /// Holds the runtime folder; kept for a server that is started after this one.
    pub dir: Arc<tempfile::TempDir>,
    instance: String,
}

impl Server {
    /// Starts in a fresh folder.
    pub fn start(config: &ServeConfig) -> Server {
        Server::start_in(Arc::new(tempfile::tempdir().unwrap()), config)
    }

    /// Starts in the folder of an earlier server.
    pub fn start_in(dir: Arc<tempfile::TempDir>, config: &ServeConfig) -> Server {
        use std::os::unix::process::CommandExt;
        let config = ServeConfig { runtime_dir: dir.path().join("run"), ..config.clone() };
        let path = dir.path().join("config.json");
        std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("serve").arg(&path).process_group(0);
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = ProcessLog::of(child.stderr.take().unwrap());
        let instance = config.instance.unwrap_or_else(|| "0".into());
        Server { child, log, dir, instance }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub fn runtime_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub fn log(&self) -> String {
        self.log.text()
    }

    /// The first `count` lines with `text`, once there are so many.
    pub fn wait_lines(&self, text: &str, count: usize) -> Vec<String> {
        self.log.wait_lines(text, count)
    }

    pub fn wait_line(&self, text: &str) {
        self.wait_lines(text, 1);
    }

    pub fn wait_online(&self) {
        self.wait_line("state=ONLINE");
    }

    /// The children as the supervisor tells them: prepare, netd, workers.
    pub fn children(&self) -> Vec<ChildReport> {
        let live = live_instances(&self.runtime_dir()).unwrap();
        let ours =
            live.into_iter().find(|live| live.name == self.instance).expect("the instance lives");
        status::ask(&ours.status_socket, false).unwrap().children
    }

    fn child(&self, name: &str) -> Option<ChildReport> {
        let (role, worker) = match name.split_once(' ') {
            Some((role, worker)) => (role, Some(worker)),
            None => (name, None),
        };
        let is = |child: &ChildReport| child.role == role && child.worker.as_deref() == worker;
        self.children().into_iter().find(is)
    }

    pub fn kill_child(&self, name: &str) {
        let pid = self.child(name).unwrap().pid;
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    }

    /// Waits until this generation of a child is ready; gives all children.
    pub fn wait_generation(&self, name: &str, generation: u32) -> Vec<ChildReport> {
        wait_for(&format!("generation {generation} of {name} in\n{}", self.log()), || {
            let child = self.child(name)?;
            (child.generation == generation && child.state == "ready").then(|| self.children())
        })
    }

    pub fn command_line(&self, pid: u32) -> String {
        let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        String::from_utf8_lossy(&bytes).replace('\0', " ")
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// The exit code, once it has ended; `Some(None)` after a signal.
    pub fn try_wait(&mut self) -> Option<Option<i32>> {
        self.child.try_wait().unwrap().map(|status| status.code())
    }

    /// The same, waited for; the log is complete then.
    pub fn wait(&mut self) -> Option<i32> {
        let code = wait_for("the supervisor to end", || self.try_wait());
        wait_for("the end of the log", || self.log.is_complete().then_some(()));
        code
    }

    /// Names in /dev/shm that the supervisor made; its children make none.
    pub fn names_in_shm(&self) -> Vec<String> {
        let ours = format!("sepal-mapping-{}-", self.pid());
        let entries = std::fs::read_dir("/dev/shm").unwrap();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter(|name| name.starts_with(&ours)).collect()
    }

    /// What lies in the runtime folder.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.runtime_dir()).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            // An orderly end; else the children die with their parent.
            let _ = kill(self.pid(), Signal::SIGTERM);
            let end = Instant::now() + DEADLINE;
            while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(LOOK_PERIOD);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("log of the server:\n{}", self.log());
        }
    }
}

/// Whether a process exists and is no zombie.
pub fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| !rest.trim_start().is_empty() && !rest.trim_start().starts_with('Z'))
}

/// Number of open descriptors of a process.
pub fn descriptors(pid: Pid) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Number of board and rings that a process maps.
pub fn segments_of(pid: Pid) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("/memfd:sepal-")).count()
}

/// Number of threads of a process.
pub fn threads(pid: Pid) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
}
