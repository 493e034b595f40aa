//! What Llama and the families that descend from it share: RMS norms, rotated heads, a gated MLP,
//! `model.layers.<i>.` names.

use serde_json::Value;

use super::field::{bad, blocks, flag, number, present, size};
use super::rotary;
use crate::error::SpecError;
use crate::spec::{BlockSpec, GatedMlp, LinearSpec, Mlp, Norm, Qkv, Residual};

/// Bounds far above any published model, which keep products of sizes within memory arithmetic.
pub(super) const MAX_WIDTH: usize = 1 << 18;
/// As [`MAX_WIDTH`].
pub(super) const MAX_HEADS: usize = 4096;
const MAX_HEAD_DIM: usize = 1024;

/// Where descendants differ, besides what they change in the spec afterwards.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    /// Epsilon of the norms where the config names none.
    pub(super) eps: f64,
    /// Base of the rotary frequencies where the config names none.
    pub(super) theta: f64,
    /// Key/value heads where the config names none; `None` for as many as heads.
    pub(super) kv_heads: Option<usize>,
    /// Whether queries, keys and values have biases.
    pub(super) qkv_bias: bool,
    /// Whether the projection after attention has one.
    pub(super) o_bias: bool,
    /// Whether the MLP has them.
    pub(super) mlp_bias: bool,
}

/// The spec of a Llama with the differences of `variant`.
pub(super) fn read(config: &Value, variant: Variant) -> Result<BlockSpec, SpecError> {
    let hidden = size(config, "hidden_size", None, 1..=MAX_WIDTH)?;
    let heads = size(config, "num_attention_heads", None, 1..=MAX_HEADS)?;
    let default = variant.kv_heads.unwrap_or(heads);
    let kv_heads = size(config, "num_key_value_heads", Some(default), 1..=MAX_HEADS)?;
    if !heads.is_multiple_of(kv_heads) {
        let value = Value::from(kv_heads);
        return Err(bad(
            "num_key_value_heads",
            &value,
            format!("a divisor of num_attention_heads ({heads})"),
        ));
    }
    let head_dim = head_dim(config, hidden, heads)?;
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    if let Some(act) = present(config, "hidden_act").filter(|act| *act != "silu") {
        return Err(bad("hidden_act", act, "\"silu\""));
    }
    let qkv = |name, outputs| LinearSpec::new(name, outputs, hidden, variant.qkv_bias);
    Ok(BlockSpec {
        num_blocks: blocks(config, "num_hidden_layers")?,
        hidden,
        heads,
        kv_heads,
        head_dim,
        norm: Norm::Rms { eps: number(config, "rms_norm_eps", Some(variant.eps), 0.0..=1.0)? },
        position: rotary::position(config, head_dim, variant.theta)?,
        window: None,
        residual: Residual::Sequential,
        attention_norm: "input_layernorm",
        mlp_norm: Some("post_attention_layernorm"),
        qkv: Qkv::Separate([
            qkv("self_attn.q_proj", q),
            qkv("self_attn.k_proj", kv),
            qkv("self_attn.v_proj", kv),
        ]),
        head_norms: None,
        o: LinearSpec::new("self_attn.o_proj", hidden, q, variant.o_bias),
        mlp: Mlp::Gated(mlp(config, hidden, variant.mlp_bias)?),
        checkpoint_prefix: "model.layers",
    })
}

fn mlp(config: &Value, hidden: usize, bias: bool) -> Result<GatedMlp, SpecError> {
    let intermediate = size(config, "intermediate_size", None, 1..=MAX_WIDTH)?;
    Ok(GatedMlp {
        intermediate,
        gate: LinearSpec::new("mlp.gate_proj", intermediate, hidden, bias),
        up: LinearSpec::new("mlp.up_proj", intermediate, hidden, bias),
        down: LinearSpec::new("mlp.down_proj", hidden, intermediate, bias),
    })
}

fn head_dim(config: &Value, hidden: usize, heads: usize) -> Result<usize, SpecError> {
    if present(config, "head_dim").is_none() && !hidden.is_multiple_of(heads) {
        let value = Value::from(heads);
        return Err(bad(
            "num_attention_heads",
            &value,
            format!("a divisor of hidden_size ({hidden})"),
        ));
    }
    let head_dim = size(config, "head_dim", Some(hidden / heads), 2..=MAX_HEAD_DIM)?;
    if !(2..=MAX_HEAD_DIM).contains(&head_dim) || !head_dim.is_multiple_of(2) {
        return Err(bad(
            "head_dim",
            &Value::from(head_dim),
            format!("an even number from 2 to {MAX_HEAD_DIM}"),
        ));
    }
    Ok(head_dim)
}

/// Positions that a token sees, from `sliding_window`.
pub(super) fn window(config: &Value) -> Result<Option<usize>, SpecError> {
    match present(config, "sliding_window") {
        None => Ok(None),
        Some(_) => size(config, "sliding_window", None, 1..=1 << 30).map(Some),
    }
}

/// Refuses windows in some of the blocks, which Qwen's configs can ask for.
pub(super) fn refuse_windows(config: &Value) -> Result<(), SpecError> {
    match flag(config, "use_sliding_window")? {
        false => Ok(()),
        true => Err(bad("use_sliding_window", &Value::from(true), "false")),
    }
}
