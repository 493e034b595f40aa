//! Settings from several places, as one command line: `flag > SEPAL_* variable > file > default`.
//! What the flags leave open is filled in from the environment, then from a file, by giving clap
//! the flags that they stand for; so every value is read, checked and explained in the same way
//! wherever it comes from (upstream's `configargparse` does the same). Only the variable `SEPAL_` +
//! name in capitals counts, `SEPAL_BLOCK_INDICES=0:4`; lists are divided by white space or commas,
//! and switches are `true` or `false`.
//!
//! A setting of a lower place that excludes one of a higher place is left out: with `--new_swarm`,
//! the `initial_peers` of a file do not count.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::Env;
use super::file::{self, Setting};

/// File that is read when it lies in the working directory and none is given (`run_server.py`,
/// `default_config_files`).
const DEFAULT_FILE: &str = "config.yml";

/// The positional model and the flag that stands for it in a file or in the environment.
const MODEL: (&str, &str) = ("model", "converted_model_name_or_path");

/// Variables that had their names before all flags had one.
const OTHER_NAMES: [(&str, &str); 1] = [("cache_dir", "SEPAL_CACHE")];

/// Where the value of a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// This variable.
    Env(String),
    /// This line of this file.
    File(PathBuf, usize),
    /// Nobody gave it.
    Default,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Flag => f.write_str("flag"),
            Origin::Env(name) => f.write_str(name),
            Origin::File(path, line) => write!(f, "{}:{line}", path.display()),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// A command line with everything that stands in its place.
#[derive(Debug)]
pub struct Layered {
    /// As clap reads it.
    pub matches: ArgMatches,
    /// Settings that do not come from the command line.
    lower: BTreeMap<String, Origin>,
    /// The file that was read.
    pub file: Option<PathBuf>,
}

impl Layered {
    /// Where the setting `id` comes from, in the matches of its subcommand.
    pub fn origin(&self, id: &str) -> Origin {
        let given = self.matches.subcommand().is_some_and(|(_, given)| {
            given.value_source(id).is_some_and(|source| source != ValueSource::DefaultValue)
        });
        match self.lower.get(id) {
            Some(origin) => origin.clone(),
            None if given => Origin::Flag,
            None => Origin::Default,
        }
    }

    /// `message`, with the origin of the first flag that it names, unless that is the command line.
    pub fn explain(&self, message: String) -> String {
        let flag = message.split([' ', ':']).find_map(|word| word.strip_prefix("--"));
        match flag.and_then(|flag| self.lower.get(flag).map(|origin| (flag, origin))) {
            Some((flag, origin)) => format!("{message} ({flag} is set by {origin})"),
            None => message,
        }
    }
}

/// Why settings cannot be read.
#[derive(Debug)]
pub enum LayerError {
    /// By clap, or a request for help.
    Clap(clap::Error),
    /// A file or a variable.
    Other(String),
}

/// Reads `args`, whose first element is the name of the program, then the environment and a file in
/// `folder` for the subcommands in `layered`.
pub fn read(
    cli: &mut Command,
    args: Vec<OsString>,
    layered: &[&str],
    env: Env<'_>,
    folder: &Path,
) -> Result<Layered, LayerError> {
    let first = cli.try_get_matches_from_mut(&args).map_err(LayerError::Clap)?;
    let plain = |matches| Layered { matches, lower: BTreeMap::new(), file: None };
    let Some((name, given)) = first.subcommand().filter(|(name, _)| layered.contains(name)) else {
        return Ok(plain(first));
    };
    let Some(command) = cli.find_subcommand(name).cloned() else {
        return Ok(plain(first));
    };
    let file = config_file(&command, given, env, folder);
    let mut merge = Merge::new(&command, given);
    merge.environment(env)?;
    if let Some(path) = &file {
        merge.file(path)?;
    }
    let Merge { mut extra, lower, .. } = merge;
    let mut all = args;
    all.append(&mut extra);
    let matches = cli
        .try_get_matches_from_mut(all)
        .map_err(|error| LayerError::Clap(annotated(error, &lower)))?;
    Ok(Layered { matches, lower, file })
}

/// The file that [`read`] reads for these arguments, whatever is in it.
pub fn file_of(
    cli: &mut Command,
    args: &[OsString],
    env: Env<'_>,
    folder: &Path,
) -> Option<PathBuf> {
    let matches = cli.try_get_matches_from_mut(args).ok()?;
    let (name, given) = matches.subcommand()?;
    config_file(cli.find_subcommand(name)?, given, env, folder)
}

/// The file to read: the one given, else [`DEFAULT_FILE`] if it exists and the command takes files
/// at all.
fn config_file(
    command: &Command,
    given: &ArgMatches,
    env: Env<'_>,
    folder: &Path,
) -> Option<PathBuf> {
    let takes_files = command.get_arguments().any(|arg| arg.get_id() == "config");
    let flag = || given.try_get_one::<PathBuf>("config").ok().flatten().cloned();
    let variable = || env.get("SEPAL_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from);
    let usual = || Some(folder.join(DEFAULT_FILE)).filter(|path| path.is_file());
    takes_files.then(|| flag().or_else(variable).or_else(usual)).flatten()
}

/// Flags that stand for what other places say.
struct Merge<'a> {
    command: &'a Command,
    /// Ids that have a value.
    given: Vec<String>,
    lower: BTreeMap<String, Origin>,
    extra: Vec<OsString>,
}

impl<'a> Merge<'a> {
    fn new(command: &'a Command, matches: &ArgMatches) -> Merge<'a> {
        let id = |arg: &Arg| arg.get_id().as_str().to_owned();
        let from_flag = |id: &String| matches.value_source(id) == Some(ValueSource::CommandLine);
        let given = command.get_arguments().map(id).filter(from_flag).collect();
        Merge { command, given, lower: BTreeMap::new(), extra: Vec::new() }
    }

    fn environment(&mut self, env: Env<'_>) -> Result<(), LayerError> {
        let ids: Vec<String> = self.settable().map(|arg| arg.get_id().to_string()).collect();
        let mut found = Vec::new();
        for id in ids {
            let mut names = vec![format!("SEPAL_{}", id.to_uppercase())];
            names.extend(
                OTHER_NAMES.iter().filter(|(of, _)| *of == id).map(|(_, name)| (*name).to_owned()),
            );
            let value = names.into_iter().find_map(|name| {
                env.get(&name).filter(|value| !value.is_empty()).map(|value| (name, value))
            });
            if let Some((name, value)) = value {
                let values = if self.is_list(&id) { split(&value) } else { vec![value] };
                found.push((Setting { name: id, values, line: 0 }, Origin::Env(name)));
            }
        }
        self.add(found)
    }

    fn file(&mut self, path: &Path) -> Result<(), LayerError> {
        let settings = file::read(path).map_err(LayerError::Other)?;
        let from = |setting: Setting| {
            let line = setting.line;
            (setting, Origin::File(path.to_owned(), line))
        };
        self.add(settings.into_iter().map(from).collect())
    }

    /// Adds the settings of one place: they may not exclude each other, but yield to those of
    /// higher places.
    fn add(&mut self, settings: Vec<(Setting, Origin)>) -> Result<(), LayerError> {
        let mut added = Vec::new();
        for (setting, origin) in settings {
            let Some(arg) = self.settable().find(|arg| is_called(arg, &setting.name)).cloned()
            else {
                return Err(LayerError::Other(format!(
                    "{origin}: there is no setting {:?}; {}",
                    setting.name,
                    self.advice(&setting.name)
                )));
            };
            let id = arg.get_id().to_string();
            if self.is_taken(&arg) {
                continue;
            }
            let Some(flags) = flags(&arg, &setting.values) else {
                let name = &setting.name;
                return Err(LayerError::Other(format!(
                    "{origin}: {name} is a switch; give true or false, not {:?}",
                    setting.values.join(" ")
                )));
            };
            if !flags.is_empty() {
                self.extra.extend(flags);
                self.lower.insert(id.clone(), origin);
                added.push(id);
            }
        }
        self.given.extend(added);
        Ok(())
    }

    /// Arguments that a file or the environment can set: those of the help but for the model's
    /// position and the file itself.
    fn settable(&self) -> impl Iterator<Item = &Arg> {
        let unset = |arg: &&Arg| {
            let id = arg.get_id().as_str();
            arg.get_long().is_some() && !arg.is_hide_set() && !is_of_command_line(id)
        };
        self.command.get_arguments().filter(unset)
    }

    /// What to do about a name that no setting has.
    fn advice(&self, name: &str) -> String {
        let names = self.settable().filter_map(|arg| arg.get_long()).chain([MODEL.0]);
        match nearest(name, names) {
            Some(near) => format!("did you mean {near}?"),
            None if is_of_command_line(name) => "it is for the command line alone".to_owned(),
            None => format!("see sepal {} --help", self.command.get_name()),
        }
    }

    fn is_list(&self, id: &str) -> bool {
        self.settable().any(|arg| arg.get_id() == id && takes_many(arg))
    }

    /// Whether a higher place has this setting, or one that excludes it.
    fn is_taken(&self, arg: &Arg) -> bool {
        let excludes = |one: &Arg, other: &str| {
            self.command
                .get_arg_conflicts_with(one)
                .iter()
                .any(|excluded| excluded.get_id() == other)
        };
        let taken_by = |id: &String| {
            let other = self.command.get_arguments().find(|other| other.get_id() == id.as_str());
            arg.get_id() == id.as_str()
                || excludes(arg, id)
                || other.is_some_and(|other| excludes(other, arg.get_id().as_str()))
        };
        self.given.iter().any(taken_by)
    }
}

/// Whether only the command line has a flag: it is not a setting of a server.
pub fn is_of_command_line(id: &str) -> bool {
    ["help", "config", "json", "bundle", "log_file"].contains(&id)
}

/// The name that was probably meant: the nearest one, if a third of the letters at most are others.
fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_lowercase();
    let distance = |near: &str| strsim::osa_distance(&name, near);
    let near = names.min_by_key(|near| (distance(near), *near))?;
    (distance(near) <= name.chars().count().div_ceil(3).min(4)).then_some(near)
}

fn takes_many(arg: &Arg) -> bool {
    arg.get_num_args().is_some_and(|range| range.max_values() > 1)
}

fn is_called(arg: &Arg, name: &str) -> bool {
    let name = if name == MODEL.0 { MODEL.1 } else { name };
    arg.get_long() == Some(name)
}

fn split(text: &str) -> Vec<String> {
    let parts = text.split([',', ' ', '\t', '\n']);
    parts.filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Whether a flag takes no value.
pub fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse)
}

/// The flags that say the same; `None` for a switch that is neither on nor off.
fn flags(arg: &Arg, values: &[String]) -> Option<Vec<OsString>> {
    let name = arg.get_long().unwrap_or_default();
    if !is_switch(arg) {
        return Some(values.iter().map(|value| format!("--{name}={value}").into()).collect());
    }
    let value = values.first().map(|value| value.to_lowercase());
    match (value.as_deref(), values.len()) {
        (Some("true" | "yes" | "1" | "on"), 1) => Some(vec![format!("--{name}").into()]),
        (Some("false" | "no" | "0" | "off"), 1) => Some(Vec::new()),
        _ => None,
    }
}

/// The error, with where the value comes from that it is about.
fn annotated(mut error: clap::Error, lower: &BTreeMap<String, Origin>) -> clap::Error {
    let about = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(arg)) => arg.clone(),
        Some(ContextValue::Strings(args)) => args.join(" "),
        _ => return error,
    };
    let named = about.split(' ').find_map(|word| {
        let name = word.strip_prefix("--")?;
        lower.get(name).map(|origin| format!("{name} is set by {origin}"))
    });
    if let Some(text) = named {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![text.into()]));
    }
    error
}
