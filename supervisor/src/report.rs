//! What a supervisor tells of its instance, as JSON and as a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use shared::bootstrap::build_id;
use shared::config::Device;
use shared::control::Role;
use shared::figures::server::DeviceFigures;
use shared::figures::{ClientFigures, Figures, Trouble};
use shared::ids::WorkerId;
use shared::model::RankShare;
use shared::sanitize_text::Escaped;
use shared::shm::board::{BoardSnapshot, ChildSnapshot, ChildState};
use shared::warpgroups::Warpgroups;

pub mod figures;

use figures::{BatchReport, WorkReport};

/// One instance, as `--json` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InstanceReport {
    pub instance: String,
    /// Process id of its supervisor.
    pub supervisor_pid: u32,
    /// When the supervisor started, seconds since 1970.
    pub started_unix_s: u64,
    /// Whether clients can come.
    pub ready: bool,
    /// Whether the operator has paused it: no, draining or paused.
    pub pause: String,
    /// The build of its supervisor, which changes with an upgrade.
    #[serde(default)]
    pub build: String,
    /// What its children are confined to: off, nothing, files, system calls.
    #[serde(default)]
    pub sandbox: String,
    /// What an upgrade that is under way is doing.
    #[serde(default)]
    pub upgrade: Option<String>,
    /// Why the last upgrade failed.
    #[serde(default)]
    pub upgrade_failure: Option<String>,
    /// Its children: prepare, netd, workers.
    pub children: Vec<ChildReport>,
    /// Sessions, the last minute, restarts, the swarm.
    #[serde(default)]
    pub figures: Figures,
}

/// One child, as `--json` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChildReport {
    /// Which child it is, in the process of the supervisor.
    #[serde(skip)]
    pub id: Option<(Role, Option<WorkerId>)>,
    pub role: String,
    /// Which worker, if it is one: its group and its rank.
    pub worker: Option<String>,
    /// Workers of its group, if it is one of several.
    #[serde(default)]
    pub world_size: Option<u16>,
    /// The device that it owns.
    #[serde(default)]
    pub device: Option<String>,
    /// What it holds of every block, as a rank of a group.
    #[serde(default)]
    pub share: Option<RankShare>,
    /// What the operator should know of it.
    #[serde(default)]
    pub note: Option<String>,
    /// Its process id; 0 before it was spawned.
    pub pid: u32,
    /// How often it was started.
    pub generation: u32,
    /// How often it was started again.
    pub restarts: u32,
    /// How it died last.
    #[serde(default)]
    pub last_death: Option<String>,
    pub state: String,
    /// The blocks it serves.
    pub span: Option<String>,
    /// What it is busy with.
    pub phase: String,
    /// Counts up whenever something got done.
    pub progress: u64,
    /// Jobs answered.
    pub jobs_done: u64,
    /// Time that those jobs waited in the worker, in all.
    pub queued_us: u64,
    /// Time that those jobs were computed, in all.
    pub computed_us: u64,
    /// The same by kind of work, of those kinds that there were (workers).
    #[serde(default)]
    pub work: Vec<WorkReport>,
    /// Decode units by their size (workers).
    #[serde(default)]
    pub batches: Vec<BatchReport>,
    /// How its device is, where NVML tells (workers).
    #[serde(default)]
    pub device_figures: Option<DeviceFigures>,
    /// Sessions open (netd).
    pub sessions_open: u64,
    /// Tokens of KV cache not leased (netd).
    pub kv_tokens_free: u64,
    /// Requests that were not served as asked, by kind (netd).
    pub troubles: BTreeMap<String, u64>,
    /// Port of the swarm (netd).
    pub port: Option<u16>,
    /// PeerID in base58 (netd).
    pub peer_id: Option<String>,
}

/// What a worker has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub device: Device,
    /// Its part of every block, as a rank of a group.
    pub share: Option<RankShare>,
}

/// Whether the instance is paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pause {
    /// It serves, or is about to.
    #[default]
    No,
    /// Sessions and workers end.
    Draining,
    /// No worker is left.
    Paused,
}

impl Pause {
    /// One word for reports.
    pub fn name(self) -> &'static str {
        match self {
            Pause::No => "no",
            Pause::Draining => "draining",
            Pause::Paused => "paused",
        }
    }
}

/// What the operator may expect of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Whether clients can come: it is announced, netd runs, and all workers of its blocks do.
    pub ready: bool,
    /// Whether it is paused.
    pub pause: Pause,
}

/// What is said of a rank whose inputs are cut beside multiples of 64.
const SLOW: &str = "its products are slow: their inputs are not cut at multiples of 64";

impl InstanceReport {
    /// What a board shows, of workers that have what `held` says.
    pub fn of(
        board: BoardSnapshot,
        standing: Readiness,
        held: impl Fn(WorkerId) -> Option<Held>,
    ) -> InstanceReport {
        let BoardSnapshot { instance, supervisor_pid, started_unix_s, children, figures } = board;
        let report = |of: ChildSnapshot| {
            let held = of.worker.and_then(&held);
            child(of, held, &figures)
        };
        let children = children.into_iter().map(report).collect();
        let Readiness { ready, pause } = standing;
        let pause = pause.name().to_owned();
        InstanceReport {
            instance,
            supervisor_pid,
            started_unix_s,
            ready,
            pause,
            build: build_id(),
            children,
            figures,
            ..InstanceReport::default()
        }
    }

    /// Adds what children are confined to.
    pub fn with_sandbox(self, sandbox: String) -> InstanceReport {
        InstanceReport { sandbox, ..self }
    }

    /// Adds what an upgrade is doing, and why the last one failed.
    pub fn with_upgrade(self, stage: Option<String>, failure: Option<String>) -> InstanceReport {
        InstanceReport { upgrade: stage, upgrade_failure: failure, ..self }
    }

    /// Adds where metrics and the page of the swarm are served.
    pub fn with_addresses(
        mut self,
        metrics: Option<SocketAddr>,
        web: Option<SocketAddr>,
    ) -> InstanceReport {
        self.figures.metrics = metrics.map(|addr| addr.to_string());
        self.figures.web = web.map(|addr| addr.to_string());
        self
    }

    /// Adds how each child died last.
    pub fn with_deaths(
        mut self,
        last: impl Fn(Role, Option<WorkerId>) -> Option<String>,
    ) -> InstanceReport {
        for child in &mut self.children {
            child.last_death = child.id.and_then(|(role, worker)| last(role, worker));
        }
        self
    }

    /// Notes beside each worker which kernels for warpgroups its device does without, as samples
    /// before this run found.
    pub fn with_warpgroups(mut self, known: &[(Device, Warpgroups)]) -> InstanceReport {
        for child in &mut self.children {
            let of_child = |(device, _): &&(Device, Warpgroups)| {
                child.device.as_deref() == Some(&device.to_string())
            };
            let Some((_, found)) = known.iter().find(of_child) else {
                continue;
            };
            if found.falls_back() {
                let text = format!("prefill {found}");
                let note = text.chars().take(MAX_NOTE_CHARS).collect();
                child.note = Some(match child.note.take() {
                    Some(other) => format!("{other}; {note}"),
                    None => note,
                });
            }
        }
        self
    }
}

/// Characters of what is noted of warpgroups.
const MAX_NOTE_CHARS: usize = 1000;

impl InstanceReport {
    /// The same in a line, for a service manager.
    pub fn line(&self) -> String {
        let of = |role: Role| self.children.iter().filter(move |child| child.role == role.name());
        let sum = |role, value: fn(&ChildReport) -> u64| of(role).map(value).sum::<u64>();
        let ready = |child: &&ChildReport| child.state == ChildState::Ready.name();
        let (workers, sessions) =
            (of(Role::Worker).count(), sum(Role::Netd, |netd| netd.sessions_open));
        if self.pause == Pause::Paused.name() {
            return "paused; sepal resume starts the workers again".to_owned();
        }
        if workers == 0 {
            let phase = of(Role::Prepare).next().map_or("starting", |prepare| &prepare.phase);
            return format!("preparing the model: {phase}");
        }
        let restarts = |child: &ChildReport| u64::from(child.restarts);
        format!(
            "{} of {workers} workers ready, netd {}, {sessions} sessions, {} restarts",
            of(Role::Worker).filter(ready).count(),
            of(Role::Netd).next().map_or("not started", |netd| &netd.state),
            sum(Role::Worker, restarts) + sum(Role::Netd, restarts),
        )
    }
}

fn child(child: ChildSnapshot, held: Option<Held>, figures: &Figures) -> ChildReport {
    let share = held.and_then(|held| held.share);
    let all = child.work.all();
    let is_netd = child.role == Some(Role::Netd);
    let of_netd = |figure: u64| if is_netd { figure } else { 0 };
    let ClientFigures { sessions, refused, .. } = &figures.clients;
    let troubles = Trouble::ALL.into_iter().map(|trouble| {
        (trouble.name().to_owned(), of_netd(refused.get(&trouble).copied().unwrap_or(0)))
    });
    ChildReport {
        id: child.role.map(|role| (role, child.worker)),
        role: child.role.map_or("unknown", |role| role.name()).to_owned(),
        worker: child.worker.map(|worker| worker.to_string()),
        world_size: child.worker.map(|worker| worker.world_size.0).filter(|size| *size > 1),
        device: held.map(|held| held.device.to_string()),
        share,
        note: share.filter(|share| share.is_slow).map(|_| SLOW.to_owned()),
        pid: child.pid,
        generation: child.generation.0,
        restarts: child.generation.0.saturating_sub(1),
        state: child.state.name().to_owned(),
        span: child.span.map(|span| span.to_string()),
        phase: child.phase.name().to_owned(),
        progress: child.progress,
        last_death: None,
        jobs_done: all.jobs,
        queued_us: all.queued_us.0,
        computed_us: all.computed_us.0,
        work: figures::work(&child.work),
        batches: figures::batches(&child.work),
        device_figures: figures::device(&child.work),
        sessions_open: of_netd(*sessions),
        kv_tokens_free: of_netd(figures.kv.tokens_free),
        troubles: troubles.collect(),
        port: child.net_port,
        peer_id: child.peer_id,
    }
}

/// Columns as wide as their widest cell, and the notes below them.
pub fn table(report: &InstanceReport) -> String {
    let mut heads = vec!["ROLE", "PID", "GEN", "STATE", "PHASE", "SPAN", "DEVICE"];
    let has_ranks = report.children.iter().any(|child| child.share.is_some());
    heads.extend(has_ranks.then_some("SHARE"));
    heads.extend(["JOBS", "RESTARTS"]);
    let heads = heads.into_iter().map(str::to_owned).collect();
    let rows = report.children.iter().map(|child| cells(child, has_ranks));
    let rows: Vec<Vec<String>> = std::iter::once(heads).chain(rows).collect();
    let mut text = title(report);
    text.push('\n');
    push_rows(&rows, &mut text);
    for child in &report.children {
        if let Some(note) = &child.note {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}: {}", name(child), Escaped(note));
        }
    }
    text
}

fn title(report: &InstanceReport) -> String {
    let mut text =
        format!("instance {}, supervisor pid {}", report.instance, report.supervisor_pid);
    if report.pause != Pause::No.name() {
        // Writing to a String cannot fail.
        let _ = write!(text, ", {}", report.pause);
    }
    for netd in report.children.iter().filter(|child| child.peer_id.is_some()) {
        let (peer_id, port) = (netd.peer_id.as_deref().unwrap_or_default(), netd.port.unwrap_or(0));
        // Writing to a String cannot fail.
        let (peer_id, sessions) = (Escaped(peer_id), netd.sessions_open);
        let _ = write!(text, ", peer {peer_id}, port {port}, sessions {sessions}");
        for (name, count) in netd.troubles.iter().filter(|(_, count)| **count > 0) {
            let _ = write!(text, ", {name} {count}");
        }
    }
    text
}

fn name(child: &ChildReport) -> String {
    match &child.worker {
        Some(worker) => match child.world_size {
            Some(size) => format!("{} {worker} of {size} ranks", child.role),
            None => format!("{} {worker}", child.role),
        },
        None => child.role.clone(),
    }
}

fn cells(child: &ChildReport, has_ranks: bool) -> Vec<String> {
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let share =
        child.share.map(|share| format!("{} heads, {} columns", share.heads, share.columns));
    let mut cells = vec![
        name(child),
        child.pid.to_string(),
        child.generation.to_string(),
        child.state.clone(),
        child.phase.clone(),
        or_none(&child.span),
        or_none(&child.device),
    ];
    cells.extend(has_ranks.then(|| or_none(&share)));
    cells.extend([child.jobs_done.to_string(), child.restarts.to_string()]);
    cells
}

fn push_rows(rows: &[Vec<String>], text: &mut String) {
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
}
