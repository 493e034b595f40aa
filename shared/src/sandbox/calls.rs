//! System calls that a process may make, held by seccomp: those of [`table`] fail with EPERM.

use std::collections::BTreeMap;
use std::path::Path;

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter, sock_filter,
};

use super::{Confinement, SandboxSubject, table};

/// Whether the kernel filters system calls.
pub(super) fn is_supported() -> bool {
    Path::new("/proc/sys/kernel/seccomp/actions_avail").exists()
}

/// Filters the calls of this thread, and of all that it starts.
pub(super) fn filter(who: SandboxSubject, confinement: &Confinement) -> Result<(), String> {
    let program = program(who, confinement)?;
    // The second filter is asked too; the strictest answer counts.
    apply_filter(&program).map_err(|error| error.to_string())?;
    apply_filter(&other_numbers()).map_err(|error| error.to_string())
}

fn program(who: SandboxSubject, confinement: &Confinement) -> Result<BpfProgram, String> {
    let failed = |error: seccompiler::BackendError| error.to_string();
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = table::REFUSALS
        .iter()
        .filter(|refusal| refusal.whom.contains(&who))
        .filter(|refusal| refusal.binds_driver || !confinement.has_driver)
        .flat_map(|refusal| refusal.calls)
        .map(|call| (*call, Vec::new()))
        .collect();
    let families = table::socket_families(who, confinement.has_driver);
    let is_other = families
        .iter()
        .map(|family| {
            let family = u64::from(family.unsigned_abs());
            SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family)
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    rules.insert(libc::SYS_socket, vec![SeccompRule::new(is_other).map_err(failed)?]);
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(failed)?;
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).map_err(failed)?;
    filter.try_into().map_err(failed)
}

/// Refuses the numbers that x86-64 has for programs with short pointers: the same calls under other
/// names, which the first filter does not know.
fn other_numbers() -> BpfProgram {
    const X32_BIT: u32 = 0x4000_0000;
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let refuse = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    vec![
        step(LOAD_NUMBER, 0, 0, 0),
        step(JUMP_IF_AT_LEAST, 0, 1, X32_BIT),
        step(RETURN, 0, 0, refuse),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}
