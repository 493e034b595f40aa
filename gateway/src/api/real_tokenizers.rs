//! Real tokenizers and templates beside transformers, which `tests/tokenizers/run` asks: lines of cases become
//! lines of tokens.

use std::collections::BTreeMap;
use std::path::Path;

use axum::body::Bytes;
use client::text::TextCodec;
use serde_json::{Value, json};

use super::{chat, request};
use crate::template::ChatTemplate;

type Files = BTreeMap<String, (TextCodec, Option<ChatTemplate>)>;

/// The tokens of `text`, or of the request for a chat `body`, with the tokenizer in `folder`.
fn tokens(files: &mut Files, case: &Value) -> Result<Vec<u32>, String> {
    let name = case["folder"].as_str().expect("a folder");
    if !files.contains_key(name) {
        let folder = Path::new(name);
        let codec = TextCodec::load(folder).map_err(|error| error.to_string())?;
        let template = ChatTemplate::load(folder, None).map_err(|error| error.to_string())?;
        files.insert(name.to_owned(), (codec, template));
    }
    let (codec, template) = &files[name];
    if let Some(text) = case["text"].as_str() {
        return codec.encode(text).map_err(|error| error.to_string());
    }
    // A text, so that the order of its keys stays.
    let body = Bytes::from(case["body"].as_str().expect("a body").to_owned());
    let refused = |error: super::error::ApiError| error.text().to_owned();
    let mut request = request::parse::<chat::ChatRequest>(&body).map_err(refused)?;
    let input = request.input().map_err(refused)?;
    let template = template.as_ref().ok_or("no template")?;
    let prompt = template.prompt(&input).map_err(|error| error.to_string())?;
    codec.encode_rendered(&prompt).map_err(|error| error.to_string())
}

/// Reads the file that SEPAL_TOKENIZER_CASES names, and writes the answers beside it.
#[test]
#[ignore = "tests/tokenizers/run calls it"]
fn real_tokenizers_answer() {
    let path = std::env::var("SEPAL_TOKENIZER_CASES").expect("tests/tokenizers/run names a file");
    let cases = std::fs::read_to_string(&path).expect("the file");
    let mut files = Files::new();
    let answer = |line: &str| {
        let case: Value = serde_json::from_str(line).expect("JSON");
        match tokens(&mut files, &case) {
            Ok(ids) => json!({ "ids": ids }).to_string() + "\n",
            Err(error) => json!({ "error": error }).to_string() + "\n",
        }
    };
    let answers: String = cases.lines().map(answer).collect();
    assert!(!answers.is_empty());
    std::fs::write(format!("{path}.answers"), answers).expect("a file beside it");
}
