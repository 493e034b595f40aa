//! Flags, environment and files of settings of `sepal`, read here and nowhere else, and turned into
//! finished settings. The flags of `serve` and `dht` are those of Petals' `run_server` and
//! `run_dht`, with the same names and defaults; a dash in the name of a flag means the same as an
//! underscore. `FLAGS.md` beside this crate lists each with the test of its effect.

mod clients;
mod command;
mod defaults;
mod dht;
mod doctor;
mod file;
mod hub;
mod layers;
mod log;
mod man_pages;
mod operate;
mod plan;
mod ports;
mod processes;
mod reread;
mod serve;
mod show;

pub use command::Command;
pub use doctor::DoctorOptions;
pub use man_pages::{Generated, make};
pub use plan::PlanOptions;
pub use reread::reread;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use client::demo::DemoConfig;
use client::generate::GenerateConfig;
use client::probe::ProbeConfig;
use gateway::chat::ChatConfig;
use gpu_worker::sample::SampleConfig;
use gpu_worker::selftest::SelfTestConfig;
use prepare::cache::CacheConfig;
use prepare::convert::ConvertConfig;
use shared::bootstrap::{LogIdentity, init_logging};
use shared::config::LogConfig;
use shared::config::values::is_maddr;
use shared::control::Role;
use shared::exit::ExitReason;
use supervisor::cache_folder::{self, TMP};
use supervisor::status::InstanceRequest;

use defaults::with_defaults;
use layers::{LayerError, Layered};
use log::{DEFAULT_LOG, LogArgs, QUIET_LOG};

const EXIT_CODES: &str = "\
Exit codes:
   0  success, or drained after SIGTERM or Ctrl-C
   1  failed; trying again may help. Also: processes did not drain in time, or a second request
      to stop ended them; for `demo`: stopped before its text was complete
   2  invalid flags, model folder or settings: trying again cannot help
  10  a device failed
  11  out of memory
  12  the supervisor and a child process come from different builds
  13  the supervisor is gone (child processes only)
  14  the instance, the port or the identity is in use
  15  a process died too often
  16  a checkpoint file was truncated while it was served
  17  the source of the model is unreachable; trying again later may help
  18  another worker of the same group died or hung (child processes only)
";

/// Flags that cannot be followed, or a request for help; prints itself.
#[derive(Debug)]
pub struct CliError(clap::Error);

impl CliError {
    fn new(message: String) -> CliError {
        CliError(Sepal::command().error(ErrorKind::ValueValidation, message))
    }

    /// Prints the message (help and version to standard output, errors to standard error), and
    /// gives the exit reason.
    pub fn report(&self) -> ExitReason {
        // A closed standard error leaves nobody to tell.
        let _ = self.0.print();
        if self.0.exit_code() == 0 { ExitReason::Clean } else { ExitReason::BadConfig }
    }
}

impl std::fmt::Display for CliError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Reads a variable of the environment.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What settings depend on beside flags and files. Flags and environment are turned into settings without
/// any effect: whoever writes to a folder makes it.
#[derive(Clone, Copy)]
pub(crate) struct Env<'a> {
    variables: Variables<'a>,
    /// The folder in which every user may make folders.
    tmp: &'a Path,
}

impl<'a> Env<'a> {
    /// These variables on this machine.
    pub(crate) fn of_machine(variables: Variables<'a>) -> Env<'a> {
        Env { variables, tmp: Path::new(TMP) }
    }

    /// A variable.
    fn get(&self, name: &str) -> Option<String> {
        (self.variables)(name)
    }
}

/// Subcommands whose settings may also come from the environment and a file.
const LAYERED: [&str; 5] = ["serve", "config", "plan", "dht", "doctor"];

/// Reads the command line `args`, whose first element is the name of the program, the environment,
/// and the file of settings that they name or that lies in the working directory. Makes nothing.
///
/// # Errors
/// [`CliError`], to be shown with [`CliError::report`].
pub fn parse(
    args: impl IntoIterator<Item = OsString>,
    variables: Variables<'_>,
) -> Result<Command, CliError> {
    parse_in(Path::new(""), args, Env::of_machine(variables))
}

/// The same with `folder` as the working directory.
fn parse_in(
    folder: &Path,
    args: impl IntoIterator<Item = OsString>,
    env: Env<'_>,
) -> Result<Command, CliError> {
    let mut cli = with_defaults(Sepal::command(), env);
    let args = models_first(&cli, args.into_iter().map(underscored).collect());
    if doctor::is_asked(&args) {
        return doctor::parse(&mut cli, &args, env, folder);
    }
    let layered =
        layers::read(&mut cli, args, &LAYERED, env, folder).map_err(|error| match error {
            LayerError::Clap(error) => CliError(error),
            LayerError::Other(message) => CliError::new(message),
        })?;
    let sepal = Sepal::from_arg_matches(&layered.matches).map_err(CliError)?;
    let explained = |message| CliError::new(layered.explain(message));
    match sepal.command {
        Commands::Serve(args) => Ok(Command::Serve {
            config: Box::new(serve::resolve(*args, env, DEFAULT_LOG).map_err(explained)?),
            notes: notes(&cli, &layered),
        }),
        Commands::Config(args) => {
            let config = serve::resolve(*args, env, DEFAULT_LOG).map_err(explained)?;
            // Rates that were measured are read from there.
            cache_folder::check_in(env.tmp, &config.prepare.cache_dir).map_err(CliError::new)?;
            let text =
                cli.find_subcommand("config").map(|command| show::text(command, &layered, &config));
            Ok(Command::ShowConfig(text.unwrap_or_default()))
        }
        Commands::Plan(args) => {
            let notes = notes(&cli, &layered);
            plan::resolve(*args, env, notes).map(Command::Plan).map_err(explained)
        }
        Commands::Dht(args) => {
            let (config, log) = dht::resolve(args, env).map_err(explained)?;
            let notes = notes(&cli, &layered);
            Ok(Command::Dht { config, log, notes })
        }
        other => plain(other, env).map_err(CliError::new),
    }
}

/// Logs what [`parse`] noted.
pub fn log_notes(notes: &[String]) {
    notes.iter().for_each(|note| tracing::warn!("{note}"));
}

/// Runs a command that logs as `role`.
pub fn with_log(
    log: &LogConfig,
    role: &'static str,
    run: impl FnOnce() -> ExitReason,
) -> ExitReason {
    match init_logging(log, LogIdentity { role, worker: None, generation: None }) {
        Ok(()) => run(),
        Err(error) => {
            eprintln!("sepal: {error}");
            ExitReason::BadConfig
        }
    }
}

/// The subcommands that read flags alone.
fn plain(command: Commands, env: Env<'_>) -> Result<Command, String> {
    Ok(match command {
        Commands::Generate(args) => {
            let (config, fetch, log) = clients::generate(*args, env)?;
            Command::Generate(Box::new(config), fetch, log)
        }
        Commands::Gateway(args) => {
            let (config, fetch, log) = clients::gateway(*args, env)?;
            Command::Gateway(Box::new(config), fetch, log)
        }
        Commands::Chat(args) => {
            let (config, fetch, log) = clients::chat(*args, env)?;
            Command::Chat(Box::new(config), fetch, log)
        }
        Commands::Cache(config) => Command::Cache(config),
        Commands::Convert(args) => {
            let ConvertArgs { mut config, log } = *args;
            hub::complete(&mut config.hub, env)?;
            Command::Convert(Box::new(config), log.resolve(env, QUIET_LOG))
        }
        Commands::Demo(args) => Command::Demo(args.config, args.log.resolve(env, QUIET_LOG)),
        Commands::Status(args) => Command::Status(args.options()),
        Commands::Top(args) => Command::Top(args.options()),
        Commands::Pause(args) => Command::Order(args.order()),
        Commands::Resume(args) => Command::Order(args.order(InstanceRequest::Resume)),
        Commands::Restart(args) => Command::Order(args.order()),
        Commands::Upgrade(args) => Command::Order(args.order()?),
        Commands::Handover(args) => Command::Handover(args.options()),
        Commands::Man(args) => Command::Generated(Generated::Manual(args.out)),
        Commands::Completions(args) => Command::Generated(Generated::Completions(args.shell)),
        Commands::Selftest(config) => Command::SelfTest(config),
        Commands::CudaDevices(args) => Command::CudaDevices { parent: args.parent },
        Commands::Probe(config) => Command::Probe(config),
        Commands::Sample(config) => Command::Sample(config),
        Commands::Netd(args) => args.command(Role::Netd),
        Commands::GpuWorker(args) => args.command(Role::Worker),
        Commands::Prepare(args) => args.command(Role::Prepare),
        Commands::Serve(_)
        | Commands::Config(_)
        | Commands::Plan(_)
        | Commands::Dht(_)
        | Commands::Doctor(_) => {
            return Err("this command reads settings from several places".to_owned());
        }
    })
}

/// Sentences for flags without effect, and the file that settings were read from.
fn notes(cli: &clap::Command, layered: &Layered) -> Vec<String> {
    let given = layered.matches.subcommand();
    let command = given.and_then(|(name, _)| cli.find_subcommand(name));
    let unused = command.into_iter().flat_map(|command| serve::notes(command, layered));
    let file =
        layered.file.iter().map(|path| format!("settings are also read from {}", path.display()));
    file.chain(unused).collect()
}

/// `--block-indices=0:4` becomes `--block_indices=0:4`; values stay as they are.
fn underscored(arg: OsString) -> OsString {
    match arg.to_str().and_then(|text| text.strip_prefix("--")) {
        Some(flag) if !flag.is_empty() => {
            let (name, value) = flag.split_at(flag.find('=').unwrap_or(flag.len()));
            format!("--{}{value}", name.replace('-', "_")).into()
        }
        _ => arg,
    }
}

/// Lists of multiaddrs, which would take a model after them along.
const MADDR_LISTS: [&str; 3] = ["--initial_peers", "--host_maddrs", "--announce_maddrs"];

/// `serve --initial_peers MULTIADDR... MODEL` becomes `serve MODEL --initial_peers MULTIADDR...`
fn models_first(cli: &clap::Command, args: Vec<OsString>) -> Vec<OsString> {
    let command = args.get(1).and_then(|name| cli.find_subcommand(name));
    if command.is_none_or(|command| command.get_positionals().next().is_none()) {
        return args;
    }
    // Within a list, whether a multiaddr of it was there.
    let mut list = None;
    let is_model = |arg: &OsString| {
        let text = arg.to_str().unwrap_or_default();
        if text.starts_with('-') {
            list = MADDR_LISTS.contains(&text).then_some(false);
        } else if list == Some(false) {
            list = Some(is_maddr(text));
        } else {
            return list == Some(true) && !is_maddr(text);
        }
        false
    };
    let (models, mut rest): (Vec<_>, Vec<_>) = args.into_iter().partition(is_model);
    rest.splice(2..2, models);
    rest
}

/// Serves blocks of large language models to the Petals swarm.
#[derive(Debug, Parser)]
#[command(name = "sepal", version, after_help = EXIT_CODES, max_term_width = 120)]
struct Sepal {
    #[command(subcommand)]
    command: Commands,
}

#[derive(Debug, Subcommand)]
enum Commands {
    /// Serve blocks of a model to the swarm
    #[command(after_help = EXIT_CODES)]
    Serve(Box<serve::ServeArgs>),
    /// Print the settings that serve would use with these flags, and where each comes from
    Config(Box<serve::ServeArgs>),
    /// Say what serve would do with these flags, without fetching weights: bytes, blocks that fit,
    /// throughput and download for each format and device
    Plan(Box<plan::PlanArgs>),
    /// List, delete, check or export what the cache folder holds
    Cache(CacheConfig),
    /// Quantize a model ahead of time into a folder that `sepal serve DIR` maps at once
    Convert(Box<ConvertArgs>),
    /// Run a bootstrap node that other peers join through
    Dht(dht::DhtArgs),
    /// Generate text through the swarm
    Generate(Box<clients::ClientArgs<GenerateConfig>>),
    /// Answer OpenAI's API over models that a swarm serves, and show the swarm in a browser
    Gateway(Box<clients::GatewayArgs>),
    /// Talk to a model that a swarm serves, on the terminal
    Chat(Box<clients::ClientArgs<ChatConfig>>),
    /// Start a private swarm with a small model and generate text through it
    Demo(DemoArgs),
    /// Show the processes of running instances
    Status(operate::StatusArgs),
    /// End the sessions and workers of a running instance, so that its devices are free; it stays connected
    Pause(operate::PauseArgs),
    /// Start the workers of a paused instance again
    Resume(operate::InstanceArgs),
    /// Replace the process of a worker; its sessions go on
    Restart(operate::RestartArgs),
    /// Have a running server go on with another executable; sessions continue
    Upgrade(operate::UpgradeArgs),
    /// Take over from another executable of a supervisor
    #[command(hide = true)]
    Handover(operate::HandoverArgs),
    /// Print completions for a shell
    Completions(CompletionsArgs),
    /// Write manual pages
    #[command(hide = true)]
    Man(ManArgs),
    /// Watch running instances on the terminal: sessions, speed, restarts, the swarm
    Top(operate::InstanceArgs),
    /// Check the machine, the network and the settings that serve would use with these flags
    #[command(after_help = doctor::AFTER_HELP)]
    Doctor(Box<doctor::DoctorArgs>),
    /// Check every kernel of a device against a reference, then measure operations and blocks
    Selftest(SelfTestConfig),
    /// Compare warpgroups with warps on a device, for a supervisor
    #[command(hide = true)]
    Sample(SampleConfig),
    /// List the CUDA devices, for a supervisor
    #[command(hide = true, name = "cuda_devices")]
    CudaDevices(processes::CudaDevicesArgs),
    /// Take a step through a server, for a supervisor
    #[command(hide = true)]
    Probe(ProbeConfig),
    /// Be the network daemon of a supervisor
    #[command(hide = true)]
    Netd(processes::RoleArgs),
    /// Be a worker of a supervisor
    #[command(hide = true)]
    GpuWorker(processes::RoleArgs),
    /// Be the reader of checkpoints of a supervisor
    #[command(hide = true)]
    Prepare(processes::RoleArgs),
}

#[derive(Debug, Args)]
struct ConvertArgs {
    #[command(flatten)]
    config: ConvertConfig,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Args)]
struct DemoArgs {
    #[command(flatten)]
    config: DemoConfig,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Args)]
struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
struct ManArgs {
    /// Folder to write them to; created if missing
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

#[cfg(test)]
mod tests;
