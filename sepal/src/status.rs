//! `sepal status`: what runs. The supervisor of each live instance tells it from its board, also
//! while netd or a worker is down.

mod orders;

use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Uid, geteuid, setegid, seteuid, setgroups};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use supervisor::instance::{InstanceError, LiveInstance, live_instances};
use supervisor::report::{InstanceReport, table};
use supervisor::status::ask;

pub use orders::{OrderOptions, run as run_order};

/// Settings of `sepal status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusOptions {
    /// Which instance; `None` = all.
    pub instance: Option<String>,
    /// Folder of the instances.
    pub runtime_dir: PathBuf,
    /// Print nothing, and fail unless clients can come.
    pub ready: bool,
    /// Print JSON instead of a table.
    pub json: bool,
}

/// Why there is nothing to show, or an order was not followed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatusError {
    #[error(transparent)]
    Instance(#[from] InstanceError),
    #[error("no instance {name} runs in {dir}; running: {running}")]
    NoSuch { name: String, dir: String, running: String },
    #[error("the supervisor of instance {name} does not answer")]
    Silent {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("several instances run in {dir}: {running}; name one with --instance")]
    Several { dir: String, running: String },
    #[error("no instance runs in {0}")]
    None(String),
    #[error("instance {name}: {error}")]
    Refused { name: String, error: String },
    #[error("cannot act as the owner of {dir}; run this command as that user")]
    Owner {
        dir: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot write the report")]
    Output(#[from] io::Error),
}

/// Prints the report to standard output; errors go to standard error.
pub fn run(options: &StatusOptions) -> ExitReason {
    ended(as_owner(&options.runtime_dir).and_then(|()| print(options, &mut io::stdout().lock())))
}

/// The exit reason of a command; an error goes to standard error.
fn ended(outcome: Result<(), StatusError>) -> ExitReason {
    match outcome {
        Ok(()) => ExitReason::Clean,
        Err(error) => {
            eprintln!("sepal: {}", with_causes(&error));
            ExitReason::Failed
        }
    }
}

/// Root becomes the user whose instances are in `dir`.
///
/// # Errors
/// When the system does not allow that.
fn as_owner(dir: &Path) -> Result<(), StatusError> {
    become_owner(dir).map_err(|errno| StatusError::Owner {
        dir: dir.display().to_string(),
        source: errno.into(),
    })
}

/// Root sees the instances of a service as their user, whose folder is trusted by nobody else.
pub(crate) fn become_owner(dir: &Path) -> nix::Result<()> {
    let owner = std::fs::symlink_metadata(dir).ok().filter(|meta| meta.is_dir());
    match owner {
        Some(owner) if geteuid().is_root() && owner.uid() != 0 => {
            setgroups(&[])?;
            setegid(Gid::from_raw(owner.gid()))?;
            seteuid(Uid::from_raw(owner.uid()))
        }
        _ => Ok(()),
    }
}

fn print(options: &StatusOptions, out: &mut impl Write) -> Result<(), StatusError> {
    let instances = wanted(options)?;
    let reports = instances
        .iter()
        .filter_map(|live| report(live, options.ready))
        .collect::<Result<Vec<_>, _>>()?;
    if options.ready {
        return check_ready(options, &reports);
    }
    if options.json {
        serde_json::to_writer_pretty(&mut *out, &reports).map_err(io::Error::from)?;
        writeln!(out)?;
    } else if reports.is_empty() {
        writeln!(out, "no instance runs in {}", options.runtime_dir.display())?;
    } else {
        for report in &reports {
            out.write_all(table(report).as_bytes())?;
        }
    }
    Ok(())
}

/// Whether clients can come to all that runs.
fn check_ready(options: &StatusOptions, reports: &[InstanceReport]) -> Result<(), StatusError> {
    if reports.is_empty() {
        return Err(StatusError::None(options.runtime_dir.display().to_string()));
    }
    match reports.iter().find(|report| !report.ready) {
        None => Ok(()),
        Some(report) => {
            let (name, line) = (report.instance.clone(), report.line());
            Err(StatusError::Refused { name, error: format!("not ready: {line}") })
        }
    }
}

/// The instances that were asked for.
pub(crate) fn wanted(options: &StatusOptions) -> Result<Vec<LiveInstance>, StatusError> {
    let live = live_instances(&options.runtime_dir)?;
    let Some(name) = &options.instance else {
        return Ok(live);
    };
    let running = running(&live);
    match live.iter().find(|live| live.name == *name) {
        Some(live) => Ok(vec![live.clone()]),
        None => {
            let dir = options.runtime_dir.display().to_string();
            Err(StatusError::NoSuch { name: name.clone(), dir, running })
        }
    }
}

/// The one instance that an order is for.
///
/// # Errors
/// When there is none of that name, or no name is given and there is not exactly one.
fn only(instance: Option<&str>, dir: &Path) -> Result<LiveInstance, StatusError> {
    let live = live_instances(dir)?;
    let (running, dir) = (running(&live), dir.display().to_string());
    let mut found = live.into_iter().filter(|live| instance.is_none_or(|name| live.name == name));
    match (found.next(), found.next(), instance) {
        (Some(one), None, _) => Ok(one),
        (Some(_), Some(_), _) => Err(StatusError::Several { dir, running }),
        (None, _, Some(name)) => Err(StatusError::NoSuch { name: name.to_owned(), dir, running }),
        (None, _, None) => Err(StatusError::None(dir)),
    }
}

fn running(live: &[LiveInstance]) -> String {
    let names: Vec<&str> = live.iter().map(|live| live.name.as_str()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// What an instance tells of itself; `None` while it starts or ends.
pub(crate) fn report(
    live: &LiveInstance,
    brief: bool,
) -> Option<Result<InstanceReport, StatusError>> {
    match ask(&live.status_socket, brief) {
        Ok(report) => Some(Ok(report)),
        Err(error)
            if [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused]
                .contains(&error.kind()) =>
        {
            None
        }
        Err(source) => Some(Err(StatusError::Silent { name: live.name.clone(), source })),
    }
}

#[cfg(test)]
mod tests {
    use shared::block::Span;
    use shared::config::Device;
    use shared::control::Role;
    use shared::ids::{Generation, GroupId, Rank, WorkerId, WorldSize};
    use shared::model::RankShare;
    use shared::shm::board::{ChildState, Occupant};

    use super::*;
    use supervisor::instance::Instance;
    use supervisor::report::Held;
    use supervisor::report::Readiness;
    use supervisor::segments::Segments;
    use supervisor::status::{InstanceAnswer, StatusSocket};

    /// What is printed while a supervisor tells of `segments`.
    fn shown(options: &StatusOptions, server: &mut Server) -> Result<String, StatusError> {
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let mut out = Vec::new();
                print(options, &mut out)?;
                Ok(String::from_utf8(out).unwrap())
            });
            while !asking.is_finished() {
                let board = server.segments.board.view();
                let held = |worker: WorkerId| {
                    server.held.iter().find(|(of, _)| *of == worker).map(|(_, held)| *held)
                };
                server.socket.answer(|_| {
                    let report = InstanceReport::of(board.snapshot(), Readiness::default(), held);
                    InstanceAnswer::Report(Box::new(report))
                });
            }
            asking.join().unwrap()
        })
    }

    /// A supervisor in the state of a worker's third life.
    struct Server {
        _dir: tempfile::TempDir,
        _instance: Instance,
        segments: Segments,
        socket: StatusSocket,
        held: Vec<(WorkerId, Held)>,
    }

    fn server() -> (StatusOptions, Server) {
        let dir = tempfile::tempdir().unwrap();
        let instance = Instance::claim(dir.path(), Some("x")).unwrap();
        let segments = Segments::new(&instance, 7).unwrap();
        let worker = Some(WorkerId::solo(GroupId(0)));
        let occupant = Occupant { role: Role::Worker, generation: Generation(3), worker };
        segments.board.assign(2, &occupant).unwrap();
        segments.board.set_pid(2, 4711).unwrap();
        segments.board.set_state(2, ChildState::Ready).unwrap();
        segments.board.set_span(2, Span::new(4, 8).unwrap()).unwrap();
        let socket = StatusSocket::bind(&instance.status_socket()).unwrap();
        let options = StatusOptions {
            instance: None,
            runtime_dir: dir.path().to_owned(),
            ready: false,
            json: false,
        };
        let held = vec![(WorkerId::solo(GroupId(0)), Held { device: Device::Cpu, share: None })];
        (options, Server { _dir: dir, _instance: instance, segments, socket, held })
    }

    #[test]
    fn the_table_shows_every_process_of_a_live_instance() {
        let (options, mut server) = server();
        let text = shown(&options, &mut server).unwrap();
        assert!(
            text.starts_with(&format!("instance x, supervisor pid {}", std::process::id())),
            "{text}"
        );
        let row = text.lines().last().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(row, "gpu-worker 0.0 4711 3 ready idle 4:8 cpu 0 2");
    }

    #[test]
    fn ranks_of_a_group_are_shown_with_its_size() {
        let (mut options, mut server) = server();
        let (group, world_size) = (GroupId(0), WorldSize(2));
        for rank in [0, 1] {
            let id = WorkerId { group, rank: Rank(rank), world_size };
            let is_slow = rank == 1;
            let share = RankShare {
                heads: 3,
                kv_heads: 1,
                columns: 256,
                block_bytes: 7,
                copied_bytes: 0,
                is_slow,
            };
            server.held.push((id, Held { device: Device::Node(rank.into()), share: Some(share) }));
            let worker = Some(id);
            let occupant = Occupant { role: Role::Worker, generation: Generation(3), worker };
            server.segments.board.assign(2 + u32::from(rank), &occupant).unwrap();
        }
        let text = shown(&options, &mut server).unwrap();
        for name in ["gpu-worker 0.0 of 2 ranks", "gpu-worker 0.1 of 2 ranks"] {
            assert!(text.contains(name), "{text}");
        }
        let lines: Vec<String> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert!(lines[3].contains("cpu:1 3 heads, 256 columns 0 2"), "{text}");
        let notes: Vec<&str> = text.lines().filter(|line| line.contains("slow")).collect();
        let [note] = notes[..] else { panic!("{text}") };
        assert!(note.starts_with("gpu-worker 0.1 of 2 ranks: its products are slow"), "{text}");
        options.json = true;
        let value: serde_json::Value =
            serde_json::from_str(&shown(&options, &mut server).unwrap()).unwrap();
        let rank = &value[0]["children"][1];
        assert_eq!((&rank["worker"], &rank["world_size"]), (&"0.1".into(), &2.into()));
        assert_eq!((&rank["device"], &rank["share"]["heads"]), (&"cpu:1".into(), &3.into()));
        let notes = [0, 1].map(|rank| value[0]["children"][rank]["note"].as_str());
        assert!(
            notes[0].is_none() && notes[1].is_some_and(|note| note.contains("64")),
            "{notes:?}"
        );
    }

    #[test]
    fn json_says_the_same_to_programs() {
        let (mut options, mut server) = server();
        options.json = true;
        let value: serde_json::Value =
            serde_json::from_str(&shown(&options, &mut server).unwrap()).unwrap();
        let mut keys: Vec<_> = value[0].as_object().unwrap().keys().collect();
        keys.sort();
        assert_eq!(
            keys,
            [
                "build",
                "children",
                "figures",
                "instance",
                "pause",
                "ready",
                "sandbox",
                "started_unix_s",
                "supervisor_pid",
                "upgrade",
                "upgrade_failure"
            ]
        );
        let child = &value[0]["children"][0];
        assert_eq!((&value[0]["instance"], &child["pid"]), (&"x".into(), &4711.into()));
        assert_eq!((&child["span"], &child["restarts"]), (&"4:8".into(), &2.into()));
    }

    #[test]
    fn an_instance_that_does_not_run_is_named_with_those_that_do() {
        let (mut options, mut server) = server();
        options.instance = Some("y".into());
        let error = shown(&options, &mut server).unwrap_err().to_string();
        assert!(error.contains("no instance y") && error.contains("running: x"), "{error}");
        options.runtime_dir = options.runtime_dir.join("none");
        options.instance = None;
        assert!(shown(&options, &mut server).unwrap().contains("no instance runs"));
    }
}
