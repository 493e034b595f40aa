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
