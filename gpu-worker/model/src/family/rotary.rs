//! The fields of the rotary encoding.

use serde_json::Value;

use super::field::{bad, number, present, size};
use crate::error::SpecError;
use crate::rope::RopeScaling;
use crate::spec::Position;

/// The encoding for heads of `head_dim`, whose base is `default_theta` where the config names none.
pub(super) fn position(
    config: &Value,
    head_dim: usize,
    default_theta: f64,
) -> Result<Position, SpecError> {
    let (scaling, theta) = (scaling(config, head_dim)?, theta(config, default_theta)?);
    Ok(Position::Rope {
        inverse_frequencies: scaling.inverse_frequencies(theta, head_dim),
        theta,
        scaling,
    })
}

/// Base of the frequencies. Configs of transformers 5 keep it, with the scaling, in
/// `rope_parameters`.
fn theta(config: &Value, default: f64) -> Result<f32, SpecError> {
    let place = present(config, "rope_parameters")
        .filter(|_| present(config, "rope_theta").is_none())
        .unwrap_or(config);
    number(place, "rope_theta", Some(default), 1.0..=1e12)
}

fn scaling(config: &Value, head_dim: usize) -> Result<RopeScaling, SpecError> {
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
            Ok(RopeScaling::Llama3 { factor: factor()?, low, high, original })
        }
        // Without the dimensions 0 and 1 there is no base to grow.
        Some("dynamic") if head_dim > 2 => {
            Ok(RopeScaling::Dynamic { factor: factor()?, original: trained(config)? })
        }
        Some("yarn") => yarn(config, scaling),
        Some("longrope" | "su") => long(config, scaling, head_dim),
        _ => Err(bad(
            "rope_scaling",
            scaling,
            "of rope_type default, linear, dynamic, yarn, longrope or llama3",
        )),
    }
}

/// Positions of the training, where no field of the scaling says it.
fn trained(config: &Value) -> Result<usize, SpecError> {
    size(config, "max_position_embeddings", Some(2048), 1..=1 << 30)
}

/// Positions of the training before the scaling, if the config tells them apart from those after.
fn original(place: &Value) -> Result<Option<usize>, SpecError> {
    const FIELD: &str = "original_max_position_embeddings";
    present(place, FIELD).map(|_| size(place, FIELD, None, 2..=1 << 30)).transpose()
}

fn yarn(config: &Value, scaling: &Value) -> Result<RopeScaling, SpecError> {
    let (longest, original) = (trained(config)?, original(scaling)?);
    let default = original.map(|n| longest as f64 / n as f64);
    let factor = number(scaling, "factor", default, 1.0..=1e6)?;
    let mscale = |weight: f32| {
        if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
    };
    let weight = |field| number(scaling, field, Some(0.0), 0.0..=1e3);
    let weights = (weight("mscale")?, weight("mscale_all_dim")?);
    let attention = match weights {
        (some, all) if some > 0.0 && all > 0.0 => mscale(some) / mscale(all),
        _ => mscale(1.0),
    };
    let [fast, slow] = [("beta_fast", 32.0), ("beta_slow", 1.0)]
        .map(|(field, default)| number(scaling, field, Some(default), 1e-3..=1e6));
    Ok(RopeScaling::Yarn {
        factor,
        original: original.unwrap_or(longest) as f32,
        fast: fast?,
        slow: slow?,
        attention: number(scaling, "attention_factor", Some(f64::from(attention)), 0.0..=1e3)?,
    })
}

fn long(config: &Value, scaling: &Value, head_dim: usize) -> Result<RopeScaling, SpecError> {
    let longest = trained(config)?;
    let trained_on = match original(config)? {
        None => original(scaling)?,
        known => known,
    };
    // As transformers: the ratio of the two lengths, else a factor.
    let factor = match trained_on {
        Some(original) => longest as f32 / original as f32,
        None => number(scaling, "factor", Some(1.0), 1e-3..=1e6)?,
    };
    let original = trained_on.unwrap_or(longest);
    let attention =
        if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f32).ln()).sqrt() };
    let divisors = |field: &'static str| -> Result<Vec<f32>, SpecError> {
        let list = present(scaling, field).ok_or(SpecError::Missing { field })?;
        let number = |n: &Value| n.as_f64().filter(|n| (1e-3..=1e6).contains(n));
        let numbers = list.as_array().map(|list| list.iter().map(number).collect());
        let numbers: Option<Vec<f64>> = numbers.unwrap_or(None);
        let numbers = numbers.filter(|n| n.len() == head_dim / 2);
        let wanted = || bad(field, list, format!("a list of {} numbers", head_dim / 2));
        Ok(numbers.ok_or_else(wanted)?.into_iter().map(|n| n as f32).collect())
    };
    Ok(RopeScaling::Long {
        original,
        long: divisors("long_factor")?,
        short: divisors("short_factor")?,
        attention: number(scaling, "attention_factor", Some(f64::from(attention)), 0.0..=1e3)?,
    })
}
