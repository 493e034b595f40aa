//! `sepal status`: what runs, read from the boards of live instances. Asks nobody anything, so that it answers while netd
//! or the supervisor is busy or stopped.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};

use serde::Serialize;
use shared::exit::ExitReason;
use shared::shm::board::{BoardError, BoardSnapshot, BoardView, ChildSnapshot, Trouble};

use crate::cli::StatusOptions;
use crate::events::chain;
use crate::instance::{InstanceError, LiveInstance, live_instances};

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
enum StatusError {
    #[error(transparent)]
    Instance(#[from] InstanceError),
    #[error("no instance {name} runs in {dir}; running: {running}")]
    NoSuch {
        name: String,
        dir: String,
        running: String,
    },
    #[error("read the board of instance {name}")]
    Board {
        name: String,
        #[source]
        source: BoardError,
    },
    #[error("write the report")]
    Output(#[from] io::Error),
}

/// One instance, as `--json` shows it.
#[derive(Debug, Serialize)]
struct InstanceReport {
    instance: String,
    supervisor_pid: u32,
    started_unix_s: u64,
    children: Vec<ChildReport>,
}

/// One child, as `--json` shows it.
#[derive(Debug, Serialize)]
struct ChildReport {
    role: &'static str,
    worker: Option<String>,
    pid: u32,
    generation: u32,
    restarts: u32,
    state: &'static str,
    span: Option<String>,
    phase: &'static str,
    progress: u64,
    jobs_done: u64,
    queued_us: u128,
    computed_us: u128,
    sessions_open: u64,
    kv_tokens_free: u64,
    troubles: BTreeMap<&'static str, u64>,
    port: Option<u16>,
    peer_id: Option<String>,
}

/// Prints the report to standard output; errors go to standard error.
pub fn run(options: &StatusOptions) -> ExitReason {
    match print(options, &mut io::stdout().lock()) {
        Ok(()) => ExitReason::Clean,
        Err(error) => {
            eprintln!("sepal: {}", chain(&error));
            ExitReason::Failed
        }
    }
}

fn print(options: &StatusOptions, out: &mut impl Write) -> Result<(), StatusError> {
    let instances = wanted(options)?;
    let reports = instances
        .iter()
        .map(report)
        .collect::<Result<Vec<_>, _>>()?;
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

fn wanted(options: &StatusOptions) -> Result<Vec<LiveInstance>, StatusError> {
    let live = live_instances(&options.runtime_dir)?;
    let Some(name) = &options.instance else {
        return Ok(live);
    };
    let names: Vec<&str> = live.iter().map(|live| live.name.as_str()).collect();
    let running = if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    };
    match live.iter().find(|live| live.name == *name) {
        Some(live) => Ok(vec![live.clone()]),
        None => {
            let dir = options.runtime_dir.display().to_string();
            Err(StatusError::NoSuch {
                name: name.clone(),
                dir,
                running,
            })
        }
    }
}

fn report(live: &LiveInstance) -> Result<InstanceReport, StatusError> {
    let failed = |source| StatusError::Board {
        name: live.name.clone(),
        source,
    };
    let BoardSnapshot {
        supervisor_pid,
        started_unix_s,
        children,
        ..
    } = BoardView::open(&live.board).map_err(failed)?.snapshot();
    let children = children.into_iter().map(child).collect();
    Ok(InstanceReport {
        instance: live.name.clone(),
        supervisor_pid,
        started_unix_s,
        children,
    })
}

fn child(child: ChildSnapshot) -> ChildReport {
    ChildReport {
        role: child.role.map_or("unknown", |role| role.name()),
        worker: child.worker.map(|worker| worker.to_string()),
        pid: child.pid,
        generation: child.generation.0,
        restarts: child.generation.0.saturating_sub(1),
        state: child.state.name(),
        span: child.span.map(|span| span.to_string()),
        phase: child.phase.name(),
        progress: child.progress,
        jobs_done: child.jobs_done,
        queued_us: child.queued.as_micros(),
        computed_us: child.computed.as_micros(),
        sessions_open: child.sessions_open,
        kv_tokens_free: child.kv_tokens_free,
        troubles: Trouble::ALL
            .into_iter()
            .map(Trouble::name)
            .zip(child.troubles)
            .collect(),
        port: child.net_port,
        peer_id: child.peer_id,
    }
}

/// Columns as wide as their widest cell.
fn table(report: &InstanceReport) -> String {
    let heads = [
        "ROLE", "PID", "GEN", "STATE", "PHASE", "SPAN", "JOBS", "RESTARTS",
    ]
    .map(str::to_owned);
    let row = |child: &ChildReport| {
        let role = match &child.worker {
            Some(worker) => format!("{} {worker}", child.role),
            None => child.role.to_owned(),
        };
        [
            role,
            child.pid.to_string(),
            child.generation.to_string(),
            child.state.to_owned(),
            child.phase.to_owned(),
            child.span.clone().unwrap_or_else(|| "-".to_owned()),
            child.jobs_done.to_string(),
            child.restarts.to_string(),
        ]
    };
    let rows: Vec<[String; 8]> = std::iter::once(heads)
        .chain(report.children.iter().map(row))
        .collect();
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(String::len)
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..8).map(width).collect();
    let mut text = format!(
        "instance {}, supervisor pid {}",
        report.instance, report.supervisor_pid
    );
    for netd in report
        .children
        .iter()
        .filter(|child| child.peer_id.is_some())
    {
        let (peer_id, port) = (
            netd.peer_id.as_deref().unwrap_or_default(),
            netd.port.unwrap_or(0),
        );
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            ", peer {peer_id}, port {port}, sessions {}",
            netd.sessions_open
        );
        for (name, count) in netd.troubles.iter().filter(|(_, count)| **count > 0) {
            let _ = write!(text, ", {name} {count}");
        }
    }
    text.push('\n');
    for row in &rows {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use shared::block::Span;
    use shared::control::Role;
    use shared::ids::{Generation, GroupId, WorkerId};
    use shared::shm::board::{ChildState, Occupant};

    use super::*;
    use crate::instance::Instance;
    use crate::segments::Segments;

    fn shown(options: &StatusOptions) -> Result<String, StatusError> {
        let mut out = Vec::new();
        print(options, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    fn server() -> (tempfile::TempDir, StatusOptions, Instance, Segments) {
        let dir = tempfile::tempdir().unwrap();
        let instance = Instance::claim(dir.path(), Some("x")).unwrap();
        let segments = Segments::new(&instance, 7).unwrap();
        let worker = Some(WorkerId::solo(GroupId(0)));
        let occupant = Occupant {
            role: Role::Worker,
            generation: Generation(3),
            worker,
        };
        segments.board.assign(2, &occupant).unwrap();
        segments.board.set_pid(2, 4711).unwrap();
        segments.board.set_state(2, ChildState::Ready).unwrap();
        segments
            .board
            .set_span(2, Span::new(4, 8).unwrap())
            .unwrap();
        let options = StatusOptions {
            instance: None,
            runtime_dir: dir.path().to_owned(),
            json: false,
        };
        (dir, options, instance, segments)
    }

    #[test]
    fn the_table_shows_every_process_of_a_live_instance() {
        let (_dir, options, _instance, _segments) = server();
        let text = shown(&options).unwrap();
        assert!(
            text.starts_with(&format!(
                "instance x, supervisor pid {}",
                std::process::id()
            )),
            "{text}"
        );
        let row = text
            .lines()
            .last()
            .unwrap()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert_eq!(row, "gpu-worker 0.0 4711 3 ready idle 4:8 0 2");
    }

    #[test]
    fn json_says_the_same_to_programs() {
        let (_dir, mut options, _instance, _segments) = server();
        options.json = true;
        let value: serde_json::Value = serde_json::from_str(&shown(&options).unwrap()).unwrap();
        let child = &value[0]["children"][0];
        assert_eq!(
            (&value[0]["instance"], &child["pid"]),
            (&"x".into(), &4711.into())
        );
        assert_eq!(
            (&child["span"], &child["restarts"]),
            (&"4:8".into(), &2.into())
        );
    }

    #[test]
    fn an_instance_that_does_not_run_is_named_with_those_that_do() {
        let (_dir, mut options, _instance, _segments) = server();
        options.instance = Some("y".into());
        let error = shown(&options).unwrap_err().to_string();
        assert!(
            error.contains("no instance y") && error.contains("running: x"),
            "{error}"
        );
        options.runtime_dir = options.runtime_dir.join("none");
        options.instance = None;
        assert!(shown(&options).unwrap().contains("no instance runs"));
    }
}
