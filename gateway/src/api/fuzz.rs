//! Fuzz targets of what callers send: bodies of both endpoints, up to the prompt. They need no model.

use axum::body::Bytes;
use fuzzing::Target;
use serde_json::{Value, json};

use super::error::ApiError;
use super::{chat, completions, request};
use crate::template::ChatTemplate;

/// That of Llama 2 in short, which calls methods of Python and refuses.
const TEMPLATE: &str = "{% for message in messages %}\
    {% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}\
    {{ message['role'] + ': ' + message['content'].strip() }}\
    {% if message.tool_calls %}{{ message.tool_calls | length }}{% endif %}{% endfor %}\
    {% if tools %}{{ tools[0]['function']['name'] }}{% endif %}";

/// Settings of all kinds.
fn settings() -> Value {
    json!({
        "model": "demo", "n": 2, "stream": true, "stream_options": {"include_usage": true},
        "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
        "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.1,
        "logit_bias": {"7": -100.0, "8": 1}, "seed": 3, "stop": ["a", "\n\n"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    })
}

fn with(more: &Value) -> Vec<u8> {
    let mut all = settings();
    if let (Some(all), Some(more)) = (all.as_object_mut(), more.as_object()) {
        all.extend(more.clone());
    }
    all.to_string().into_bytes()
}

fn told(result: &Result<(), ApiError>) -> String {
    result.as_ref().map_or_else(|error| error.text().to_owned(), |()| "checked".to_owned())
}

#[test]
fn fuzz_bodies_of_chats() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = json!({ "chat_template": TEMPLATE }).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("a template");
    let template = ChatTemplate::load(folder.path(), None).expect("valid").expect("there");
    // libFuzzer ends the process.
    drop(folder);
    let parts = json!([{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]);
    let seeds = [
        json!({"messages": [{"role": "user", "content": "Hi"}], "logprobs": true, "top_logprobs": 5}),
        json!({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": null,
               "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
               "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]}),
        json!({"messages": [{"role": "system", "content": "Be brief."}], "stop": "x"}),
    ];
    let seeds = seeds.iter().map(with);
    Target::new("bodies of chats", seeds).fuzz(move |input| {
        let body = Bytes::copy_from_slice(input);
        let checked = request::parse::<chat::ChatRequest>(&body).and_then(|mut request| {
            request.settings.checked()?;
            let prompt = template.prompt(&request.input()?);
            prompt.map(drop).map_err(|error| ApiError::bad(error.to_string(), None))
        });
        told(&checked)
    });
}

#[test]
fn fuzz_bodies_of_completions() {
    let seeds = [
        json!({"prompt": "Once upon", "logprobs": 3, "echo": false, "best_of": 2}),
        json!({"prompt": [1, 2, 3], "suffix": null}),
        json!({"prompt": ["Once"], "response_format": {"type": "json_object"}}),
        json!({"prompt": [[1, 2], [3]], "response_format": {"type": "text"}}),
    ];
    let seeds = seeds.iter().map(with);
    Target::new("bodies of completions", seeds).fuzz(|input| {
        let body = Bytes::copy_from_slice(input);
        let checked = request::parse::<completions::CompletionRequest>(&body)
            .and_then(|request| request.settings.checked());
        told(&checked)
    });
}
