//! Which tokens end a text, and from which length on. Pure.

/// What a caller says of the end of a text, beside the tokens of the model that end it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndRules {
    /// More tokens that end the text.
    pub stop_tokens: Vec<u32>,
    /// Whether the model's own tokens do not end it.
    pub ignores_eos: bool,
    /// Tokens before which neither a token nor a text ends it.
    pub min_tokens: usize,
}

impl EndRules {
    /// Whether `token` ends a text of a model whose texts end at `eos`.
    pub fn is_end(&self, token: u32, eos: &[u32]) -> bool {
        self.stop_tokens.contains(&token) || (!self.ignores_eos && eos.contains(&token))
    }

    /// The logits of the token number `count` without all tokens that would end the text too early; `None` if
    /// every token may come.
    pub fn without_ends(&self, logits: &[f32], count: usize, eos: &[u32]) -> Option<Vec<f32>> {
        if count >= self.min_tokens {
            return None;
        }
        let mut left = logits.to_vec();
        for token in self.stop_tokens.iter().chain(eos) {
            if let Some(logit) = left.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_at_tokens_of_the_model_and_of_the_caller() {
        let plain = EndRules::default();
        assert!(plain.is_end(2, &[1, 2]) && !plain.is_end(3, &[1, 2]));
        let rules = EndRules { stop_tokens: vec![3], ignores_eos: true, min_tokens: 0 };
        assert!(rules.is_end(3, &[1, 2]) && !rules.is_end(2, &[1, 2]));
    }

    #[test]
    fn no_token_ends_a_text_before_its_shortest_length() {
        let rules = EndRules { stop_tokens: vec![0, 99], min_tokens: 2, ..EndRules::default() };
        let logits = [9.0, 8.0, 7.0];
        let expected = [f32::NEG_INFINITY, f32::NEG_INFINITY, 7.0];
        for count in [0, 1] {
            assert_eq!(rules.without_ends(&logits, count, &[1]).unwrap(), expected);
        }
        assert_eq!(rules.without_ends(&logits, 2, &[1]), None);
    }
}
