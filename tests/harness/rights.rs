//! What a machine or a user lacks for a check: it is said on the output, and the check is left out.

/// Says that `check` is left out since `needs` is missing, whether or not the test's output is captured.
pub fn ignored(check: &str, needs: &str) {
    testkit::skip::ignored(check, &format!("needs {needs}"));
}

/// Whether this process may read `/proc/PID/{maps,environ,exe,fd,...}` of the children of a server, which are
/// undumpable; if not, says that `check` is left out.
pub fn may_look_into_children(check: &str) -> bool {
    const CAP_SYS_PTRACE: u32 = 19;
    let held = has_capability(CAP_SYS_PTRACE);
    if !held {
        ignored(check, "CAP_SYS_PTRACE");
    }
    held
}

fn has_capability(number: u32) -> bool {
    let rights = own_status("CapEff");
    u64::from_str_radix(&rights, 16).is_ok_and(|rights| rights & (1 << number) != 0)
}

/// The first word of a line of this process' /proc/self/status.
pub fn own_status(name: &str) -> String {
    let text = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().next()).unwrap_or_default().to_owned()
}

/// Whether a program is installed; if not, says that `check` is left out.
pub fn has_program(check: &str, name: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).any(|folder| folder.join(name).is_file());
    if !found {
        ignored(check, name);
    }
    found
}
