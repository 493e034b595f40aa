//! Tokenizers of Llama 2 and its kin: transformers keeps the words and merges of tokenizer.json and makes the rest
//! anew (`LlamaTokenizer` of 5.24).

use serde_json::{Value, json};

use crate::tokenizer_config::TokenizerConfig;

/// The file `tokenizer` as transformers reads it; the same where its words are made of bytes.
///
/// # Errors
/// No JSON.
pub fn rebuilt(tokenizer: Vec<u8>, config: &TokenizerConfig) -> Result<Vec<u8>, serde_json::Error> {
    let mut file: Value = serde_json::from_slice(&tokenizer)?;
    let parts = ["normalizer", "pre_tokenizer", "post_processor", "decoder"];
    let is_bytes = parts.iter().any(|part| names_byte_level(&file[*part]));
    if !file.is_object() || is_bytes || file["model"]["type"] != "BPE" {
        return Ok(tokenizer);
    }
    let Some(model) = file.get_mut("model").and_then(Value::as_object_mut) else {
        return Ok(tokenizer);
    };
    for (key, value) in [
        ("unk_token", Value::Null),
        ("dropout", Value::Null),
        ("fuse_unk", true.into()),
        ("byte_fallback", true.into()),
        ("ignore_merges", false.into()),
    ] {
        model.insert(key.to_owned(), value);
    }
    let scheme = match (config.add_prefix_space, config.legacy) {
        (Some(false), _) => "never",
        (_, Some(true)) => "always",
        _ => "first",
    };
    file["normalizer"] = Value::Null;
    file["pre_tokenizer"] =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    serde_json::to_vec(&file)
}

/// Whether a part of a tokenizer has a step over bytes.
fn names_byte_level(part: &Value) -> bool {
    part.to_string().contains("\"ByteLevel\"")
}
