//! `sepal top`: a live view of running instances on the terminal. It asks the same socket as `sepal
//! status` once a second, on a thread of its own, and draws what it hears.
//!
//! ```text
//! thread: ask every instance ── reports ──┐
//! keys of the terminal ───────────────────┴─> View (state, pure) ──> draw (pure)
//!                                               └── Request, once confirmed ──> order of `sepal pause` or `restart`
//! ```
//!
//! The terminal is left as it was found at the end, whatever ends the program: `q`, Ctrl-C, SIGTERM,
//! SIGHUP, or a panic, through the hook that ratatui installs.

mod draw;
mod state;
mod text;

use std::io::{self, IsTerminal};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use supervisor::instance::LiveInstance;
use supervisor::report::InstanceReport;
use supervisor::status::{self, InstanceAnswer, InstanceRequest as Order};

use crate::status::{StatusOptions, become_owner, report, wanted};
use state::{Heard, KeyOutcome};

pub use state::{OperatorRequest, TopState};

/// Time between two questions.
const PERIOD: Duration = Duration::from_secs(1);

/// Longest wait for a key, after which reports and signals are looked at.
const TICK: Duration = Duration::from_millis(100);

/// How long sessions may go on that a person drains.
const PATIENCE_S: u64 = 60;

/// Shows instances until the person has seen enough.
pub fn run(options: &StatusOptions) -> ExitReason {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        eprintln!(
            "sepal: `sepal top` needs a terminal; `sepal status --json` prints the same figures"
        );
        return ExitReason::BadConfig;
    }
    match show(options) {
        Ok(()) => ExitReason::Clean,
        Err(message) => {
            eprintln!("sepal: {message}");
            ExitReason::Failed
        }
    }
}

fn show(options: &StatusOptions) -> Result<(), String> {
    become_owner(&options.runtime_dir).map_err(|errno| {
        format!("cannot act as the owner of {}: {errno}", options.runtime_dir.display())
    })?;
    // An instance that does not exist is told before the screen is taken.
    let first = ask(options)?;
    let signals = take_signals().map_err(|errno| format!("cannot take signals: {errno}"))?;
    let reports = listen(options.clone()).map_err(|e| format!("cannot start a thread: {e}"))?;
    let mut view = TopState::default();
    view.hear(Ok(first));
    let mut terminal = ratatui::try_init().map_err(|e| format!("cannot use the terminal: {e}"))?;
    let shown = watch(&mut terminal, &mut view, &reports, &signals);
    let restored = ratatui::try_restore();
    shown.and(restored).map_err(|error| format!("the terminal failed: {error}"))
}

fn watch(
    terminal: &mut DefaultTerminal,
    view: &mut TopState,
    reports: &Receiver<Heard>,
    signals: &SignalFd,
) -> io::Result<()> {
    loop {
        terminal.draw(|frame| draw::draw(frame, view))?;
        if event::poll(TICK)? {
            let outcome = match event::read()? {
                Event::Key(key) => view.key(key),
                _ => KeyOutcome::Nothing,
            };
            match outcome {
                KeyOutcome::Quit => return Ok(()),
                KeyOutcome::Ask(instance, request) => view.answered(carry(&instance, &request)),
                KeyOutcome::Nothing => {}
            }
        }
        if matches!(signals.read_signal(), Ok(Some(_))) {
            return Ok(());
        }
        while let Ok(heard) = reports.try_recv() {
            view.hear(heard);
        }
    }
}

/// Carries out what the person asked of an instance and has confirmed. The answer is a sentence,
/// either way.
fn carry(instance: &LiveInstance, request: &OperatorRequest) -> Result<String, String> {
    let order = match request {
        OperatorRequest::Drain => Order::Pause { patience_s: PATIENCE_S },
        OperatorRequest::RestartWorker(worker) => Order::Restart { worker: worker.clone() },
    };
    match status::order(&instance.status_socket, &order) {
        Ok(InstanceAnswer::Refused { error }) => Err(error),
        Ok(_) => Ok(format!("{}: begun", instance.name)),
        Err(error) => Err(format!("the supervisor of {} does not answer: {error}", instance.name)),
    }
}

/// Blocks the signals that end the program, and takes them as a descriptor.
fn take_signals() -> nix::Result<SignalFd> {
    let mut mask = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        mask.add(signal);
    }
    mask.thread_block()?;
    SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Asks again and again, on a thread that ends with the program.
fn listen(options: StatusOptions) -> io::Result<Receiver<Heard>> {
    // One report waits for the screen; the next is asked for when it was taken.
    let (sender, receiver): (SyncSender<Heard>, _) = sync_channel(1);
    std::thread::Builder::new().name("ask".to_owned()).spawn(move || {
        loop {
            let next = Instant::now() + PERIOD;
            if sender.send(ask(&options)).is_err() {
                return;
            }
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    })?;
    Ok(receiver)
}

/// What the instances tell of themselves.
fn ask(options: &StatusOptions) -> Heard {
    let instances = wanted(options).map_err(|error| with_causes(&error))?;
    let told = instances.into_iter().filter_map(|live| Some((report(&live, false)?, live)));
    told.map(|(report, live)| {
        let report: InstanceReport = report.map_err(|error| with_causes(&error))?;
        Ok((live, report))
    })
    .collect()
}
