//! The families: each file fills in a [`BlockSpec`] from a config.json. A new family is a new file and a line here.

use serde_json::Value;

use super::spec::{BlockSpec, SpecError};

mod alibi;
mod bloom;
mod decoder;
mod falcon;
mod field;
mod llama;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod rotary;

/// `model_type` of each family.
pub(super) const NAMES: [&str; 7] = [
    "bloom", "falcon", "llama", "mistral", "mixtral", "qwen2", "qwen3",
];

/// The spec of the model that `config` describes.
pub(super) fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    let found = config.get("model_type").ok_or(SpecError::Missing {
        field: "model_type",
    })?;
    match found.as_str() {
        Some("bloom") => bloom::read(config),
        Some("falcon") => falcon::read(config),
        Some("llama") => llama::read(config),
        Some("mistral") => mistral::read(config),
        Some("mixtral") => mixtral::read(config),
        Some("qwen2") => qwen2::read(config),
        Some("qwen3") => qwen3::read(config),
        _ => Err(SpecError::UnknownModelType {
            found: field::shown(found).trim_matches('"').to_owned(),
        }),
    }
}
