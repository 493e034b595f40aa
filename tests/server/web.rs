//! `sepal serve --web`: the swarm's page beside a server, and what becomes of both when one of them is killed.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::harness::demo::demo_model;
use crate::harness::rights::may_look_into_children;
use crate::harness::{
    self, Sepal, children_of, command_line, generate, http, own_loopback, wait_for,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

const PROMPT: &str = "Once upon a time";

/// Where `sepal` shows the page, by its log.
fn address(sepal: &Sepal) -> String {
    http::address_in(&sepal.wait_line("page of the swarm at /", 1))
}

fn get(addr: &str, path: &str) -> (u16, String) {
    http::exchange(addr, &http::request("GET", path, "", ""))
}

/// What the page knows of its model, once it has seen a server that is online.
fn model(addr: &str) -> Value {
    wait_for("the server on its page", || {
        let state: Value = serde_json::from_str(&get(addr, "/api/v1/state").1).ok()?;
        let model = state.pointer("/models/0")?.clone();
        (model.pointer("/servers/0/state")? == "online").then_some(model)
    })
}

/// The process of the page.
fn page_process(sepal: &Sepal) -> Pid {
    wait_for("the process of the page", || {
        children_of(sepal.pid()).into_iter().find(|pid| command_line(*pid).contains(": gateway"))
    })
}

/// Checks which executable the process of the page runs.
fn assert_runs(page: Pid, build: &Path) {
    if may_look_into_children("which build the page is of") {
        assert_eq!(fs::read_link(format!("/proc/{page}/exe")).unwrap(), build);
    }
}

#[test]
fn the_page_shows_its_server_chats_and_costs_the_server_nothing_when_it_dies() {
    let folder = demo_model();
    let more = ["--torch_dtype", "float32", "--web", "0"];
    let sepal = Sepal::serve(&folder, "demo", &more);
    let addr = address(&sepal);
    let shown = model(&addr);
    let name = folder.file_name().unwrap().to_str().unwrap();
    assert_eq!((shown["name"].as_str(), shown["dht_prefix"].as_str()), (Some(name), Some("demo")));
    assert_eq!(shown["servers"][0]["peer"], sepal.peer_id().as_str());
    let (status, page) = get(&addr, "/");
    assert!(status == 200 && page.contains("<h1>Sepal</h1>"), "{page}");
    assert_eq!(sepal.status()[0]["figures"]["web"], addr.as_str());

    let body = json!({"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0});
    let ask = http::request("POST", "/v1/completions", "", &body.to_string());
    let complete = |addr: &str| {
        let (status, answer) = http::exchange(addr, &ask);
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        answer["choices"][0]["text"].as_str().expect("a text").trim_end_matches('\n').to_owned()
    };
    assert_eq!(complete(&addr), generate(&sepal, &folder, "demo", "float32", PROMPT, 12));

    let first = page_process(&sepal);
    kill(first, Signal::SIGKILL).expect("kill the page");
    sepal.wait_line("the page of the swarm ended, the server goes on", 1);
    // The port stays: this call waits for the next process.
    model(&addr);
    assert_ne!(page_process(&sepal), first);
    complete(&addr);
    assert!(sepal.status()[0]["children"].as_array().unwrap().iter().all(|c| c["generation"] == 1));

    // The next executable shows it at the same address.
    let build = sepal.upgrade_to_copy("another-build", &[]);
    model(&addr);
    complete(&addr);
    let page = page_process(&sepal);
    assert_runs(page, &build);
    assert_eq!(sepal.terminate().code(), Some(0));
    assert!(!harness::alive(page));
}

#[test]
fn texts_under_way_on_the_page_go_on_over_an_upgrade() {
    let folder = demo_model();
    let sepal = Sepal::serve(&folder, "demo", &["--torch_dtype", "float32", "--web", "0"]);
    let addr = address(&sepal);
    let name = model(&addr)["name"].clone();
    let body = json!({"model": name, "prompt": PROMPT, "max_tokens": 400, "temperature": 0,
        "stream": true});
    let ask = http::request("POST", "/v1/completions", "", &body.to_string());
    let text = |addr: &str| {
        let (status, answer) = http::exchange(addr, &ask);
        (status, text_of(&answer))
    };
    let (status, expected) = text(&addr);
    assert!(status == 200 && !expected.is_empty(), "{status} {expected}");
    let (first, is_over) = (page_process(&sepal), AtomicBool::new(false));
    let (build, texts) = std::thread::scope(|scope| {
        // One text after the other, so that one is under way whenever the executables change.
        let ask = || {
            let mut texts = Vec::new();
            loop {
                let is_last = is_over.load(Ordering::Relaxed);
                texts.push(text(&addr));
                if is_last {
                    return texts;
                }
            }
        };
        let texts = scope.spawn(ask);
        let build = sepal.upgrade_to_copy("another-build", &["--patience", "0"]);
        is_over.store(true, Ordering::Relaxed);
        (build, texts.join().expect("no panic"))
    });
    // A call that the old process had taken and not read yet finds its connection closed, and nothing else.
    let unread = texts.iter().filter(|(status, text)| *status == 0 && text.is_empty()).count();
    let exact = texts.iter().filter(|text| **text == (200, expected.clone())).count();
    assert!(unread <= 1 && exact > 0 && exact + unread == texts.len(), "{texts:?}");
    wait_for("the process of the page to end", || (!harness::alive(first)).then_some(()));
    assert_runs(page_process(&sepal), &build);
    model(&addr);
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// The text of a stream of completions.
fn text_of(events: &str) -> String {
    let events = events.lines().filter_map(|line| line.strip_prefix("data: {"));
    let piece = |event: &str| -> String {
        let event: Value = serde_json::from_str(&format!("{{{event}")).expect("JSON");
        assert!(event.get("error").is_none(), "{event}");
        event.pointer("/choices/0/text").and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    events.map(piece).collect()
}

#[test]
fn a_model_that_only_its_blocks_are_there_of_is_shown_without_a_chat() {
    let folder = tempfile::tempdir().expect("folder");
    let copy = |name: &str| fs::copy(demo_model().join(name), folder.path().join(name));
    for name in ["config.json", "model.safetensors"] {
        copy(name).expect(name);
    }
    let sepal = Sepal::serve(folder.path(), "demo", &["--web", "0"]);
    let addr = address(&sepal);
    let shown = model(&addr);
    assert_eq!((&shown["can_chat"], &shown["holes"]), (&json!(false), &json!([])));
    assert_eq!(shown["blocks"], 8);
    let line = sepal.wait_line("the page has no chat", 1);
    assert!(line.contains("tokenizer.json"), "{line}");
    let (_, offered) = get(&addr, "/v1/models");
    assert_eq!(serde_json::from_str::<Value>(&offered).unwrap()["data"], json!([]));
    assert_eq!(get(&addr, "/readyz").0, 200);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_port_in_use_costs_a_line_and_is_taken_when_it_is_free() {
    let other = TcpListener::bind((own_loopback(), 0)).expect("bind");
    let addr = other.local_addr().expect("address").to_string();
    let sepal = Sepal::serve(&demo_model(), "demo", &["--web", &addr]);
    let line = sepal.wait_line("cannot listen on", 1);
    assert!(line.contains(&addr) && line.contains("give another --web"), "{line}");
    assert!(sepal.status()[0]["figures"]["web"].is_null());
    drop(other);
    assert_eq!(address(&sepal), addr);
    model(&addr);
    assert_eq!(sepal.terminate().code(), Some(0));
}
