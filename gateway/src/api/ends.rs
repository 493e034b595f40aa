//! Settings of a request that say where its texts end, as in vLLM's API.

use client::end_rules::EndRules;
use serde::Deserialize;

use super::error::ApiError;

/// Most tokens of a request that end a text.
const MAX_STOP_TOKENS: usize = 256;

/// Which tokens end a text, and from which length on; `null` is as if it were not there.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct EndSettings {
    stop_token_ids: Option<Vec<i64>>,
    ignore_eos: Option<bool>,
    min_tokens: Option<i64>,
}

impl EndSettings {
    /// The rules for texts of at most `max_tokens` tokens of a vocabulary.
    ///
    /// # Errors
    /// Too many tokens, one outside of the vocabulary, or a shortest length above the longest.
    pub fn rules(&self, vocabulary: usize, max_tokens: u32) -> Result<EndRules, ApiError> {
        let ids = self.stop_token_ids.as_deref().unwrap_or_default();
        if ids.len() > MAX_STOP_TOKENS {
            let got = format!("{} tokens", ids.len());
            return Err(ApiError::out_of_range(
                "stop_token_ids",
                got,
                &format!("at most {MAX_STOP_TOKENS}"),
            ));
        }
        let known = |id: &i64| {
            let token = u32::try_from(*id).ok().filter(|token| (*token as usize) < vocabulary);
            let expected = format!("tokens of the vocabulary of {vocabulary}");
            token.ok_or_else(|| ApiError::out_of_range("stop_token_ids", id, &expected))
        };
        let min_tokens = self.min_tokens.unwrap_or(0);
        let is_least = |least: &u32| *least <= max_tokens;
        let least = u32::try_from(min_tokens).ok().filter(is_least).ok_or_else(|| {
            ApiError::out_of_range(
                "min_tokens",
                min_tokens,
                &format!("0 to {max_tokens} (max_tokens)"),
            )
        })?;
        Ok(EndRules {
            stop_tokens: ids.iter().map(known).collect::<Result<_, _>>()?,
            ignores_eos: self.ignore_eos == Some(true),
            min_tokens: least as usize,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rules(settings: serde_json::Value) -> Result<EndRules, String> {
        let settings: EndSettings = serde_json::from_value(settings).unwrap();
        settings.rules(1024, 16).map_err(|error| error.text().to_owned())
    }

    #[test]
    fn settings_of_vllm_are_understood_and_null_is_none() {
        let all = json!({"stop_token_ids": [0, 1023], "ignore_eos": true, "min_tokens": 16});
        let expected = EndRules { stop_tokens: vec![0, 1023], ignores_eos: true, min_tokens: 16 };
        assert_eq!(rules(all).unwrap(), expected);
        let none = json!({"stop_token_ids": null, "ignore_eos": null, "min_tokens": null});
        assert_eq!(rules(none).unwrap(), EndRules::default());
        assert_eq!(rules(json!({})).unwrap(), EndRules::default());
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        for (settings, part) in [
            (json!({"stop_token_ids": [1024]}), "stop_token_ids 1024"),
            (json!({"stop_token_ids": [-1]}), "stop_token_ids -1"),
            (json!({"stop_token_ids": vec![1; 257]}), "257 tokens: expected at most 256"),
            (json!({"min_tokens": 17}), "min_tokens 17: expected 0 to 16"),
            (json!({"min_tokens": -1}), "min_tokens -1"),
        ] {
            let error = rules(settings).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
