//! `sepal doctor`: the flags of `serve`, and a file of settings that may be broken. Then the flags
//! alone are followed, and the complaint becomes a finding.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Args, FromArgMatches};
use shared::config::ServeConfig;
use supervisor::cache_folder;

use super::layers::{self, LayerError, Origin};
use super::{CliError, Command, Commands, Env, LAYERED, Sepal, serve, show};

/// What to check.
#[derive(Clone, Debug)]
pub struct DoctorOptions {
    /// Settings of the server in question. Its model is empty if none was named.
    pub config: ServeConfig,
    /// The model.
    pub model: Option<String>,
    /// Whether the flags, variables or the file name a swarm.
    pub names_swarm: bool,
    /// Whether nothing that needs the network is checked.
    pub offline: bool,
    /// The file of settings, which may be at fault.
    pub file: Option<PathBuf>,
    /// Why the file or the environment cannot be followed.
    pub complaint: Option<String>,
    /// The settings in force as `sepal config` shows them, without secrets.
    pub shown: String,
    /// Print JSON instead of lines.
    pub json: bool,
    /// Where to pack a report.
    pub bundle: Option<PathBuf>,
    /// The log that goes into it.
    pub log_file: Option<PathBuf>,
}

/// Its flags; those that are not of `serve` are in [`layers::is_of_command_line`].
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DoctorArgs {
    /// Print JSON instead of lines
    #[arg(long, help_heading = "Doctor")]
    json: bool,
    /// Pack the findings, the settings, the status of running servers and the log into a .tar.gz for
    /// a bug report, without tokens and keys
    #[arg(long, value_name = "FILE", help_heading = "Doctor")]
    bundle: Option<PathBuf>,
    /// Log that --bundle packs [default: that of the units called sepal* in the journal]
    #[arg(long, value_name = "FILE", requires = "bundle", help_heading = "Doctor")]
    log_file: Option<PathBuf>,
    #[command(flatten)]
    serve: serve::ServeArgs,
}

/// What is said below the help.
pub(super) const AFTER_HELP: &str = "\
Give the flags of `sepal serve` that are in question. Each check prints one line: ok, warning, problem
or skipped; what was found; and what to do. MODEL, --initial_peers or --new_swarm name the swarm that
is checked, by a node of its own with a fresh identity; --offline skips what needs a network.

Exit codes:
   0  no problems; warnings are possible
   1  a problem, or the bundle could not be written
   2  invalid flags, or the file of --bundle exists
";

/// Whether these arguments, the name of the program first, ask for the doctor.
pub(super) fn is_asked(args: &[OsString]) -> bool {
    args.get(1).is_some_and(|command| command == "doctor")
}

/// Reads everything; if the file or the environment is at fault, the flags alone.
pub(super) fn parse(
    cli: &mut clap::Command,
    args: &[OsString],
    env: Env<'_>,
    folder: &Path,
) -> Result<Command, CliError> {
    let options = match read(cli, args, &LAYERED, env, folder) {
        Ok(options) => options,
        // What is wrong with the flags themselves is wrong again.
        Err(error) => DoctorOptions {
            complaint: Some(sentence(&error)),
            file: layers::file_of(cli, args, env, folder),
            ..read(cli, args, &[], env, folder)?
        },
    };
    Ok(Command::Doctor(Box::new(options)))
}

fn read(
    cli: &mut clap::Command,
    args: &[OsString],
    layered: &[&str],
    env: Env<'_>,
    folder: &Path,
) -> Result<DoctorOptions, CliError> {
    let read = layers::read(cli, args.to_vec(), layered, env, folder);
    let layered = read.map_err(|error| match error {
        LayerError::Clap(error) => CliError(error),
        LayerError::Other(message) => CliError::new(message),
    })?;
    let sepal = Sepal::from_arg_matches(&layered.matches).map_err(CliError)?;
    let Commands::Doctor(args) = sepal.command else {
        return Err(CliError::new("expected the command doctor".to_owned()));
    };
    let DoctorArgs { json, bundle, log_file, serve } = *args;
    let config = serve::resolve_for(serve, env, super::log::DEFAULT_LOG, Some(String::new()));
    let mut config = config.map_err(|message| CliError::new(layered.explain(message)))?;
    // What another user can write to is a finding, and is not read.
    if cache_folder::check_in(env.tmp, &config.prepare.cache_dir).is_err() {
        config.netd.rates_dir = None;
        config.worker.rates_dir = None;
    }
    let is_given = |id: &str| layered.origin(id) != Origin::Default;
    let command = cli.find_subcommand("doctor");
    Ok(DoctorOptions {
        model: Some(config.prepare.model.clone()).filter(|model| !model.is_empty()),
        names_swarm: is_given("initial_peers") || is_given("new_swarm"),
        offline: is_given("offline"),
        file: layered.file.clone(),
        complaint: None,
        shown: command.map(|of| show::text(of, &layered, &config)).unwrap_or_default(),
        config,
        json,
        bundle,
        log_file,
    })
}

/// What clap says, in one line without its usage.
fn sentence(error: &CliError) -> String {
    let text = error.to_string();
    let said = text.split("\n\nUsage:").next().unwrap_or_default();
    let said = said.split("\n\nFor more information").next().unwrap_or_default();
    let lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ").trim_start_matches("error: ").to_owned()
}
