//! Runs every command of README.md and of the pages in `docs/`, each page in its order, with a small model
//! in the place of `MODEL` and the address of the page's first server in the place of `ADDRESS`. A page
//! that starts no server gets that of README. `.ci/run` and `.ci/long` run the commands of cargo.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use crate::harness::{self, SEPAL, Sepal};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The model that the executable carries, as a folder.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../client/model");

/// What README starts first, for the pages that only connect.
const SERVE: &str = "sepal serve MODEL --dht_prefix my-model --new_swarm --port 31337";

/// README.md and the pages in `docs/`.
fn pages() -> Vec<PathBuf> {
    let docs = fs::read_dir(Path::new(ROOT).join("docs")).expect("the folder of the pages");
    let mut pages: Vec<PathBuf> = docs.map(|page| page.expect("a page").path()).collect();
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    assert!(pages.len() >= 4, "the pages were found: {pages:?}");
    pages.push(Path::new(ROOT).join("README.md"));
    pages.sort();
    pages
}

/// The lines of all blocks of shell commands.
fn commands(page: &str) -> Vec<&str> {
    let blocks = page.split("```sh\n").skip(1);
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

/// What a reader of a page has after some of its commands.
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
    fn args(&mut self, line: &str) -> Vec<String> {
        let mut args = words(line);
        args.remove(0);
        for at in 0..args.len() {
            args[at] = match args[at].as_str() {
                "MODEL" => MODEL.to_owned(),
                "ADDRESS" => self.server().addr(),
                // The kernel chooses.
                _ if at > 0 && ["--port", "--listen"].contains(&args[at - 1].as_str()) => {
                    "0".to_owned()
                }
                word => word.to_owned(),
            };
        }
        args
    }

    /// The first server.
    fn server(&mut self) -> &Sepal {
        if self.servers.is_empty() {
            self.follow(SERVE);
        }
        &self.servers[0]
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
                self.server();
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
fn every_command_of_readme_and_docs_works_as_written() {
    let read = |path: &Path| fs::read_to_string(path).expect("a readable file");
    let ci = [".ci/run", ".ci/long"].map(|script| read(&Path::new(ROOT).join(script))).concat();
    let ci = ci.replace(" --locked", "");
    let mut followed = 0;
    for page in pages() {
        let (text, mut reader) = (read(&page), Reader::new());
        for line in commands(&text) {
            println!("{}: {line}", page.display());
            match line.split_whitespace().next() {
                Some("cargo") => assert!(ci.contains(line), ".ci does not run {line:?}"),
                Some("sepal") => reader.follow(line),
                _ => panic!("{} has {line:?}, which this test cannot run", page.display()),
            }
            followed += 1;
        }
        for server in reader.servers {
            assert_eq!(server.terminate().code(), Some(0));
        }
    }
    assert!(followed > 20, "the pages have commands");
}
