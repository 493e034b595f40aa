//! Commands whose terminal goes away, as when a window is closed: they end, with SIGHUP and without, and do
//! not abort. The terminal is made by `script` (package bsdutils); its end closes the terminal.

use std::process::{Child, Command, Stdio};

use crate::harness::demo::demo_model;
use crate::harness::rights::has_program;
use crate::harness::{SEPAL, Sepal, all_at_once, wait_for};
use nix::sys::signal::{Signal, kill};

/// Runs `$RUN`, which the shell outlives, and writes how it ended to a file.
const SHELL: &str = "trap \"$TRAP\" HUP; stty rows 24 cols 80; $RUN; echo $? > ended";

const TEMPLATE: &str = "{% for m in messages %}{{ m['content'] }} {% endfor %}";

/// A shell on a terminal of its own that runs a command.
struct Terminal {
    script: Child,
    folder: tempfile::TempDir,
}

impl Terminal {
    /// Runs `sepal ARGS`, which gets SIGHUP when the terminal goes away or, as below `nohup`, does not.
    fn start(sepal: &Sepal, args: &str, is_told: bool) -> Terminal {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("template.jinja"), TEMPLATE).expect("a template");
        let output = std::fs::File::create(folder.path().join("output")).expect("a file");
        let script = Command::new("script")
            .args(["--quiet", "--flush", "--command", SHELL, "/dev/null"])
            .current_dir(folder.path())
            .env("RUN", format!("{SEPAL} {args}"))
            // An ignored signal stays ignored in the command, a trapped one does not.
            .env("TRAP", if is_told { ":" } else { "" })
            .env("SHELL", "/bin/sh")
            .env("TERM", "xterm")
            .env("XDG_RUNTIME_DIR", sepal.dir.path())
            .env("XDG_STATE_HOME", folder.path())
            .stdin(Stdio::piped())
            .stdout(output)
            .spawn()
            .expect("script of bsdutils");
        Terminal { script, folder }
    }

    fn read(&self, file: &str) -> String {
        let bytes = std::fs::read(self.folder.path().join(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn wait_text(&self, text: &str) {
        wait_for(text, || self.read("output").contains(text).then_some(()));
    }

    /// The terminal goes away; the shell and its command go on.
    fn hang_up(&mut self) {
        self.script.kill().expect("end script");
        self.script.wait().expect("the end of script");
    }

    /// The exit status of the command, as the shell tells it.
    fn status(&self) -> String {
        let name = "the end of a command without a terminal";
        wait_for(name, || Some(self.read("ended")).filter(|text| text.ends_with('\n')))
    }
}

/// The swarm of the server and the demo model, as arguments.
fn model(sepal: &Sepal) -> String {
    let model = demo_model();
    format!("{} --initial_peers {} --dht_prefix demo", model.display(), sepal.addr())
}

/// Whether a server can be asked from a terminal here.
fn has_terminals() -> bool {
    ["script", "stty"].into_iter().all(|name| has_program("a terminal that goes away", name))
}

fn top() {
    let sepal = Sepal::serve(&demo_model(), "demo", &[]);
    for is_told in [true, false] {
        let mut terminal = Terminal::start(&sepal, "top", is_told);
        terminal.wait_text("gpu-worker");
        terminal.hang_up();
        assert_eq!(terminal.status(), "0\n", "told: {is_told}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}

fn chat() {
    let sepal = Sepal::serve(&demo_model(), "demo", &[]);
    let args = format!("chat {} --chat_template template.jinja", model(&sepal));
    // 129 is 128 and SIGHUP, which whoever started the tests may ignore. Without it, the end of the input
    // is read, or an error of the terminal.
    for is_told in [true, false] {
        let mut terminal = Terminal::start(&sepal, &args, is_told);
        terminal.wait_text("/help lists");
        terminal.hang_up();
        let status = terminal.status();
        assert!(["129\n", "0\n", "1\n"].contains(&status.as_str()), "told: {is_told}: {status}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// It reads no terminal, but writes one.
fn generate() {
    let sepal = Sepal::serve(&demo_model(), "demo", &[]);
    let args =
        format!("generate {} --prompt beginning --stats --max_new_tokens 200", model(&sepal));
    let signal = |signal| kill(sepal.worker(), signal).expect("a signal to the worker");
    // Without the signal, writing fails.
    for is_told in [true, false] {
        signal(Signal::SIGSTOP);
        let mut terminal = Terminal::start(&sepal, &args, is_told);
        terminal.wait_text("beginning");
        terminal.hang_up();
        signal(Signal::SIGCONT);
        let status = terminal.status();
        assert!(["129\n", "1\n"].contains(&status.as_str()), "told: {is_told}: {status}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn commands_end_with_their_terminal() {
    if has_terminals() {
        all_at_once(&[("top", top), ("chat", chat), ("generate", generate)]);
    }
}
