//! Flags, environment and files of settings of `sepal`, read here and nowhere else, and turned into
//! finished settings. The flags of `serve` and `dht` are those of Petals' `run_server` and
//! `run_dht`, with the same names and defaults; a dash in the name of a flag means the same as an
//! underscore. `FLAGS.md` beside this crate lists each with the test of its effect.

mod cache;
mod command;
mod convert;
mod dht;
mod doctor;
mod file;
mod gateway;
mod generate;
mod generated;
mod layers;
mod local;
mod log;
mod operate;
mod plan;
mod processes;
mod reread;
mod serve;
mod show;
mod values;

pub use command::Command;
pub use doctor::DoctorOptions;
pub use generated::{Generated, make};
pub use plan::PlanOptions;
pub use reread::reread;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use shared::bootstrap::{Identity, init_logging};
use shared::config::{DemoConfig, LogConfig};
use shared::control::Role;
use shared::exit::ExitReason;

use layers::{LayerError, Layered};
use log::{DEFAULT_LOG, LogArgs, QUIET_LOG};
use supervisor::cache_folder::{self, TMP, own_folder};
use supervisor::status::Request;

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
    let mut cli = Sepal::command();
    let args: Vec<OsString> = args.into_iter().map(underscored).collect();
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
    match init_logging(log, Identity { role, worker: None, generation: None }) {
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
            let (config, fetch, log) = generate::resolve(*args, env)?;
            Command::Generate(config, fetch, log)
        }
        Commands::Gateway(args) => {
            let (config, fetch, log) = gateway::resolve(*args, env)?;
            Command::Gateway(Box::new(config), fetch, log)
        }
        Commands::Chat(args) => {
            let (config, fetch, log) = gateway::resolve_chat(*args, env)?;
            Command::Chat(Box::new(config), fetch, log)
        }
        Commands::Cache(args) => Command::Cache(cache::resolve(args, env)?),
        Commands::Convert(args) => {
            let (config, log) = convert::resolve(*args, env)?;
            Command::Convert(config, log)
        }
        Commands::Demo(args) => {
            let (prompt, max_new_tokens, keep) = (args.prompt, args.max_new_tokens, args.keep);
            let config = DemoConfig { prompt, max_new_tokens, keep };
            Command::Demo(config, args.log.resolve(env, QUIET_LOG))
        }
        Commands::Status(args) => Command::Status(args.options(env)),
        Commands::Top(args) => Command::Top(args.options(env)),
        Commands::Pause(args) => Command::Order(args.order(env)),
        Commands::Resume(args) => Command::Order(args.order(Request::Resume, env)),
        Commands::Restart(args) => Command::Order(args.order(env)),
        Commands::Upgrade(args) => Command::Order(args.order(env)?),
        Commands::Handover(args) => Command::Handover(args.options()),
        Commands::Man(args) => Command::Generated(Generated::Manual(args.out)),
        Commands::Completions(args) => Command::Generated(Generated::Completions(args.shell)),
        Commands::Selftest(args) => args.command(),
        Commands::CudaDevices(args) => args.command(),
        Commands::Probe(args) => args.command(),
        Commands::Sample(args) => args.command(),
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

/// `$XDG_RUNTIME_DIR/sepal`, or a folder of the user's own in /tmp.
fn runtime_dir(env: Env<'_>) -> PathBuf {
    match env.get("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("sepal"),
        None => own_folder(env.tmp),
    }
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
    Cache(cache::CacheArgs),
    /// Quantize a model ahead of time into a folder that `sepal serve DIR` maps at once
    Convert(Box<convert::ConvertArgs>),
    /// Run a bootstrap node that other peers join through
    Dht(dht::DhtArgs),
    /// Generate text through the swarm
    Generate(Box<generate::GenerateArgs>),
    /// Answer OpenAI's API over models that a swarm serves, and show the swarm in a browser
    Gateway(Box<gateway::GatewayArgs>),
    /// Talk to a model that a swarm serves, on the terminal
    Chat(Box<gateway::ChatArgs>),
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
    Selftest(processes::SelftestArgs),
    /// Compare warpgroups with warps on a device, for a supervisor
    #[command(hide = true)]
    Sample(processes::SampleArgs),
    /// List the CUDA devices, for a supervisor
    #[command(hide = true, name = "cuda_devices")]
    CudaDevices(processes::CudaDevicesArgs),
    /// Take a step through a server, for a supervisor
    #[command(hide = true)]
    Probe(processes::ProbeArgs),
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
#[command(rename_all = "snake_case")]
struct DemoArgs {
    /// Text to continue
    #[arg(long, short)]
    prompt: Option<String>,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_new_tokens: u32,
    /// Keep the swarm running until Ctrl-C
    #[arg(long)]
    keep: bool,
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
