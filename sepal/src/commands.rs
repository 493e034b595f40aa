//! Composition root of `sepal`: which subcommand runs which role. Everything else is in the crates.

use std::ffi::OsString;

use client::{demo, generate, probe};
use gpu_worker::{inventory, sample, selftest};
use netd::dht_node;
use prepare::{cache, convert};
use shared::bootstrap::Bootstrap;
use shared::control::Role;
use shared::exit::ExitReason;
use supervisor::devices;
use supervisor::handover::{self, HandoverOptions};

use crate::cli::{self, Command, with_log};
use crate::fetch;

/// Runs `sepal` with these arguments, of which the first is the program's name; says why it ended.
///
/// What is wrong with an argument is printed. Call it on the main thread of a process that does nothing
/// else.
pub fn run_command(arguments: impl Iterator<Item = OsString>) -> ExitReason {
    run_with_worker(arguments, gpu_worker::run)
}

/// [`run_command`] with other workers, for laboratories.
pub fn run_with_worker(
    arguments: impl Iterator<Item = OsString>,
    worker: fn(Bootstrap) -> ExitReason,
) -> ExitReason {
    let command = match cli::parse(arguments, &|name| std::env::var(name).ok()) {
        Ok(command) => command,
        Err(error) => return error.report(),
    };
    match command {
        Command::Serve { config, notes } => {
            netd::join::make_identity(&config.netd);
            supervisor::serve(*config, &notes, &cli::reread)
        }
        Command::Plan(options) => crate::plan::run(*options, prepare::survey_model),
        Command::Cache(config) => {
            fetch::for_cache(&config).unwrap_or_else(|| cache::run_command(&config))
        }
        Command::Convert(config, log) => with_log(&log, "convert", || {
            fetch::for_convert(&config).unwrap_or_else(|| convert::run_command(&config))
        }),
        Command::Status(options) => crate::status::run(&options),
        Command::Handover(HandoverOptions::Describe) => handover::describe(),
        Command::Handover(HandoverOptions::Resume(state)) => {
            supervisor::resume(state, &cli::reread)
        }
        Command::Order(options) => crate::status::run_order(&options),
        Command::Generated(what) => cli::make(&what),
        Command::Top(options) => crate::top::run(&options),
        Command::Doctor(options) => crate::doctor::run(&options, netd::checkup::OBSERVERS),
        Command::SelfTest { device, is_quick, report, parent, skipped } => {
            supervisor::spawn::count_along_bus();
            let report = report.as_deref();
            selftest::run_command(device, is_quick, report, parent, skipped, devices::sample)
        }
        Command::CudaDevices { parent } => inventory::run_command(parent),
        Command::Probe(config) => probe::run_command(&config),
        Command::Sample { ordinal, kernels: of, parent } => {
            sample::run_command(ordinal, of, parent)
        }
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
            let models = [(&mut config.model, &mut config.dht_prefix)];
            fetch::fetched(models, &fetch).unwrap_or_else(|| generate::run_command(&config))
        }),
        Command::Gateway(mut config, fetch, log) => with_log(&log, "gateway", || {
            let ended = fetch::for_gateway(&mut config, &fetch);
            ended.unwrap_or_else(|| gateway::run_command(&config))
        }),
        Command::Chat(mut config, fetch, log) => with_log(&log, "chat", || {
            let fetched = fetch::fetched(fetch::of_gateway(&mut config.engine), &fetch);
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

fn print_addresses(addrs: &[String]) {
    println!("Others join this swarm through any of these addresses:");
    addrs.iter().for_each(|addr| println!("  --initial_peers {addr}"));
}
