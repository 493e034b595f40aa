//! Limits of a server that depend on its settings and on the model.

use crate::config::NetdConfig;
use crate::model::{ModelFacts, PAGE_TOKENS};

/// Limits that depend on the model, filled in from [`NetdConfig`] once the model is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest `max_length` of a session in tokens.
    pub inference_max_length: u32,
    /// KV budget per block in tokens.
    pub attn_cache_tokens: u32,
    /// Largest batch × tokens of one request.
    pub max_batch_size: u32,
}

/// Rows of a batch over all sessions for which the KV pool holds a spare page and a partly filled
/// one each.
pub const POOL_ROWS: u32 = 256;

impl NetdConfig {
    /// The limits for `model`: what was asked for, else the defaults of
    /// `petals.server.server.Server`, which are larger where query heads share key/value heads. A
    /// session is as long as the model's texts if that is known.
    pub fn limits(&self, model: &ModelFacts) -> Limits {
        let grouped = model.kv_groups() > 1;
        let pick =
            |asked: Option<u32>, large, small| asked.unwrap_or(if grouped { large } else { small });
        Limits {
            inference_max_length: pick(
                self.inference_max_length.or(model.context_tokens),
                8192,
                2048,
            ),
            attn_cache_tokens: pick(self.attn_cache_tokens, 16384, 4096),
            max_batch_size: pick(self.max_batch_size, 8192, 2048),
        }
    }
}

impl Limits {
    /// Pages per block in the pool of a worker: the budget, and for [`POOL_ROWS`] rows the rounding
    /// of the last page and one spare page for copies.
    pub fn kv_pages(&self) -> u32 {
        let page = PAGE_TOKENS as u32;
        self.attn_cache_tokens.div_ceil(page).saturating_add(2 * POOL_ROWS)
    }
}
