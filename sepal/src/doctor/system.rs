//! The machine: kernel, limits, shared memory, memory.

use std::path::Path;

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::statvfs::statvfs;
use shared::sandbox::Support;
use shared::shm::segment::MemfdSegment;
use supervisor::{sizing, spawn};

use super::check::CheckVerdict;

/// Memory below which only the smallest blocks fit beside the processes.
const LITTLE_MEMORY: u64 = 1 << 30;
/// Memory below which not even the processes fit.
const TOO_LITTLE_MEMORY: u64 = 256 << 20;
/// Threads and processes that a server may need: its own, and those of a worker for each device.
const LEAST_TASKS: u64 = 256;
/// Free space of /dev/shm that the small segments pass through.
const LEAST_SHM: u64 = 1 << 20;

/// What the kernel offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFacts {
    /// Its release, such as 6.8.0-31-generic.
    pub release: String,
    /// What Sepal needs and the kernel refuses, with its reason.
    pub missing: Vec<(&'static str, String)>,
    /// Whether it measures the pressure on memory.
    pub has_psi: bool,
}

/// Asks the kernel for one of each.
pub fn kernel() -> KernelFacts {
    let text = |path: &str| std::fs::read_to_string(path);
    let refused = |name, outcome: Result<(), String>| outcome.err().map(|why| (name, why));
    let pid = nix::unistd::getpid();
    let missing = [
        refused(
            "sealed memory files (memfd_create)",
            MemfdSegment::create("sepal-doctor", 4096)
                .map(drop)
                .map_err(|e| shared::error_chain::with_causes(&e)),
        ),
        refused(
            "event descriptors (eventfd)",
            EventFd::from_flags(EfdFlags::EFD_CLOEXEC).map(drop).map_err(|e| e.to_string()),
        ),
        refused(
            "process descriptors (pidfd_open)",
            spawn::pidfd_open(pid).map(drop).map_err(|e| e.to_string()),
        ),
    ];
    KernelFacts {
        release: text("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        missing: missing.into_iter().flatten().collect(),
        has_psi: text("/proc/pressure/memory").is_ok(),
    }
}

/// Sepal needs Linux 5.3 (pidfd_open); containers may refuse more.
pub fn judge_kernel(facts: &KernelFacts) -> CheckVerdict {
    let KernelFacts { release, missing, has_psi } = facts;
    if let Some((what, why)) = missing.first() {
        return CheckVerdict::problem(
            format!("Linux {release} refuses {what}: {why}"),
            "use Linux 5.3 or newer, and allow the call in the container's seccomp profile",
        );
    }
    match has_psi {
        true => {
            CheckVerdict::ok(format!("Linux {release} has sealed memory, eventfd, pidfd and PSI"))
        }
        false => CheckVerdict::warning(
            format!("Linux {release} does not tell the pressure on memory (/proc/pressure/memory)"),
            "boot with psi=1, so that Sepal sees a lack of memory before the OOM killer does",
        ),
    }
}

/// Whether children can be confined.
pub fn judge_sandbox(support: Support) -> CheckVerdict {
    match support.check() {
        Ok(()) => CheckVerdict::ok(format!("the kernel confines {support}")),
        Err(error) => CheckVerdict::warning(
            format!("children are confined less than they could be: {error}"),
            "use Linux 5.13 or newer with Landlock among its security modules (lsm=landlock,...)",
        ),
    }
}

/// Limits of this process, which a server started from the same place has too. `None`: unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitFacts {
    /// Most open files, which a process may raise to.
    pub files: Option<u64>,
    /// Open files that `serve` wants (`--increase_file_limit`).
    pub wanted_files: u64,
    /// Most bytes locked in memory.
    pub locked: Option<u64>,
    /// Most processes and threads of the user.
    pub tasks: Option<u64>,
}

/// Reads them; what cannot be read counts as unlimited.
pub fn limits(wanted_files: u64) -> LimitFacts {
    let of = |resource| getrlimit(resource).ok();
    let finite = |limit: u64| Some(limit).filter(|limit| *limit != RLIM_INFINITY);
    LimitFacts {
        files: of(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| finite(soft.max(hard))),
        wanted_files,
        locked: of(Resource::RLIMIT_MEMLOCK).and_then(|(soft, _)| finite(soft)),
        tasks: of(Resource::RLIMIT_NPROC).and_then(|(soft, _)| finite(soft)),
    }
}

/// Whether they suffice.
pub fn judge_limits(facts: &LimitFacts) -> CheckVerdict {
    let shown = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| n.to_string());
    let LimitFacts { files, wanted_files, locked, tasks } = *facts;
    if let Some(files) = files.filter(|files| *files < wanted_files) {
        return CheckVerdict::warning(
            format!("at most {files} open files are allowed, and serve wants {wanted_files}"),
            format!(
                "raise the limit (ulimit -n {wanted_files}, or LimitNOFILE={wanted_files} in the unit), \
                 or give --increase_file_limit {files}"
            ),
        );
    }
    if let Some(tasks) = tasks.filter(|tasks| *tasks < LEAST_TASKS) {
        return CheckVerdict::warning(
            format!("at most {tasks} processes and threads of this user are allowed"),
            format!(
                "raise the limit to {LEAST_TASKS} or more (ulimit -u, or LimitNPROC= in the unit)"
            ),
        );
    }
    CheckVerdict::ok(format!(
        "open files {}, processes and threads {}, locked memory {}",
        shown(files),
        shown(tasks),
        locked.map_or("unlimited".to_owned(), size)
    ))
}

/// What /dev/shm offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmFacts {
    /// Bytes free, or why no file can be made there.
    pub free: Result<u64, String>,
}

/// Makes a file in `folder`, which goes at once.
pub fn shm(folder: &Path) -> ShmFacts {
    let made = tempfile::tempfile_in(folder).and_then(|_| Ok(statvfs(folder)?));
    let free = |disk: nix::sys::statvfs::Statvfs| {
        let (blocks, size): (u64, u64) = (disk.blocks_available(), disk.fragment_size());
        blocks.saturating_mul(size)
    };
    ShmFacts { free: made.map(free).map_err(|error| error.to_string()) }
}

/// Only the small segments pass through /dev/shm; tensors do not.
pub fn judge_shm(facts: &ShmFacts) -> CheckVerdict {
    match &facts.free {
        Err(why) => CheckVerdict::problem(
            format!("no file can be made in /dev/shm: {why}"),
            "mount a tmpfs there that this user can write to (containers: --tmpfs /dev/shm)",
        ),
        Ok(free) if *free < LEAST_SHM => CheckVerdict::problem(
            format!("/dev/shm has {} free", size(*free)),
            format!("remove files there; {} are needed", size(LEAST_SHM)),
        ),
        Ok(free) => CheckVerdict::ok(format!("/dev/shm has {} free", size(*free))),
    }
}

/// Memory of the machine and of the control groups around this process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryFacts {
    /// Memory of the machine.
    pub total: u64,
    /// What this process and its children may still take.
    pub available: u64,
    /// The least limit of a control group.
    pub group_limit: Option<u64>,
    /// Swap space.
    pub swap: u64,
    /// Of which so much is used.
    pub swap_used: u64,
}

/// Reads them; `None` where /proc does not tell.
pub fn memory() -> Option<MemoryFacts> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let of = |name| meminfo(&text, name);
    let limit = |folder: std::path::PathBuf| {
        std::fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse().ok()
    };
    let swap = of("SwapTotal:").unwrap_or(0);
    Some(MemoryFacts {
        total: of("MemTotal:")?,
        available: sizing::available_bytes()?,
        group_limit: sizing::control_groups().filter_map(limit).min(),
        swap,
        swap_used: swap.saturating_sub(of("SwapFree:").unwrap_or(0)),
    })
}

fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Whether blocks fit beside the processes. How many, `sepal serve` says with its arithmetic.
pub fn judge_memory(facts: Option<MemoryFacts>) -> CheckVerdict {
    let Some(MemoryFacts { total, available, group_limit, swap, swap_used }) = facts else {
        return CheckVerdict::warning("/proc/meminfo does not tell", "give --max_memory");
    };
    let limit = group_limit.filter(|limit| *limit < total);
    let of = match limit {
        Some(limit) => format!("{} of which a control group allows {}", size(total), size(limit)),
        None => size(total),
    };
    let found = format!("{} of {of} are available, swap {}", size(available), size(swap));
    let more = match limit {
        Some(_) => "raise the limit of the control group (MemoryMax=, docker run --memory)",
        None => "end other programs, or add memory",
    };
    if available < TOO_LITTLE_MEMORY {
        return CheckVerdict::problem(found, more);
    }
    if available < LITTLE_MEMORY {
        return CheckVerdict::warning(format!("{found}: few blocks fit"), more);
    }
    if swap_used > LITTLE_MEMORY && available < total / 10 {
        return CheckVerdict::warning(
            format!(
                "{found}, of which {} are used: weights that are swapped out are slow",
                size(swap_used)
            ),
            "end other programs, or give --max_memory",
        );
    }
    CheckVerdict::ok(found)
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} bytes"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    fn is(verdict: &CheckVerdict, status: Status, words: &[&str]) {
        let text = format!("{}; {}", verdict.found, verdict.advice.as_deref().unwrap_or_default());
        assert_eq!(verdict.status, status, "{text}");
        assert_eq!(verdict.advice.is_some(), status != Status::Ok, "{text}");
        for word in words {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
    }

    #[test]
    fn a_kernel_without_what_sepal_uses_is_a_problem() {
        let good = KernelFacts { release: "6.8.0".into(), missing: Vec::new(), has_psi: true };
        is(&judge_kernel(&good), Status::Ok, &["6.8.0"]);
        let old = KernelFacts { missing: vec![("pidfd", "ENOSYS".into())], ..good.clone() };
        is(&judge_kernel(&old), Status::Problem, &["pidfd", "ENOSYS", "5.3", "seccomp"]);
        is(&judge_kernel(&KernelFacts { has_psi: false, ..good }), Status::Warning, &["psi=1"]);
        assert_eq!(kernel().missing, [], "the kernel that runs the tests runs Sepal");
    }

    #[test]
    fn limits_below_what_serve_wants_are_named_with_the_way_to_raise_them() {
        let good =
            LimitFacts { files: None, wanted_files: 4096, locked: Some(8 << 20), tasks: None };
        is(&judge_limits(&good), Status::Ok, &["open files unlimited", "8.0 MiB"]);
        let few = LimitFacts { files: Some(1024), ..good };
        is(&judge_limits(&few), Status::Warning, &["1024", "LimitNOFILE=4096"]);
        is(
            &judge_limits(&LimitFacts { tasks: Some(50), ..good }),
            Status::Warning,
            &["50", "ulimit -u"],
        );
    }

    #[test]
    fn shared_memory_must_be_there_and_not_full() {
        is(&judge_shm(&ShmFacts { free: Ok(64 << 20) }), Status::Ok, &["64.0 MiB"]);
        is(&judge_shm(&ShmFacts { free: Ok(4096) }), Status::Problem, &["4.0 KiB"]);
        let none = shm(Path::new("/nonexistent"));
        is(&judge_shm(&none), Status::Problem, &["No such file", "tmpfs"]);
        assert!(shm(Path::new("/dev/shm")).free.is_ok());
    }

    #[test]
    fn memory_is_judged_within_the_control_group() {
        let good = MemoryFacts { total: 64 << 30, available: 50 << 30, ..MemoryFacts::default() };
        is(&judge_memory(Some(good)), Status::Ok, &["50.0 GiB of 64.0 GiB"]);
        let little = MemoryFacts { available: 600 << 20, ..good };
        is(&judge_memory(Some(little)), Status::Warning, &["600.0 MiB", "end other programs"]);
        let group = MemoryFacts { available: 100 << 20, group_limit: Some(1 << 30), ..good };
        is(&judge_memory(Some(group)), Status::Problem, &["allows 1.0 GiB", "MemoryMax="]);
        let swapped = MemoryFacts { available: 4 << 30, swap: 8 << 30, swap_used: 2 << 30, ..good };
        is(&judge_memory(Some(swapped)), Status::Warning, &["2.0 GiB are used", "--max_memory"]);
        is(&judge_memory(None), Status::Warning, &["--max_memory"]);
        let now = memory().unwrap();
        assert!(now.total >= now.available && now.available > 0, "{now:?}");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!([size(12), size(1536), size(3 << 30)], ["12 bytes", "1.5 KiB", "3.0 GiB"]);
    }
}
