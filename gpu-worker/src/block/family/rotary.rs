//! The fields of the rotary encoding.

use serde_json::Value;

use super::SpecError;
use super::field::{bad, number, present};
use crate::block::rope::RopeScaling;
use crate::block::spec::Position;

/// The encoding for heads of `head_dim`, whose base is `default_theta` where the config names none.
pub(super) fn position(
    config: &Value,
    head_dim: usize,
    default_theta: f64,
) -> Result<Position, SpecError> {
    let scaling = scaling(config)?;
    Ok(Position::Rope {
        inverse_frequencies: scaling.inverse_frequencies(theta(config, default_theta)?, head_dim),
        scaling,
    })
}

/// Base of the frequencies. Configs of transformers 5 keep it, with the scaling, in `rope_parameters`.
fn theta(config: &Value, default: f64) -> Result<f32, SpecError> {
    let place = present(config, "rope_parameters")
        .filter(|_| present(config, "rope_theta").is_none())
        .unwrap_or(config);
    number(place, "rope_theta", Some(default), 1.0..=1e12)
}

fn scaling(config: &Value) -> Result<RopeScaling, SpecError> {
    let Some(scaling) =
        present(config, "rope_scaling").or_else(|| present(config, "rope_parameters"))
    else {
        return Ok(RopeScaling::None);
    };
    let Some(kind) = present(scaling, "rope_type").or_else(|| present(scaling, "type")) else {
        return Err(bad("rope_scaling", scaling, "an object with a rope_type"));
    };
    let factor = || number(scaling, "factor", None, 1.0..=1e6);
    match kind.as_str() {
        Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
        Some("llama3") => {
            let low = number(scaling, "low_freq_factor", None, 1e-3..=1e6)?;
            let high = number(scaling, "high_freq_factor", None, 1e-3..=1e6)?;
            if high <= low {
                return Err(bad(
                    "rope_scaling",
                    scaling,
                    "one with high_freq_factor above low_freq_factor",
                ));
            }
            let original = number(scaling, "original_max_position_embeddings", None, 1.0..=1e9)?;
            Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low,
                high,
                original,
            })
        }
        _ => Err(bad(
            "rope_scaling",
            scaling,
            "of rope_type default, linear or llama3",
        )),
    }
}
