//! What is written: texts whole and in pieces, settings, guesses, forms, conversations.

use super::*;
use crate::harness;

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

    let (mut pieces, mut finishes) = (String::new(), Vec::new());
    let (mut usage, mut route) = (Value::Null, Value::Null);
    let body = completion(&json!({"stream_options": {"include_usage": true}}));
    gateway.stream("/v1/completions", body, |chunk| {
        for choice in chunk["choices"].as_array().unwrap() {
            pieces += choice["text"].as_str().unwrap();
            finishes.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
        usage = chunk["usage"].clone();
        route = chunk["route"].clone();
    });
    assert_eq!(pieces, text(&answer));
    assert_eq!(finishes, [finish]);
    assert_eq!(route, json!([{"peer": sepal.peer_id(), "start": 0, "end": 8}]));
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
fn several_prompts_of_one_request_get_their_own_texts_in_order() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &[]);
    let path = "/v1/completions";
    let prompts = ["There was once a fox", "The sea was", "Once upon a time"];
    let alone: Vec<Value> = prompts
        .iter()
        .map(|prompt| gateway.done(path, &completion(&json!({"prompt": prompt}))))
        .collect();
    let expected: Vec<String> = alone.iter().map(text).collect();
    let several = completion(&json!({"prompt": prompts}));
    let answer = gateway.done(path, &several);
    let choices = answer["choices"].as_array().unwrap();
    let got: Vec<&str> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(got, expected);
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(tokens(&answer), alone.iter().map(tokens).sum::<u64>());
    let mut streamed = vec![String::new(); prompts.len()];
    gateway.stream(path, several, |chunk| {
        let choice = &chunk["choices"][0];
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        streamed[index] += choice["text"].as_str().unwrap_or_default();
    });
    assert_eq!(streamed, expected);
    let drawn = json!({"prompt": &prompts[..2], "n": 2, "temperature": 1.2, "seed": 7});
    let indices = |answer: &Value| {
        let choices = answer["choices"].as_array().unwrap().iter();
        choices.map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(indices(&gateway.done(path, &completion(&drawn))), [0, 1, 2, 3]);
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
