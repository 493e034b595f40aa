//! Which code starts processes.

use crate::source::{strip, words};

/// Calls of the system that start one.
const CALLS: [&str; 7] =
    ["fork", "vfork", "clone3", "execv", "execve", "posix_spawn", "posix_spawnp"];

/// Whether code, without comments and literals, names what starts a process: `Command` of a module
/// `process` (of std or tokio), or a call of the system.
pub fn starts_one(code: &str) -> bool {
    let names_command =
        code.match_indices("process::").any(|(at, path)| names(&code[at + path.len()..]));
    names_command || words(code).any(|word| CALLS.contains(&word))
}

/// Whether the names that a path goes on with, one or several in braces, include `Command` or all.
fn names(rest: &str) -> bool {
    let end = match rest.strip_prefix('{') {
        Some(list) => list.find('}').map_or(rest.len(), |at| at + 1),
        None => rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len()),
    };
    rest.starts_with('*') || words(&rest[..end]).any(|word| word == "Command")
}

#[test]
fn whoever_starts_a_process_is_found() {
    for code in [
        "use std::process::Command;",
        "use std::process::{Child, Command as Process};",
        "std::process::Command::new(name).spawn()",
        "use tokio::process::{\n    Child,\n    Command,\n};",
        "use std::process::*;",
        "unsafe { nix::unistd::fork() }",
    ] {
        assert!(starts_one(&strip(code)), "{code}");
    }
    for code in [
        "use std::process::{Child, ExitCode}; use crate::executor::Command;",
        "std::process::id(); // std::process::Command",
        "std::thread::Builder::new().spawn(run)",
        "let fork_point = 3;",
    ] {
        assert!(!starts_one(&strip(code)), "{code}");
    }
}
