//! Ports: whether a server can listen where it is asked to, and who does if not.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener};

use super::check::CheckVerdict;

/// Processes looked at for the one that listens.
const MAX_PROCESSES: usize = 100_000;
/// Descriptors of a process looked at.
const MAX_DESCRIPTORS: usize = 100_000;

/// One address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFacts {
    /// As it was given.
    pub addr: String,
    pub port: u16,
    /// What came of listening there.
    pub bind: Bind,
}

/// What came of listening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bind {
    Free,
    /// Somebody else listens; who, if /proc tells.
    InUse(Option<PortHolder>),
    /// The system does not let this user.
    Denied,
    /// The machine has no such address.
    NoAddress,
    /// Something else.
    Refused(String),
}

/// A process that listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortHolder {
    pub pid: u32,
    pub name: String,
}

/// Listens for a moment on each TCP address of `maddrs`; names are left to the server.
pub fn observe(maddrs: &[String]) -> Vec<PortFacts> {
    let tried = |addr: &String| {
        let socket = socket(addr)?;
        Some(PortFacts { addr: addr.clone(), port: socket.port(), bind: bind(socket) })
    };
    maddrs.iter().filter_map(tried).collect()
}

/// `/ip4/1.2.3.4/tcp/5` as an address of a socket.
fn socket(maddr: &str) -> Option<SocketAddr> {
    let parts: Vec<&str> = maddr.split('/').collect();
    match parts[..] {
        ["", "ip4" | "ip6", ip, "tcp", port, ..] => {
            Some(SocketAddr::new(ip.parse::<IpAddr>().ok()?, port.parse().ok()?))
        }
        _ => None,
    }
}

fn bind(socket: SocketAddr) -> Bind {
    match TcpListener::bind(socket) {
        Ok(_) => Bind::Free,
        Err(error) => refused(&error, || holder(socket.port())),
    }
}

/// Why listening failed; `holder` tells who listens.
fn refused(error: &io::Error, holder: impl FnOnce() -> Option<PortHolder>) -> Bind {
    match error.kind() {
        ErrorKind::AddrInUse => Bind::InUse(holder()),
        ErrorKind::PermissionDenied => Bind::Denied,
        ErrorKind::AddrNotAvailable => Bind::NoAddress,
        // No IPv6 at all.
        _ if error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT) => Bind::NoAddress,
        _ => Bind::Refused(error.to_string()),
    }
}

/// The process that listens on a port, if this user may see its descriptors.
fn holder(port: u16) -> Option<PortHolder> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(fs::read_to_string);
    let inodes: Vec<u64> =
        tables.iter().flatten().flat_map(|table| listeners(table, port)).collect();
    let sockets: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let has_socket = |pid: &u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors.take(MAX_DESCRIPTORS).any(|descriptor| {
            let link = fs::read_link(descriptor.path()).unwrap_or_default();
            sockets.iter().any(|socket| link.as_os_str() == socket.as_str())
        })
    };
    let processes = fs::read_dir("/proc").ok()?.flatten().take(MAX_PROCESSES);
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let pid = pids.find(has_socket)?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(PortHolder { pid, name: name.trim().to_owned() })
}

/// Inodes of the sockets that listen on `port`, in a table of `/proc/net/tcp`.
fn listeners(table: &str, port: u16) -> Vec<u64> {
    const LISTEN: &str = "0A";
    let inode = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (_, local) = columns.get(1)?.rsplit_once(':')?;
        let is_it = u16::from_str_radix(local, 16) == Ok(port) && columns.get(3) == Some(&LISTEN);
        columns.get(9).filter(|_| is_it)?.parse().ok()
    };
    table.lines().skip(1).filter_map(inode).collect()
}

/// The first address that cannot be used, unless others can and the machine merely lacks it.
pub fn judge(facts: &[PortFacts]) -> CheckVerdict {
    let works = facts.iter().any(|port| port.bind == Bind::Free);
    let bad = facts.iter().find(|port| match port.bind {
        Bind::Free => false,
        Bind::NoAddress => !works,
        _ => true,
    });
    let Some(PortFacts { addr, port, bind }) = bad else {
        return free(facts);
    };
    match bind {
        Bind::Free => free(facts),
        Bind::InUse(holder) => {
            let who = match holder {
                Some(PortHolder { pid, name }) => format!("{name} (pid {pid})"),
                None => "a process of another user".to_owned(),
            };
            CheckVerdict::problem(
                format!("port {port} of {addr} is in use by {who}"),
                "stop that process or choose another --port; if it is the server that you ask about, all is well",
            )
        }
        Bind::Denied => CheckVerdict::problem(
            format!("this user may not listen on port {port} of {addr}"),
            "choose a --port above 1023, or grant CAP_NET_BIND_SERVICE",
        ),
        Bind::NoAddress => CheckVerdict::problem(
            format!("this machine does not have the address {addr}"),
            "give one of its own with --host_maddrs, and the public one with --public_ip",
        ),
        Bind::Refused(why) => CheckVerdict::problem(
            format!("cannot listen on {addr}: {why}"),
            "choose other --host_maddrs",
        ),
    }
}

fn free(facts: &[PortFacts]) -> CheckVerdict {
    let mut ports: Vec<u16> = facts.iter().map(|facts| facts.port).collect();
    ports.dedup();
    match &ports[..] {
        [] => CheckVerdict::skipped("no address of --host_maddrs is an IP address with a TCP port"),
        [0] => CheckVerdict::ok(
            "a free port is chosen at each start; --port keeps one for routers and peers",
        ),
        [port] => CheckVerdict::ok(format!("port {port} is free")),
        several => CheckVerdict::ok(format!("ports {several:?} are free")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    fn facts(bind: Bind) -> PortFacts {
        PortFacts { addr: "/ip4/0.0.0.0/tcp/80".into(), port: 80, bind }
    }

    #[test]
    fn a_port_that_cannot_be_used_is_a_problem_and_its_holder_is_named() {
        let holder = PortHolder { pid: 7, name: "nginx".into() };
        for (bind, words) in [
            (Bind::InUse(Some(holder)), &["port 80", "nginx (pid 7)", "--port"][..]),
            (Bind::InUse(None), &["another user"]),
            (Bind::Denied, &["CAP_NET_BIND_SERVICE"]),
            (Bind::NoAddress, &["/ip4/0.0.0.0/tcp/80", "--public_ip"]),
            (Bind::Refused("EIO".into()), &["EIO"]),
        ] {
            let verdict = judge(&[facts(bind)]);
            let text = format!("{} {}", verdict.found, verdict.advice.unwrap_or_default());
            assert_eq!(verdict.status, Status::Problem, "{text}");
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
        assert_eq!(judge(&[facts(Bind::Free)]).found, "port 80 is free");
        let any = PortFacts { port: 0, ..facts(Bind::Free) };
        assert!(judge(&[any]).found.contains("--port"));
        assert_eq!(judge(&[]).status, Status::Skipped);
    }

    #[test]
    fn a_machine_without_ipv6_listens_on_ipv4() {
        let six = PortFacts { addr: "/ip6/::/tcp/80".into(), ..facts(Bind::NoAddress) };
        assert_eq!(judge(&[facts(Bind::Free), six]).status, Status::Ok);
    }

    #[test]
    fn a_listener_of_this_process_is_found_by_its_port() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let seen = observe(&[format!("/ip4/127.0.0.1/tcp/{port}"), "/dns/x/tcp/1".to_owned()]);
        let [PortFacts { bind: Bind::InUse(Some(holder)), .. }] = &seen[..] else {
            panic!("{seen:?}")
        };
        assert_eq!(holder.pid, std::process::id());
        drop(taken);
        assert_eq!(observe(&["/ip4/127.0.0.1/tcp/0".to_owned()])[0].bind, Bind::Free);
    }

    #[test]
    fn what_the_system_refuses_is_told_apart() {
        use nix::libc::{EACCES, EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT, EIO};
        let of = |code| refused(&io::Error::from_raw_os_error(code), || None);
        assert_eq!(of(EADDRINUSE), Bind::InUse(None));
        assert_eq!(of(EACCES), Bind::Denied);
        assert_eq!([EADDRNOTAVAIL, EAFNOSUPPORT].map(of), [Bind::NoAddress, Bind::NoAddress]);
        assert!(matches!(of(EIO), Bind::Refused(_)));
    }

    #[test]
    fn tables_of_sockets_are_read_whatever_they_hold() {
        let table = "  sl  local_address rem_address   st ...\n\
             0: 0100007F:7A69 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n\
             1: 0100007F:7A69 00000000:0000 01 00000000:00000000 00:00000000 00000000     0        0 4712 1\n\
             nonsense\n 2: x:y\n";
        assert_eq!(listeners(table, 31337), [4711]);
        assert_eq!(listeners(table, 1), [0; 0]);
    }
}
