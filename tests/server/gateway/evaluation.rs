//! What evaluations ask: probabilities of texts that are given, tokens of texts.

use super::*;

const PATH: &str = "/v1/completions";

fn numbers(value: &Value) -> Vec<Option<f64>> {
    value.as_array().expect("a list").iter().map(Value::as_f64).collect()
}

#[test]
fn a_prompt_is_scored_as_if_its_tokens_had_been_written() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &[]);
    let tokens = [0, 484, 485, 260, 486, 300, 5, 77];
    let ask = json!({"prompt": tokens, "echo": true, "logprobs": 1, "max_tokens": 0});
    let answer = gateway.done(PATH, &completion(&ask));
    let choice = &answer["choices"][0];
    let scores = numbers(&choice["logprobs"]["token_logprobs"]);
    assert_eq!((scores.len(), scores[0]), (8, None), "{answer}");
    assert_eq!(choice["logprobs"]["top_logprobs"][0], Value::Null);
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    for at in 1..tokens.len() {
        // A bias decides which token comes, and changes no probability.
        let bias = json!({"prompt": tokens[..at], "logprobs": 1, "max_tokens": 1,
                          "logit_bias": {tokens[at].to_string(): 100}});
        let written = gateway.done(PATH, &completion(&bias));
        let written = &written["choices"][0]["logprobs"];
        let expected = written["token_logprobs"][0].as_f64().unwrap();
        assert!((scores[at].unwrap() - expected).abs() < 1e-3, "token {at}: {answer} {written}");
        let top = choice["logprobs"]["top_logprobs"][at].as_object().unwrap();
        assert_eq!(top.len(), 1);
        assert!(top.values().all(|best| best.as_f64().unwrap() >= scores[at].unwrap() - 1e-6));
    }
}

#[test]
fn an_echo_comes_before_the_text_whole_and_in_pieces() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &[]);
    let plain = text(&gateway.done(PATH, &completion(&json!({}))));
    let prompts = json!([PROMPT, "The sea was"]);
    let ask = json!({"prompt": prompts, "n": 2, "echo": true, "max_tokens": 3, "logprobs": 0});
    let answer = gateway.done(PATH, &completion(&ask));
    for (at, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
        let prompt = prompts[at / 2].as_str().unwrap();
        assert!(choice["text"].as_str().unwrap().starts_with(prompt), "{choice}");
        let scores = numbers(&choice["logprobs"]["token_logprobs"]);
        assert_eq!(scores.iter().filter(|score| score.is_none()).count(), 1, "{choice}");
    }
    let unscored = completion(&json!({"echo": true}));
    assert_eq!(text(&gateway.done(PATH, &unscored)), format!("{PROMPT}{plain}"));
    let mut streamed = String::new();
    gateway.stream(PATH, unscored, |chunk| {
        streamed += chunk["choices"][0]["text"].as_str().unwrap_or_default();
    });
    assert_eq!(streamed, format!("{PROMPT}{plain}"));
    let alone = completion(&json!({"echo": true, "max_tokens": 0}));
    assert_eq!(text(&gateway.done(PATH, &alone)), PROMPT);
}

#[test]
fn lengths_are_read_as_clients_write_them() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &["--max_tokens", "3"]);
    let made = |more: Value| {
        let mut body = json!({"model": "demo", "prompt": PROMPT, "temperature": 0,
                              "logit_bias": {"1": -100}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        gateway.done(PATH, &body)["usage"]["completion_tokens"].as_u64().unwrap()
    };
    assert_eq!(made(json!({})), 3);
    assert_eq!(made(json!({"max_tokens": 7.0})), 7);
    assert_eq!(made(json!({"max_completion_tokens": 5.0, "max_tokens": 7})), 5);
    // As many as the model takes, which is 2048 tokens.
    let prompt = vec![5; 2000];
    assert_eq!(made(json!({"max_tokens": -1, "prompt": prompt})), 48);
    assert_eq!(made(json!({"max_completion_tokens": -1, "prompt": prompt})), 48);
    for bad in [json!(-2), json!(0.5), json!("many")] {
        let (status, answer) = gateway.post(PATH, &completion(&json!({"max_tokens": bad})));
        assert_eq!(status, 400, "{answer}");
    }
}

#[test]
fn texts_and_conversations_become_tokens_and_tokens_texts() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&sepal.addr(), &["--chat_template", &template(dir.path())]);
    let found = gateway.done("/tokenize", &json!({"model": "demo", "prompt": PROMPT}));
    let expected = json!({"count": 5, "max_model_len": 2048, "tokens": [0, 484, 485, 260, 486],
                          "token_strs": null});
    assert_eq!(found, expected);
    let more = json!({"prompt": PROMPT, "add_special_tokens": false, "return_token_strs": true});
    let found = gateway.done("/tokenize", &more);
    assert_eq!(found["tokens"], json!([484, 485, 260, 486]));
    assert_eq!(found["token_strs"].as_array().unwrap().len(), 4);
    let messages = json!([{"role": "user", "content": "Tell me of a fox."}]);
    let chat = gateway.done("/tokenize", &json!({"model": "demo", "messages": messages}));
    let body = json!({"model": "demo", "messages": messages, "max_tokens": 1});
    let answered = gateway.done("/v1/chat/completions", &body);
    assert_eq!(chat["count"], answered["usage"]["prompt_tokens"]);
    let back = gateway.done("/detokenize", &json!({"model": "demo", "tokens": chat["tokens"]}));
    let written = back["prompt"].as_str().unwrap();
    assert!(written.ends_with("user: Tell me of a fox.\nassistant:"), "{written}");
    for (path, body, part) in [
        ("/tokenize", json!({"model": "demo"}), "prompt or messages"),
        ("/tokenize", json!({"prompt": "x", "messages": messages}), "both"),
        ("/tokenize", json!({"model": "other", "prompt": "x"}), "there are: demo"),
        ("/detokenize", json!({"tokens": [99999]}), "outside the vocabulary"),
        ("/detokenize", json!({"tokens": "x"}), "cannot read the body"),
    ] {
        let (status, answer) = gateway.post(path, &body);
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status >= 400 && message.contains(part), "{path} {body}: {answer}");
    }
}

#[test]
fn other_methods_and_what_is_not_offered_are_told_apart() {
    let sepal = serve(&["--block_indices", "0:5"]);
    let gateway = Gateway::start(&sepal.addr(), &[]);
    for (method, path, allowed) in [
        ("GET", PATH, "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET,HEAD"),
        ("POST", "/health", "GET,HEAD"),
        ("PUT", "/tokenize", "POST"),
    ] {
        let answer = gateway.raw(method, path, "", "{}");
        assert!(answer.contains(" 405 "), "{method} {path}: {answer}");
        assert!(answer.to_lowercase().contains(&format!("allow: {allowed}\r\n").to_lowercase()));
        assert!(answer.contains("invalid_request_error"), "{answer}");
    }
    let (status, answer) = gateway.post("/v1/embeddings", &json!({"model": "demo", "input": "x"}));
    assert_eq!(status, 404);
    assert!(answer["error"]["message"].as_str().unwrap().contains("embeddings"), "{answer}");
    assert_eq!(gateway.get("/health").0, 503);
    let joined = Sepal::join(&sepal, &demo_model(), "demo", &["--block_indices", "5:8"]);
    wait_for("health", || (gateway.get("/health").0 == 200).then_some(()));
    drop(joined);
}
