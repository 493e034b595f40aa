//! Runs every command of README.md in its order, with a small model in the place of `MODEL` and the
//! address of the first server in the place of `ADDRESS`. Commands of cargo are those of `.ci/run`.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use crate::harness::{self, SEPAL, Sepal};

const README: &str = include_str!("../../README.md");
const CI: &str = include_str!("../../.ci/run");

/// The model that the executable carries, as a folder.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/client/model");

/// The lines of all blocks of shell commands.
fn commands() -> Vec<&'static str> {
    let blocks = README.split("```sh\n").skip(1);
    blocks.flat_map(|block| block.split("```").next().unwrap_or_default().lines()).collect()
}

/// The words of a command line; double quotes hold a word together.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, piece) in line.split('"').enumerate() {
        match index % 2 {
            0 => words.extend(piece.split_whitespace().map(str::to_owned)),
            _ => words.push(piece.to_owned()),
        }
    }
    words
}

/// A port that is free, for the one that a command names.
fn free_port() -> String {
    let listener = TcpListener::bind("0.0.0.0:0").expect("a free port");
    listener.local_addr().expect("its address").port().to_string()
}

/// What a reader of README has after some of its commands.
struct Reader {
    dir: Arc<tempfile::TempDir>,
    servers: Vec<Sepal>,
}

impl Reader {
    fn new() -> Reader {
        let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
        Reader { dir, servers: Vec::new() }
    }

    /// The arguments of `line` with what the placeholders stand for.
    fn args(&self, line: &str) -> Vec<String> {
        let mut args = words(line);
        args.remove(0);
        for at in 0..args.len() {
            args[at] = match args[at].as_str() {
                "MODEL" => MODEL.to_owned(),
                "ADDRESS" => self.servers.first().expect("a server runs").addr(),
                _ if at > 0 && args[at - 1] == "--port" => free_port(),
                _ if at > 0 && args[at - 1] == "--listen" => "0".to_owned(),
                word => word.to_owned(),
            };
        }
        args
    }

    /// Runs a command of sepal that ends by itself, in the folder of the reader.
    fn run(&self, args: &[String]) -> Output {
        let out = Command::new(SEPAL)
            .args(args)
            .current_dir(self.dir.path())
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .env("SEPAL_CACHE", self.dir.path().join("cache"))
            .stdin(Stdio::null())
            .output()
            .expect("run sepal");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "sepal {args:?}: {said}");
        out
    }

    fn follow(&mut self, line: &str) {
        let args = self.args(line);
        let flags: Vec<&str> = args.iter().map(String::as_str).collect();
        match args[0].as_str() {
            "serve" if !flags.contains(&"dry_run") => {
                let server = Sepal::start_in(self.dir.clone(), &flags);
                server.wait_online();
                self.servers.push(server);
            }
            "dht" => self.bootstrap(&flags),
            "gateway" => {
                let gateway = Sepal::start_in(self.dir.clone(), &flags);
                gateway.wait_line("gateway answers", 1);
                assert_eq!(gateway.terminate().code(), Some(0));
            }
            "generate" => {
                let prompt = &args[1 + flags.iter().position(|f| *f == "--prompt").unwrap()];
                let text = String::from_utf8(self.run(&args).stdout).expect("text is UTF-8");
                assert!(text.starts_with(prompt.as_str()), "{text:?}");
                assert!(text.len() > prompt.len() + 10, "{text:?}");
            }
            "status" => {
                let text = String::from_utf8(self.run(&args).stdout).expect("text is UTF-8");
                assert!(text.contains("gpu-worker"), "{text}");
            }
            _ => drop(self.run(&args)),
        }
    }

    /// A bootstrap node has an address and a key, and ends when it is told to.
    fn bootstrap(&self, flags: &[&str]) {
        let mut command = Command::new(SEPAL);
        command.current_dir(self.dir.path());
        let node = Sepal::start_by(command, self.dir.clone(), flags);
        let key = self.dir.path().join("bootstrap.key");
        harness::wait_for("the key of the bootstrap node", || key.is_file().then_some(()));
        node.wait_line("listening", 1);
        assert_eq!(node.terminate().code(), Some(0));
    }
}

#[test]
fn every_command_of_the_readme_works_as_written() {
    let mut reader = Reader::new();
    let (commands, ci) = (commands(), CI.replace(" --locked", ""));
    assert!(commands.len() > 10, "README has commands: {commands:?}");
    for line in commands {
        match line.split_whitespace().next() {
            Some("cargo") => assert!(ci.contains(line), ".ci/run does not run {line:?}"),
            Some("sepal") => reader.follow(line),
            _ => panic!("README has the command {line:?}, which this test cannot run"),
        }
    }
    for server in reader.servers {
        assert_eq!(server.terminate().code(), Some(0));
    }
}

#[test]
fn the_readme_names_files_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let links = README.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    for link in links.filter(|link| !link.contains("://")) {
        assert!(root.join(link).exists(), "README links {link}, which does not exist");
    }
}
