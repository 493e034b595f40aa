//! The families: each file fills in a [`BlockSpec`] from a config.json. A new family is a new file
//! and a line in the list below.

use serde_json::Value;

use crate::error::SpecError;
use crate::spec::BlockSpec;

mod alibi;
mod context;
mod decoder;
mod field;
mod rotary;

pub use context::context_length;

/// Declares the file of each family and lists them all.
macro_rules! families {
    ($($family:ident),+ $(,)?) => {
        $(mod $family;)+

        /// Every family.
        const FAMILIES: &[Family] = &[$($family::FAMILY),+];
    };
}

// Sorted. rustfmt does not follow these declarations; `rustfmt family/*.rs` formats the files.
families! {
    bloom,
    falcon,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
}

/// What a family knows of its models.
struct Family {
    /// `model_type` in config.json.
    model_type: &'static str,
    /// The form of the blocks that a config describes.
    read: fn(&Value) -> Result<BlockSpec, SpecError>,
    /// The prefix of the module uids that Petals derives from a repository id (petals
    /// `models/FAMILY/config.py`, `from_pretrained`); `None` for families that Petals does not
    /// have.
    dht_prefix: Option<fn(&str) -> String>,
}

impl BlockSpec {
    /// The form of the blocks of the model that `config` (a config.json) describes.
    ///
    /// # Errors
    /// [`SpecError`] names the field, its value and what is accepted: unknown families, missing or
    /// absurd numbers, heads that do not divide, features that are not supported.
    pub fn from_config(config: &Value) -> Result<BlockSpec, SpecError> {
        let found = config.get("model_type").ok_or(SpecError::Missing { field: "model_type" })?;
        match found.as_str().and_then(family) {
            Some(family) => (family.read)(config),
            None => Err(SpecError::UnknownModelType {
                found: field::shown(found).trim_matches('"').to_owned(),
                supported: names().join(", "),
            }),
        }
    }
}

/// `model_type` of each family, sorted.
fn names() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.model_type).collect()
}

/// The prefix of the module uids that Petals takes by default for a model of the Hub, if it has a
/// rule for the family.
pub fn dht_prefix(model_type: &str, repository: &str) -> Option<String> {
    family(model_type)?.dht_prefix.map(|rule| rule(repository))
}

fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}

/// The part of a repository id behind the owner.
fn last_part(repository: &str) -> &str {
    repository.rsplit('/').next().unwrap_or(repository)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_unknown_model_type_is_named_with_the_supported_ones() {
        let names = names();
        assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
        let refusal = |config: Value| BlockSpec::from_config(&config).unwrap_err().to_string();
        let listed = format!("supported are: {}", names.join(", "));
        let said = refusal(json!({"model_type": "gpt2"}));
        assert_eq!(said, format!("model_type \"gpt2\" is not supported; {listed}"));
        assert!(refusal(json!({"model_type": 7})).contains("\"7\""));
        assert_eq!(refusal(json!({})), "model_type is missing");
    }

    #[test]
    fn every_family_reads_its_own_configs() {
        for name in names() {
            let refusal = BlockSpec::from_config(&json!({"model_type": name})).unwrap_err();
            assert!(matches!(refusal, SpecError::Missing { .. }), "{name}: {refusal}");
        }
    }
}
