//! Flags of `serve` that bound what clients may take.

use std::time::Duration;

use clap::Args;

use crate::cli::values::{seconds, share, size_bytes};

#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Longest session in tokens [default: 8192 with grouped key/value heads, else 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) inference_max_length: Option<u32>,
    /// KV cache per block in tokens [default: 16384 with grouped key/value heads, else 4096]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) attn_cache_tokens: Option<u32>,
    /// Part of the KV cache that the sessions of one client may hold together. Below it a client may take what it likes while nobody
    /// else wants any; while others do, one that has more than its fair share gets no more
    #[arg(long, value_name = "PART", default_value = "1", value_parser = share)]
    pub(super) max_kv_share: f64,
    /// Whether a GPU's KV cache is mirrored in host memory, so that sessions survive its worker: on, off, or auto (if it fits)
    #[arg(long, value_name = "on|off|auto", default_value = "auto")]
    pub(super) kv_mirror: String,
    /// Largest batch x tokens of one request [default: 8192 with grouped key/value heads, else 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_batch_size: Option<u32>,
    /// Longest wait of a session for KV cache, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub(super) max_alloc_timeout: Duration,
    /// Seconds for a whole forward or backward request
    #[arg(long, value_name = "SECONDS", default_value = "180", value_parser = seconds)]
    pub(super) request_timeout: Duration,
    /// Longest life of a session, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = seconds)]
    pub(super) session_timeout: Duration,
    /// Longest silence between two steps of a session, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub(super) step_timeout: Duration,
    /// Memory between the network and the workers, also for the inputs of blocks whose gradients come later; taken when used
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = size_bytes)]
    pub(super) arena_size: u64,
    /// Memory that blocks, KV cache and processes may take together: so many blocks are served, and a move to others loads them beside
    /// the present ones only if both fit [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size_bytes)]
    pub(super) max_memory: Option<u64>,
    /// Most memory that each worker takes of its GPU [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size_bytes)]
    pub(super) device_memory: Option<u64>,
    /// Open files allowed to each process; 0 leaves the limit as it is
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub(super) increase_file_limit: u64,
}
