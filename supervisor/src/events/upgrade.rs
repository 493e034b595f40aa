//! What the driver does for an upgrade: asks the new executable what it is, waits until nothing else is
//! under way, has the children hold their messages back, and becomes it.
//!
//! ```text
//! Describing -> Waiting -> Holding -> the new executable, which replaces the processes (tree, `upgrade`)
//!                  |
//!                  +-> Draining (other NUMERICS: no session may go on) -> Holding -> ... and resumes
//!                  +-> Draining (another FORMAT) -> Leaving -> the new executable, from the beginning
//! ```
//! Whatever fails before the executable changes leaves the run as it was.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use shared::build::Build;
use tracing::{info, warn};

use super::compose::manifest_of;
use super::{RunParts, TreeDriver};
use crate::channel::Wake;
use crate::child_process::ChildProcess;
use crate::devices::subprocess::Subprocess;
use crate::feed::Feed;
use crate::handover::{self, Description, Handover, PendingEvent};
use crate::inherited_fds::{Fd, Handed};
use crate::instance::Instance;
use crate::listener::{self, ListeningSocket};
use crate::segments::Segments;
use crate::status::StatusSocket;
use crate::tree::{Order, TreeEvent};
use crate::weights::Weights;

/// Time for the new executable to say what it is.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an upgrade waits for what else is under way.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Time for the children to hold their messages back; they do so at once.
const HOLD_TIMEOUT: Duration = Duration::from_secs(5);

/// An upgrade before the executable changes.
pub(super) struct Upgrade {
    path: PathBuf,
    /// How long open sessions may hold it up, if they cannot go on.
    patience: Duration,
    step: UpgradeStep,
    until: Instant,
}

enum UpgradeStep {
    Describing(Subprocess),
    Waiting(Mode),
    Draining(Mode),
    Holding { resumes: bool },
    Leaving,
}

/// How a run goes on under the new executable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Sessions go on.
    Live,
    /// Its kernels compute other bits: sessions end first.
    OtherNumerics,
    /// It cannot read this one's state: the run ends first.
    OtherFormat,
}

/// What the operator sees of upgrades.
#[derive(Default)]
pub(super) struct UpgradeNotes {
    /// Why the last one failed.
    pub(super) failure: Option<String>,
}

impl TreeDriver<'_> {
    /// Begins to upgrade to the executable at `path`, or at the place of the present one.
    ///
    /// # Errors
    /// A sentence, when that cannot begin now.
    pub(super) fn begin_upgrade(
        &mut self,
        path: Option<PathBuf>,
        patience: Duration,
    ) -> Result<(), String> {
        if self.upgrade.is_some() || self.tree.replaces().is_some() {
            return Err("another upgrade is under way".to_owned());
        }
        if self.tree.is_ending() {
            return Err("the instance is stopping".to_owned());
        }
        let path = path.or_else(|| self.executable.clone());
        let path =
            path.ok_or("the path of the running executable is not known: name one with --to")?;
        let state =
            self.state(&mut Handed::default(), patience, false).and_then(|state| state.write());
        let state =
            state.map_err(|error| format!("cannot write the state of this run: {error}"))?;
        let process = Subprocess::describe(&path, state, DESCRIBE_TIMEOUT)?;
        info!(path = %path.display(), "upgrade: asking the new executable what it is");
        self.notes.failure = None;
        let until = Instant::now() + WAIT_TIMEOUT;
        self.upgrade =
            Some(Upgrade { path, patience, step: UpgradeStep::Describing(process), until });
        Ok(())
    }

    /// Whether the children hold their messages back: the tree hears nothing meanwhile.
    pub(super) fn is_holding(&self) -> bool {
        matches!(&self.upgrade, Some(Upgrade { step: UpgradeStep::Holding { .. }, .. }))
    }

    /// Whether the run ends in favour of a new executable.
    pub(super) fn is_leaving(&self) -> bool {
        matches!(&self.upgrade, Some(Upgrade { step: UpgradeStep::Leaving, .. }))
    }

    /// The executable that follows the end of the run.
    pub(super) fn successor(&mut self) -> Option<PathBuf> {
        self.upgrade
            .take_if(|upgrade| matches!(upgrade.step, UpgradeStep::Leaving))
            .map(|left| left.path)
    }

    /// What an upgrade is doing, for the operator.
    pub(super) fn upgrade_stage(&self) -> Option<String> {
        let before = self.upgrade.as_ref().map(|upgrade| match &upgrade.step {
            UpgradeStep::Describing(_) => "asking the new executable what it is".to_owned(),
            UpgradeStep::Waiting(_) => self.tree.upgrade_waits_for().unwrap_or_default(),
            UpgradeStep::Draining(_) => "waiting for sessions to end".to_owned(),
            UpgradeStep::Holding { .. } => "handing over".to_owned(),
            UpgradeStep::Leaving => "ending, the new executable starts anew".to_owned(),
        });
        before.or_else(|| self.tree.replaces())
    }

    /// Goes on with the upgrade as far as it gets now.
    pub(super) fn follow_upgrade(&mut self) {
        let Some(mut upgrade) = self.upgrade.take() else { return };
        let next = match &mut upgrade.step {
            UpgradeStep::Describing(process) => match process.poll() {
                None => Ok(None),
                Some(end) => {
                    self.described(&upgrade.path, end).map(|mode| Some(UpgradeStep::Waiting(mode)))
                }
            },
            UpgradeStep::Waiting(mode) => {
                let mode = *mode;
                self.waited(mode, &upgrade)
            }
            UpgradeStep::Draining(mode) => {
                let mode = *mode;
                self.drained(mode)
            }
            UpgradeStep::Holding { resumes } => {
                let resumes = *resumes;
                match self.held(resumes, &upgrade) {
                    Ok(()) => Ok(None),
                    Err(why) => {
                        self.go_on_after(resumes);
                        Err(why)
                    }
                }
            }
            UpgradeStep::Leaving => Ok(None),
        };
        match next {
            Ok(None) => self.upgrade = Some(upgrade),
            Ok(Some(step)) => {
                upgrade.until = Instant::now()
                    + match step {
                        UpgradeStep::Holding { .. } => HOLD_TIMEOUT,
                        _ => WAIT_TIMEOUT,
                    };
                self.upgrade = Some(Upgrade { step, ..upgrade });
            }
            Err(why) => self.fail_upgrade(&upgrade.path, &why),
        }
    }

    fn fail_upgrade(&mut self, path: &Path, why: &str) {
        let text = format!("not upgraded to {}, the running server goes on: {why}", path.display());
        warn!("{text}");
        if let Some(screen) = &self.screen {
            screen.line(&text);
        }
        self.notes.failure = Some(text);
    }

    /// What the new executable said of itself.
    fn described(
        &self,
        path: &Path,
        end: Result<crate::devices::subprocess::Output, String>,
    ) -> Result<Mode, String> {
        let output = end?;
        output.complaint().map_err(|why| format!("it does not say which build it is: {why}"))?;
        let said: Description = serde_json::from_str(output.text.trim())
            .map_err(|_| "it does not say which build it is: is it a sepal?".to_owned())?;
        let ours = Build::this();
        let Build { version, format, numerics } = &said.build;
        info!(path = %path.display(), version, format, numerics, "upgrade: executable found");
        if *format != ours.format || !said.reads_state {
            warn!(
                theirs = format,
                ours = ours.format,
                "the new executable cannot take over what this one holds: sessions end first, and it starts anew"
            );
            return Ok(Mode::OtherFormat);
        }
        if *numerics != ours.numerics {
            warn!(
                theirs = numerics,
                ours = ours.numerics,
                "the new executable computes other bits: sessions end first"
            );
            return Ok(Mode::OtherNumerics);
        }
        Ok(Mode::Live)
    }

    fn waited(&mut self, mode: Mode, upgrade: &Upgrade) -> Result<Option<UpgradeStep>, String> {
        let is_paused = self.tree.is_paused();
        if let Some(why) = self.tree.upgrade_waits_for().filter(|_| !is_paused) {
            return match Instant::now() < upgrade.until && !self.tree.is_ending() {
                true => Ok(None),
                false => Err(why),
            };
        }
        match mode {
            Mode::Live => Ok(Some(self.hold(false))),
            Mode::OtherNumerics if is_paused => Ok(Some(self.hold(false))),
            Mode::OtherNumerics | Mode::OtherFormat => {
                if !is_paused {
                    self.pending.push_back(TreeEvent::Ordered(Order::Pause(upgrade.patience)));
                }
                Ok(Some(UpgradeStep::Draining(mode)))
            }
        }
    }

    fn drained(&mut self, mode: Mode) -> Result<Option<UpgradeStep>, String> {
        let standing = self.tree.standing();
        if self.tree.is_ending()
            || standing.pause == crate::report::Pause::No && self.pending.is_empty()
        {
            return Err("the pause for it was ended".to_owned());
        }
        if !self.tree.is_paused() {
            return Ok(None);
        }
        if mode == Mode::OtherFormat {
            self.pending.push_back(TreeEvent::Stop);
            return Ok(Some(UpgradeStep::Leaving));
        }
        Ok(Some(self.hold(true)))
    }

    /// Asks all children to hold their messages back.
    fn hold(&mut self, resumes: bool) -> UpgradeStep {
        for child in self.processes.iter_mut().filter(|child| child.end.is_none()) {
            child.is_held = false;
            child.channel.hold(true);
        }
        UpgradeStep::Holding { resumes }
    }

    /// Becomes the new executable once all children hold their messages back.
    fn held(&mut self, resumes: bool, upgrade: &Upgrade) -> Result<(), String> {
        if let Some(late) = self.processes.iter().find(|child| !child.is_held) {
            return match Instant::now() < upgrade.until {
                true => Ok(()),
                false => Err(format!("{} did not answer in time", late.id)),
            };
        }
        if let Some(service) = &mut self.service {
            service.reloading(Instant::now());
        }
        // The next executable starts its own.
        self.web.retire(Instant::now());
        let mut handed = Handed::default();
        let state = self.state(&mut handed, upgrade.patience, resumes);
        let state = state.map_err(|error| format!("cannot hand over: {error}"))?;
        info!(path = %upgrade.path.display(), "handing over to the new executable");
        let error = handover::become_next(&upgrade.path, &state, handed);
        Err(format!("it cannot be started: {error}"))
    }

    /// No other executable took over: everything goes on here.
    fn go_on_after(&mut self, resumes: bool) {
        for child in self.processes.iter_mut().filter(|child| child.end.is_none()) {
            child.is_held = false;
            child.channel.hold(false);
        }
        if resumes {
            self.pending.push_back(TreeEvent::Ordered(Order::Resume));
        }
    }

    /// All that the next executable needs.
    fn state(
        &self,
        handed: &mut Handed,
        patience: Duration,
        resumes: bool,
    ) -> std::io::Result<Handover> {
        let (metrics, page) = (self.metrics.try_clone()?, self.web.socket().try_clone()?);
        let alive = self.processes.iter().filter(|child| child.end.is_none());
        Ok(Handover {
            build: Build::this(),
            arguments: self.arguments.clone(),
            config: self.config.clone(),
            instance: self.instance.name().to_owned(),
            lock: handed.put(self.instance.lock()?),
            status: handed.put(self.status.try_clone()?),
            metrics: metrics.map(|socket| handed.put(socket)),
            page: page.map(|socket| handed.put(socket)),
            leaving_pages: self.web.leaving(),
            tree: self.tree.clone(),
            children: alive.map(|child| child.hand_over(handed)).collect::<Result<_, _>>()?,
            pending: self.pending.iter().filter_map(pending).collect(),
            segments: self.segments.hand_over(handed)?,
            weights: self.weights.hand_over(handed)?,
            facts: self.facts.clone(),
            span: self.span,
            addrs: self.addrs.clone(),
            was_ready: self.service.as_ref().is_some_and(|service| service.is_ready()),
            patience,
            resumes,
        })
    }

    /// All processes are of this executable.
    pub(super) fn upgraded(&self) {
        info!(version = env!("CARGO_PKG_VERSION"), "upgraded: every process is of the new build");
        if let Some(screen) = &self.screen {
            screen.line("upgraded: every process is of the new build");
        }
    }
}

/// What of an event the next executable has to hear.
fn pending(event: &TreeEvent) -> Option<PendingEvent> {
    match event.clone() {
        TreeEvent::Said(id, generation, up) => Some(PendingEvent::Said(id, generation, up)),
        TreeEvent::Ended(id, generation, end) => Some(PendingEvent::Ended(id, generation, end)),
        TreeEvent::Closed(id, generation) => Some(PendingEvent::Closed(id, generation)),
        // Seen anew, or asked for again.
        _ => None,
    }
}

/// Goes on with the run that the executable before handed over, to its end.
///
/// # Errors
/// As [`super::run`]. The children die with the process.
pub fn resume(
    state: Handover,
    instance: &Instance,
    feed: &mut Option<Feed>,
    reread: super::Reread<'_>,
) -> Result<super::RunOutcome, super::LoopError> {
    let now = Instant::now();
    let system = |what| move |error| super::LoopError::System(what, error);
    let wake = Wake::new().map_err(system("make an eventfd"))?;
    let take = |socket: Option<Fd>| {
        let taken = socket.map(|mut socket| socket.take()).transpose();
        taken.map_err(system("take a listening socket over"))
    };
    let (metrics, page) = (take(state.metrics)?, take(state.page)?);
    let mut socket = state.status;
    let status = socket.take().and_then(StatusSocket::adopt);
    let segments = Segments::adopt(instance, state.segments)?;
    let weights = Weights::adopt(state.weights, |span| manifest_of(instance, span));
    let (mut processes, mut events) = (Vec::new(), Vec::new());
    for child in state.children {
        let (id, generation) = (child.id, child.generation);
        match ChildProcess::adopt(child, &wake) {
            Ok(child) => processes.push(child),
            Err(error) => {
                return Err(super::LoopError::System(
                    "go on with a child",
                    std::io::Error::other(error),
                ));
            }
        }
        info!(child = %id, generation = generation.0, "taken over");
    }
    events.extend(state.pending.into_iter().map(|pending| match pending {
        PendingEvent::Said(id, generation, up) => TreeEvent::Said(id, generation, up),
        PendingEvent::Ended(id, generation, end) => TreeEvent::Ended(id, generation, end),
        PendingEvent::Closed(id, generation) => TreeEvent::Closed(id, generation),
    }));
    events.push(TreeEvent::HandedOver(state.patience));
    events.extend(state.resumes.then_some(TreeEvent::Ordered(Order::Resume)));
    let parts = RunParts {
        tree: state.tree,
        pending: events.into(),
        processes,
        segments,
        weights: weights.map_err(system("take the files of the weights over"))?,
        status: status.map_err(system("take the status socket over"))?,
        metrics: ListeningSocket::adopt(listener::METRICS, state.config.metrics, metrics),
        page: ListeningSocket::adopt(listener::PAGE, state.config.web, page),
        leaving_pages: state.leaving_pages,
        wake,
        arguments: state.arguments,
    };
    let mut driver = TreeDriver::of_parts(state.config, instance, feed, reread, parts)?;
    driver.facts = state.facts;
    (driver.span, driver.addrs) = (state.span, state.addrs);
    if let Some(service) = &mut driver.service {
        service.taken_over(state.was_ready, now);
    }
    if let Some(screen) = &mut driver.screen {
        screen.taken_over();
    }
    driver.run()
}
