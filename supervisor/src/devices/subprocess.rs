//! A short-lived process of this executable that says something about a device. It has a time limit,
//! because a driver may hang, and a bound on what is read of it.
//!
//! It ends with the thread that started it (`die_with_parent` in each of its commands), so start it
//! from the main thread.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::spawn::{DEVICE_ORDER, TITLE};

/// How long a killed process is waited for; one that the driver holds back is left alone.
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Pause between two looks at a process.
const POLL: Duration = Duration::from_millis(5);

/// Bytes of each output that are read.
const MAX_OUTPUT_BYTES: u64 = 64 << 10;

/// A process that was started.
pub struct Subprocess {
    child: Child,
    deadline: Instant,
    is_killed: bool,
    text: File,
    errors: File,
}

/// How a process ended and what it wrote.
pub struct Output {
    /// `None`: it was killed after its time.
    pub status: Option<ExitStatus>,
    pub text: String,
    pub errors: String,
}

impl Subprocess {
    /// Starts `sepal ARGUMENTS... --parent PID`, for at most `limit`.
    ///
    /// # Errors
    /// A sentence, when the system refuses a process.
    pub fn start(arguments: &[&str], limit: Duration) -> Result<Subprocess, String> {
        // The file that runs now, even when its path was replaced.
        let mut command = Command::new("/proc/self/exe");
        command.arg0(format!("{TITLE}{}", arguments.join(" ")));
        command.env_remove("NOTIFY_SOCKET");
        command.env(DEVICE_ORDER.0, DEVICE_ORDER.1);
        command.args(arguments).args(["--parent", &std::process::id().to_string()]);
        Subprocess::of(command, limit)
            .map_err(|error| format!("no process for `sepal {}`: {error}", arguments.join(" ")))
    }

    /// Asks the executable at `path` which build it is, and whether it reads `state`.
    ///
    /// # Errors
    /// A sentence, when it cannot be started.
    pub fn describe(path: &Path, state: File, limit: Duration) -> Result<Subprocess, String> {
        let mut command = Command::new(path);
        command.arg0(format!("{TITLE}handover")).args(["handover", "--describe"]);
        command.env_remove("NOTIFY_SOCKET").stdin(state);
        Subprocess::with_input(command, limit)
            .map_err(|error| format!("cannot start {}: {error}", path.display()))
    }

    fn of(mut command: Command, limit: Duration) -> io::Result<Subprocess> {
        command.stdin(Stdio::null());
        Subprocess::with_input(command, limit)
    }

    fn with_input(mut command: Command, limit: Duration) -> io::Result<Subprocess> {
        // Files and not pipes: reading them never waits, and a process never waits for a reader.
        let (text, errors) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let child = command.stdout(text.try_clone()?).stderr(errors.try_clone()?).spawn()?;
        Ok(Subprocess { child, deadline: Instant::now() + limit, is_killed: false, text, errors })
    }

    /// Its end, once it has ended; kills it once its time is over. Never waits.
    pub fn poll(&mut self) -> Option<Result<Output, String>> {
        self.polled().map_err(|error| format!("its process is out of reach: {error}")).transpose()
    }

    fn polled(&mut self) -> io::Result<Option<Output>> {
        let status = self.child.try_wait()?;
        if status.is_none() && Instant::now() < self.deadline {
            return Ok(None);
        }
        if status.is_none() && !self.is_killed {
            self.child.kill()?;
            self.is_killed = true;
        }
        if status.is_none() && Instant::now() < self.deadline + KILL_PATIENCE {
            return Ok(None);
        }
        let status = status.filter(|_| !self.is_killed);
        let (text, errors) = (self.text.try_clone()?, self.errors.try_clone()?);
        Ok(Some(Output { status, text: read(text)?, errors: read(errors)? }))
    }

    /// Waits for its end, or kills it once its time is over.
    ///
    /// # Errors
    /// A sentence, when the system refuses to wait, kill or read.
    pub fn finish(self) -> Result<Output, String> {
        self.finished().map_err(|error| format!("its process is out of reach: {error}"))
    }

    fn finished(mut self) -> io::Result<Output> {
        let status = wait(&mut self.child, self.deadline)?;
        let mut is_left = false;
        if status.is_none() {
            self.child.kill()?;
            is_left = wait(&mut self.child, Instant::now() + KILL_PATIENCE)?.is_none();
        }
        let (text, mut errors) = (read(self.text)?, read(self.errors)?);
        if is_left {
            errors += "\nits process cannot be killed and may keep memory of the device";
        }
        Ok(Output { status, text, errors })
    }
}

impl Output {
    /// Why the process failed, if it did: what it wrote last.
    ///
    /// # Errors
    /// That sentence.
    pub fn complaint(&self) -> Result<(), String> {
        let last = self.errors.lines().rev().find(|line| !line.is_empty());
        match self.status {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(last.map_or_else(|| status.to_string(), str::to_owned)),
            None => Err("it did not end in time".to_owned()),
        }
    }
}

fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() >= deadline => return Ok(None),
            None => std::thread::sleep(POLL),
        }
    }
}

fn read(mut file: File) -> io::Result<String> {
    file.rewind()?;
    let mut bytes = Vec::new();
    file.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// What a shell script does as such a process, for tests of those that read it.
#[cfg(test)]
pub fn output_of(script: &str, limit: Duration) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    Subprocess::of(command, limit).unwrap().finish().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_process_that_ends_is_read_and_one_that_does_not_is_killed() {
        let output = output_of("echo out; echo err >&2; exit 3", LONG);
        assert_eq!(output.status.unwrap().code(), Some(3));
        assert_eq!((output.text.as_str(), output.errors.as_str()), ("out\n", "err\n"));
        let start = Instant::now();
        let output = output_of("exec sleep 1000", Duration::from_millis(50));
        assert!(output.status.is_none() && start.elapsed() < LONG);
    }

    #[test]
    fn output_without_end_is_cut() {
        let output = output_of("head -c 1000000 /dev/zero | tr '\\0' x", LONG);
        assert_eq!(output.text.len() as u64, MAX_OUTPUT_BYTES);
    }
}
