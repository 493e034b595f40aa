//! `sepal top`: a live view of running instances on the terminal. It asks the same socket as `sepal
//! status` once a second, on a thread of its own, and draws what it hears.
//!
//! ```text
//! thread ask: every instance ── reports ──┐
//! thread keys: the terminal ── events ────┴─> thread screen: TopState (pure) ──> draw (pure)
//!                                               └── Request, once confirmed ──> order of `sepal pause` or `restart`
//! main thread: signals, a terminal that goes away ──> stop
//! ```
//!
//! The terminal is left as it was found at the end, whatever ends the program: `q`, Ctrl-C, SIGTERM,
//! SIGHUP, or a panic, through the hook that ratatui installs.
//!
//! The main thread neither reads nor writes the terminal. crossterm reads one that went away for ever
//! (`event/source/unix/mio.rs` takes the end of file for an empty read), and a terminal that is not read
//! blocks the screen in a write; the program ends in both cases.

mod draw;
mod state;
mod text;

use std::io::{self, IsTerminal, Write};
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::terminal::disable_raw_mode;
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

/// Time between two looks at signals and at whether the terminal is there.
const TICK: Duration = Duration::from_millis(100);

/// How long the screen may take to end, before the program ends without it.
const GRACE: Duration = Duration::from_secs(1);

/// Most keys and reports that wait for the screen; whoever has more waits too.
const MAX_WAITING: usize = 8;

/// How long sessions may go on that a person drains.
const PATIENCE_S: u64 = 60;

/// Shows instances until the person has seen enough.
pub fn run(options: &StatusOptions) -> ExitReason {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        complain("`sepal top` needs a terminal; `sepal status --json` prints the same figures");
        return ExitReason::BadConfig;
    }
    match show(options) {
        Ok(()) => ExitReason::Clean,
        Err(message) => {
            complain(&message);
            ExitReason::Failed
        }
    }
}

/// Says what went wrong, if standard error is still there to say it to.
fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "sepal: {message}");
}

/// What wakes the screen.
enum TopEvent {
    /// The person did something.
    Terminal(io::Result<Event>),
    /// The instances answered.
    Heard(Heard),
    /// The program ends.
    Stop,
}

fn show(options: &StatusOptions) -> Result<(), String> {
    become_owner(&options.runtime_dir).map_err(|errno| {
        format!("cannot act as the owner of {}: {errno}", options.runtime_dir.display())
    })?;
    // An instance that does not exist is told before the screen is taken.
    let first = ask(options)?;
    // Threads that start from here on block the signals too.
    let signals = take_signals().map_err(|errno| format!("cannot take signals: {errno}"))?;
    let (wake, woken) = sync_channel(MAX_WAITING);
    let (end, ended) = sync_channel(1);
    let started = ask_again(options.clone(), wake.clone()).and_then(|()| {
        let keys = wake.clone();
        thread("screen", move || drop(end.send(screen(Ok(first), &woken, keys))))
    });
    started.map_err(|error| format!("cannot start a thread: {error}"))?;
    loop {
        match ended.recv_timeout(TICK) {
            // A terminal that went away is why this program ends, not a failure.
            Ok(Err(_)) if terminal_is_gone() => return Ok(()),
            Ok(shown) => return shown,
            Err(RecvTimeoutError::Disconnected) => return Err("the screen ended".to_owned()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if terminal_is_gone() || matches!(signals.read_signal(), Ok(Some(_))) {
            // A full channel has a screen behind it that hears nothing.
            let _ = wake.try_send(TopEvent::Stop);
            if ended.recv_timeout(GRACE).is_err() {
                let _ = disable_raw_mode();
            }
            return Ok(());
        }
    }
}

/// Whether nobody can read or type any more: the window was closed, the connection ended.
fn terminal_is_gone() -> bool {
    let stdin = io::stdin();
    let mut polled = [PollFd::new(stdin.as_fd(), PollFlags::empty())];
    let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
    matches!(poll(&mut polled, PollTimeout::ZERO), Ok(1..))
        && polled.iter().any(|fd| fd.revents().is_some_and(|events| events.intersects(gone)))
}

/// Takes the terminal, draws until the end, and gives the terminal back.
fn screen(
    first: Heard,
    woken: &Receiver<TopEvent>,
    wake: SyncSender<TopEvent>,
) -> Result<(), String> {
    let mut view = TopState::default();
    view.hear(first);
    let mut terminal = ratatui::try_init().map_err(|e| format!("cannot use the terminal: {e}"))?;
    let shown = read_keys(wake).and_then(|()| watch(&mut terminal, &mut view, woken));
    let restored = ratatui::try_restore();
    if shown.is_err() || restored.is_err() {
        // Its end would print to a standard error that may be gone too, which panics.
        let _ = ManuallyDrop::new(terminal);
    }
    shown.and(restored).map_err(|error| format!("the terminal failed: {error}"))
}

fn watch(
    terminal: &mut DefaultTerminal,
    view: &mut TopState,
    woken: &Receiver<TopEvent>,
) -> io::Result<()> {
    loop {
        terminal.draw(|frame| draw::draw(frame, view))?;
        let outcome = match woken.recv() {
            Ok(TopEvent::Terminal(event)) => match event? {
                Event::Key(key) => view.key(key),
                _ => KeyOutcome::Nothing,
            },
            Ok(TopEvent::Heard(heard)) => {
                view.hear(heard);
                KeyOutcome::Nothing
            }
            Ok(TopEvent::Stop) | Err(_) => KeyOutcome::Quit,
        };
        match outcome {
            KeyOutcome::Quit => return Ok(()),
            KeyOutcome::Ask(instance, request) => view.answered(carry(&instance, &request)),
            KeyOutcome::Nothing => {}
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
fn ask_again(options: StatusOptions, wake: SyncSender<TopEvent>) -> io::Result<()> {
    thread("ask", move || {
        loop {
            let next = Instant::now() + PERIOD;
            if wake.send(TopEvent::Heard(ask(&options))).is_err() {
                return;
            }
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    })
}

/// Reads the terminal on a thread that ends with the program, or with the terminal's first error.
fn read_keys(wake: SyncSender<TopEvent>) -> io::Result<()> {
    thread("keys", move || {
        loop {
            let event = event::read();
            let is_last = event.is_err();
            if wake.send(TopEvent::Terminal(event)).is_err() || is_last {
                return;
            }
        }
    })
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
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
