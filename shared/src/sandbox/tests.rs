//! Each child, tried from inside: a process of its own enters the sandbox and does what it may and what it
//! may not.

use std::collections::BTreeMap;
use std::fs;
use std::io::IoSliceMut;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use caps::{CapSet, Capability};
use nix::sched::CloneFlags;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use super::*;
use crate::test_skips::ignored;

const VARIABLE: &str = "SEPAL_TEST_SANDBOX";

/// What a child tries, by name, and whether it could.
type Outcomes = BTreeMap<String, bool>;

/// Files of a test: one that may be read, a folder that may be changed, and one of somebody else.
struct Site {
    root: tempfile::TempDir,
}

impl Site {
    fn new() -> Site {
        let site = Site { root: tempfile::tempdir().unwrap() };
        fs::write(site.path("weights"), "weights").unwrap();
        fs::create_dir(site.path("mine")).unwrap();
        fs::create_dir(site.path("theirs")).unwrap();
        fs::write(site.path("theirs/secret"), "secret").unwrap();
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// What a process that is confined like this can do.
    fn outcomes(&self, who: SandboxSubject, mode: SandboxMode, has_driver: bool) -> Outcomes {
        let confinement = Confinement {
            mode,
            readable: vec![self.path("weights")],
            writable: vec![self.path("mine")],
            has_driver,
        };
        let order = serde_json::to_string(&(who, confinement, self.root.path())).unwrap();
        let output = Command::new("/proc/self/exe")
            .args([
                "--ignored",
                "--exact",
                "sandbox::tests::child",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(VARIABLE, order)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find_map(|line| line.split_once("OUTCOMES ")).map(|(_, json)| json);
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        serde_json::from_str(line.unwrap_or_else(|| panic!("{text}{complaint}"))).unwrap()
    }
}

/// Whether a file of /proc says anything; without the right to look it is empty.
fn is_shown(path: &str) -> bool {
    fs::read(path).is_ok_and(|bytes| !bytes.is_empty())
}

fn attempts(root: &Path, parent: Pid) -> Vec<(&'static str, bool)> {
    let remote = [RemoteIoVec { base: 0x1000, len: 1 }];
    let mut byte = [0];
    // What the kernel answers about an address that is not mapped, once it looks at all.
    let looks = process_vm_readv(parent, &mut [IoSliceMut::new(&mut byte)], &remote);
    let opens = |family| {
        let kind = SockType::Datagram;
        socket(family, kind, SockFlag::empty(), None).is_ok()
    };
    let resizes = |size| {
        let memory = memfd_create("test", MFdFlags::empty()).unwrap();
        nix::unistd::ftruncate(&memory, size).is_ok()
    };
    vec![
        ("starts a program", Command::new("/bin/true").status().is_ok()),
        ("reads the weights", fs::read(root.join("weights")).is_ok()),
        ("writes to the weights", fs::write(root.join("weights"), "weights").is_ok()),
        ("reads a secret", fs::read(root.join("theirs/secret")).is_ok()),
        ("lists a folder", fs::read_dir(root.join("theirs")).is_ok()),
        ("makes a file", fs::write(root.join("theirs/new"), "").is_ok()),
        ("makes a file of its own", fs::write(root.join("mine/new"), "").is_ok()),
        (
            "renames a file of its own",
            fs::rename(root.join("mine/new"), root.join("mine/x")).is_ok(),
        ),
        (
            "takes a file away",
            fs::rename(root.join("theirs/secret"), root.join("mine/secret")).is_ok(),
        ),
        ("writes to the null device", fs::write("/dev/null", "x").is_ok()),
        ("reads its own figures", fs::read("/proc/self/status").is_ok()),
        ("listens on a port", TcpListener::bind("127.0.0.1:0").is_ok()),
        ("opens a datagram socket", opens(AddressFamily::Inet6)),
        ("opens a packet socket", opens(AddressFamily::Packet)),
        ("opens a local socket", UnixStream::pair().is_ok() && opens(AddressFamily::Unix)),
        ("changes the length of memory", resizes(4096)),
        ("signals its parent", nix::sys::signal::kill(parent, None).is_ok()),
        ("reads the environment of its parent", is_shown(&format!("/proc/{parent}/environ"))),
        ("looks into the memory of its parent", looks == Err(nix::errno::Errno::EFAULT)),
        ("makes a namespace", nix::sched::unshare(CloneFlags::CLONE_NEWNS).is_ok()),
        ("gives a file away", std::os::unix::fs::chown(root.join("mine/x"), Some(1), None).is_ok()),
        ("is the superuser", nix::unistd::geteuid().is_root()),
        ("starts a thread", std::thread::spawn(|| ()).join().is_ok()),
        ("can be dumped", nix::sys::prctl::get_dumpable().unwrap()),
    ]
}

/// The body of the processes of the tests here.
#[test]
#[ignore = "started by other tests"]
fn child() {
    let order = std::env::var(VARIABLE).expect("started by another test");
    let (who, confinement, root): (SandboxSubject, Confinement, PathBuf) =
        serde_json::from_str(&order).unwrap();
    // As in a role, nothing else runs: the harness of the tests waits.
    enter(who, &confinement).unwrap();
    let made: Outcomes = attempts(&root, nix::unistd::getppid())
        .into_iter()
        .map(|(name, done)| (name.to_owned(), done))
        .collect();
    println!("\nOUTCOMES {}", serde_json::to_string(&made).unwrap());
}

/// What a process that is not confined can do.
const EVERYTHING: [&str; 24] = [
    "starts a program",
    "reads the weights",
    "writes to the weights",
    "reads a secret",
    "lists a folder",
    "makes a file",
    "makes a file of its own",
    "renames a file of its own",
    "takes a file away",
    "writes to the null device",
    "reads its own figures",
    "listens on a port",
    "opens a datagram socket",
    "opens a packet socket",
    "opens a local socket",
    "changes the length of memory",
    "signals its parent",
    "reads the environment of its parent",
    "looks into the memory of its parent",
    "makes a namespace",
    "gives a file away",
    "is the superuser",
    "starts a thread",
    "can be dumped",
];

/// What takes rights that not every user has, or parts that not every kernel has.
const NOT_EVERYWHERE: [&str; 6] = [
    "opens a datagram socket",
    "opens a packet socket",
    "looks into the memory of its parent",
    "makes a namespace",
    "gives a file away",
    "is the superuser",
];

/// What this process can do, which is not confined: it tries, in a thread that ends with its namespace.
fn tried_here() -> Vec<&'static str> {
    let site = Site::new();
    let root = site.root.path().to_owned();
    let tried = std::thread::spawn(move || attempts(&root, Pid::this()));
    let done = tried.join().unwrap().into_iter().filter(|(_, done)| *done).map(|(name, _)| name);
    done.filter(|name| *name != "looks into the memory of its parent" || looks_into_parents())
        .collect()
}

/// Whether the kernel lets a process look into one that it has not started (man 5 proc,
/// `/proc/sys/kernel/yama/ptrace_scope`).
fn looks_into_parents() -> bool {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    match scope.as_deref().map(str::trim) {
        Err(_) | Ok("0") => true,
        Ok("1" | "2") => has_right(Capability::CAP_SYS_PTRACE),
        Ok(_) => false,
    }
}

fn has_right(right: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, right).unwrap()
}

/// Whether children of this process get a user of their own.
fn children_change_user() -> bool {
    // Where only some users exist, theirs may not.
    let has = |map: &str, number: u32| {
        let text = fs::read_to_string(map).unwrap();
        text.lines().any(|line| {
            let numbers: Vec<u64> =
                line.split_whitespace().map(|word| word.parse().unwrap()).collect();
            (numbers[0]..numbers[0] + numbers[2]).contains(&u64::from(number))
        })
    };
    let users = [
        SandboxSubject::Netd,
        SandboxSubject::Worker,
        SandboxSubject::Prepare,
        SandboxSubject::Page,
    ]
    .map(table::user);
    let maps = ["/proc/self/uid_map", "/proc/self/gid_map"];
    rights::OF_WHO_CHANGES.into_iter().all(has_right)
        && fs::read_to_string("/proc/self/setgroups").is_ok_and(|text| text.trim() == "allow")
        && users.iter().all(|user| maps.iter().all(|map| has(map, *user)))
}

/// What every child can do.
const COMMON: [&str; 7] = [
    "reads the weights",
    "makes a file of its own",
    "renames a file of its own",
    "writes to the null device",
    "reads its own figures",
    "opens a local socket",
    "starts a thread",
];

fn assert_can(outcomes: &Outcomes, expected: &[&str], who: &str) {
    // Who reads all of /proc is kept from this by some kernels and not by others.
    let by_kernel = |name: &str| {
        expected.contains(&"reads a secret")
            && !expected.contains(&"starts a program")
            && name == "reads the environment of its parent"
    };
    let done = outcomes.iter().filter(|(_, done)| **done).map(|(name, _)| &**name);
    let can: Vec<&str> = done.filter(|name| !by_kernel(name)).collect();
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    assert_eq!(can, expected, "{who}");
}

const EACH_CHILD: &str = "sandbox::tests::each_child_can_do_its_work_and_nothing_else";
const UNCONFINED: &str = "sandbox::tests::what_is_refused_works_where_nothing_is_confined";

#[test]
fn each_child_can_do_its_work_and_nothing_else() {
    if Support::of_this_kernel().check().is_err() {
        return ignored(EACH_CHILD, &format!("this kernel confines {}", Support::of_this_kernel()));
    }
    let free = Site::new().outcomes(SandboxSubject::Netd, SandboxMode::Off, false);
    for (name, _) in free.iter().filter(|(_, done)| !**done) {
        ignored(EACH_CHILD, &format!("\"{name}\", which no process here can"));
    }
    // A child has the user of its parent, unless that is the superuser and may change it.
    let mut kept = Vec::new();
    let changes_user = children_change_user();
    if free["is the superuser"] && !changes_user {
        ignored(
            EACH_CHILD,
            "a user of its own: this process of the superuser may not change users",
        );
        kept.push("is the superuser");
    }
    let net = ["listens on a port", "opens a datagram socket"];
    let netd = [&COMMON[..], &net].concat();
    let prepare =
        [&netd[..], &["reads a secret", "lists a folder", "changes the length of memory"]];
    let driver = ["reads a secret", "lists a folder", "changes the length of memory"];
    let signals = ["signals its parent"];
    let signals = if changes_user { &signals[..0] } else { &signals };
    let driver = [&driver[..], signals].concat();
    for mode in [SandboxMode::On, SandboxMode::Require] {
        let check = |who, has_driver, can: &[&'static str], name| {
            let can = can.iter().chain(&kept).copied().filter(|what| free[*what]);
            let can: Vec<&str> = can.collect();
            assert_can(&Site::new().outcomes(who, mode, has_driver), &can, name);
        };
        check(SandboxSubject::Netd, false, &netd, "netd");
        check(SandboxSubject::Worker, false, &COMMON, "worker");
        check(SandboxSubject::Prepare, false, &prepare.concat(), "prepare");
        let page = [&netd[..], &["changes the length of memory"]].concat();
        check(SandboxSubject::Page, false, &page, "page");
        check(SandboxSubject::Worker, true, &[&COMMON[..], &driver].concat(), "worker of a GPU");
    }
}

#[test]
fn what_is_refused_works_where_nothing_is_confined() {
    let can = tried_here();
    for what in EVERYTHING.iter().filter(|what| !can.contains(*what)) {
        assert!(NOT_EVERYWHERE.contains(what), "every process can: {what}");
        ignored(UNCONFINED, &format!("\"{what}\", which no process here can"));
    }
    for who in [
        SandboxSubject::Netd,
        SandboxSubject::Worker,
        SandboxSubject::Prepare,
        SandboxSubject::Page,
    ] {
        let outcomes = Site::new().outcomes(who, SandboxMode::Off, false);
        assert_can(&outcomes, &can, &format!("{who:?}"));
    }
}

/// Kernels for tiles ask the kernel for them when a backend is made, after the sandbox was entered.
#[cfg(target_arch = "x86_64")]
#[test]
fn asking_for_the_state_of_tiles_is_refused_to_nobody() {
    let is_refused =
        |refusal: &table::SyscallRefusal| refusal.calls.contains(&nix::libc::SYS_arch_prctl);
    assert!(!table::REFUSALS.iter().any(is_refused));
}

#[test]
fn modes_have_names() {
    for (text, mode) in
        [("off", SandboxMode::Off), ("on", SandboxMode::On), ("require", SandboxMode::Require)]
    {
        assert_eq!(text.parse(), Ok(mode));
    }
    assert!("yes".parse::<SandboxMode>().unwrap_err().contains("off, on or require"));
}
