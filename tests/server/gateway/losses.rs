//! Callers and servers that go away while a text is under way.

use nix::sys::signal::{Signal, kill};

use super::*;
use crate::harness::rank;

/// Sessions that were open on a server a second ago or later.
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
    wait_for("the session", || (sessions(&sepal) == 1).then_some(()));
    drop(lines);
    wait_for("no session", || (sessions(&sepal) == 0).then_some(()));
    wait_for("no text", || {
        let (_, metrics) = gateway.ask("GET", "/metrics", "", "");
        metrics.contains("sepal_gateway_texts 0").then_some(())
    });
}

#[test]
fn a_server_that_is_lost_within_a_stream_is_replaced_unseen() {
    // A worker hangs in the middle of the text, which therefore does not end before its server does.
    let fault = ["--inject_fault", "hang@block:0#12", "--hang_timeout", "3600"];
    let first = serve(&fault);
    let more = [&["--torch_dtype", "float32"], &fault[..]].concat();
    let second = Sepal::join(&first, &demo_model(), "demo", &more);
    let gateway = Gateway::start(&first.addr(), &["--sessions_kept", "0", "--speculate", "0"]);
    let wanted = completion(&json!({"max_tokens": 60, "logit_bias": {"1": -100}}));
    let (mut pieces, mut text_of_both) = (0, String::new());
    gateway.stream("/v1/completions", wanted.clone(), |chunk| {
        text_of_both += chunk["choices"][0]["text"].as_str().unwrap_or("");
        pieces += 1;
        if pieces == 5 {
            wait_for("the session", || (sessions(&first) + sessions(&second) == 1).then_some(()));
            let (serving, other) = match sessions(&first) {
                0 => (&second, &first),
                _ => (&first, &second),
            };
            assert_eq!((sessions(serving), sessions(other)), (1, 0));
            // The next worker of the other server has no fault.
            let worker = rank(other, 0);
            kill(worker, Signal::SIGKILL).expect("the worker is there");
            wait_for("the next worker", || (rank(other, 0) != worker).then_some(()));
            serving.kill();
        }
    });
    assert!(pieces > 5, "{pieces}");
    // The other server alone, undisturbed.
    assert_eq!(text_of_both, text(&gateway.done("/v1/completions", &wanted)));
}

/// A stream of a text whose server has not answered yet, up to its first comment.
fn opened(gateway: &Gateway) -> impl Iterator<Item = String> {
    let body = completion(&json!({"stream": true, "logit_bias": {"1": -100}}));
    let stream = gateway.send("POST", "/v1/completions", "", &body.to_string());
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let head: Vec<String> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
    let head = head.join("\n").to_lowercase();
    assert!(head.contains(" 200 "), "{head}");
    assert!(head.contains("x-accel-buffering: no"), "{head}");
    assert!(head.contains("cache-control: no-cache"), "{head}");
    let first = lines.next().expect("a comment");
    assert!(first.starts_with(':'), "{first}");
    lines
}

#[test]
fn a_stream_opens_before_its_first_token_and_goes_on_or_says_what_failed() {
    let sepal = serve(&["--hang_timeout", "3600"]);
    let gateway = Gateway::start(&sepal.addr(), &["--route_timeout", "1"]);
    let worker = rank(&sepal, 0);
    let pause = |signal| kill(worker, signal).expect("the worker is there");
    pause(Signal::SIGSTOP);
    let mut lines = opened(&gateway);
    // More comments come while it waits.
    assert!(lines.by_ref().any(|line| line.starts_with(':')));
    pause(Signal::SIGCONT);
    let rest: Vec<String> = lines.filter(|line| line.starts_with("data: ")).collect();
    assert!(rest.len() > 2 && rest.iter().all(|line| !line.contains("\"error\"")), "{rest:?}");
    assert_eq!(rest.last().map(String::as_str), Some("data: [DONE]"));

    pause(Signal::SIGSTOP);
    let lines = opened(&gateway);
    sepal.kill();
    let rest: Vec<String> = lines.filter(|line| line.starts_with("data: ")).collect();
    let [error] = rest.as_slice() else { panic!("one event: {rest:?}") };
    let error: Value = serde_json::from_str(error.trim_start_matches("data: ")).expect("JSON");
    assert_eq!(error["error"]["type"], "server_error", "{error}");
    assert!(error["error"]["message"].is_string(), "{error}");
}
