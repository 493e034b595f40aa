//! Which adapters are plain LoRA: `y + scale · B A x` beside matrices of the published model, and nothing else.
//! Whatever asks for more is refused by its key, for servers and clients alike.
//!
//! # Source
//! The keys of `LoraConfig` and their defaults are those of PEFT 0.21.2 (`tuners/lora/config.py` and
//! `config.py`); `tuners/lora/variants.py` and `layer.py` tell which of them change what an adapter computes.

use serde_json::{Map, Value};

/// The release of PEFT whose keys [`KEYS`] are.
const PEFT: &str = "PEFT 0.21.2";

/// What to do about an adapter that computes something else.
const RETRAIN: &str =
    "train it without, or merge the adapter into the model (merge_and_unload) and serve that";

/// What to do about an adapter of a changed base model.
const CONVERT: &str = "it belongs to a changed base model: convert it (save_pretrained with \
     path_initial_model_for_weight_conversion), or merge it (merge_and_unload) and serve that model";

/// What to do about an adapter of a quantized base model.
const MERGE: &str = "it belongs to a base model that LoftQ changed: merge it into that model \
     (merge_and_unload) and serve the merged one";

/// What to do about a key that nobody knows.
const UNKNOWN: &str = "remove the key if the adapter is plain LoRA without it";

/// Initial values after which the base model is the published one.
const PLAIN_INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// Names of the list of blocks, which PEFT looks for unless it is told others (`COMMON_LAYERS_PATTERN`).
const LAYERS: [&str; 5] = ["layers", "h", "block", "blocks", "layer"];

/// How a key of an adapter's config is taken.
enum Rule {
    /// Whoever applies the adapter reads the value and checks it.
    Read,
    /// True, false or absent, and read as that.
    Flag,
    /// It says nothing about what the adapter computes; or only together with a key that is refused.
    NoEffect,
    /// It changes what is computed, unless it is empty, false or this.
    Only(&'static str),
    /// It may be told as one of [`LAYERS`].
    Layers,
    /// It tells whether the base model is the published one.
    Init,
}

/// All keys of `LoraConfig`, with those that every adapter has.
const KEYS: &[(&str, Rule)] = &[
    ("alora_invocation_tokens", Rule::Only("")),
    ("alpha_pattern", Rule::Read),
    ("arrow_config", Rule::Only("")),
    ("auto_mapping", Rule::NoEffect),
    ("base_model_name_or_path", Rule::Read),
    ("bias", Rule::Only("none")),
    // Read beside init_lora_weights "corda", "eva", "loftq" and "lora_ga"; stays behind after a conversion.
    ("corda_config", Rule::NoEffect),
    ("eva_config", Rule::NoEffect),
    ("loftq_config", Rule::NoEffect),
    ("lora_ga_config", Rule::NoEffect),
    ("ensure_weight_tying", Rule::Only("")),
    ("exclude_modules", Rule::Read),
    // Tells how the base model stores its matrices; A and B are stored alike.
    ("fan_in_fan_out", Rule::NoEffect),
    ("inference_mode", Rule::NoEffect),
    ("init_lora_weights", Rule::Init),
    ("kasa_config", Rule::Only("")),
    ("layer_replication", Rule::Only("")),
    ("layers_pattern", Rule::Layers),
    ("layers_to_transform", Rule::Read),
    ("lora_alpha", Rule::Read),
    ("lora_bias", Rule::Only("")),
    ("lora_dropout", Rule::NoEffect),
    ("megatron_config", Rule::Only("")),
    ("megatron_core", Rule::NoEffect),
    ("modules_to_save", Rule::Read),
    ("monteclora_config", Rule::Only("")),
    ("peft_type", Rule::Read),
    ("peft_version", Rule::NoEffect),
    ("qalora_group_size", Rule::NoEffect),
    ("r", Rule::Read),
    ("rank_pattern", Rule::Read),
    ("revision", Rule::NoEffect),
    ("runtime_config", Rule::NoEffect),
    ("target_modules", Rule::Read),
    ("target_parameters", Rule::Only("")),
    ("task_type", Rule::NoEffect),
    ("trainable_token_indices", Rule::Only("")),
    ("use_bdlora", Rule::Only("")),
    ("use_dora", Rule::Only("")),
    ("use_qalora", Rule::Only("")),
    ("use_rslora", Rule::Flag),
    ("velora_config", Rule::Only("")),
];

/// Checks that adapter_config.json describes plain LoRA.
///
/// # Errors
/// The key that asks for something else, its value, and what to do.
pub fn check(config: &Map<String, Value>) -> Result<(), String> {
    match config.get("peft_type").filter(|kind| !kind.is_null()) {
        Some(Value::String(kind)) if kind.eq_ignore_ascii_case("LORA") => {}
        Some(other) => {
            let advice = "train a LoRA, or merge the adapter into the model and serve that";
            return Err(format!(
                "peft_type is {}, but only LORA is supported: {advice}",
                shown(other)
            ));
        }
        None => return Err("peft_type is missing: save the adapter with save_pretrained".into()),
    }
    config.iter().try_for_each(|(key, value)| check_key(key, value))
}

fn check_key(key: &str, value: &Value) -> Result<(), String> {
    let Some((_, rule)) = KEYS.iter().find(|(name, _)| *name == key) else {
        let key: String = key.chars().take(60).collect();
        let what = format!("{key} is {}, but {PEFT} has no such key", shown(value));
        return if is_off(value) { Ok(()) } else { Err(format!("{what}: {UNKNOWN}")) };
    };
    let (is_plain, advice) = match rule {
        Rule::Read | Rule::NoEffect => (true, ""),
        Rule::Flag => (value.is_null() || value.is_boolean(), "set it to true or false"),
        Rule::Only(plain) => (is_off(value) || value == plain, RETRAIN),
        Rule::Layers => (is_off(value) || are_layers(value), "leave it out"),
        Rule::Init => return check_init(value),
    };
    if is_plain { Ok(()) } else { Err(refusal(key, value, advice)) }
}

/// `pissa_niter_16` and the like have numbers behind them; PEFT takes the names in any case.
fn check_init(value: &Value) -> Result<(), String> {
    let Value::String(init) = value else {
        let advice = "set it to true if the base model is the published one";
        let is_plain = value.is_null() || value.is_boolean();
        return if is_plain { Ok(()) } else { Err(refusal("init_lora_weights", value, advice)) };
    };
    let init = init.to_ascii_lowercase();
    if PLAIN_INITS.contains(&init.as_str()) {
        return Ok(());
    }
    let advice = if init.starts_with("loftq") { MERGE } else { CONVERT };
    Err(refusal("init_lora_weights", value, advice))
}

fn refusal(key: &str, value: &Value, advice: &str) -> String {
    format!("{key} is {}, but only plain LoRA is supported: {advice}", shown(value))
}

/// Whether a value is one that switches its key off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_on) => !is_on,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn are_layers(value: &Value) -> bool {
    let is_one = |name: &Value| name.as_str().is_some_and(|name| LAYERS.contains(&name));
    match value {
        Value::Array(names) => names.iter().all(is_one),
        name => is_one(name),
    }
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(key: &str, value: &Value) -> Option<String> {
        let mut config = json!({"peft_type": "LORA", "r": 8});
        config[key] = value.clone();
        check(config.as_object().unwrap()).err()
    }

    /// What `LoraConfig().to_dict()` of PEFT 0.21.2 gives, with `runtime_config`, which it leaves out.
    const DEFAULTS: &str = r#"{
        "task_type": null, "peft_type": "LORA", "auto_mapping": null, "peft_version": "0.21.2",
        "base_model_name_or_path": null, "revision": null, "inference_mode": false, "r": 8,
        "target_modules": null, "exclude_modules": null, "lora_alpha": 8, "lora_dropout": 0.0,
        "fan_in_fan_out": false, "bias": "none", "use_rslora": false, "modules_to_save": null,
        "init_lora_weights": true, "layers_to_transform": null, "layers_pattern": null,
        "rank_pattern": {}, "alpha_pattern": {}, "megatron_config": null,
        "megatron_core": "megatron.core", "trainable_token_indices": null, "loftq_config": {},
        "eva_config": null, "corda_config": null, "lora_ga_config": null, "use_dora": false,
        "velora_config": null, "alora_invocation_tokens": null, "use_qalora": false,
        "qalora_group_size": 16, "monteclora_config": null, "layer_replication": null,
        "runtime_config": {"ephemeral_gpu_offload": false}, "lora_bias": false,
        "target_parameters": null, "use_bdlora": null, "arrow_config": null, "kasa_config": null,
        "ensure_weight_tying": false
    }"#;

    #[test]
    fn the_table_has_the_keys_of_peft_and_its_defaults_are_plain() {
        let defaults: Value = serde_json::from_str(DEFAULTS).unwrap();
        let mut names: Vec<&str> = KEYS.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        let keys = defaults.as_object().unwrap().keys();
        let mut wanted: Vec<&str> = keys.map(String::as_str).collect();
        wanted.sort_unstable();
        assert_eq!(names, wanted);
        assert_eq!(check(defaults.as_object().unwrap()), Ok(()));
    }

    #[test]
    fn what_is_no_plain_lora_is_refused_by_key_value_and_advice() {
        let cases = [
            ("alora_invocation_tokens", json!([151644, 77091]), RETRAIN),
            ("arrow_config", json!({"top_k": 3}), RETRAIN),
            ("bias", json!("lora_only"), RETRAIN),
            ("bias", json!("all"), RETRAIN),
            ("ensure_weight_tying", json!(true), RETRAIN),
            ("init_lora_weights", json!("loftq"), MERGE),
            ("init_lora_weights", json!("lora_ga"), CONVERT),
            ("init_lora_weights", json!("pissa"), CONVERT),
            ("init_lora_weights", json!("PiSSA_niter_16"), CONVERT),
            ("init_lora_weights", json!("olora"), CONVERT),
            ("init_lora_weights", json!("corda"), CONVERT),
            ("init_lora_weights", json!("of next year"), CONVERT),
            ("init_lora_weights", json!(1), "set it to true"),
            ("kasa_config", json!({"beta": 1e-4}), RETRAIN),
            ("layer_replication", json!([[0, 2], [1, 3]]), RETRAIN),
            ("layers_pattern", json!("experts"), "leave it out"),
            ("lora_bias", json!(true), RETRAIN),
            ("megatron_config", json!({"num_layers": 2}), RETRAIN),
            ("monteclora_config", json!({"num_samples": 8}), RETRAIN),
            ("target_parameters", json!(["experts.down_proj"]), RETRAIN),
            ("trainable_token_indices", json!([0, 1]), RETRAIN),
            ("trainable_token_indices", json!({"embed_tokens": [0]}), RETRAIN),
            ("use_bdlora", json!({"nblocks": 2}), RETRAIN),
            ("use_dora", json!(true), RETRAIN),
            ("use_dora", json!("true"), RETRAIN),
            ("use_dora", json!(1), RETRAIN),
            ("use_qalora", json!(true), RETRAIN),
            ("use_rslora", json!("true"), "set it to true or false"),
            ("velora_config", json!({"num_groups": 64}), RETRAIN),
            ("of_next_year", json!(3), UNKNOWN),
            ("enable_lora", json!([true, false]), UNKNOWN),
            ("peft_type", json!("IA3"), "only LORA"),
            ("peft_type", json!(null), "save_pretrained"),
        ];
        for (key, value, advice) in cases {
            let error = refused(key, &value).unwrap_or_else(|| panic!("{key} {value} passes"));
            assert!(error.contains(key) && error.contains(advice), "{key} {value}: {error}");
            let is_told = value.is_null() || error.contains(&value.to_string());
            assert!(is_told && !error.contains('\n'), "{key} {value}: {error}");
        }
    }

    #[test]
    fn keys_that_change_nothing_pass() {
        for (key, value) in [
            ("init_lora_weights", json!("gaussian")),
            ("init_lora_weights", json!("eva")),
            ("init_lora_weights", json!("orthogonal")),
            ("init_lora_weights", json!("mica")),
            ("init_lora_weights", json!(false)),
            ("corda_config", json!({"corda_method": "kpm"})),
            ("eva_config", json!({"rho": 2.0})),
            ("lora_dropout", json!(0.1)),
            ("fan_in_fan_out", json!(true)),
            ("layers_pattern", json!(["layers"])),
            ("use_rslora", json!(true)),
            ("use_bdlora", json!(false)),
            ("target_parameters", json!([])),
            ("of_next_year", json!(null)),
            ("merge_weights", json!(false)),
        ] {
            assert_eq!(refused(key, &value), None, "{key} {value}");
        }
    }
}
