//! What is made from the flags: manual pages and completions of shells.

use std::io;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap_complete::Shell;
use shared::exit::ExitReason;

use super::Sepal;

/// What to make.
#[derive(Debug)]
pub enum Generated {
    /// Manual pages, in this folder.
    Manual(PathBuf),
    /// Completions, on standard output.
    Completions(Shell),
}

/// Makes it; errors go to standard error.
pub fn make(what: &Generated) -> ExitReason {
    match what {
        Generated::Manual(folder) => manual(folder),
        Generated::Completions(shell) => completions(*shell),
    }
}

/// Writes `sepal.1` and one page for each subcommand, such as `sepal-serve.1`, to `folder`.
fn manual(folder: &Path) -> ExitReason {
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Sepal::command(), folder));
    match written {
        Ok(()) => ExitReason::Clean,
        Err(error) => {
            eprintln!("sepal: cannot write manual pages to {}: {error}", folder.display());
            ExitReason::Failed
        }
    }
}

/// Prints completions to standard output.
fn completions(shell: Shell) -> ExitReason {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Sepal::command(), "sepal", &mut text);
    match io::Write::write_all(&mut io::stdout(), &text) {
        Ok(()) => ExitReason::Clean,
        // The reader has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitReason::Clean,
        Err(error) => {
            eprintln!("sepal: cannot write completions: {error}");
            ExitReason::Failed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("man");
        assert_eq!(manual(&folder), ExitReason::Clean);
        let command = Sepal::command();
        for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            let page = folder.join(format!("sepal-{}.1", subcommand.get_name()));
            let text = std::fs::read_to_string(&page).unwrap();
            assert!(text.contains(".SH SYNOPSIS"), "{page:?}");
        }
        let hidden: Vec<_> = ["sepal-netd.1", "sepal-man.1"].map(|name| folder.join(name)).into();
        assert!(hidden.iter().all(|page| !page.exists()), "{hidden:?}");
        assert_eq!(manual(Path::new("/dev/null/x")), ExitReason::Failed);
    }
}
