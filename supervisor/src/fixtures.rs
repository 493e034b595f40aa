//! Settings for the tests of this crate.

use std::path::PathBuf;
use std::time::Duration;

use shared::config::{
    Compression, Device, HubConfig, LogConfig, LogFormat, NetdConfig, PrepareConfig, QuantType,
    RestartConfig, ServeConfig, SpanChoice, Throughput, WorkerConfig,
};
use shared::sandbox::SandboxMode;

/// A server of a swarm of its own, with one worker on the processor.
pub(crate) fn serve_config() -> ServeConfig {
    let minute = Duration::from_secs(60);
    ServeConfig {
        devices: vec![Device::Cpu],
        world_size: 1,
        uuids: Vec::new(),
        automatic: None,
        warpgroups: Vec::new(),
        sample_timeout: minute,
        netd: netd_config(),
        worker: WorkerConfig::default(),
        prepare: PrepareConfig {
            model: "m".to_owned(),
            dtype: None,
            quant_type: QuantType::None,
            is_quant_named: false,
            adapters: Vec::new(),
            cache_dir: PathBuf::from("/nowhere/cache"),
            hub: HubConfig::default(),
        },
        max_memory_bytes: None,
        restart: RestartConfig {
            backoff_min: Duration::from_secs(1),
            backoff_max: minute,
            max_restarts: 20,
            window: minute,
            retry_after: None,
            hang_timeout: minute,
            start_timeout: minute,
        },
        log: LogConfig { filter: "info".to_owned(), format: LogFormat::Text },
        drain_timeout: minute,
        file_limit: 512,
        metrics: None,
        web: None,
        fallback: None,
        sandbox: SandboxMode::On,
        events: false,
        end_with: None,
        instance: None,
        runtime_dir: PathBuf::from("/nowhere/run"),
    }
}

fn netd_config() -> NetdConfig {
    let minute = Duration::from_secs(60);
    NetdConfig {
        dht_prefix: None,
        host_maddrs: vec!["/ip4/0.0.0.0/tcp/0".to_owned()],
        announce_maddrs: Vec::new(),
        initial_peers: Vec::new(),
        identity_path: None,
        use_auto_relay: true,
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
        use_upnp: true,
        dials_private_nets: true,
        stats_report_interval: None,
        public_name: None,
        update_period: minute,
        expiration: minute,
        balance_quality: 0.75,
        mean_balance_check_period: minute,
        inference_max_length: None,
        attn_cache_tokens: None,
        max_kv_share: 1.0,
        max_batch_size: None,
        max_alloc_timeout: minute,
        request_timeout: minute,
        session_timeout: minute,
        step_timeout: minute,
        session_grace: minute,
        startup_timeout: minute,
        arena_bytes: 512 << 20,
    }
}
