//! What a person at a terminal sees of a run: progress until the server is ready, one summary, and
//! then one line per event that matters. The log in full is for `--log` and for pipes.
//!
//! ```text
//! [=======>            ] downloading blocks 0:16: block 6 of 16, 85 MB/s, about 2m left
//! Serving blocks 0:16 of meta-llama/... as 12D3Koo...
//!   devices   cuda:0
//!   ...
//! 12:03:41 gpu-worker 0.0 died (SIGKILL); restarting
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};
use shared::control::{PrepareStage, Progress};

/// How often the progress is drawn again while nothing happens.
const REDRAW: Duration = Duration::from_millis(120);

/// Speeds are those of this last stretch of time.
const SPEED_WINDOW: Duration = Duration::from_secs(10);

/// The screen of one run on standard error.
#[derive(Debug)]
pub struct Screen {
    bar: Option<ProgressBar>,
    speed: Speed,
    /// When children died that are to come back, by their names.
    deaths: BTreeMap<String, Instant>,
    is_online: bool,
}

/// What the summary says, line by line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// For example `Serving blocks 0:16 of 32 of NAME`.
    pub title: String,
    /// Label and value of each line.
    pub lines: Vec<(&'static str, String)>,
}

/// What happened to a child, as far as a person cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened<'a> {
    Started,
    Ready,
    /// It died for this reason and is started again.
    Died(&'a str),
    /// It died for this reason and stays dead.
    Lost(&'a str),
    /// It was told to finish.
    Draining,
}

impl Screen {
    /// A screen that shows that the start has begun.
    pub fn new(model: &str) -> Screen {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{spinner} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.enable_steady_tick(REDRAW);
        bar.set_message(format!("reading {model}"));
        Screen {
            bar: Some(bar),
            speed: Speed::default(),
            deaths: BTreeMap::new(),
            is_online: false,
        }
    }

    /// Shows what the start is doing, unless the server is ready.
    pub fn stage(&mut self, text: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(text);
        }
    }

    /// Shows how far the preparation of the blocks is.
    pub fn progress(&mut self, progress: &Progress) {
        let Some(bar) = &self.bar else { return };
        self.speed.record(progress.stage, progress.bytes_done, Instant::now());
        bar.set_message(progress_text(progress, self.speed.bytes_per_s()));
    }

    /// Tells of a child by its name.
    pub fn child(&mut self, name: &str, happened: Happened<'_>) {
        let now = Instant::now();
        match happened {
            Happened::Started => {}
            Happened::Ready => match self.deaths.remove(name) {
                Some(died) => {
                    let after = now.duration_since(died).as_millis();
                    self.line(&format!("{name} is back after {after} ms"));
                }
                None if name.starts_with("gpu-worker") => self.stage(format!("{name} is ready")),
                None => {}
            },
            Happened::Died(why) => {
                self.deaths.entry(name.to_owned()).or_insert(now);
                self.line(&format!("{name} died ({why}); restarting"));
            }
            Happened::Lost(why) => {
                self.deaths.remove(name);
                // Before the server is ready, the run ends with this sentence.
                if self.is_online {
                    self.line(&format!("{name} died ({why}) and is not restarted"));
                }
            }
            Happened::Draining if self.is_online && name == "netd" => {
                self.line("stopping: sessions finish their running steps (Ctrl-C again: at once)");
            }
            Happened::Draining => {}
        }
    }

    /// Ends the progress and shows the summary; a later one, after a move, is one line.
    pub fn online(&mut self, summary: &Summary) {
        if self.is_online {
            return self.line(&summary.title);
        }
        self.is_online = true;
        self.clear();
        eprint!("{}", summary_text(summary));
    }

    /// The run goes on from another executable: nothing of the start is shown.
    pub fn taken_over(&mut self) {
        self.is_online = true;
        self.clear();
    }

    /// One line about an event, with the time of day (UTC) once the server is ready.
    pub fn line(&self, text: &str) {
        let stamp = self.is_online.then(time_of_day).unwrap_or_default();
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{stamp}{text}"),
        }
    }

    /// Takes the progress off the screen.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

fn summary_text(summary: &Summary) -> String {
    let width = summary.lines.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    let mut text = format!("{}\n", summary.title);
    for (label, value) in &summary.lines {
        text.push_str(&format!("  {label:width$}  {value}\n"));
    }
    text
}

/// For example `downloading block 7 of 16, 1.2 GiB of about 20 GiB, 85 MiB/s, about 4 minutes left`.
fn progress_text(progress: &Progress, bytes_per_s: Option<f64>) -> String {
    let Progress { stage, block, blocks, bytes_done, bytes_total } = *progress;
    let doing = match stage {
        PrepareStage::Downloading => "downloading",
        PrepareStage::Converting => "preparing",
    };
    let mut text = format!("{doing} block {block} of {blocks}");
    if bytes_total > 0 {
        let (done, total) = (HumanBytes(bytes_done), HumanBytes(bytes_total));
        text.push_str(&format!(", {done} of about {total}"));
    }
    let Some(rate) = bytes_per_s.filter(|rate| *rate >= 1.0) else {
        return text;
    };
    text.push_str(&format!(", {}/s", HumanBytes(rate as u64)));
    let left = bytes_total.saturating_sub(bytes_done) as f64 / rate;
    if (1.0..1e7).contains(&left) {
        text.push_str(&format!(", about {} left", HumanDuration(Duration::from_secs_f64(left))));
    }
    text
}

/// `12:03:41 `.
fn time_of_day() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let second = since.as_secs() % 86_400;
    format!("{:02}:{:02}:{:02} ", second / 3600, second / 60 % 60, second % 60)
}

/// The speed of a preparation over its last seconds.
#[derive(Debug, Default)]
struct Speed {
    stage: Option<PrepareStage>,
    points: std::collections::VecDeque<(Instant, u64)>,
}

impl Speed {
    fn record(&mut self, stage: PrepareStage, bytes: u64, now: Instant) {
        let is_behind = self.points.back().is_some_and(|(_, last)| *last > bytes);
        if self.stage != Some(stage) || is_behind {
            self.points.clear();
            self.stage = Some(stage);
        }
        self.points.push_back((now, bytes));
        while self.points.len() > 2
            && self.points.front().is_some_and(|(at, _)| now - *at > SPEED_WINDOW)
        {
            self.points.pop_front();
        }
    }

    fn bytes_per_s(&self) -> Option<f64> {
        let (first, last) = (self.points.front()?, self.points.back()?);
        let seconds = (last.0 - first.0).as_secs_f64();
        (seconds > 0.2).then(|| last.1.saturating_sub(first.1) as f64 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRESS: Progress = Progress {
        stage: PrepareStage::Downloading,
        block: 3,
        blocks: 16,
        bytes_done: 512 << 20,
        bytes_total: 4 << 30,
    };

    #[test]
    fn progress_shows_bytes_speed_and_time_left() {
        let text = progress_text(&PROGRESS, Some((64 << 20) as f64));
        assert_eq!(
            text,
            "downloading block 3 of 16, 512.00 MiB of about 4.00 GiB, 64.00 MiB/s, about 56 seconds left"
        );
    }

    #[test]
    fn progress_without_a_speed_claims_none() {
        let unknown = Progress { stage: PrepareStage::Converting, bytes_total: 0, ..PROGRESS };
        assert_eq!(progress_text(&unknown, None), "preparing block 3 of 16");
    }

    #[test]
    fn speed_is_that_of_the_present_stage() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut speed = Speed::default();
        speed.record(PrepareStage::Downloading, 0, at(0));
        speed.record(PrepareStage::Downloading, 100, at(1));
        assert_eq!(speed.bytes_per_s(), Some(100.0));
        speed.record(PrepareStage::Converting, 100, at(2));
        assert_eq!(speed.bytes_per_s(), None);
        for second in 3..60 {
            speed.record(PrepareStage::Converting, 100 + 7 * second, at(second));
        }
        assert_eq!(speed.bytes_per_s(), Some(7.0));
    }

    #[test]
    fn the_summary_lines_up_its_values() {
        let summary = Summary {
            title: "Serving".to_owned(),
            lines: vec![("model", "m".to_owned()), ("address", "a".to_owned())],
        };
        assert_eq!(summary_text(&summary), "Serving\n  model    m\n  address  a\n");
    }
}
