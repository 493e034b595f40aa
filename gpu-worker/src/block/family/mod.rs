//! The families: each file fills in a [`BlockSpec`] from a config.json. A new family is a new file and a line here.

use serde_json::Value;

use super::spec::{BlockSpec, SpecError};

mod field;
mod llama;

/// `model_type` of each family.
pub(super) const NAMES: [&str; 1] = ["llama"];

/// The spec of the model that `config` describes.
pub(super) fn read(config: &Value) -> Result<BlockSpec, SpecError> {
    let found = config.get("model_type").ok_or(SpecError::Missing {
        field: "model_type",
    })?;
    match found.as_str() {
        Some("llama") => llama::read(config),
        _ => Err(SpecError::UnknownModelType {
            found: field::shown(found).trim_matches('"').to_owned(),
        }),
    }
}
