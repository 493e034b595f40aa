//! `sepal top` on a real terminal: what it shows of a running server, and that it leaves the terminal
//! as it was, whatever ends it. The terminal is made by `script` (package bsdutils).

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::harness::demo::demo_model;
use crate::harness::rights::has_program;
use crate::harness::{SEPAL, Sepal, children_of, command_line, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// What the terminal says of itself after `sepal top` has ended.
const SHELL: &str = "stty rows 24 cols 80; $SEPAL top; echo ended with $?; stty -a";

/// A shell on a terminal of its own that runs `sepal top`.
struct Terminal {
    script: Child,
    output: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn start(sepal: &Sepal) -> Terminal {
        let mut script = Command::new("script")
            .args(["--quiet", "--flush", "--command", SHELL, "/dev/null"])
            .env("SEPAL", SEPAL)
            .env("SHELL", "/bin/sh")
            .env("TERM", "xterm")
            .env("XDG_RUNTIME_DIR", sepal.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script of bsdutils");
        let output = Arc::new(Mutex::new(Vec::new()));
        let (mut from, sink) = (script.stdout.take().expect("piped"), output.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                sink.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        Terminal { script, output }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.output.lock().unwrap()).into_owned()
    }

    /// Waits for a word: between words only the cursor moves.
    fn wait_text(&self, text: &str) {
        wait_for(text, || self.text().contains(text).then_some(()));
    }

    fn press(&mut self, keys: &[u8]) {
        let stdin = self.script.stdin.as_mut().expect("piped");
        stdin.write_all(keys).expect("keys");
        stdin.flush().expect("keys");
    }

    /// The process of `sepal top`.
    fn top(&self) -> Pid {
        let script = Pid::from_raw(i32::try_from(self.script.id()).expect("a pid"));
        wait_for("sepal top", || {
            let shells = children_of(script);
            let below = shells.iter().flat_map(|shell| children_of(*shell));
            below.into_iter().find(|pid| command_line(*pid).contains("sepal top"))
        })
    }

    /// Waits for the end of `sepal top`, and checks that the terminal is as it was.
    fn check_restored(mut self, code: u8) {
        self.wait_text(&format!("ended with {code}"));
        drop(self.script.stdin.take());
        self.script.wait().expect("the end of script");
        wait_for("the last words", || self.text().contains("icanon").then_some(()));
        let text = self.text();
        let after = text.rsplit_once("ended with").expect("said above").1;
        assert!(!after.contains("-icanon") && !after.contains("-echo "), "{after}");
        // The screen that was there before comes back, with its cursor.
        assert!(text.contains("\u{1b}[?1049h") && text.contains("\u{1b}[?1049l"), "{text:?}");
        assert!(text.contains("\u{1b}[?25h"), "{text:?}");
    }
}

#[test]
fn a_server_is_shown_and_the_terminal_is_as_before_after_q_ctrl_c_and_sigterm() {
    let programs = ["script", "stty"];
    if !programs.into_iter().all(|name| has_program("sepal top on a terminal", name)) {
        return;
    }
    let sepal = Sepal::serve(&demo_model(), "demo", &[]);
    let mut terminal = Terminal::start(&sepal);
    for text in ["gpu-worker", "online", "PROCESS", "SESSION", "leave"] {
        terminal.wait_text(text);
    }
    // netd has read the swarm for who looks.
    terminal.wait_text("without");
    terminal.press(b"?");
    terminal.wait_text("choose");
    terminal.press(b"xq");
    terminal.check_restored(0);

    let mut terminal = Terminal::start(&sepal);
    terminal.wait_text("gpu-worker");
    terminal.press(b"\x03");
    terminal.check_restored(0);

    let terminal = Terminal::start(&sepal);
    terminal.wait_text("gpu-worker");
    kill(terminal.top(), Signal::SIGTERM).expect("SIGTERM");
    terminal.check_restored(0);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn without_a_terminal_it_names_the_command_for_programs() {
    let out = Command::new(SEPAL).arg("top").stdin(Stdio::null()).output().expect("run sepal top");
    assert_eq!(out.status.code(), Some(2));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("needs a terminal") && said.contains("sepal status --json"), "{said}");
}
