//! What happens to a run, as lines of JSON on standard output (`sepal serve --events`): for the program
//! that started the server, such as one that hosts it with `sepal::Server`.
//!
//! A reader that stops reading loses events and delays nothing: a thread writes, its queue is bounded,
//! and what did not fit is counted.

use std::io::Write;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;
use serde::{Deserialize, Serialize};
use shared::block::Span;
use shared::control::{PrepareStage, Progress};
use shared::exit::ExitReason;

/// Events that wait for the reader of standard output.
const QUEUE: usize = 1024;

/// How long the end of a run waits for the reader.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Pause between two looks at the writing thread at the end.
const LOOK_PERIOD: Duration = Duration::from_millis(2);

/// Something that happened to a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// Blocks are being downloaded or converted.
    Preparing {
        /// Whether the download or the conversion runs.
        stage: PrepareStage,
        /// Block under way, counted from one.
        block: u32,
        /// Blocks in all.
        blocks: u32,
        /// Bytes of this stage so far.
        bytes_done: u64,
        /// Bytes of this stage in all, estimated; 0 if unknown.
        bytes_total: u64,
    },
    /// A process entered another state.
    Process {
        /// Its name, for example `netd` or `gpu-worker 0.0`.
        name: String,
        /// How often it was started, counted from 0.
        generation: u32,
        state: ProcessState,
        /// The reason of a death; empty for other states.
        why: String,
    },
    /// The server announced itself: clients can come.
    Online {
        span: Span,
        /// PeerID of the server.
        peer_id: String,
        /// Multiaddresses of the server, each with the PeerID.
        addrs: Vec<String>,
    },
    /// The operator has to act.
    Complaint {
        /// What is wrong and what to do, in one sentence.
        text: String,
    },
    /// The reader was too slow for the events before this one.
    Missed {
        /// Number of lost events.
        events: u64,
    },
    /// The run is over; the last event.
    Ended {
        /// Exit code of the server (`sepal serve --help` lists them).
        code: u8,
        /// What is wrong and what to do, unless the run ended as asked.
        complaint: Option<String>,
    },
}

impl From<Progress> for Event {
    fn from(progress: Progress) -> Event {
        let Progress { stage, block, blocks, bytes_done, bytes_total } = progress;
        Event::Preparing { stage, block, blocks, bytes_done, bytes_total }
    }
}

/// State of a process of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProcessState {
    Starting,
    Ready,
    /// It finishes what it does.
    Draining,
    /// It died and starts again.
    Restarting,
    /// It died and stays dead.
    Lost,
    /// It ended as asked.
    Ended,
}

/// Writes events to standard output.
#[derive(Debug)]
pub struct Feed {
    queue: SyncSender<String>,
    writer: JoinHandle<()>,
    missed: u64,
}

impl Feed {
    /// Starts the writing thread.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn to_stdout() -> std::io::Result<Feed> {
        let (queue, lines) = sync_channel(QUEUE);
        let thread = thread::Builder::new().name("events".to_owned());
        let writer = thread.spawn(move || {
            // Signals are the poll loop's, which blocks them once it reads them.
            let blocked = SigSet::all().thread_block();
            debug_assert!(blocked.is_ok(), "{blocked:?}");
            write_lines(&lines, std::io::stdout());
        })?;
        Ok(Feed { queue, writer, missed: 0 })
    }

    /// Queues an event; counts it as missed when the queue is full.
    pub fn tell(&mut self, event: &Event) {
        if self.missed > 0 && self.put(&Event::Missed { events: self.missed }) {
            self.missed = 0;
        }
        if self.missed > 0 || !self.put(event) {
            self.missed += 1;
        }
    }

    /// A reader that has gone misses nothing.
    fn put(&self, event: &Event) -> bool {
        let Ok(line) = serde_json::to_string(event) else { return true };
        !matches!(self.queue.try_send(line), Err(TrySendError::Full(_)))
    }

    /// Tells how the run ended, and gives the reader a second to read it.
    pub fn end(mut self, reason: ExitReason, complaint: Option<&str>) {
        let complaint = complaint.map(str::to_owned);
        self.tell(&Event::Ended { code: reason.code(), complaint });
        let Feed { queue, writer, .. } = self;
        drop(queue);
        let deadline = Instant::now() + LAST_WORDS;
        while !writer.is_finished() && Instant::now() < deadline {
            thread::sleep(LOOK_PERIOD);
        }
    }
}

/// Ends when the queue is closed or nobody reads any more.
fn write_lines(lines: &Receiver<String>, mut out: impl Write) {
    while let Ok(line) = lines.recv() {
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaint(text: &str) -> Event {
        Event::Complaint { text: text.to_owned() }
    }

    #[test]
    fn an_event_is_one_line_of_json() {
        let span = Span::new(2, 5).unwrap();
        let event = Event::Online { span, peer_id: "Qm".to_owned(), addrs: vec!["/a".to_owned()] };
        let line = serde_json::to_string(&event).unwrap();
        assert!(line.starts_with(r#"{"event":"online""#), "{line}");
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
    }

    #[test]
    fn a_slow_reader_hears_how_much_it_missed() {
        let (queue, lines) = sync_channel(2);
        let mut feed = Feed { queue, writer: thread::spawn(|| {}), missed: 0 };
        for text in ["one", "two", "three", "four"] {
            feed.tell(&complaint(text));
        }
        let next = || serde_json::from_str::<Event>(&lines.try_recv().unwrap()).unwrap();
        assert_eq!([next(), next()], [complaint("one"), complaint("two")]);
        feed.tell(&complaint("five"));
        assert_eq!([next(), next()], [Event::Missed { events: 2 }, complaint("five")]);
    }

    #[test]
    fn a_reader_that_has_gone_ends_the_writer_and_misses_nothing() {
        let (queue, lines) = sync_channel(2);
        drop(lines);
        let mut feed = Feed { queue, writer: thread::spawn(|| {}), missed: 0 };
        (0..10).for_each(|_| feed.tell(&complaint("nobody hears this")));
        assert_eq!(feed.missed, 0);
        feed.end(ExitReason::Clean, None);
    }
}
