//! A role as a process of its own, and the board that it writes to: for the tests of roles.

use std::os::fd::AsRawFd;
use std::process::{Child, Command as Process, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use ipc_channel::ipc::{IpcOneShotServer, IpcReceiver, IpcSender};
use ipc_channel::{IpcError, TryRecvError};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::Serialize;
use serde::de::DeserializeOwned;
use shared::bootstrap::{Bootstrap, DescriptorSocket, Exchange, FromChild, ToChild, build_id};
use shared::config::{LogConfig, LogFormat};
use shared::control::{Birth, BoardSeat, Role};
use shared::exit::ExitReason;
use shared::ids::{Generation, GroupId, WorkerId};
use shared::sandbox::{Confinement, SandboxMode};
use shared::shm::board::{Board, Occupant};

/// Longest wait of any test.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A name that no other segment of this machine has.
pub fn unique(what: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("sepal-test-{}-{}-{what}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// The worker of all tests.
pub fn worker_id() -> WorkerId {
    WorkerId::solo(GroupId(0))
}

/// A board with one worker on it.
pub struct Seat {
    pub board: Board,
    pub seat: BoardSeat,
}

impl Seat {
    pub fn of(role: Role, generation: Generation) -> Seat {
        let board = Board::create("test", 0).unwrap();
        let worker = (role == Role::Worker).then(worker_id);
        board.assign(0, &Occupant { role, generation, worker }).unwrap();
        Seat { board, seat: BoardSeat { slot: 0, heartbeat: Duration::from_millis(100) } }
    }
}

const FD_VARIABLE: &str = "SEPAL_TEST_BOOTSTRAP";

/// Where the supervisor writes.
pub struct DownEnd<Down>(pub IpcSender<ToChild<Down>>);

impl<Down: Serialize> DownEnd<Down> {
    pub fn send(&self, message: Down) -> Result<(), IpcError> {
        self.0.send(ToChild::Message(message))
    }
}

/// Where the supervisor reads.
pub struct UpEnd<Up>(IpcReceiver<FromChild<Up>>);

impl<Up: Serialize + DeserializeOwned> UpEnd<Up> {
    pub fn try_recv_timeout(&self, patience: Duration) -> Result<Up, TryRecvError> {
        match self.0.try_recv_timeout(patience)? {
            FromChild::Message(message) => Ok(message),
            FromChild::Held => panic!("nobody asked it to hold its messages back"),
        }
    }
}

/// A role as a process of its own, and the supervisor's ends of its channels.
pub struct Spawned<Down, Up> {
    pub process: Child,
    pub down: DownEnd<Down>,
    pub up: UpEnd<Up>,
    pub descriptors: DescriptorSocket,
}

/// Starts the ignored test `child` of this test executable as `role`, the way the supervisor starts
/// it.
pub fn spawn<Down, Up>(role: Role, generation: Generation, child: &str) -> Spawned<Down, Up>
where
    Down: Serialize + DeserializeOwned + Send + 'static,
    Up: Serialize + DeserializeOwned + Send + 'static,
{
    let (server, name) = IpcOneShotServer::<Exchange<Down, Up>>::new().unwrap();
    let (descriptors, theirs) = DescriptorSocket::pair().unwrap();
    let birth = Birth {
        build: build_id(),
        role,
        server: name,
        parent_pid: std::process::id(),
        generation,
        worker: (role == Role::Worker).then(worker_id),
        log: LogConfig { filter: "off".into(), format: LogFormat::Text },
        confinement: Confinement { mode: SandboxMode::Off, ..Confinement::default() },
    };
    descriptors.send_birth(&birth).unwrap();
    fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let process = Process::new("/proc/self/exe")
        .args(["--ignored", "--exact", child, "--test-threads=1", "--nocapture"])
        .env(FD_VARIABLE, theirs.as_raw_fd().to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(theirs);
    let (accepted, accept) = sync_channel(1);
    std::thread::spawn(move || accepted.send(server.accept().map(|(_, ends)| ends)));
    let Exchange { down, up } = accept.recv_timeout(DEADLINE).expect("the child connects").unwrap();
    Spawned { process, down: DownEnd(down), up: UpEnd(up), descriptors }
}

/// The body of the ignored test: this process is the child.
pub fn as_child(role: Role, run: fn(Bootstrap) -> ExitReason) {
    let Ok(fd) = std::env::var(FD_VARIABLE) else {
        // All tests were asked for, also those that are ignored.
        return;
    };
    let fd = fd.parse().unwrap();
    let reason = run(Bootstrap::from_fd(fd, role).unwrap());
    // The test harness knows only success and failure.
    #[allow(clippy::disallowed_methods, reason = "the exit code is what the tests look at")]
    std::process::exit(reason.code().into());
}

/// Waits until a process has ended.
pub fn wait(process: &mut Child) -> ExitStatus {
    let until = Instant::now() + DEADLINE;
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        if Instant::now() >= until {
            process.kill().unwrap();
            panic!("the process does not end");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
