//! adapter_config.json (peft `LoraConfig`): which modules are adapted, with what rank and scale.

use std::collections::BTreeSet;

use regex::{Regex, RegexBuilder};
use serde_json::Value;

/// Largest accepted rank; common ones are 4 to 256.
const MAX_RANK: u64 = 4096;

/// Longest accepted pattern.
const MAX_PATTERN_BYTES: usize = 16 << 10;

/// Most patterns of a field: some for each matrix of the largest models.
const MAX_PATTERNS: usize = 4096;

/// Memory that a compiled pattern may take.
const MAX_COMPILED_BYTES: usize = 256 << 10;

/// What we use of a config.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    /// Name of the model it was made for.
    pub base: Option<String>,
    rank: u64,
    alpha: f64,
    is_rank_stabilized: bool,
    targets: Modules,
    excluded: Modules,
    layers: Option<BTreeSet<u64>>,
    ranks: Vec<(Regex, u64)>,
    alphas: Vec<(Regex, f64)>,
}

/// A choice of modules.
#[derive(Debug)]
enum Modules {
    /// Not said, or in a way that cannot be checked.
    Unknown,
    None,
    All,
    /// Modules of these names, or whose paths end with them.
    Named(Vec<String>),
    /// Modules whose whole paths match.
    Matching(Regex),
}

impl AdapterConfig {
    /// Reads a config; the error says what is not supported.
    pub fn parse(json: &[u8]) -> Result<AdapterConfig, String> {
        let config: Value = serde_json::from_slice(json).map_err(|e| format!("is no JSON: {e}"))?;
        let fields = config.as_object().ok_or("is no object")?;
        model::plain_lora::check(fields)?;
        let config = ConfigFields(&config);
        let rank = whole("r", config.required("r")?)?;
        let alpha = match config.get("lora_alpha") {
            Some(value) => number("lora_alpha", value)?,
            None => 8.0,
        };
        Ok(AdapterConfig {
            base: config
                .get("base_model_name_or_path")
                .and_then(Value::as_str)
                .map(|s| s.chars().take(200).collect()),
            rank,
            alpha,
            is_rank_stabilized: config.is_true("use_rslora"),
            targets: match config.get("target_modules") {
                None => Modules::Unknown,
                Some(Value::String(all)) if all.eq_ignore_ascii_case("all-linear") => Modules::All,
                Some(value) => Modules::parse("target_modules", value)?,
            },
            excluded: config
                .get("exclude_modules")
                .map_or(Ok(Modules::None), |value| Modules::parse("exclude_modules", value))?,
            layers: config.get("layers_to_transform").map(layers).transpose()?,
            ranks: config.patterns("rank_pattern", whole)?,
            alphas: config.patterns("alpha_pattern", number)?,
        })
    }

    /// Whether the module at `path` in block `block` is adapted; `None` when the config does not
    /// tell.
    pub fn targets(&self, path: &str, block: u32) -> Option<bool> {
        if self.layers.as_ref().is_some_and(|layers| !layers.contains(&u64::from(block))) {
            return Some(false);
        }
        match (self.targets.contain(path), self.excluded.contain(path)) {
            (Some(false), _) | (_, Some(true)) => Some(false),
            (Some(true), Some(false)) => Some(true),
            _ => None,
        }
    }

    /// Rank for the module at `path`.
    pub fn rank(&self, path: &str) -> u64 {
        find(&self.ranks, path).unwrap_or(self.rank)
    }

    /// What multiplies `B A x` for the module at `path` (peft `lora/layer.py`, `update_layer`).
    pub fn scale(&self, path: &str) -> f32 {
        let (alpha, rank) =
            (find(&self.alphas, path).unwrap_or(self.alpha), self.rank(path) as f64);
        let scale = if self.is_rank_stabilized { alpha / rank.sqrt() } else { alpha / rank };
        scale as f32
    }
}

fn find<T: Copy>(patterns: &[(Regex, T)], path: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(path)).map(|(_, value)| *value)
}

impl Modules {
    fn parse(field: &str, value: &Value) -> Result<Modules, String> {
        match value {
            Value::Array(names) => {
                let names: Option<Vec<_>> =
                    names.iter().map(|n| n.as_str().map(str::to_owned)).collect();
                let names = names.ok_or_else(|| {
                    format!("{field} is {}, but must be a list of names", shown(value))
                })?;
                Ok(if names.is_empty() { Modules::None } else { Modules::Named(names) })
            }
            // Python's dialect has what ours lacks, such as looking around: then only what is in
            // the file tells.
            Value::String(pattern) => {
                Ok(regex(&format!("^(?:{pattern})$")).map_or(Modules::Unknown, Modules::Matching))
            }
            _ => Err(format!("{field} is {}, but must be a list or a pattern", shown(value))),
        }
    }

    fn contain(&self, path: &str) -> Option<bool> {
        match self {
            Modules::Unknown => None,
            Modules::None => Some(false),
            Modules::All => Some(true),
            Modules::Named(names) => Some(names.iter().any(|name| {
                path.strip_suffix(name.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            })),
            Modules::Matching(pattern) => Some(pattern.is_match(path)),
        }
    }
}

/// The fields of a config; `null` counts as absent.
struct ConfigFields<'a>(&'a Value);

impl<'a> ConfigFields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    fn required(&self, field: &str) -> Result<&'a Value, String> {
        self.get(field).ok_or_else(|| format!("{field} is missing"))
    }

    fn is_true(&self, field: &str) -> bool {
        self.get(field).and_then(Value::as_bool).unwrap_or(false)
    }

    /// A map from ends of paths to values; the ends may be patterns (peft `get_pattern_key`).
    fn patterns<T>(
        &self,
        field: &str,
        value_of: impl Fn(&str, &Value) -> Result<T, String>,
    ) -> Result<Vec<(Regex, T)>, String> {
        let Some(value) = self.get(field) else {
            return Ok(Vec::new());
        };
        let map = value
            .as_object()
            .ok_or_else(|| format!("{field} is {}, but must be an object", shown(value)))?;
        if map.len() > MAX_PATTERNS {
            let count = map.len();
            return Err(format!("{field} has {count} patterns, the limit is {MAX_PATTERNS}"));
        }
        map.iter()
            .map(|(key, value)| {
                let pattern = regex(&format!(r"^(?:.*\.)?(?:{key})$"));
                let pattern = pattern.ok_or_else(|| {
                    format!("{field} has the pattern {key:?}, which cannot be read")
                })?;
                Ok((pattern, value_of(field, value)?))
            })
            .collect()
    }
}

fn regex(pattern: &str) -> Option<Regex> {
    (pattern.len() <= MAX_PATTERN_BYTES)
        .then(|| RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).build().ok())
        .flatten()
}

fn layers(value: &Value) -> Result<BTreeSet<u64>, String> {
    let list = match value {
        Value::Array(list) => list.iter().map(Value::as_u64).collect(),
        one => one.as_u64().map(|one| BTreeSet::from([one])),
    };
    list.ok_or_else(|| {
        format!("layers_to_transform is {}, but must be a number or a list of them", shown(value))
    })
}

fn whole(field: &str, value: &Value) -> Result<u64, String> {
    let wanted =
        || format!("{field} is {}, but must be a whole number from 1 to {MAX_RANK}", shown(value));
    value.as_u64().filter(|n| (1..=MAX_RANK).contains(n)).ok_or_else(wanted)
}

fn number(field: &str, value: &Value) -> Result<f64, String> {
    let number = value.as_f64().filter(|n| n.is_finite() && n.abs() <= 1e6);
    number.ok_or_else(|| format!("{field} is {}, but must be a number", shown(value)))
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(fields: Value) -> Result<AdapterConfig, String> {
        let mut config = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16});
        for (name, value) in fields.as_object().unwrap() {
            config[name] = value.clone();
        }
        AdapterConfig::parse(config.to_string().as_bytes())
    }

    #[test]
    fn modules_are_chosen_by_whole_names_patterns_or_all() {
        let at = |fields, path| parse(fields).unwrap().targets(path, 3);
        let names = json!({"target_modules": ["dense", "w1"]});
        assert_eq!(at(names.clone(), "h.3.self_attention.dense"), Some(true));
        assert_eq!(at(names.clone(), "h.3.mlp.dense_h_to_4h"), Some(false));
        assert_eq!(at(names, "h.3.mlp.xdense"), Some(false));
        let pattern = json!({"target_modules": r".*\.layers\.\d\.self_attn\.(q|v)_proj"});
        assert_eq!(at(pattern.clone(), "model.layers.3.self_attn.q_proj"), Some(true));
        assert_eq!(at(pattern.clone(), "model.layers.3.self_attn.k_proj"), Some(false));
        assert_eq!(at(pattern, "model.layers.3.self_attn.q_proj.x"), Some(false));
        assert_eq!(at(json!({"target_modules": "all-linear"}), "x.y"), Some(true));
        assert_eq!(at(json!({"target_modules": "(?!a).*"}), "x.y"), None);
        assert_eq!(at(json!({}), "x.y"), None);
        let some = json!({"target_modules": ["a"], "layers_to_transform": [1, 3]});
        assert_eq!(at(some.clone(), "l.3.a"), Some(true));
        assert_eq!(parse(some).unwrap().targets("l.2.a", 2), Some(false));
        let but = json!({"target_modules": "all-linear", "exclude_modules": ["gate"]});
        assert_eq!((at(but.clone(), "l.3.gate"), at(but, "l.3.up")), (Some(false), Some(true)));
    }

    #[test]
    fn scales_follow_rank_alpha_and_patterns() {
        let config = parse(
            json!({"rank_pattern": {"up": 4, r"3\.down": 2}, "alpha_pattern": {"l.3.down": 5}}),
        )
        .unwrap();
        assert_eq!((config.rank("l.3.q"), config.scale("l.3.q")), (8, 2.0));
        assert_eq!((config.rank("l.3.up"), config.scale("l.3.up")), (4, 4.0));
        assert_eq!((config.rank("l.3.down"), config.scale("l.3.down")), (2, 2.5));
        assert_eq!(config.rank("l.3.xup"), 8);
        let stabilized = parse(json!({"r": 16, "use_rslora": true})).unwrap();
        assert_eq!(stabilized.scale("l.3.q"), 4.0);
    }

    #[test]
    fn patterns_are_bounded_in_number_and_size() {
        let many: serde_json::Map<_, _> =
            (0..=MAX_PATTERNS).map(|n| (n.to_string(), json!(4))).collect();
        let error = parse(json!({"rank_pattern": many})).unwrap_err();
        assert!(error.contains("4097 patterns"), "{error}");
        let large = json!({"rank_pattern": {r"(\w{200}){200}": 4}});
        let error = parse(large).unwrap_err();
        assert!(error.contains("cannot be read"), "{error}");
    }

    #[test]
    fn what_is_no_plain_lora_is_refused_by_field() {
        for (fields, says) in [
            (json!({"peft_type": "PREFIX_TUNING"}), "only LORA"),
            (json!({"peft_type": null}), "peft_type is missing"),
            (json!({"r": 0}), "r is 0"),
            (json!({"r": null}), "r is missing"),
            (json!({"lora_alpha": "x"}), "lora_alpha"),
            (json!({"use_dora": true}), "use_dora"),
            (json!({"layer_replication": [[0, 2]]}), "layer_replication"),
            (json!({"init_lora_weights": "pissa_niter_4"}), "base model"),
            (json!({"alora_invocation_tokens": [1]}), "alora_invocation_tokens is [1]"),
            (json!({"target_modules": 7}), "target_modules is 7"),
            (json!({"target_modules": [7]}), "list of names"),
            (json!({"rank_pattern": {"q": 0}}), "rank_pattern is 0"),
            (json!({"rank_pattern": {"(": 1}}), "cannot be read"),
            (json!({"layers_to_transform": "all"}), "layers_to_transform"),
        ] {
            let error = parse(fields.clone()).unwrap_err();
            assert!(error.contains(says), "{fields}: {error}");
        }
        assert!(AdapterConfig::parse(b"{").is_err());
        assert!(AdapterConfig::parse(b"[]").unwrap_err().contains("no object"));
        assert!(parse(json!({"layer_replication": null, "target_parameters": []})).is_ok());
    }
}
