//! Flags of `serve` that bound what clients may take.

use std::time::Duration;

use clap::Args;
use shared::config::values::{pause, seconds, share, size_bytes};

#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Maximum length of a session in tokens [default: 8192 with grouped key/value heads, else 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) inference_max_length: Option<u32>,
    /// KV cache per block in tokens [default: 16384 with grouped key/value heads, else 4096]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) attn_cache_tokens: Option<u32>,
    /// Maximum share of the KV cache for all sessions of one client, above 0 and at most 1. While
    /// other clients wait, a client above its fair share gets no more [default: 1, in the public
    /// swarm 0.5]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(super) max_kv_share: Option<f64>,
    /// Mirror the KV cache of a GPU in host memory, so that sessions survive a crash of its worker:
    /// on, off, or auto (when it fits)
    #[arg(long, value_name = "on|off|auto", default_value = "auto")]
    pub(super) kv_mirror: String,
    /// Maximum batch size times tokens of one request [default: 8192 with grouped key/value heads, else
    /// 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_batch_size: Option<u32>,
    /// Maximum time that a session waits for KV cache, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub(super) max_alloc_timeout: Duration,
    /// Timeout of a forward or backward request, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "180", value_parser = seconds)]
    pub(super) request_timeout: Duration,
    /// Maximum lifetime of a session, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = seconds)]
    pub(super) session_timeout: Duration,
    /// Maximum time between two steps of a session, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub(super) step_timeout: Duration,
    /// Time that the KV cache of a session is kept after its connection broke or the network daemon
    /// restarted, for a client that can resume it, in seconds; 0 keeps none
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = pause)]
    pub(super) session_grace: Duration,
    /// Shared memory for tensors between the network daemon and the workers; allocated when used
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = size_bytes)]
    pub(super) arena_size: u64,
    /// Maximum memory for blocks, KV cache and processes together. It decides how many blocks fit,
    /// and whether a move loads new blocks beside the old ones [default: the free memory]
    #[arg(long, value_name = "SIZE", value_parser = size_bytes)]
    pub(super) max_memory: Option<u64>,
    /// Memory for requests of all peers together; one IP net may hold half, one peer a quarter, and
    /// more wait unread. The largest request always fits [default: an eighth of the free memory, at
    /// least 256MiB, at most 8GiB]
    #[arg(long, value_name = "SIZE", value_parser = size_bytes)]
    pub(super) request_memory: Option<u64>,
    /// Maximum memory that each worker takes of its GPU [default: the free memory]
    #[arg(long, value_name = "SIZE", value_parser = size_bytes)]
    pub(super) device_memory: Option<u64>,
    /// Limit of open files for each process; 0 does not change the limit
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub(super) increase_file_limit: u64,
}
