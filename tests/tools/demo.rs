//! `sepal demo` is ended in the middle: its servers, their processes and their shared memory end
//! with it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::pipe::{Messages, one_message_pipe};
use crate::harness::{SEPAL, alive, children_of, command_line, wait_for};

/// Exit code of a demo that was stopped before its end, as `sepal --help` tells.
const STOPPED: i32 = 1;

struct Demo {
    child: Child,
    out: BufReader<Messages>,
    /// Where its temporary folder is made.
    temporary: tempfile::TempDir,
}

/// Processes below a demo.
struct Below {
    processes: Vec<Pid>,
}

impl Demo {
    /// A demo whose text waits for who reads it.
    fn start() -> Demo {
        let temporary = tempfile::tempdir().expect("temporary folder");
        let (out, stdout) = one_message_pipe();
        let child = Command::new(SEPAL)
            .args(["demo", "--max_new_tokens", "1800"])
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(Stdio::null())
            .spawn()
            .expect("start sepal demo");
        Demo { child, out, temporary }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    fn wait_line(&mut self, text: &str) {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            let read = self.out.read_line(&mut line).expect("read the demo");
            assert!(read > 0, "the demo ended before it said {text:?}");
        }
    }

    /// Waits until both servers serve and the first text of the answer is there.
    fn wait_text(&mut self) {
        self.wait_line("both are ONLINE");
        let mut text = [0; 24];
        self.out.read_exact(&mut text).expect("text of the demo");
    }

    fn below(&self) -> Below {
        let servers = children_of(self.pid());
        assert_eq!(servers.len(), 2, "two servers");
        // The processes that prepared their blocks may end a moment later.
        let children = wait_for("netd and a worker of each", || {
            let children: Vec<Pid> =
                servers.iter().flat_map(|server| children_of(*server)).collect();
            (children.len() == 4).then_some(children)
        });
        Below { processes: [servers, children].concat() }
    }

    fn files_left(&self) -> usize {
        std::fs::read_dir(self.temporary.path()).expect("list the temporary folder").count()
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Below {
    fn wait_gone(&self) {
        for pid in &self.processes {
            wait_for(&format!("the end of {}", command_line(*pid)), || {
                (!alive(*pid)).then_some(())
            });
        }
        let is_ours = |name: &str| {
            self.processes.iter().any(|pid| name.starts_with(&format!("sepal-mapping-{pid}-")))
        };
        let names = std::fs::read_dir("/dev/shm").expect("list shared memory");
        let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let left: Vec<String> = names.filter(|name| is_ours(name)).collect();
        assert!(left.is_empty(), "left in shared memory: {left:?}");
    }
}

#[test]
fn servers_end_with_a_killed_demo_and_leave_no_shared_memory() {
    let mut demo = Demo::start();
    demo.wait_text();
    let below = demo.below();
    kill(demo.pid(), Signal::SIGKILL).expect("kill the demo");
    below.wait_gone();
}

#[test]
fn an_interrupted_demo_drains_its_servers_and_removes_its_folder() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut demo = Demo::start();
        demo.wait_text();
        let below = demo.below();
        assert_eq!(demo.files_left(), 1, "its folder");
        kill(demo.pid(), signal).expect("interrupt the demo");
        // It may be in the middle of a word.
        demo.out.read_to_end(&mut Vec::new()).expect("the rest");
        let status = wait_for("the demo to end", || demo.child.try_wait().expect("wait"));
        assert_eq!(status.code(), Some(STOPPED), "{signal}");
        assert!(below.processes.iter().all(|pid| !alive(*pid)), "{signal}");
        below.wait_gone();
        assert_eq!(demo.files_left(), 0, "{signal}");
    }
}

#[test]
fn a_demo_interrupted_while_its_servers_start_leaves_nothing() {
    let mut demo = Demo::start();
    demo.wait_line("starting two servers");
    let server = wait_for("a server", || children_of(demo.pid()).first().copied());
    kill(demo.pid(), Signal::SIGINT).expect("interrupt the demo");
    let status = wait_for("the demo to end", || demo.child.try_wait().expect("wait"));
    assert_eq!(status.code(), Some(STOPPED));
    assert!(!alive(server));
    assert_eq!(demo.files_left(), 0);
}
