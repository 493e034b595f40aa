//! Whether the warpgroups of a device may be used, found out by a process of its own, `sepal sample`.
//!
//! The sample itself is `kernels/src/cuda/agree.rs`. A kernel that faults leaves its process with a device that fails every later call, and one that
//! never ends keeps it waiting for ever. A worker that took the sample itself would do either at every start. So a worker starts this executable once more,
//! before it opens the device itself, and waits for a limited time; whatever goes wrong there means "by warps", which give the same bits.
//!
//! The process dies with the thread that started it (the worker's main thread), inherits nothing but a memfd for what it prints, and has ended
//! or was killed when the worker looks at how much memory is free. It prints each kernel before it is launched, then its answer in the last line.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kernels::cuda::driver::{Driver, OpenError};
use kernels::cuda::{Agreement, Cuda};
use nix::sys::memfd::{MFdFlags, memfd_create};
use shared::bootstrap::die_with_parent;
use shared::exit::ExitReason;

use crate::prepare::with_source;
use crate::worker::unusable;

/// How long a process is waited for that was killed. One that a driver holds back longer is left alone.
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Pause between two looks at the process.
const POLL: Duration = Duration::from_millis(5);

/// Bytes of its output that are read, and characters that are told.
const MOST_READ: u64 = 64 << 10;
const MOST_TOLD: usize = 400;

/// What begins the line of a launch.
const LAUNCHES: &str = "launches ";

/// What the process may answer.
const ANSWERS: [(&str, Agreement); 3] = [
    ("sample: no warpgroups", Agreement::NoWarpgroups),
    ("sample: same bits", Agreement::Same),
    ("sample: other bits", Agreement::Different),
];

/// A device that was opened, and what is known of its warpgroups.
pub(crate) struct Opened {
    /// Goes by warpgroups or by warps as the sample says.
    pub cuda: Cuda<Driver>,
    /// What came of the sample, or why nothing did.
    pub sampled: Result<Agreement, String>,
    /// How long the process took.
    pub took: Duration,
}

/// Opens device `ordinal`, after another process has taken the sample within `limit`, if the device has warpgroups at all. Without a limit no sample is
/// taken: warpgroups are under suspicion.
///
/// # Errors
/// When the device cannot be opened; a sample that fails is no error.
pub(crate) fn open(ordinal: u32, limit: Option<Duration>) -> Result<Opened, OpenError> {
    let start = Instant::now();
    let sampled = match (Driver::properties_of(ordinal)?.has_wgmma(), limit) {
        (true, Some(limit)) => {
            by_another_process(ordinal, limit).map_err(|why| format!("the sample failed: {why}"))
        }
        (true, None) => Err("an earlier process of this worker failed on its device".to_owned()),
        (false, _) => Ok(Agreement::NoWarpgroups),
    };
    let took = start.elapsed();
    let mut cuda = Cuda::new(Driver::open(ordinal)?);
    match &sampled {
        Ok(agreement) => {
            cuda.use_warpgroups(*agreement == Agreement::Same);
        }
        Err(_) => cuda.give_warpgroups_up(),
    }
    Ok(Opened {
        cuda,
        sampled,
        took,
    })
}

fn by_another_process(ordinal: u32, limit: Duration) -> Result<Agreement, String> {
    // The file that runs now, even when its path was replaced.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(format!("sepal: sample cuda:{ordinal}"))
        .args(["sample", "--ordinal", &ordinal.to_string()])
        .args(["--parent", &std::process::id().to_string()]);
    match run(command, limit) {
        Ok((status, said)) => judge(status, &said, limit),
        Err(failure) => Err(format!("no process for it: {failure}")),
    }
}

/// Runs `command` for at most `limit`: how it ended (`None`: it was killed), and what it printed.
fn run(mut command: Command, limit: Duration) -> io::Result<(Option<ExitStatus>, String)> {
    // A file and not a pipe: reading it never waits, whoever else may have it open.
    let mut printed = File::from(memfd_create(c"sepal-sample", MFdFlags::MFD_CLOEXEC)?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(printed.try_clone()?)
        .stderr(printed.try_clone()?)
        .spawn()?;
    let status = wait(&mut child, limit)?;
    let mut is_left = false;
    if status.is_none() {
        child.kill()?;
        is_left = wait(&mut child, KILL_PATIENCE)?.is_none();
    }
    let mut bytes = Vec::new();
    printed.rewind()?;
    printed.take(MOST_READ).read_to_end(&mut bytes)?;
    let mut said = String::from_utf8_lossy(&bytes).into_owned();
    if is_left {
        said += "\nits process cannot be killed and may keep memory of the device";
    }
    Ok((status, said))
}

fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        let status = child.try_wait()?;
        if status.is_some() || start.elapsed() >= limit {
            return Ok(status);
        }
        std::thread::sleep(POLL);
    }
}

/// The answer of a process that ended well, or a sentence about what it did instead.
fn judge(status: Option<ExitStatus>, said: &str, limit: Duration) -> Result<Agreement, String> {
    let is_well = status.is_some_and(|status| status.success());
    let last = said.lines().next_back();
    let answer = ANSWERS.iter().find(|(line, _)| last == Some(*line));
    if let (true, Some((_, agreement))) = (is_well, answer) {
        return Ok(*agreement);
    }
    let mut why = match status {
        None => format!("it did not end within {limit:?}"),
        Some(status) if is_well => format!("it gave no answer ({status})"),
        Some(status) => format!("its process ended with {status}"),
    };
    let (launches, rest): (Vec<&str>, Vec<&str>) =
        said.lines().partition(|line| line.starts_with(LAUNCHES));
    if let Some(kernel) = launches.last() {
        why += &format!(" after launching {}", &kernel[LAUNCHES.len()..]);
    }
    let rest = rest.join("; ");
    if !rest.is_empty() {
        why += ": ";
        why.extend(rest.chars().take(MOST_TOLD));
    }
    Err(why)
}

/// What `sepal sample` does, for process `parent`: takes the sample on device `ordinal` and prints the answer.
pub fn run_command(ordinal: u32, parent: u32) -> ExitReason {
    let _ = nix::sys::prctl::set_name(c"sepal-sample");
    let done = die_with_parent(parent)
        .map_err(|failure| (failure.exit_reason(), with_source(&failure)))
        .and_then(|()| take(ordinal));
    match done {
        Ok(agreement) => {
            let answer = ANSWERS.iter().find(|(_, known)| *known == agreement);
            println!("{}", answer.map_or("", |(line, _)| line));
            ExitReason::Clean
        }
        Err((reason, message)) => {
            eprintln!("{message}");
            reason
        }
    }
}

fn take(ordinal: u32) -> Result<Agreement, (ExitReason, String)> {
    let driver = Driver::open(ordinal).map_err(|failure| unusable(ordinal, &failure))?;
    let mut cuda = Cuda::new(driver);
    cuda.watch(Some(|kernel| println!("{LAUNCHES}{kernel}")));
    let agreement = cuda.choose_products();
    agreement.map_err(|failure| (ExitReason::DeviceLost, with_source(&failure)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn judged(script: &str, limit: Duration) -> Result<Agreement, String> {
        let (status, said) = run(shell(script), limit).unwrap();
        judge(status, &said, limit)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn only_the_answer_of_a_process_that_ends_well_counts() {
        for (answer, agreement) in ANSWERS {
            let script = format!("echo launches linear_many_bf16; echo '{answer}'");
            assert_eq!(judged(&script, LONG), Ok(agreement));
            for bad in [
                format!("{script}; exit 10"),
                format!("{script}; kill -SEGV $$"),
                format!("{script}; echo more"),
                format!("{script}$"),
            ] {
                assert!(judged(&bad, LONG).is_err(), "{bad}");
            }
        }
        assert!(judged("", LONG).is_err());
    }

    #[test]
    fn what_went_wrong_is_told_with_the_last_kernel() {
        let why = judged(
            "echo launches linear_many_bf16; echo launches linear_wgmma_bf16; echo 'a fault' >&2; exit 10",
            LONG,
        )
        .unwrap_err();
        let wanted =
            "its process ended with exit status: 10 after launching linear_wgmma_bf16: a fault";
        assert_eq!(why, wanted);
        let why = judged("kill -SEGV $$", LONG).unwrap_err();
        assert!(why.contains("signal: 11 (SIGSEGV)"), "{why}");
        let why = judged("echo nonsense", LONG).unwrap_err();
        assert!(why.contains("no answer"), "{why}");
        assert!(why.ends_with("nonsense"), "{why}");
    }

    #[test]
    fn a_process_that_does_not_end_is_killed() {
        let limit = Duration::from_millis(50);
        let script = "echo launches linear_wgmma_bf16; exec sleep 1000";
        let start = Instant::now();
        let why = judged(script, limit).unwrap_err();
        assert!(why.starts_with("it did not end within 50ms"), "{why}");
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn output_without_end_is_cut() {
        let why = judged("head -c 1000000 /dev/zero | tr '\\0' x", LONG).unwrap_err();
        assert!(why.len() < 2 * MOST_TOLD, "{}", why.len());
    }
}
