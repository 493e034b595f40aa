//! What each child may do. Everything else that the table names is refused with EPERM or EACCES; SECURITY.md
//! shows it for people.

use caps::Capability;
use nix::libc;

use super::SandboxSubject;

/// System calls that are refused, and to whom.
#[derive(Debug)]
pub struct SyscallRefusal {
    /// What they do, for people.
    pub what: &'static str,
    pub calls: &'static [libc::c_long],
    /// Whom they are refused.
    pub whom: &'static [SandboxSubject],
    /// Whether they are refused where the driver of a GPU is open, too.
    pub binds_driver: bool,
}

const ALL: &[SandboxSubject] =
    &[SandboxSubject::Netd, SandboxSubject::Worker, SandboxSubject::Prepare, SandboxSubject::Page];

/// System calls that are refused whatever their arguments are.
pub const REFUSALS: &[SyscallRefusal] = &[
    SyscallRefusal {
        what: "start a program",
        calls: &[libc::SYS_execve, libc::SYS_execveat],
        whom: ALL,
        binds_driver: true,
    },
    SyscallRefusal {
        what: "look into other processes",
        calls: &[
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_process_madvise,
            libc::SYS_pidfd_getfd,
            libc::SYS_kcmp,
        ],
        whom: ALL,
        binds_driver: true,
    },
    SyscallRefusal {
        what: "mount, change roots and namespaces",
        calls: &[
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_chroot,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_open_tree,
            libc::SYS_move_mount,
            libc::SYS_fsopen,
            libc::SYS_fsconfig,
            libc::SYS_fsmount,
            libc::SYS_fspick,
            libc::SYS_mount_setattr,
            libc::SYS_open_by_handle_at,
        ],
        whom: ALL,
        binds_driver: true,
    },
    SyscallRefusal {
        what: "reach rarely used parts of the kernel",
        calls: &[
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_io_uring_setup,
            libc::SYS_io_uring_enter,
            libc::SYS_io_uring_register,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_delete_module,
            libc::SYS_kexec_load,
            libc::SYS_reboot,
            libc::SYS_swapon,
            libc::SYS_swapoff,
            libc::SYS_acct,
            libc::SYS_quotactl,
            libc::SYS_settimeofday,
            libc::SYS_clock_settime,
            libc::SYS_clock_adjtime,
            libc::SYS_adjtimex,
            libc::SYS_sethostname,
            libc::SYS_setdomainname,
            libc::SYS_vhangup,
        ],
        whom: ALL,
        binds_driver: true,
    },
    SyscallRefusal {
        what: "change the length of a file or of shared memory",
        calls: &[libc::SYS_ftruncate, libc::SYS_truncate, libc::SYS_fallocate],
        whom: &[SandboxSubject::Netd, SandboxSubject::Worker],
        // It makes memory of its own.
        binds_driver: false,
    },
];

/// Families of sockets that a child may open. The control channel needs local ones after an upgrade; a
/// driver asks the kernel for the links between cards.
pub fn socket_families(who: SandboxSubject, has_driver: bool) -> &'static [libc::c_int] {
    match (who, has_driver) {
        (SandboxSubject::Worker, false) => &[libc::AF_UNIX],
        (SandboxSubject::Worker, true) => &[libc::AF_UNIX, libc::AF_NETLINK],
        (SandboxSubject::Netd | SandboxSubject::Prepare | SandboxSubject::Page, _) => {
            &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK]
        }
    }
}

/// The user and group of a child where the supervisor is the superuser. No system gives these numbers to
/// anybody (systemd, "Users, Groups, UIDs and GIDs on systemd Systems").
pub fn user(who: SandboxSubject) -> u32 {
    match who {
        SandboxSubject::Netd => 60_600,
        SandboxSubject::Worker => 60_601,
        SandboxSubject::Prepare => 60_602,
        SandboxSubject::Page => 60_603,
    }
}

/// Rights of the superuser that a child keeps if it is started with them. Files belong to the operator, and
/// Landlock says which; netd listens on low ports if it is told to; a driver pins memory.
pub fn rights(who: SandboxSubject, has_driver: bool) -> &'static [Capability] {
    use Capability::{
        CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_IPC_LOCK, CAP_NET_BIND_SERVICE,
    };
    match (who, has_driver) {
        (SandboxSubject::Netd, _) => &[CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_NET_BIND_SERVICE],
        (SandboxSubject::Worker, false) => &[CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH],
        (SandboxSubject::Worker, true) => &[CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_IPC_LOCK],
        (SandboxSubject::Prepare | SandboxSubject::Page, _) => {
            &[CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER]
        }
    }
}

/// What every process reads: libraries and their cache, the time zone, its own figures in /proc
/// and the machine's.
pub const READ_BY_ALL: &[&str] = &[
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/lib",
    "/lib64",
    "/proc/cpuinfo",
    "/proc/driver",
    "/proc/filesystems",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/pressure",
    "/proc/self",
    "/proc/stat",
    "/proc/sys",
    "/proc/uptime",
    "/proc/version",
    "/sys/devices/system",
    "/sys/fs/cgroup",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
];

/// What finding hosts and checking certificates takes.
pub const READ_BY_NETD: &[&str] = &[
    "/etc/ca-certificates",
    "/etc/crypto-policies",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/pki",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl",
    "/run/NetworkManager",
    "/run/nscd",
    "/run/resolvconf",
    "/run/systemd/resolve",
    "/usr/local/share/ca-certificates",
    "/usr/share/ca-certificates",
];

/// What prepare reads, beyond which nobody knows where a model's links lead; and what the driver of a GPU
/// reads, whose files no list of ours would name for all its versions.
pub const READ_EVERYTHING: &[&str] = &["/"];

/// What every process may write to.
pub const WRITTEN_BY_ALL: &[&str] = &["/dev/null"];

/// Nodes of devices, and where the driver keeps what it compiled.
pub const WRITTEN_BY_DRIVER: &[&str] = &["/dev"];

/// Folders and files that a child may read whatever the model is.
pub fn read_by(who: SandboxSubject, has_driver: bool) -> Vec<&'static str> {
    let more = match who {
        SandboxSubject::Prepare => READ_EVERYTHING,
        _ if has_driver => READ_EVERYTHING,
        SandboxSubject::Netd | SandboxSubject::Page => READ_BY_NETD,
        SandboxSubject::Worker => &[],
    };
    [READ_BY_ALL, more].concat()
}

/// Folders and files that a child may change whatever the model is.
pub fn written_by(has_driver: bool) -> Vec<&'static str> {
    [WRITTEN_BY_ALL, if has_driver { WRITTEN_BY_DRIVER } else { &[] }].concat()
}
