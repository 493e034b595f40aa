//! `sepal gateway` from outside: texts, streams, conversations, errors, servers that are lost while a text is
//! under way; and `sepal chat`. Requests are written by hand; the official clients are in `tests/openai`.

mod budgets;
mod chat;
mod context;
mod evaluation;
mod losses;
mod requests;
mod texts;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;

use crate::harness::demo::demo_model;
use crate::harness::{Sepal, generate, http, wait_for};
use serde_json::{Value, json};

const PROMPT: &str = "Once upon a time";
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n\
    {% endfor %}assistant:";

struct Gateway {
    sepal: Sepal,
    addr: String,
}

impl Gateway {
    fn start(peer: &str, more: &[&str]) -> Gateway {
        let model = format!("demo={}", demo_model().display());
        let args = ["gateway", &model, "--dht_prefix", "demo", "--initial_peers", peer];
        let own = ["--listen", "0", "--torch_dtype", "float32"];
        let sepal = Sepal::start(&[&args[..], &own, more].concat());
        let line = sepal.wait_line("gateway answers", 1);
        let gateway = Gateway { addr: http::address_in(&line), sepal };
        wait_for("the first look at the servers", || {
            let (_, state) = gateway.get("/api/v1/state");
            state.pointer("/models/0/servers/0").cloned()
        });
        gateway
    }

    /// Sends a request; the stream is where its answer comes.
    fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        http::send(&self.addr, &http::request(method, path, headers, body))
    }

    fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        http::exchange(&self.addr, &http::request(method, path, headers, body))
    }

    /// The whole answer, with its headers.
    fn raw(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let mut answer = String::new();
        let mut stream = self.send(method, path, headers, body);
        std::io::Read::read_to_string(&mut stream, &mut answer).expect("an answer");
        answer
    }

    fn get(&self, path: &str) -> (u16, Value) {
        let (status, body) = self.ask("GET", path, "", "");
        (status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.ask("POST", path, "", &body.to_string());
        (status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
    }

    /// The answer to a request that must be served.
    fn done(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// The chunks of a stream as they come; it must end with `[DONE]`.
    fn stream(&self, path: &str, mut body: Value, mut each: impl FnMut(&Value)) {
        body["stream"] = json!(true);
        let mut lines = BufReader::new(self.send("POST", path, "", &body.to_string())).lines();
        let mut events = std::iter::from_fn(|| {
            lines.find_map(|line| line.ok()?.strip_prefix("data: ").map(str::to_owned))
        });
        loop {
            let data = events.next().expect("the stream ends with [DONE]");
            if data == "[DONE]" {
                return;
            }
            each(&serde_json::from_str(&data).expect("JSON"));
        }
    }
}

fn completion(more: &Value) -> Value {
    let mut body = json!({"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0});
    for (name, value) in more.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn text(answer: &Value) -> String {
    answer["choices"][0]["text"].as_str().expect("a text").to_owned()
}

fn serve(more: &[&str]) -> Sepal {
    let own = ["--torch_dtype", "float32", "--public_name", "<script>alert(1)</script>"];
    Sepal::serve(&demo_model(), "demo", &[&own[..], more].concat())
}

fn template(dir: &Path) -> String {
    let path = dir.join("template.jinja");
    std::fs::write(&path, TEMPLATE).expect("write the template");
    path.display().to_string()
}
