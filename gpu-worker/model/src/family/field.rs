//! Fields of a config.json, each with the bounds in which it makes sense. A `null` counts as
//! absent.

use std::ops::RangeInclusive;

use serde_json::Value;
use shared::block::MAX_BLOCKS;

use crate::error::SpecError;

/// A whole number within bounds; `default` when it is absent, and an error when there is no default
/// either.
pub(super) fn size(
    config: &Value,
    field: &'static str,
    default: Option<usize>,
    bounds: RangeInclusive<usize>,
) -> Result<usize, SpecError> {
    let Some(value) = present(config, field) else {
        return default.ok_or(SpecError::Missing { field });
    };
    let number =
        value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| bounds.contains(n));
    number.ok_or_else(|| {
        bad(field, value, format!("a whole number from {} to {}", bounds.start(), bounds.end()))
    })
}

/// A number within bounds; `default` when it is absent, and an error when there is no default
/// either.
pub(super) fn number(
    config: &Value,
    field: &'static str,
    default: Option<f64>,
    bounds: RangeInclusive<f64>,
) -> Result<f32, SpecError> {
    let Some(value) = present(config, field) else {
        return default.map(|n| n as f32).ok_or(SpecError::Missing { field });
    };
    let number = value.as_f64().filter(|n| bounds.contains(n));
    let wanted = || format!("a number from {} to {}", bounds.start(), bounds.end());
    number.map(|n| n as f32).ok_or_else(|| bad(field, value, wanted()))
}

/// True or false; false when it is absent.
pub(super) fn flag(config: &Value, field: &'static str) -> Result<bool, SpecError> {
    match present(config, field) {
        None => Ok(false),
        Some(value) => value.as_bool().ok_or_else(|| bad(field, value, "true or false".to_owned())),
    }
}

/// True or false; `default` when it is absent.
pub(super) fn flag_or(
    config: &Value,
    field: &'static str,
    default: bool,
) -> Result<bool, SpecError> {
    match present(config, field) {
        None => Ok(default),
        Some(_) => flag(config, field),
    }
}

/// The first of two spellings of a field that is there; the first if none is.
pub(super) fn first_present(config: &Value, fields: [&'static str; 2]) -> &'static str {
    let [first, second] = fields;
    if present(config, first).is_none() && present(config, second).is_some() {
        second
    } else {
        first
    }
}

/// Number of blocks of the model.
pub(super) fn blocks(config: &Value, field: &'static str) -> Result<usize, SpecError> {
    size(config, field, None, 1..=MAX_BLOCKS as usize)
}

/// The field, unless it is absent or `null`.
pub(super) fn present<'a>(config: &'a Value, field: &str) -> Option<&'a Value> {
    config.get(field).filter(|value| !value.is_null())
}

pub(super) fn bad(field: &'static str, value: &Value, wanted: impl Into<String>) -> SpecError {
    SpecError::Bad { field, value: shown(value), wanted: wanted.into() }
}

/// A value as it is quoted in errors.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
