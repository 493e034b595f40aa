//! Composition root of `sepal`: which subcommand runs which role. Everything else is in the crates.

use client::{demo, generate, probe};
use gpu_worker::selftest::{SelfTest, SelfTestConfig};
use gpu_worker::{inventory, sample};
use netd::dht_node;
use prepare::{cache, convert};
use shared::bootstrap::Bootstrap;
use shared::control::Role;
use shared::exit::ExitReason;
use supervisor::devices;
use supervisor::handover::{self, HandoverOptions};

use crate::cli::{self, Command, with_log};
use crate::{doctor, fetch, plan, status, top};

/// Carries out `command`; a process that is to be a worker is `worker`.
pub fn run(command: Command, worker: fn(Bootstrap) -> ExitReason) -> ExitReason {
    match command {
        Command::Serve { config, notes } => {
            netd::join::make_identity(&config.netd);
            supervisor::serve(*config, &notes, &cli::reread)
        }
        Command::Plan(options) => plan::run(*options),
        Command::Cache(config) => {
            fetch::for_cache(&config).unwrap_or_else(|| cache::run_command(&config))
        }
        Command::Convert(config, log) => with_log(&log, "convert", || {
            fetch::for_convert(&config).unwrap_or_else(|| convert::run_command(&config))
        }),
        Command::Status(options) => status::run(&options),
        Command::Handover(HandoverOptions::Describe) => handover::describe(),
        Command::Handover(HandoverOptions::Resume(state)) => {
            supervisor::resume(state, &cli::reread)
        }
        Command::Order(options) => status::run_order(&options),
        Command::Generated(what) => cli::make(&what),
        Command::Top(options) => top::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::SelfTest(config) => self_test(config),
        Command::CudaDevices { parent } => inventory::run_command(parent),
        Command::Probe(config) => probe::run_command(&config),
        Command::Sample(config) => sample::run_command(&config),
        Command::Role { role, bootstrap } => child(role, bootstrap, worker),
        Command::ShowConfig(text) => {
            print!("{text}");
            ExitReason::Clean
        }
        Command::Dht { config, log, notes } => with_log(&log, "dht", || {
            cli::log_notes(&notes);
            dht_node::run(config, print_addresses)
        }),
        Command::Generate(mut config, fetch, log) => with_log(&log, "generate", || {
            let models = [(&mut config.model, &mut config.client.dht_prefix)];
            fetch::fetched(models, &fetch).unwrap_or_else(|| generate::run_command(&config))
        }),
        Command::Gateway(mut config, fetch, log) => with_log(&log, "gateway", || {
            let ended = fetch::for_gateway(&mut config, &fetch);
            ended.unwrap_or_else(|| gateway::run_command(&config))
        }),
        Command::Chat(mut config, fetch, log) => with_log(&log, "chat", || {
            let fetched =
                fetch::fetched([(&mut config.model.folder, &mut config.client.dht_prefix)], &fetch);
            fetched.unwrap_or_else(|| gateway::chat::run_command(&config))
        }),
        Command::Demo(config, log) => with_log(&log, "demo", || demo::run_command(&config)),
    }
}

fn child(role: Role, bootstrap: i32, worker: fn(Bootstrap) -> ExitReason) -> ExitReason {
    let bootstrap = match Bootstrap::from_fd(bootstrap, role) {
        Ok(bootstrap) => bootstrap,
        Err(error) => {
            eprintln!("sepal {}: {error}", role.name());
            return error.exit_reason();
        }
    };
    match role {
        Role::Netd => netd::run::run(bootstrap),
        Role::Worker => worker(bootstrap),
        Role::Prepare => prepare::run(bootstrap),
    }
}

fn self_test(config: SelfTestConfig) -> ExitReason {
    supervisor::spawn::count_along_bus();
    match SelfTest::begin(config) {
        Ok(test) => {
            let sampled = test.to_sample().map(devices::sample);
            test.run(sampled)
        }
        Err(reason) => reason,
    }
}

fn print_addresses(addrs: &[String]) {
    println!("Others join this swarm through any of these addresses:");
    addrs.iter().for_each(|addr| println!("  --initial_peers {addr}"));
}
