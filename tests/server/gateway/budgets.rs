//! How much callers may use at once and in a minute.

use super::*;

#[test]
fn tokens_of_a_key_are_counted_and_limited_and_told() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "secret-key-of-ann\nsecret-key-of-bob\n").unwrap();
    let keys = keys.display().to_string();
    let model = format!("demo={}", demo_model().display());
    let args = ["gateway", &model, "--dht_prefix", "demo", "--initial_peers", &sepal.addr()];
    // They come back in a minute: what is used below takes more than two.
    let own = ["--listen", "0", "--api_keys", &keys, "--tokens_per_minute", "40"];
    let process = Sepal::start(&[&args[..], &own].concat());
    let addr = http::address_in(&process.wait_line("gateway answers", 1));
    let gateway = Gateway { addr, sepal: process };
    let ask = |who: &str, prompt: usize| {
        let body = completion(&json!({"prompt": vec![5; prompt], "max_tokens": 100,
                                      "logit_bias": {"1": -100}}));
        let headers = format!("Authorization: bearer secret-key-of-{who}\r\n");
        gateway.raw("POST", "/v1/completions", &headers, &body.to_string()).to_lowercase()
    };
    let header = |answer: &str, name: &str| {
        let found = answer.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        found.unwrap_or_else(|| panic!("no {name}: {answer}")).to_owned()
    };
    let first = ask("ann", 20);
    assert!(first.contains(" 200 "), "{first}");
    assert_eq!(header(&first, "x-ratelimit-limit-tokens"), "40");
    header(&first, "x-ratelimit-remaining-tokens");
    header(&first, "x-ratelimit-reset-tokens");
    // It used 120 of 40 tokens.
    let second = ask("ann", 20);
    assert!(second.contains(" 429 "), "{second}");
    assert!(header(&second, "retry-after").parse::<u64>().unwrap() > 0);
    assert_eq!(header(&second, "x-ratelimit-remaining-tokens"), "0");
    assert!(second.contains("more than 40 tokens"), "{second}");
    assert!(ask("bob", 41).contains("send a shorter one"));
    assert!(ask("bob", 5).contains(" 200 "), "another key has its own");

    let (_, metrics) = gateway.ask("GET", "/metrics", "", "");
    assert!(!metrics.contains("secret-key"), "{metrics}");
    let used = |kind: &str, count: u64| {
        let line = |line: &&str| {
            line.starts_with("sepal_gateway_key_tokens_total{key=\"")
                && line.contains(&format!("kind=\"{kind}\"}} {count}"))
        };
        metrics.lines().filter(line).count()
    };
    let counted = [used("prompt", 20), used("completion", 100), used("prompt", 5)];
    assert_eq!(counted, [1, 2, 1], "{metrics}");
}

#[test]
fn more_texts_than_a_server_takes_sessions_wait_and_all_are_written() {
    const TEXTS: usize = 300;
    let sepal = serve(&["--attn_cache_tokens", "65536"]);
    let gateway = Gateway::start(&sepal.addr(), &[]);
    let bias = json!({"1": -100});
    let body = completion(&json!({"max_tokens": 12, "logit_bias": bias})).to_string();
    let texts: Vec<_> =
        (0..TEXTS).map(|_| gateway.send("POST", "/v1/completions", "", &body)).collect();
    for mut text in texts {
        let mut answer = String::new();
        std::io::Read::read_to_string(&mut text, &mut answer).expect("an answer");
        assert!(answer.contains(" 200 "), "{answer}");
    }
    let log = gateway.sepal.log();
    assert!(!log.contains("trying another"), "a server refused a session: {log}");
}
