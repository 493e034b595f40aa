//! What the processes of a running server are held to, seen from outside.

use std::process::Command;
use std::sync::Arc;

use crate::harness::demo::demo_model;
use crate::harness::rights::{ignored, may_look_into_children};
use crate::harness::{SEPAL, Sepal, children_of, command_line, serve_args, wait_for};
use nix::unistd::Pid;
use shared::sandbox::Support;

const SECRET: &str = "hf_a_secret_of_the_operator";

fn start(more: &[&str]) -> Sepal {
    let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
    let mut command = Command::new(SEPAL);
    command.env("HF_TOKEN", SECRET).env("NOT_FOR_CHILDREN", SECRET);
    let model = demo_model();
    Sepal::start_by(command, dir, &serve_args(&model, "demo", &[&["--new_swarm"], more].concat()))
}

/// What a line of /proc/PID/status says.
fn words(pid: Pid, name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let line = line.unwrap_or_else(|| panic!("{name} in {text}"));
    line.split_whitespace().map(str::to_owned).collect()
}

fn figure(pid: Pid, name: &str) -> u32 {
    words(pid, name)[0].parse().expect("a number")
}

/// Filters of system calls that a confined child has: two, and those of this process (in a container).
fn filters() -> u32 {
    figure(Pid::this(), "Seccomp_filters") + 2
}

/// The process of the page, once it is confined.
fn page_process(sepal: &Sepal) -> Pid {
    wait_for("the process of the page", || {
        let mut children = children_of(sepal.pid()).into_iter();
        let page = children.find(|pid| command_line(*pid).contains(": gateway"))?;
        (figure(page, "Seccomp_filters") == filters()).then_some(page)
    })
}

fn environment(pid: Pid) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).expect("environment");
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn children_are_confined_and_know_no_secret() {
    let support = Support::of_this_kernel();
    if !support.calls {
        return ignored("confined children", "a kernel with seccomp");
    }
    for mode in [&["--web", "0"][..], &["--web", "0", "--sandbox", "require"]] {
        if mode.contains(&"require") && !support.files {
            ignored("--sandbox require", "a kernel with Landlock");
            continue;
        }
        let sepal = start(mode);
        sepal.wait_online();
        sepal.wait_line("page of the swarm at /", 1);
        page_process(&sepal);
        assert_eq!(sepal.status()[0]["sandbox"], support.to_string().as_str());
        let said = if support.files { "children are confined" } else { "cannot restrict files" };
        assert!(sepal.log().contains(said), "{}", sepal.log());
        let children = children_of(sepal.pid());
        assert_eq!(children.len(), 3, "netd, a worker and the page");
        let mut users = Vec::new();
        let may_look = may_look_into_children("environments have no secret");
        for child in children {
            assert_eq!((figure(child, "Seccomp"), figure(child, "NoNewPrivs")), (2, 1), "{child}");
            assert_eq!(figure(child, "Seccomp_filters"), filters(), "{child}");
            let (user, rights) = (words(child, "Uid"), words(child, "CapPrm"));
            if nix::unistd::geteuid().is_root() {
                // Real, effective, saved, of files: a child's own, which the others do not share.
                assert!(user.iter().all(|one| *one == user[0]) && user[0] != "0", "{user:?}");
                users.push(user);
            }
            let rights = u64::from_str_radix(&rights[0], 16).expect("a number");
            // Of the superuser's rights: CAP_KILL, CAP_SETUID and CAP_SYS_ADMIN.
            assert_eq!(rights & (1 << 5 | 1 << 7 | 1 << 21), 0, "{child}: {rights:x}");
            if may_look {
                let environment = environment(child);
                assert!(!environment.contains(SECRET), "{environment}");
            }
            assert!(!command_line(child).contains(SECRET));
        }
        let all = users.len();
        users.sort();
        users.dedup();
        assert_eq!(users.len(), all, "one user for two children");
        let own = figure(Pid::this(), "Seccomp_filters");
        assert_eq!(figure(sepal.pid(), "Seccomp_filters"), own, "the supervisor starts others");
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}

#[test]
fn the_sandbox_can_be_switched_off_and_the_log_says_so() {
    let sepal = start(&["--sandbox", "off"]);
    sepal.wait_online();
    assert_eq!(sepal.status()[0]["sandbox"], "off");
    assert!(sepal.log().contains("--sandbox off"), "{}", sepal.log());
    for child in children_of(sepal.pid()) {
        let own = figure(Pid::this(), "Seccomp_filters");
        assert_eq!(figure(child, "Seccomp_filters"), own, "{child}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}
