//! What a process writes to its log, read by a thread and watched by a test.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Longest wait for a line or for an event: a guard against hanging, far beyond what a loaded
/// machine needs.
pub const PATIENCE: Duration = Duration::from_secs(1200);

/// Between two looks at what wakes nobody.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

#[derive(Default)]
struct Lines {
    lines: Mutex<Vec<String>>,
    grown: Condvar,
}

/// The lines that a process and its children wrote so far.
pub struct ProcessLog {
    lines: Arc<Lines>,
    /// Ends with the last process that writes to the log.
    reader: JoinHandle<()>,
}

impl ProcessLog {
    /// Reads `output` to its end.
    pub fn of(output: impl Read + Send + 'static) -> ProcessLog {
        let lines = Arc::new(Lines::default());
        let sink = lines.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                sink.lines.lock().push(line);
                sink.grown.notify_all();
            }
        });
        ProcessLog { lines, reader }
    }

    /// Also after a panic that showed them.
    pub fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.lines.lines.lock()
    }

    pub fn text(&self) -> String {
        self.lines().join("\n")
    }

    /// Whether nobody writes to it any more.
    pub fn is_complete(&self) -> bool {
        self.reader.is_finished()
    }

    /// The first `count` lines with `text`, once there are so many.
    ///
    /// # Panics
    /// When the log ends before, or after [`PATIENCE`].
    pub fn wait_lines(&self, text: &str, count: usize) -> Vec<String> {
        let end = Instant::now() + PATIENCE;
        let mut lines = self.lines();
        loop {
            // Looked at first: what was written before the end is in the log then.
            let is_complete = self.is_complete();
            let found = lines.iter().filter(|line| line.contains(text)).take(count);
            let found: Vec<String> = found.cloned().collect();
            if found.len() == count {
                return found;
            }
            assert!(
                !is_complete && Instant::now() < end,
                "no {count} lines with {text:?} in the log:\n{}",
                lines.join("\n")
            );
            // The end of the log wakes nobody.
            self.lines.grown.wait_for(&mut lines, LOOK_PERIOD);
        }
    }
}

/// Polls `ready` until it gives a value.
///
/// # Panics
/// After [`PATIENCE`], naming `what`.
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        let began = Instant::now();
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < end, "timed out waiting for {what}");
        // Whoever is waited for has most of the processor, also where a look starts a process.
        let pause = 3 * began.elapsed();
        std::thread::sleep(pause.clamp(LOOK_PERIOD, Duration::from_millis(100)));
    }
}
