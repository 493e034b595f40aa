//! Defaults that the environment decides: clap is given them before it reads flags.

use std::path::PathBuf;

use clap::Command;
use supervisor::cache_folder::{own_folder, without_home};

use super::Env;

/// The command line of `command` and its subcommands with these defaults.
pub fn with_defaults(command: Command, env: Env<'_>) -> Command {
    let folders = [("cache_dir", cache_dir(env)), ("runtime_dir", runtime_dir(env))];
    let filled = |command: Command| {
        folders.iter().fold(command, |command, (id, folder)| {
            let has_it = command.get_arguments().any(|arg| arg.get_id() == id);
            let default = || folder.clone().into_os_string();
            match has_it {
                true => {
                    command.mut_arg(id, |arg| arg.default_value(default()).hide_default_value(true))
                }
                false => command,
            }
        })
    };
    command.mut_subcommands(filled)
}

/// The cache folder when no flag names one.
fn cache_dir(env: Env<'_>) -> PathBuf {
    let given = |name| env.get(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let named = given("SEPAL_CACHE").or_else(|| given("PETALS_CACHE"));
    let in_home = || Some(given("HOME")?.join(".cache/sepal"));
    named.or_else(in_home).unwrap_or_else(|| without_home(env.tmp))
}

/// `$XDG_RUNTIME_DIR/sepal`, or a folder of the user's own in /tmp.
fn runtime_dir(env: Env<'_>) -> PathBuf {
    match env.get("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("sepal"),
        None => own_folder(env.tmp),
    }
}
