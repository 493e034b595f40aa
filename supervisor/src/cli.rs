//! Flags, environment and files of settings of `sepal`, read here and nowhere else, and turned into
//! finished settings. The flags of `serve` and `dht` are those of Petals' `run_server` and
//! `run_dht`, with the same names and defaults; a dash in the name of a flag means the same as an
//! underscore. `FLAGS.md` beside this crate lists each with the test of its effect.

mod cache;
mod convert;
mod doctor;
mod file;
mod gateway;
mod generated;
mod layers;
mod local;
mod operate;
mod plan;
mod reread;
mod serve;
mod show;
mod values;

pub use doctor::DoctorOptions;
pub use generated::{Generated, make};
pub use plan::PlanOptions;
pub use reread::Settings;
pub(crate) use serve::{MAX_DEVICES, crowded, threads};

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use shared::block::Span;
use shared::bootstrap::{Identity, init_logging};
use shared::config::{
    CacheConfig, ChatConfig, ConvertConfig, DemoConfig, Device, DhtNodeConfig, FetchConfig,
    GatewayConfig, GenerateConfig, LogConfig, LogFormat, ProbeConfig, SamplingConfig, ServeConfig,
};
use shared::control::Role;
use shared::exit::ExitReason;
use shared::public_swarm;
use shared::warpgroups::{WarpgroupKernel, WarpgroupKernels};

use crate::handover::HandoverOptions;
use crate::status::{OrderOptions, Request, StatusOptions};
use layers::{LayerError, Layered};
use local::{FetchArgs, LocalArgs};
use values::{check_maddrs, model_or_last, seconds, token_bias};

/// What is logged unless the operator says otherwise. libp2p warns of things that are no trouble
/// here, such as a new swarm without peers.
const DEFAULT_LOG: &str = "info,libp2p_swarm=warn,libp2p_kad=error";

/// The same for a person at a terminal, whom the supervisor tells what matters.
const TERMINAL_LOG: &str = "warn,libp2p_kad=error";

/// The same for a command whose answer is what it prints.
const QUIET_LOG: &str = "warn";

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

/// What `sepal` was asked to do.
#[derive(Debug)]
pub enum Command {
    /// Serve blocks of a model.
    Serve {
        /// Settings.
        config: Box<ServeConfig>,
        /// Flags without effect, a sentence each, to be logged once logging has started.
        notes: Vec<String>,
    },
    /// Print the settings of `serve`, which are in this text.
    ShowConfig(String),
    /// Say what `serve` would do with these settings.
    Plan(Box<PlanOptions>),
    /// Work on the cache folder.
    Cache(CacheConfig),
    /// Convert a model ahead of time.
    Convert(ConvertConfig, LogConfig),
    /// Run a bootstrap node.
    Dht {
        /// Settings.
        config: DhtNodeConfig,
        /// How to log.
        log: LogConfig,
        /// Flags without effect, a sentence each.
        notes: Vec<String>,
    },
    /// Generate text through the swarm.
    Generate(GenerateConfig, FetchConfig, LogConfig),
    /// Answer OpenAI's API over models of a swarm.
    Gateway(Box<GatewayConfig>, FetchConfig, LogConfig),
    /// Talk to a model of a swarm.
    Chat(Box<ChatConfig>, FetchConfig, LogConfig),
    /// Start a private swarm and generate text through it.
    Demo(DemoConfig, LogConfig),
    /// Show what runs.
    Status(StatusOptions),
    /// Give an order to a running instance.
    Order(OrderOptions),
    /// Write manual pages, or print completions for a shell.
    Generated(Generated),
    /// The same, live on a terminal.
    Top(StatusOptions),
    /// Check the machine, the network and the settings.
    Doctor(Box<DoctorOptions>),
    /// Check and measure a device.
    SelfTest {
        /// Which.
        device: Device,
        /// Only the smallest cases.
        is_quick: bool,
        /// The file that everything that is found goes to.
        report: Option<PathBuf>,
        /// The process that waits for the outcome and with which the test ends.
        parent: Option<u32>,
        /// Kernels for warpgroups that it must not launch.
        skipped: WarpgroupKernels,
    },
    /// List the CUDA devices, for the process that started this one.
    CudaDevices {
        /// That process.
        parent: u32,
    },
    /// Take the sample of warpgroups, for the process that started this one.
    Sample {
        /// Number of the CUDA device.
        ordinal: u32,
        /// Of which kernels.
        kernels: WarpgroupKernels,
        /// That process.
        parent: u32,
    },
    /// Take a step through a server, for the process that started this one.
    Probe(ProbeConfig),
    /// Take over from another executable of a supervisor.
    Handover(HandoverOptions),
    /// Be a child of a supervisor.
    Role {
        /// Which.
        role: Role,
        /// The inherited descriptor.
        bootstrap: i32,
    },
}

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
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Subcommands whose settings may also come from the environment and a file.
const LAYERED: [&str; 5] = ["serve", "config", "plan", "dht", "doctor"];

/// Reads the command line `args`, whose first element is the name of the program, the environment,
/// and the file of settings that they name or that lies in the working directory.
///
/// # Errors
/// [`CliError`], to be shown with [`CliError::report`].
pub fn parse(args: impl IntoIterator<Item = OsString>, env: Env<'_>) -> Result<Command, CliError> {
    parse_in(Path::new(""), args, env)
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
            let text =
                cli.find_subcommand("config").map(|command| show::text(command, &layered, &config));
            Ok(Command::ShowConfig(text.unwrap_or_default()))
        }
        Commands::Plan(args) => {
            let notes = notes(&cli, &layered);
            plan::resolve(*args, env, notes).map(Command::Plan).map_err(explained)
        }
        Commands::Dht(args) => {
            let (config, log) = dht(args, env).map_err(explained)?;
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
    let role = |role, args: RoleArgs| Command::Role { role, bootstrap: args.bootstrap };
    Ok(match command {
        Commands::Generate(args) => generate(*args, env)?,
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
            Command::Demo(config, args.log.resolve(env, "warn"))
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
        Commands::Selftest(args) => Command::SelfTest {
            device: args.device,
            is_quick: args.quick,
            report: args.report,
            parent: args.parent,
            skipped: args.skip.into_iter().collect(),
        },
        Commands::CudaDevices(args) => Command::CudaDevices { parent: args.parent },
        Commands::Probe(args) => Command::Probe(ProbeConfig {
            peers: args.peers,
            dht_prefix: args.dht_prefix,
            blocks: args.blocks.start().0..args.blocks.end().0,
            hidden_size: args.hidden_size,
            parent: args.parent,
        }),
        Commands::Sample(args) => Command::Sample {
            ordinal: args.ordinal,
            kernels: args.kernels.into_iter().collect(),
            parent: args.parent,
        },
        Commands::Netd(args) => role(Role::Netd, args),
        Commands::GpuWorker(args) => role(Role::Worker, args),
        Commands::Prepare(args) => role(Role::Prepare, args),
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

fn dht(args: DhtArgs, env: Env<'_>) -> Result<(DhtNodeConfig, LogConfig), String> {
    check_maddrs("--initial_peers", &args.initial_peers)?;
    let (host_maddrs, announce_maddrs) =
        serve::addresses(args.port, args.public_ip, args.host_maddrs, args.announce_maddrs)?;
    let is_public = public_swarm::is_entered_through(&args.initial_peers);
    let config = DhtNodeConfig {
        initial_peers: args.initial_peers,
        host_maddrs,
        announce_maddrs,
        identity_path: args.identity_path,
        use_relay: !args.no_relay,
        use_auto_relay: args.use_auto_relay,
        use_upnp: !args.no_upnp,
        dials_private_nets: args.dial_private_nets.unwrap_or(!is_public),
        refresh_period: args.refresh_period,
        startup_timeout: args.startup_timeout,
    };
    Ok((config, args.log.resolve(env, DEFAULT_LOG)))
}

fn generate(mut args: GenerateArgs, env: Env<'_>) -> Result<Command, String> {
    let model = model_or_last(args.model, &mut [&mut args.initial_peers])
        .ok_or("no model given: name a folder or a model of the Hub, as in sepal generate MODEL")?;
    check_maddrs("--initial_peers", &args.initial_peers)?;
    let fetch = args.fetch.resolve(env)?;
    let config = GenerateConfig {
        model: model.into(),
        dht_prefix: args.dht_prefix,
        initial_peers: args.initial_peers,
        prompt: args.prompt,
        local: args.local.resolve()?,
        draft: args.draft,
        max_new_tokens: args.max_new_tokens,
        sampling: SamplingConfig {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            repetition_penalty: args.repetition_penalty,
            frequency_penalty: args.frequency_penalty,
            presence_penalty: args.presence_penalty,
            logit_bias: args.logit_bias,
            seed: args.seed,
        },
        stop: args.stop,
        stats: args.stats,
        startup_timeout: args.startup_timeout,
    };
    Ok(Command::Generate(config, fetch, args.log.resolve(env, "warn")))
}

/// `$XDG_RUNTIME_DIR/sepal`, or a folder of the user's own in /tmp.
fn runtime_dir(env: Env<'_>) -> PathBuf {
    match env("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("sepal"),
        None => folder_in_tmp(),
    }
}

/// The folder of the user's own in /tmp.
fn folder_in_tmp() -> PathBuf {
    PathBuf::from(format!("/tmp/sepal-{}", nix::unistd::geteuid()))
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
    Dht(DhtArgs),
    /// Generate text through the swarm
    Generate(Box<GenerateArgs>),
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
    Selftest(SelftestArgs),
    /// Compare warpgroups with warps on a device, for a supervisor
    #[command(hide = true)]
    Sample(SampleArgs),
    /// List the CUDA devices, for a supervisor
    #[command(hide = true, name = "cuda_devices")]
    CudaDevices(CudaDevicesArgs),
    /// Take a step through a server, for a supervisor
    #[command(hide = true)]
    Probe(ProbeArgs),
    /// Be the network daemon of a supervisor
    #[command(hide = true)]
    Netd(RoleArgs),
    /// Be a worker of a supervisor
    #[command(hide = true)]
    GpuWorker(RoleArgs),
    /// Be the reader of checkpoints of a supervisor
    #[command(hide = true)]
    Prepare(RoleArgs),
}

#[derive(Debug, Args)]
struct SelftestArgs {
    /// Device to test: cuda:N, cpu (measured only), or emu:N in builds with the emulator
    #[arg(long, default_value = "cuda:0", value_parser = values::device)]
    device: Device,

    /// Run only the smallest cases: whether kernels load and give correct results
    #[arg(long)]
    quick: bool,

    /// Also write everything that is found to FILE, as JSON, to be sent in
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// End with this process, the parent
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<u32>,

    /// Kernels for warpgroups not to launch
    #[arg(long, value_delimiter = ',', value_parser = values::warpgroup_kernel, hide = true)]
    skip: Vec<WarpgroupKernel>,
}

#[derive(Debug, Args)]
struct CudaDevicesArgs {
    /// The process that waits for the answer
    #[arg(long)]
    parent: u32,
}

#[derive(Debug, Args)]
struct SampleArgs {
    /// Number of the CUDA device
    #[arg(long)]
    ordinal: u32,
    /// Kernels for warpgroups to compare
    #[arg(long, value_delimiter = ',', value_parser = values::warpgroup_kernel, required = true)]
    kernels: Vec<WarpgroupKernel>,
    /// The process that waits for the answer
    #[arg(long)]
    parent: u32,
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct ProbeArgs {
    /// Addresses of the server
    #[arg(long, num_args = 1.., required = true)]
    peers: Vec<String>,
    /// Prefix under which it announces the model
    #[arg(long)]
    dht_prefix: String,
    /// Its blocks
    #[arg(long)]
    blocks: Span,
    /// Width of the hidden states
    #[arg(long)]
    hidden_size: u32,
    /// The process that waits for the outcome
    #[arg(long)]
    parent: u32,
}

#[derive(Debug, Args)]
struct RoleArgs {
    /// Descriptor inherited from the supervisor
    #[arg(long)]
    bootstrap: i32,
}

/// How to log.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Logging")]
struct LogArgs {
    /// Log filter: a level, or a list such as info,netd=debug [env: SEPAL_LOG]
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
    /// Format of the log: terminal (progress and the events that matter), text (every event with its
    /// time and process) or json [default: terminal on a terminal without --log, else text]
    #[arg(long, value_name = "FORMAT", value_parser = values::log_format)]
    log_format: Option<LogFormat>,
}

impl LogArgs {
    fn resolve(self, env: Env<'_>, default: &str) -> LogConfig {
        let filter = self.log.or_else(|| env("SEPAL_LOG"));
        let for_a_person = filter.is_none() && std::io::stderr().is_terminal();
        let format = self.log_format.unwrap_or(match for_a_person {
            true => LogFormat::Terminal,
            false => LogFormat::Text,
        });
        let default = if format == LogFormat::Terminal { TERMINAL_LOG } else { default };
        LogConfig { filter: filter.unwrap_or_else(|| default.to_owned()), format }
    }
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct DhtArgs {
    /// Peers to join through [default: none, start a new swarm]
    #[arg(long, num_args = 0.., value_name = "MULTIADDR")]
    initial_peers: Vec<String>,
    /// Listen on this port on all addresses [default: a free port]
    #[arg(long, value_name = "PORT", conflicts_with = "host_maddrs")]
    port: Option<u16>,
    /// Announce only this address; requires --port
    #[arg(long, value_name = "IPV4", requires = "port", conflicts_with = "announce_maddrs")]
    public_ip: Option<std::net::Ipv4Addr>,
    /// Addresses to listen on
    #[arg(long, num_args = 0.., value_name = "MULTIADDR")]
    host_maddrs: Vec<String>,
    /// Addresses to announce instead of those listened on
    #[arg(long, num_args = 0.., value_name = "MULTIADDR")]
    announce_maddrs: Vec<String>,
    /// File of the private key, which keeps the PeerID stable; created if missing
    #[arg(long, value_name = "FILE")]
    identity_path: Option<PathBuf>,
    /// File with settings: TOML, or lines name: value
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Disable relaying for others and hole punching
    #[arg(long)]
    no_relay: bool,
    /// Use relays when peers cannot dial this node
    #[arg(long)]
    use_auto_relay: bool,
    /// Do not ask the router to forward the port (UPnP)
    #[arg(long)]
    no_upnp: bool,
    /// Whether peers may have this node dial addresses of private nets and of this machine: on or
    /// off [default: on, in the public swarm off]
    #[arg(long, value_name = "on|off", value_parser = values::on_off)]
    dial_private_nets: Option<bool>,
    /// No effect: peers are found through hivemind's DHT, not through IPFS
    #[arg(long, help_heading = serve::NO_EFFECT)]
    use_ipfs: bool,
    /// Time between two status lines, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    refresh_period: Duration,
    /// Timeout for listening and for reaching a first peer, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    startup_timeout: Duration,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct GenerateArgs {
    /// Model folder in Hugging Face layout, with tokenizer.json, embeddings and head, or a model of the Hub, of
    /// which just these are downloaded; required
    model: Option<String>,
    /// Text to continue
    #[arg(long, short)]
    prompt: String,
    /// Peers of the swarm
    #[arg(long, num_args = 1.., required = true, value_name = "MULTIADDR")]
    initial_peers: Vec<String>,
    /// Prefix under which the servers announce the model
    #[arg(long, value_name = "PREFIX")]
    dht_prefix: Option<String>,
    #[command(flatten)]
    local: LocalArgs,
    #[command(flatten)]
    fetch: FetchArgs,
    /// Folder of a small model of the same family that guesses next tokens on this machine
    #[arg(long, value_name = "FOLDER")]
    draft: Option<PathBuf>,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_new_tokens: u32,
    /// Sample tokens at this temperature [default: greedy decoding]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Sample from the N most probable tokens
    #[arg(long, value_name = "N", requires = "temperature")]
    top_k: Option<usize>,
    /// Sample from the most probable tokens whose probabilities sum to P
    #[arg(long, value_name = "P", requires = "temperature")]
    top_p: Option<f32>,
    /// Sample from tokens at least P times as probable as the most probable one
    #[arg(long, value_name = "P", requires = "temperature")]
    min_p: Option<f32>,
    /// Seed of the sampling; the same seed gives the same text
    #[arg(long, value_name = "N", requires = "temperature")]
    seed: Option<u64>,
    /// Divide the logits of tokens of the prompt and of the text by P; 1 does nothing
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Subtract P from the logit of a token for each time that it was generated, from -2 to 2
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Subtract P from the logit of a token that was generated, from -2 to 2
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Add a bias from -100 to 100 to the logit of a token, by its number
    #[arg(long, value_name = "TOKEN=BIAS", value_parser = token_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// End the text before this one; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print speed and step times at the end
    #[arg(long)]
    stats: bool,
    /// Timeout for reaching the swarm and finding servers for all blocks, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    startup_timeout: Duration,
    #[command(flatten)]
    log: LogArgs,
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
pub(crate) mod tests;
