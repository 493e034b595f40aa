//! Starting and ending processes: `/proc/self/exe ROLE --bootstrap FD`, a pidfd for each, signals
//! and the reap.
//!
//! `/proc/self/exe` is the file that runs now, even when its path was replaced, so that builds
//! never mix. Children must be spawned from a thread that lives as long as the supervisor: the
//! kernel delivers PR_SET_PDEATHSIG when the *thread* that spawned them ends.
#![allow(unsafe_code, reason = "pidfd_open has no safe wrapper")]

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use shared::control::Role;

use crate::tree::ExitStatus;

/// The variable that has the driver of CUDA count devices along the PCI bus, as its tools do, and not
/// by speed.
pub const DEVICE_ORDER: (&str, &str) = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");

/// Longest secret that a child is passed: a token of the Hub has some forty characters.
const MAX_SECRET_BYTES: usize = 4096;

/// Variables that children inherit: of logs, of the driver and its libraries, of the way to other hosts.
/// Tokens and the sockets of a service manager are not among them.
const INHERITED: [&str; 18] = [
    "ALL_PROXY",
    "HOME",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "NO_COLOR",
    "NO_PROXY",
    "PATH",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TMPDIR",
    "TZ",
    "all_proxy",
    "http_proxy",
    "https_proxy",
    "no_proxy",
];

/// What the names of others that they inherit begin with.
// The stand-in for the driver, which tests use, reads EMU_CUDA_*.
const INHERITED_PREFIXES: [&str; 8] =
    ["CUDA_", "EMU_CUDA_", "GLIBC_TUNABLES", "LC_", "MALLOC_", "NVIDIA_", "RUST_", "SEPAL_"];

/// What a child finds in its environment.
pub fn environment() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(|(name, _)| is_inherited(name))
}

/// A descriptor that the next child inherits and from which it reads `secret`, at most
/// `MAX_SECRET_BYTES`, to its end.
///
/// # Errors
/// When the process is out of descriptors, or the secret is longer.
pub fn pass_secret(secret: &str) -> io::Result<OwnedFd> {
    if secret.len() > MAX_SECRET_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the secret is too long"));
    }
    let (read, mut write) = io::pipe()?;
    // A pipe holds more.
    write.write_all(secret.as_bytes())?;
    let read = OwnedFd::from(read);
    fcntl(&read, FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(read)
}

/// Reads what [`pass_secret`] left for this process.
///
/// # Errors
/// When there is no such descriptor, or no such text in it.
pub fn take_secret(fd: RawFd) -> io::Result<String> {
    let mut secret = String::new();
    let bytes = MAX_SECRET_BYTES as u64;
    File::from(adopt(fd)?).take(bytes).read_to_string(&mut secret)?;
    Ok(secret)
}

fn is_inherited(name: &OsStr) -> bool {
    let starts = |prefix: &&str| name.as_bytes().starts_with(prefix.as_bytes());
    INHERITED.iter().any(|known| name == *known) || INHERITED_PREFIXES.iter().any(starts)
}

/// How the titles of all processes of a server begin, which `ps` shows. A program that hosts a server
/// tells by it that it was started as one of them.
pub const TITLE: &str = "sepal: ";

/// Starts this executable as `sepal ARGUMENTS...` for the program that it is a part of. Returns the
/// process and its standard output. Ctrl-C of a terminal does not reach it.
///
/// # Errors
/// When the system refuses a process.
pub fn hosted(arguments: &[OsString], log: Stdio) -> io::Result<(Child, ChildStdout)> {
    let mut child = Command::new("/proc/self/exe")
        .arg0(format!("{TITLE}server of {}", std::process::id()))
        .args(arguments)
        .env_remove("NOTIFY_SOCKET")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()?;
    let output = child.stdout.take().ok_or_else(|| io::Error::other("no pipe for its events"))?;
    Ok((child, output))
}

/// Has this process count CUDA devices as the children of a supervisor do: it starts itself again, in
/// place, with [`DEVICE_ORDER`]. For commands that open the driver themselves, before they do.
pub fn count_along_bus() {
    let (name, order) = DEVICE_ORDER;
    if std::env::var_os(name).is_some_and(|set| set == order) {
        return;
    }
    let mut args = std::env::args_os();
    let mut command = Command::new("/proc/self/exe");
    if let Some(title) = args.next() {
        command.arg0(title);
    }
    let error = command.args(args).env(name, order).exec();
    eprintln!("sepal: devices are counted in the order of the driver, not of the PCI bus: {error}");
}

/// Takes a descriptor by its number, which this process was left by the executable before.
///
/// # Errors
/// When there is none of that number, or it is one of the standard three.
pub fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    if fd <= 2 || std::fs::read_link(format!("/proc/self/fd/{fd}")).is_err() {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("no descriptor {fd}")));
    }
    // SAFETY: the descriptor is open, was left to this process, and each number is taken once, by the
    // one who finds it in the state of the executable before.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok(fd)
}

/// Has this process become the executable at `path`, with these arguments. Unlike `Command::exec`, this
/// keeps the blocked signals blocked: none is lost on the way.
///
/// # Errors
/// When the system refuses it; then nothing has changed.
pub fn execute(
    path: &Path,
    arguments: impl Iterator<Item = OsString>,
) -> io::Result<std::convert::Infallible> {
    let text = |text: OsString| CString::new(text.into_vec()).map_err(io::Error::other);
    let path = text(path.to_owned().into_os_string())?;
    let arguments = arguments.map(text).collect::<io::Result<Vec<_>>>()?;
    Ok(nix::unistd::execv(&path, &arguments)?)
}

/// A child process that was not reaped yet; its process id therefore names nobody else.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Process {
    /// A child of this process that the executable before started.
    pub fn adopt(pid: i32, pidfd: OwnedFd) -> Process {
        Process { pid: Pid::from_raw(pid), pidfd }
    }

    /// Another descriptor of the process, and its id.
    ///
    /// # Errors
    /// When this process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<(i32, OwnedFd)> {
        Ok((self.pid.as_raw(), self.pidfd.try_clone()?))
    }

    /// Starts this executable as `role`. `title` is what `ps` shows, `bootstrap` the descriptor
    /// that the child inherits; all others are closed on exec. Standard input and output are
    /// /dev/null, standard error is ours.
    ///
    /// # Errors
    /// When the system refuses a process or a descriptor.
    pub fn spawn(role: Role, title: &str, bootstrap: &OwnedFd) -> io::Result<Process> {
        fcntl(bootstrap, FcntlArg::F_SETFD(FdFlag::empty()))?;
        let child = Command::new("/proc/self/exe")
            .arg0(title)
            .arg(role.name())
            .arg("--bootstrap")
            .arg(bootstrap.as_raw_fd().to_string())
            .env_clear()
            .envs(environment())
            .env(DEVICE_ORDER.0, DEVICE_ORDER.1)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        let pid = Pid::from_raw(child.id().cast_signed());
        match pidfd_open(pid) {
            Ok(pidfd) => Ok(Process { pid, pidfd }),
            Err(error) => {
                // Nothing could watch it: end it here. SIGKILL to a process that does nothing yet
                // takes effect at once.
                let _ = kill(pid, Signal::SIGKILL);
                let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED);
                Err(error)
            }
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw().cast_unsigned()
    }

    /// Sends SIGKILL.
    ///
    /// # Errors
    /// When the system refuses; a process that has ended and was not reaped is no error.
    pub fn kill(&self) -> io::Result<()> {
        Ok(kill(self.pid, Signal::SIGKILL)?)
    }

    /// Reaps it if it has ended. After `Some` the process does not exist any more.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn reap(&self) -> io::Result<Option<ExitStatus>> {
        match waitid(Id::PIDFd(self.pidfd.as_fd()), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
            Ok(WaitStatus::Exited(_, code)) => Ok(Some(ExitStatus::Code(code))),
            Ok(WaitStatus::Signaled(_, signal, _)) => Ok(Some(ExitStatus::Signal(signal as i32))),
            Ok(_) | Err(Errno::EINTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Process {
    /// The pidfd: readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// A descriptor that names a process, readable once the process has ended.
///
/// # Errors
/// When there is no such process, or this one is out of descriptors.
pub fn pidfd_open(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers and touches no memory of this process.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor, close-on-exec, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
