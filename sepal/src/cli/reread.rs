//! The settings of a running server, read again from where they came from.

use std::ffi::OsString;
use std::path::Path;

use shared::config::ServeConfig;

use super::{CliError, Command, Env, parse_in};

/// Reads the settings of `args`, the command line of `sepal serve` with the program's name.
///
/// # Errors
/// A sentence, for settings that `sepal serve` would refuse.
pub fn reread(args: &[OsString]) -> Result<ServeConfig, String> {
    let variables = |name: &str| std::env::var(name).ok();
    let read = read_in(Path::new(""), args, Env::of_machine(&variables));
    read.map_err(|error| error.to_string())
}

/// The same with `folder` as the working directory.
pub(super) fn read_in(
    folder: &Path,
    args: &[OsString],
    env: Env<'_>,
) -> Result<ServeConfig, CliError> {
    match parse_in(folder, args.iter().cloned(), env)? {
        Command::Serve { config, .. } => Ok(*config),
        _ => Err(CliError::new("this process was not started as sepal serve".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use supervisor::changed;

    use super::*;

    #[test]
    fn what_changed_in_a_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("server.toml");
        let config = format!("--config={}", file.display());
        let args = ["sepal", "serve", "--new_swarm", "--drain_timeout=7", &config];
        let args: Vec<OsString> = args.into_iter().map(OsString::from).collect();
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            read_in(dir.path(), &args, Env { variables: &|_| None, tmp: dir.path() })
        };
        let before = read("model = \"/m\"\nmax_restarts = 3\n").unwrap();
        let again = read("model = \"/m\"\nmax_restarts = 3\n").unwrap();
        assert!(changed(&before, &again).is_empty());
        let after =
            read("model = \"/m\"\nmax_restarts = 4\nnum_blocks = 2\ndrain_timeout = 9\n").unwrap();
        assert_eq!(
            Vec::from_iter(changed(&before, &after)),
            ["max_restarts", "num_blocks"],
            "the flag goes first"
        );
        assert_eq!(after.restart.max_restarts, 4);
        let error = read("model = \"/m\"\nmax_restart = 4\n").unwrap_err().to_string();
        assert!(error.contains("max_restarts"), "{error}");
        let status: Vec<OsString> = ["sepal", "status"].map(OsString::from).into();
        assert!(reread(&status).is_err());
    }
}
