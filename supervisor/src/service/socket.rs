//! The socket of a service manager. It is written without waiting: a manager that does not read must
//! not stop the supervisor.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use super::Listener;

/// Where the manager listens.
#[derive(Debug)]
pub struct Manager {
    /// A path, or the name of an abstract socket after an @.
    address: OsString,
}

impl Manager {
    /// The manager that this process was started by, if it wants to hear of it.
    pub fn of_environment() -> Option<Manager> {
        std::env::var_os("NOTIFY_SOCKET")
            .filter(|address| !address.is_empty())
            .map(|address| Manager { address })
    }

    fn address(&self) -> io::Result<SocketAddr> {
        match self.address.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(&self.address),
        }
    }
}

impl Listener for Manager {
    /// The manager may have been started again in the meantime, so each message finds it anew.
    fn tell(&mut self, message: &str) -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        socket.send_to_addr(message.as_bytes(), &self.address()?).map(|_| ())
    }
}

/// How long the manager waits for a sign of life of this process (man 3 sd_watchdog_enabled).
pub fn patience() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let is_ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    let micros = number("WATCHDOG_USEC").filter(|micros| *micros > 0 && is_ours);
    micros.map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_that_never_reads_does_not_stop_us() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let mut manager = Manager { address: path.clone().into() };
        assert!(manager.tell("READY=1").is_err(), "nobody listens");
        let socket = UnixDatagram::bind(&path).unwrap();
        let full = (0..100_000).find_map(|_| manager.tell("WATCHDOG=1").err());
        assert_eq!(full.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
        let mut bytes = [0; 64];
        let len = socket.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"WATCHDOG=1");
    }

    #[test]
    fn abstract_names_begin_with_an_at() {
        let name = format!("sepal-test-{}", std::process::id());
        let socket =
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let mut manager = Manager { address: format!("@{name}").into() };
        manager.tell("READY=1").unwrap();
        let mut bytes = [0; 64];
        let len = socket.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"READY=1");
    }
}
