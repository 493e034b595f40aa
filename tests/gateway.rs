//! `sepal gateway` from outside: texts, streams, conversations, errors, and servers that are lost while a
//! text is under way. Requests are written by hand; the official clients are in `tests/openai`.

mod harness;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;

use harness::demo::demo_model;
use harness::{Sepal, generate, http, wait_for};
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

#[test]
fn texts_are_those_of_generate_whole_and_in_pieces() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &[]);
    let whole = generate(&sepal, &demo_model(), "demo", "float32", PROMPT, 24);
    let answer = gateway.done("/v1/completions", &completion(&json!({})));
    assert_eq!(text(&answer).trim_end_matches('\n'), whole);
    let finish = answer["choices"][0]["finish_reason"].as_str().unwrap();
    let made = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((finish == "length" && made == 24) || (finish == "stop" && made < 24), "{answer}");
    assert_eq!(answer["object"], "text_completion");

    let (mut pieces, mut finishes, mut usage) = (String::new(), Vec::new(), Value::Null);
    let body = completion(&json!({"stream_options": {"include_usage": true}}));
    gateway.stream("/v1/completions", body, |chunk| {
        for choice in chunk["choices"].as_array().unwrap() {
            pieces += choice["text"].as_str().unwrap();
            finishes.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
        usage = chunk["usage"].clone();
    });
    assert_eq!(pieces, text(&answer));
    assert_eq!(finishes, [finish]);
    assert_eq!(usage["completion_tokens"], made);

    let (status, models) = gateway.get("/v1/models");
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("demo")));
    assert_eq!(gateway.get("/v1/models/demo").0, 200);
    assert_eq!(gateway.get("/readyz").0, 200);
    let (_, metrics) = gateway.ask("GET", "/metrics", "", "");
    assert!(
        metrics.contains("sepal_gateway_requests_total{endpoint=\"completions\",code=\"200\"} 2")
    );
    assert!(gateway.sepal.terminate().success());
}

#[test]
fn settings_change_texts_as_they_say() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &[]);
    let path = "/v1/completions";
    let plain = text(&gateway.done(path, &completion(&json!({}))));

    let stop = plain.split_whitespace().nth(2).expect("three words");
    let stopped = gateway.done(path, &completion(&json!({"stop": stop})));
    assert_eq!(Some(text(&stopped).as_str()), plain.split(stop).next());
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");

    let draw = |seed: i64, n: u32| {
        let body = completion(&json!({"temperature": 1.5, "seed": seed, "n": n}));
        let answer = gateway.done(path, &body);
        let choices = answer["choices"].as_array().unwrap().clone();
        choices.iter().map(|one| one["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let three = draw(7, 3);
    assert_eq!(three.len(), 3);
    assert_eq!(draw(7, 3), three, "the same seed gives the same texts");
    assert_eq!(draw(8, 1)[0], three[1]);
    assert_ne!(three[0], three[1]);

    let named = gateway.done(path, &completion(&json!({"logprobs": 3, "max_tokens": 4})));
    let logprobs = &named["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 4);
    let chosen = logprobs["token_logprobs"][0].as_f64().unwrap();
    let top = logprobs["top_logprobs"][0].as_object().unwrap();
    assert!(chosen < 0.0 && top.len() <= 3);
    let best = top.values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max);
    assert_eq!(chosen, best, "greedy decoding takes the most probable token");

    let tokens = completion(&json!({"prompt": [0, 484, 485, 260, 486]}));
    assert_eq!(text(&gateway.done(path, &tokens)), plain, "the prompt as tokens");
}

#[test]
fn a_small_model_guesses_and_the_text_stays_the_same() {
    let sepal = serve(&[]);
    let small = demo_model();
    let small = small.to_str().expect("UTF-8");
    let say = |more: &[&str]| {
        let out = std::process::Command::new(harness::SEPAL)
            .args(["generate", "--initial_peers", &sepal.addr(), "--dht_prefix", "demo"])
            .args([
                "--torch_dtype",
                "float32",
                "--prompt",
                PROMPT,
                "--max_new_tokens",
                "40",
                "--stats",
            ])
            .args([more, &[small]].concat())
            .output()
            .expect("run sepal generate");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let (plain, _) = say(&["--speculate", "0"]);
    let (drafted, stats) = say(&["--draft", small]);
    assert_eq!(drafted, plain);
    let tokens = stats.lines().find_map(|line| line.split_once(" tokens per step: "));
    let (per_step, _) = tokens.expect(&stats);
    assert!(per_step.parse::<f64>().unwrap() > 3.0, "a model guesses right for itself: {stats}");
    let gateway = Gateway::start(&sepal.addr(), &["--draft", &format!("demo={small}")]);
    let answer = gateway.done("/v1/completions", &completion(&json!({"max_tokens": 40})));
    assert_eq!(format!("{PROMPT}{}", text(&answer)).trim_end(), plain.trim_end());
    let eighths = Gateway::start(&sepal.addr(), &["--head_quant_type", "int8"]);
    assert!(!text(&eighths.done("/v1/completions", &completion(&json!({})))).is_empty());
}

#[test]
fn texts_have_the_form_that_is_asked_for() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &["--speculate", "4"]);
    let form = |schema: &Value| {
        let json_schema = json!({"name": "answer", "strict": true, "schema": schema});
        json!({"response_format": {"type": "json_schema", "json_schema": json_schema}, "max_tokens": 400})
    };
    let schema = json!({
        "type": "object",
        "properties": {
            "animal": {"enum": ["fox", "hare", "owl"]},
            "legs": {"type": "integer", "minimum": 2, "maximum": 4},
            "wild": {"type": "boolean"},
        },
        "required": ["animal", "legs", "wild"],
        "additionalProperties": false,
    });
    let mut several = completion(&form(&schema));
    several["n"] = json!(4);
    several["temperature"] = json!(1.5);
    let answer = gateway.done("/v1/completions", &several);
    for choice in answer["choices"].as_array().unwrap() {
        let text = choice["text"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).expect(text);
        assert!(["fox", "hare", "owl"].contains(&value["animal"].as_str().unwrap()), "{text}");
        assert!((2..=4).contains(&value["legs"].as_i64().unwrap()), "{text}");
        assert!(value["wild"].is_boolean(), "{text}");
        assert_eq!(choice["finish_reason"], "stop");
    }
    let mut streamed = String::new();
    let whole = text(&gateway.done("/v1/completions", &completion(&form(&schema))));
    gateway.stream("/v1/completions", completion(&form(&schema)), |chunk| {
        streamed += chunk["choices"][0]["text"].as_str().unwrap_or_default();
    });
    assert_eq!(streamed, whole);
    let object = json!({"response_format": {"type": "json_object"}});
    assert!(text(&gateway.done("/v1/completions", &completion(&object))).starts_with('{'));
    for refused in [form(&json!({"type": "elephant"})), form(&json!(7))] {
        let (status, answer) = gateway.post("/v1/completions", &completion(&refused));
        assert_eq!(
            (status, &answer["error"]["param"]),
            (400, &json!("response_format")),
            "{answer}"
        );
    }
}

#[test]
fn a_conversation_that_goes_on_sends_its_new_tokens_only_and_says_the_same() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let template = template(dir.path());
    let keeps = Gateway::start(&sepal.addr(), &["--chat_template", &template]);
    let forgets =
        Gateway::start(&sepal.addr(), &["--chat_template", &template, "--sessions_kept", "0"]);
    let path = "/v1/chat/completions";
    let mut messages = vec![json!({"role": "user", "content": "Tell me of a fox and the sea."})];
    for round in 0..3 {
        let body =
            json!({"model": "demo", "messages": messages, "max_tokens": 16, "temperature": 0});
        let answer = keeps.done(path, &body);
        let said = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        let fresh = forgets.done(path, &body);
        assert_eq!(fresh["choices"][0]["message"]["content"], said.as_str(), "round {round}");
        let cached = |answer: &Value| {
            answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        };
        assert_eq!(
            (cached(&answer) > 0, cached(&fresh)),
            (round > 0, 0),
            "round {round}: {answer}"
        );
        let mut streamed = String::new();
        keeps.stream(path, body, |chunk| {
            streamed += chunk["choices"][0]["delta"]["content"].as_str().unwrap_or("");
        });
        assert_eq!(streamed, said);
        messages.push(json!({"role": "assistant", "content": said}));
        messages.push(json!({"role": "user", "content": [{"type": "text", "text": "Go on."}]}));
    }
}

#[test]
fn bad_requests_get_errors_in_the_shape_of_the_api_and_others_go_on() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &["--max_body", "64KiB"]);
    let path = "/v1/completions";
    let bad = |more: Value| (path, completion(&more).to_string());
    let long = json!({"prompt": vec![5; 2040], "max_tokens": 64});
    let cases = [
        (bad(json!({"model": "gpt-4"})), 404, "there are: demo"),
        ((path, "{".to_owned()), 400, "cannot read the body"),
        ((path, "[]".to_owned()), 400, "cannot read the body"),
        (bad(json!({"n": 0})), 400, "invalid n 0"),
        (bad(json!({"n": 1000})), 400, "1 to 16"),
        (bad(json!({"temperature": -1})), 400, "invalid temperature"),
        (bad(json!({"top_p": 7})), 400, "top-p 7"),
        (bad(json!({"max_tokens": 0})), 400, "max_tokens"),
        (bad(json!({"max_tokens": -5})), 400, "max_tokens"),
        (bad(json!({"logit_bias": {"x": 1}})), 400, "logit_bias"),
        (bad(json!({"frequency_penalty": 9})), 400, "frequency penalty 9"),
        (bad(json!({"prompt": ""})), 400, "empty"),
        (bad(json!({"prompt": [99999]})), 400, "outside the vocabulary"),
        (bad(json!({"prompt": ["a", "b"]})), 400, "one request for each"),
        (bad(json!({"echo": true})), 400, "echo"),
        (bad(json!({"logprobs": 99})), 400, "0 to 20"),
        (bad(long), 400, "2048"),
        (bad(json!({"prompt": "x".repeat(80_000)})), 413, "more than 65536 bytes"),
        (
            (
                "/v1/chat/completions",
                json!({"model": "demo", "messages": [{"role": "user", "content": "x"}]})
                    .to_string(),
            ),
            400,
            "no chat template",
        ),
        (("/v1/nothing", "{}".to_owned()), 404, "/v1/chat/completions"),
    ];
    for ((path, body), expected, part) in cases {
        let (status, answer) = gateway.ask("POST", path, "", &body);
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        let message = answer["error"]["message"].as_str().expect("a message");
        assert_eq!((status, message.contains(part)), (expected, true), "{body:.80}: {answer}");
        assert!(answer["error"]["type"].is_string(), "{answer}");
    }
    assert_eq!(gateway.ask("GET", path, "", "").0, 400);
    let (_, answer) = gateway.post(path, &completion(&json!({"prompt": vec![5; 2048]})));
    assert_eq!(answer["error"]["code"], "context_length_exceeded");
    gateway.done(path, &completion(&json!({})));
}

#[test]
fn keys_and_rates_are_held() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "# mine\nsecret-key-0123456789\n").unwrap();
    let model = format!("demo={}", demo_model().display());
    let (addr, keys) = (sepal.addr(), keys.display().to_string());
    let args = ["gateway", &model, "--dht_prefix", "demo", "--initial_peers", &addr];
    let more = ["--listen", "0", "--api_keys", &keys, "--requests_per_minute", "3"];
    let process = Sepal::start(&[&args[..], &more].concat());
    let line = process.wait_line("gateway answers", 1);
    let word = line.split(|c: char| c.is_whitespace() || "=\"".contains(c));
    let addr = word.into_iter().find(|word| word.starts_with("127.0.0.1:")).unwrap().to_owned();
    let gateway = Gateway { sepal: process, addr };
    for headers in
        ["", "Authorization: Bearer secret-key-012345678\r\n", "Authorization: secret\r\n"]
    {
        let (status, body) = gateway.ask("GET", "/v1/models", headers, "");
        assert_eq!(status, 401, "{body}");
        assert!(body.contains("invalid_api_key"), "{body}");
    }
    let good = "Authorization: Bearer secret-key-0123456789\r\n";
    let asked: Vec<u16> = (0..4).map(|_| gateway.ask("GET", "/v1/models", good, "").0).collect();
    assert_eq!(asked, [200, 200, 200, 429]);
    assert_eq!(gateway.get("/livez").0, 200);
}

#[test]
fn a_hole_is_named_with_what_would_fill_it_and_the_page_escapes_what_servers_say() {
    let sepal = serve(&["--block_indices", "0:5"]);
    let gateway = Gateway::start(&sepal.addr(), &["--route_timeout", "0.5"]);
    let (status, answer) = gateway.post("/v1/completions", &completion(&json!({})));
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(status, 503, "{answer}");
    assert!(message.contains("blocks 5:8") && message.contains("--block_indices 5:8"), "{message}");
    assert_eq!(gateway.get("/readyz").0, 503);
    let (_, state) = gateway.get("/api/v1/state");
    assert_eq!(state["models"][0]["holes"], json!([[5, 8]]));
    assert_eq!(state["models"][0]["servers"][0]["public_name"], "<script>alert(1)</script>");

    let (status, page) = gateway.ask("GET", "/", "", "");
    assert_eq!(status, 200);
    assert!(
        !page.contains("alert(1)") && !page.contains("innerHTML") && !page.contains("{{nonce}}")
    );
    let joined = Sepal::join(&sepal, &demo_model(), "demo", &["--block_indices", "5:8"]);
    wait_for("readiness", || (gateway.get("/readyz").0 == 200).then_some(()));
    gateway.done("/v1/completions", &completion(&json!({})));
    drop(joined);
}

/// Sessions that are open on a server.
fn sessions(sepal: &Sepal) -> u64 {
    let status = sepal.status();
    let open = status.pointer("/0/figures/sessions").and_then(Value::as_array);
    open.expect("sessions").len() as u64
}

#[test]
fn a_caller_that_goes_away_frees_its_session() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &["--sessions_kept", "0"]);
    let bias = json!({"1": -100});
    let body = completion(&json!({"max_tokens": 1500, "stream": true, "logit_bias": bias}));
    let stream = gateway.send("POST", "/v1/completions", "", &body.to_string());
    let mut lines = BufReader::new(stream).lines();
    let piece = lines.find_map(|line| line.ok().filter(|line| line.starts_with("data: ")));
    assert!(piece.is_some());
    drop(lines);
    wait_for("no session", || (sessions(&sepal) == 0).then_some(()));
    wait_for("no text", || {
        let (_, metrics) = gateway.ask("GET", "/metrics", "", "");
        metrics.contains("sepal_gateway_texts 0").then_some(())
    });
}

#[test]
fn a_server_that_is_lost_within_a_stream_is_replaced_unseen() {
    let first = serve(&[]);
    let second = Sepal::join(&first, &demo_model(), "demo", &["--torch_dtype", "float32"]);
    let gateway = Gateway::start(&first.addr(), &["--sessions_kept", "0"]);
    let wanted = completion(&json!({"max_tokens": 300, "logit_bias": {"1": -100}}));
    let calm = text(&gateway.done("/v1/completions", &wanted));
    let (mut pieces, mut text) = (0, String::new());
    let mut lost = false;
    gateway.stream("/v1/completions", wanted, |chunk| {
        text += chunk["choices"][0]["text"].as_str().unwrap_or("");
        pieces += 1;
        if pieces == 5 {
            let serving = [&first, &second].into_iter().find(|server| sessions(server) > 0);
            let serving = serving.expect("one of them has the session");
            serving.kill();
            lost = true;
        }
    });
    assert!(lost);
    assert_eq!(text, calm);
}

#[test]
fn chat_answers_as_the_gateway_does_and_carries_out_commands() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let template = template(dir.path());
    let gateway = Gateway::start(&sepal.addr(), &["--chat_template", &template]);
    let mut messages =
        vec![json!({"role": "user", "content": "Tell me of a fox.\nAnd of the sea."})];
    let mut said = Vec::new();
    for _ in 0..2 {
        let body =
            json!({"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 0});
        let answer = gateway.done("/v1/chat/completions", &body);
        said.push(answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned());
        messages.push(json!({"role": "assistant", "content": said.last()}));
        messages.push(json!({"role": "user", "content": "Go on."}));
    }
    let saved = dir.path().join("saved.md");
    let input = format!(
        "/stats\nTell me of a fox.\\\nAnd of the sea.\n\nGo on.\n/stats\n/nonsense\n/save {}\n/clear\n",
        saved.display()
    );
    let mut chat = std::process::Command::new(harness::SEPAL)
        .args([
            "chat",
            "--initial_peers",
            &sepal.addr(),
            "--dht_prefix",
            "demo",
            "--temperature",
            "0",
        ])
        .args(["--torch_dtype", "float32", "--max_tokens", "12", "--chat_template", &template])
        .arg(demo_model())
        .env("XDG_STATE_HOME", dir.path())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("run sepal chat");
    chat.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = chat.wait_with_output().expect("sepal chat ends");
    assert!(out.status.success());
    let text = String::from_utf8(out.stdout).expect("UTF-8");
    assert!(text.starts_with("There is no answer yet.\n"), "{text}");
    assert!(text.contains(&format!("{}\n{}\n", said[0], said[1])), "{text}\n{said:?}");
    assert!(text.contains("tokens/s") && text.contains("blocks 0:8"), "{text}");
    assert!(text.contains("/nonsense is no command") && !text.contains('\x1b'), "{text}");
    let saved = std::fs::read_to_string(saved).expect("the saved conversation");
    assert!(saved.contains("## user\n\nGo on.") && saved.contains(&said[1]), "{saved}");
}
