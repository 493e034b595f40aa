//! Composition root of `sepal`: which subcommand runs which role. Everything else is in the crates.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use client::demo::{self, DemoConfig};
use client::generate::{self, GenerateConfig};
use client::sampling::SamplingConfig;
use netd::dht_node::{self, DhtNodeConfig};
use shared::bootstrap::{Bootstrap, Identity, init_logging};
use shared::config::LogConfig;
use shared::control::Role;
use shared::exit::ExitReason;
use supervisor::cli::{self, Command, DhtOptions, GenerateOptions};

/// Time for a bootstrap node to listen and to reach a first peer.
const DHT_STARTUP: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let command = match cli::parse(std::env::args_os(), &|name| std::env::var(name).ok()) {
        Ok(command) => command,
        Err(error) => return code(error.report()),
    };
    code(match command {
        Command::Serve { config, notes } => supervisor::serve(*config, &notes),
        Command::Status(options) => supervisor::report::run(&options),
        Command::Role { role, bootstrap } => child(role, bootstrap),
        Command::Dht(options) => with_log(&options.log.clone(), "dht", || dht(options)),
        Command::Generate(options) => with_log(&options.log.clone(), "generate", || text(options)),
        Command::Demo(options) => with_log(&options.log, "demo", || {
            let (prompt, max_new_tokens, keep) = (options.prompt, options.max_new_tokens, options.keep);
            demo::run_command(&DemoConfig { prompt, max_new_tokens, keep })
        }),
    })
}

fn child(role: Role, bootstrap: i32) -> ExitReason {
    let bootstrap = match Bootstrap::from_fd(bootstrap, role) {
        Ok(bootstrap) => bootstrap,
        Err(error) => {
            eprintln!("sepal {}: {error}", role.name());
            return error.exit_reason();
        }
    };
    match role {
        Role::Netd => netd::run::run(bootstrap),
        Role::Worker => gpu_worker::run(bootstrap),
        Role::Prepare => gpu_worker::prepare::run(bootstrap),
    }
}

fn dht(options: DhtOptions) -> ExitReason {
    let config = DhtNodeConfig {
        host_maddrs: options.host_maddrs,
        announce_maddrs: options.announce_maddrs,
        initial_peers: options.initial_peers,
        identity_path: options.identity_path,
        refresh_period: options.refresh_period,
        startup_timeout: DHT_STARTUP,
    };
    dht_node::run(config, |addrs| {
        println!("Others join this swarm through any of these addresses:");
        addrs.iter().for_each(|addr| println!("  --initial_peers {addr}"));
    })
}

fn text(options: GenerateOptions) -> ExitReason {
    let GenerateOptions { temperature, top_k, top_p, seed, .. } = options;
    // The addresses were checked when the flags were read.
    let initial_peers = options.initial_peers.iter().filter_map(|addr| addr.parse().ok()).collect();
    let config = GenerateConfig {
        model: options.model,
        dht_prefix: options.dht_prefix,
        initial_peers,
        prompt: options.prompt,
        max_new_tokens: options.max_new_tokens,
        sampling: SamplingConfig { temperature, top_k, top_p, seed },
        startup_timeout: options.startup_timeout,
    };
    generate::run_command(&config, options.stats)
}

fn with_log(log: &LogConfig, role: &'static str, run: impl FnOnce() -> ExitReason) -> ExitReason {
    match init_logging(log, Identity { role, worker: None, generation: None }) {
        Ok(()) => run(),
        Err(error) => {
            eprintln!("sepal: {error}");
            ExitReason::BadConfig
        }
    }
}

fn code(reason: ExitReason) -> ExitCode {
    ExitCode::from(reason.code())
}
