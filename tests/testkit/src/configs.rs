//! Settings of children that differ from test to test in a field or two, which a test names by
//! struct update.

use std::path::Path;
use std::time::Duration;

use shared::config::{
    Compression, Device, HubConfig, LogConfig, LogFormat, NetdConfig, PrepareConfig, QuantChoice,
    QuantType, RestartConfig, ServeConfig, SpanChoice, Throughput, WorkerConfig,
};
use shared::sandbox::SandboxMode;

use crate::process::DEADLINE;

const LOOPBACK: &str = "/ip4/127.0.0.1/tcp/0";

/// `model` as it is stored, without adapters.
pub fn prepare_config(model: impl AsRef<Path>, cache_dir: impl AsRef<Path>) -> PrepareConfig {
    PrepareConfig {
        model: model.as_ref().to_str().expect("UTF-8 path").to_owned(),
        dtype: None,
        quant_type: QuantChoice::ByDevice(QuantType::None),
        adapters: Vec::new(),
        cache_dir: cache_dir.as_ref().to_owned(),
        hub: HubConfig::default(),
    }
}

/// A server of all blocks on a free port of the loopback device.
pub fn netd_config(initial_peers: Vec<String>) -> NetdConfig {
    NetdConfig {
        dht_prefix: None,
        host_maddrs: vec![LOOPBACK.into()],
        announce_maddrs: Vec::new(),
        initial_peers,
        identity_path: None,
        use_auto_relay: false,
        span: SpanChoice::All,
        throughput: Throughput::Measure,
        compression: Compression::None,
        link_bits_per_s: None,
        max_upload_bits_per_s: None,
        relay_bits_per_s: None,
        request_memory: 256 << 20,
        network_test: None,
        rates_dir: None,
        monitor: None,
        use_upnp: false,
        dials_private_nets: true,
        stats_report_interval: None,
        public_name: None,
        update_period: 2 * DEADLINE,
        expiration: 4 * DEADLINE,
        balance_quality: 0.0,
        mean_balance_check_period: Duration::from_secs(1),
        inference_max_length: None,
        attn_cache_tokens: None,
        max_kv_share: 1.0,
        max_batch_size: None,
        max_alloc_timeout: DEADLINE,
        request_timeout: DEADLINE,
        session_timeout: 3 * DEADLINE,
        step_timeout: 2 * DEADLINE,
        session_grace: DEADLINE,
        startup_timeout: DEADLINE,
        arena_bytes: 4 << 20,
    }
}

/// A server of a swarm of its own, with one worker on the processor.
pub fn serve_config() -> ServeConfig {
    ServeConfig {
        devices: vec![Device::Cpu],
        world_size: 1,
        uuids: Vec::new(),
        automatic: None,
        warpgroups: Vec::new(),
        sample_timeout: DEADLINE,
        netd: netd_config(Vec::new()),
        worker: WorkerConfig::default(),
        prepare: prepare_config("m", "/nowhere/cache"),
        max_memory_bytes: None,
        restart: RestartConfig {
            backoff_min: Duration::from_secs(1),
            backoff_max: DEADLINE,
            max_restarts: 20,
            window: DEADLINE,
            retry_after: None,
            hang_timeout: DEADLINE,
            start_timeout: DEADLINE,
        },
        log: LogConfig { filter: "info".to_owned(), format: LogFormat::Text },
        drain_timeout: DEADLINE,
        file_limit: 512,
        metrics: None,
        web: None,
        fallback: None,
        sandbox: SandboxMode::On,
        events: false,
        end_with: None,
        instance: None,
        runtime_dir: "/nowhere/run".into(),
    }
}
