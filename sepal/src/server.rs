//! A server that this program hosts: its process, its events, its end.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use futures::stream::{self, BoxStream, Stream, StreamExt};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shared::exit::ExitReason;
use supervisor::feed::Event;
use supervisor::spawn;
use tokio::sync::{broadcast, watch};

use crate::cli;

/// Whether [`crate::init`] ran in this process.
pub(crate) static CALLED: AtomicBool = AtomicBool::new(false);

/// Events that a slow reader may be behind.
const BACKLOG: usize = 1024;

/// Longest line that a server writes about an event.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Pause between two looks whether a process that closed its output has ended.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// Why a server cannot be hosted.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The program cannot start its own executable as a server.
    #[error("sepal::init() was not called: call it first in main")]
    NoInit,
    /// A setting is refused.
    #[error("{0}")]
    Setting(String),
    /// The system refuses a process, a thread or a signal.
    #[error("cannot {0} the server")]
    System(&'static str, #[source] io::Error),
}

/// Where the log of a hosted server goes.
#[derive(Debug, Default)]
pub enum LogTo {
    /// The standard error of the hosting program.
    #[default]
    Stderr,
    /// This file, at its end.
    File(File),
    /// Nowhere.
    Off,
}

/// How a server ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Why, as `sepal serve` says it by its exit code; `None` if a signal killed the server.
    pub reason: Option<ExitReason>,
    /// What is wrong and what to do, unless the server ended as asked.
    pub complaint: Option<String>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.complaint, self.reason) {
            (Some(complaint), _) => f.write_str(complaint),
            (None, Some(reason)) => write!(f, "server ended: {reason}"),
            (None, None) => f.write_str("server was killed"),
        }
    }
}

/// The events of a server from the start of this stream on; ends with the server.
///
/// A reader that falls behind by more than a thousand events gets [`Event::Missed`].
pub struct Events(BoxStream<'static, Event>);

impl Stream for Events {
    type Item = Event;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Event>> {
        self.0.poll_next_unpin(context)
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Events")
    }
}

/// A running server. Dropping it asks the server to drain, and does not wait.
#[derive(Debug)]
pub struct Server {
    drainer: Drainer,
    events: broadcast::Receiver<Event>,
    end: watch::Receiver<Option<Outcome>>,
}

/// Asks a server to drain; may be cloned and used from any thread.
#[derive(Clone, Debug)]
pub struct Drainer(Arc<Mutex<Option<Child>>>);

impl Drainer {
    /// Asks the server to end: it announces itself OFFLINE, lets running steps finish for at most
    /// `drain_timeout`, and ends. A second call ends it at once; one after its end does nothing.
    ///
    /// # Errors
    /// [`HostError::System`] when the signal cannot be sent.
    pub fn drain(&self) -> Result<(), HostError> {
        let child = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A process that was not waited for keeps its id.
        let pid = child.as_ref().and_then(|child| i32::try_from(child.id()).ok());
        pid.map_or(Ok(()), |pid| kill(Pid::from_raw(pid), Signal::SIGTERM))
            .map_err(|errno| HostError::System("signal", errno.into()))
    }

    /// Waits for the end of a process that has closed its output.
    fn wait(&self) -> Option<ExitReason> {
        loop {
            let mut child = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match child.as_mut().map(Child::try_wait) {
                Some(Ok(None)) => {}
                Some(Ok(Some(status))) => {
                    *child = None;
                    return status.code().and_then(ExitReason::from_code);
                }
                Some(Err(_)) | None => return None,
            }
            drop(child);
            thread::sleep(LOOK_PERIOD);
        }
    }
}

impl Server {
    pub(crate) fn start(mut arguments: Vec<OsString>, log: LogTo) -> Result<Server, HostError> {
        if !CALLED.load(Ordering::Acquire) {
            return Err(HostError::NoInit);
        }
        let line = std::iter::once(OsString::from("sepal")).chain(arguments.iter().cloned());
        cli::parse(line, &|name| std::env::var(name).ok())
            .map_err(|error| HostError::Setting(error.to_string()))?;
        let parent = format!("--end_with={}", std::process::id());
        arguments.insert(1, parent.into());
        let (started, outcome) = sync_channel(1);
        let (events, first) = broadcast::channel(BACKLOG);
        let (told, end) = watch::channel(None);
        // The server ends with the thread that started it, so that thread lasts as long.
        thread::Builder::new()
            .name("sepal-server".to_owned())
            .spawn(move || follow(&arguments, log, &started, &events, &told))
            .map_err(|error| HostError::System("watch", error))?;
        let no_answer = || io::Error::other("its thread ended");
        let drainer = outcome.recv().map_err(|_| no_answer()).flatten();
        let drainer = drainer.map_err(|error| HostError::System("start", error))?;
        Ok(Server { drainer, events: first, end })
    }

    /// What happens to the server from its start, in the first call; later calls begin with what
    /// happens next.
    pub fn events(&mut self) -> Events {
        let next = self.events.resubscribe();
        let from = std::mem::replace(&mut self.events, next);
        let next = |mut from: broadcast::Receiver<Event>| async move {
            let event = match from.recv().await {
                Ok(event) => event,
                Err(broadcast::error::RecvError::Lagged(events)) => Event::Missed { events },
                Err(broadcast::error::RecvError::Closed) => return None,
            };
            Some((event, from))
        };
        Events(stream::unfold(from, next).boxed())
    }

    /// What asks the server to drain, for other threads and tasks.
    pub fn drainer(&self) -> Drainer {
        self.drainer.clone()
    }

    /// Waits for the end of the server. May be cancelled and called again.
    ///
    /// # Errors
    /// [`HostError::System`] when the server cannot be watched any more.
    pub async fn run(&mut self) -> Result<Outcome, HostError> {
        let lost = |_| HostError::System("watch", io::Error::other("its thread ended"));
        let end = self.end.wait_for(Option::is_some).await.map_err(lost)?;
        Ok(end.clone().unwrap_or(Outcome { reason: None, complaint: None }))
    }

    /// The same as [`Server::run`], for a thread outside of any runtime.
    ///
    /// # Errors
    /// As [`Server::run`].
    pub fn wait(&mut self) -> Result<Outcome, HostError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.map_err(|error| HostError::System("watch", error))?;
        runtime.block_on(self.run())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let is_over = self.end.borrow().is_some();
        if !is_over {
            // It may end at this very moment; then there is nobody to ask.
            let _ = self.drainer.drain();
        }
    }
}

/// Starts the server and passes its events on until it has ended.
fn follow(
    arguments: &[OsString],
    log: LogTo,
    started: &SyncSender<io::Result<Drainer>>,
    events: &broadcast::Sender<Event>,
    told: &watch::Sender<Option<Outcome>>,
) {
    let stderr = match log {
        LogTo::Stderr => Stdio::inherit(),
        LogTo::File(file) => file.into(),
        LogTo::Off => Stdio::null(),
    };
    let (drainer, output) = match spawn::hosted(arguments, stderr) {
        Ok((child, output)) => (Drainer(Arc::new(Mutex::new(Some(child)))), output),
        Err(error) => return drop(started.send(Err(error))),
    };
    let _ = started.send(Ok(drainer.clone()));
    let complaint = pass_on(output, events);
    let reason = drainer.wait();
    let complaint = complaint.filter(|_| reason != Some(ExitReason::Clean));
    // Nobody may be there to hear of it.
    let _ = told.send(Some(Outcome { reason, complaint }));
}

/// Passes on what the server writes; returns what it says at its end, or the last that it complained
/// of if it does not get there.
fn pass_on(output: ChildStdout, events: &broadcast::Sender<Event>) -> Option<String> {
    let mut output = BufReader::new(output);
    let (mut line, mut last) = (Vec::new(), None);
    loop {
        line.clear();
        match output.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(1..) => {}
            Ok(0) | Err(_) => return last,
        }
        // What is no event has no reader: the log goes elsewhere.
        let Ok(event) = serde_json::from_slice::<Event>(&line) else { continue };
        match &event {
            Event::Complaint { text } => last = Some(text.clone()),
            Event::Ended { complaint, .. } => last.clone_from(complaint),
            _ => {}
        }
        // Without receivers nobody misses it.
        let _ = events.send(event);
    }
}
