//! Callers and servers that go away while a text is under way.

use super::*;

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
