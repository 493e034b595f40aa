//! Logging of every process of Sepal: one line per event on standard error. Every line names the
//! process, since all processes of a run share one standard error. Three forms exist: short text for
//! a person at a terminal, full text, and one JSON object per line:
//!
//! ```text
//! warning: gpu-worker 0.0: disk is slow path=/data
//! 2026-01-02T03:04:05.678901Z  INFO gpu-worker 0.0 #2 gpu_worker::executor: serving span=0:16
//! {"time":"...","level":"INFO","role":"gpu-worker","rank":"0.0","generation":2,"pid":71,"target":"...","message":"serving","span":"0:16"}
//! ```

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::config::{LogConfig, LogFormat};
use crate::ids::{Generation, WorkerId};
use crate::sanitize_text::{Escaping, escaped_json};

/// Who writes the lines of this process.
#[derive(Clone, Copy, Debug)]
pub struct LogIdentity {
    /// Role of the process, for example `netd`.
    pub role: &'static str,
    pub worker: Option<WorkerId>,
    /// How often the child was started; `None` for processes that are nobody's child.
    pub generation: Option<Generation>,
}

/// Why logging could not start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter does not parse.
    #[error("invalid log filter {filter:?}: expected a level or a list such as info,netd=debug")]
    BadFilter {
        filter: String,
        /// What the parser says.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
}

/// Starts logging to standard error. The first call of a process counts; later ones change nothing.
///
/// # Errors
/// [`LogError::BadFilter`] when the filter does not parse.
pub fn init_logging(config: &LogConfig, identity: LogIdentity) -> Result<(), LogError> {
    // The Hub's library logs each failed request as an error. prepare says what matters of it.
    let filter = match config.filter.contains("hf_hub") {
        true => config.filter.clone(),
        false => format!("{},hf_hub=off", config.filter),
    };
    let filter = EnvFilter::try_new(filter)
        .map_err(|source| LogError::BadFilter { filter: config.filter.clone(), source })?;
    let colour = config.format != LogFormat::Json && io::stderr().is_terminal();
    let lines = Lines { identity, format: config.format };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colour)
        .with_writer(io::stderr)
        // A reader of the log that went away must not take the process with it: the complaint would
        // go to the same place.
        .log_internal_errors(false)
        .event_format(lines)
        .finish();
    // Fails only when a subscriber is set already, which is the documented case of a second call.
    let _ = tracing::subscriber::set_global_default(subscriber);
    Ok(())
}

/// From here on a panic in any thread is logged, or printed while there is no log, and ends the process: one
/// with a broken invariant must not go on, and its parent restarts it. For executables, not for libraries.
///
/// It is a hook, not the profile's `panic = "abort"`, so that all builds behave alike, and so that a library
/// that is known to panic on bad input can be called behind a hook of its own (`client::grammar`).
pub fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        match tracing::dispatcher::has_been_set() {
            true => tracing::error!(thread = thread.name().unwrap_or("?"), "{info}"),
            false => print(info),
        }
        std::process::abort();
    }));
}

struct Lines {
    identity: LogIdentity,
    format: LogFormat,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        match self.format {
            LogFormat::Terminal => self.terminal_prefix(&mut out, event.metadata())?,
            LogFormat::Text => self.text_prefix(&mut out, event.metadata())?,
            LogFormat::Json => return self.json(out, event),
        }
        self.fields(&mut out, event)?;
        writeln!(out)
    }
}

impl Lines {
    /// What a line says first at a terminal, without time and target. It clears the line of the
    /// terminal, where the supervisor may have drawn progress.
    fn terminal_prefix(&self, out: &mut Writer<'_>, metadata: &Metadata<'_>) -> fmt::Result {
        let word = match *metadata.level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            _ => "debug",
        };
        if out.has_ansi_escapes() {
            out.write_str("\r\x1b[2K")?;
        }
        write_coloured(out, metadata.level(), word)?;
        out.write_str(": ")?;
        if self.identity.generation.is_some() {
            self.write_process(out)?;
            out.write_str(": ")?;
        }
        Ok(())
    }

    /// What a line says first in full text.
    fn text_prefix(&self, out: &mut Writer<'_>, metadata: &Metadata<'_>) -> fmt::Result {
        SystemTime.format_time(out)?;
        out.write_char(' ')?;
        write_coloured(out, metadata.level(), &format!("{:>5}", metadata.level().as_str()))?;
        out.write_char(' ')?;
        self.write_process(out)?;
        if let Some(generation) = self.identity.generation {
            write!(out, " #{generation}")?;
        }
        write!(out, " {}: ", metadata.target())
    }

    /// The message and the fields, in one line: what peers say is in some of them.
    fn fields(&self, out: &mut Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let is_coloured = out.has_ansi_escapes();
        let mut fields = TextFields { out, is_coloured, is_first: true, result: Ok(()) };
        event.record(&mut fields);
        fields.result
    }

    /// Role and worker.
    fn write_process(&self, out: &mut Writer<'_>) -> fmt::Result {
        out.write_str(self.identity.role)?;
        match self.identity.worker {
            Some(worker) => write!(out, " {worker}"),
            None => Ok(()),
        }
    }

    fn json(&self, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = Map::new();
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        line.insert("time".into(), time.into());
        line.insert("level".into(), event.metadata().level().as_str().into());
        line.insert("role".into(), self.identity.role.into());
        if let Some(worker) = self.identity.worker {
            line.insert("rank".into(), worker.to_string().into());
        }
        if let Some(generation) = self.identity.generation {
            line.insert("generation".into(), generation.0.into());
        }
        line.insert("pid".into(), std::process::id().into());
        line.insert("target".into(), event.metadata().target().into());
        event.record(&mut LogFields(&mut line));
        writeln!(out, "{}", escaped_json(&Value::Object(line).to_string()))
    }
}

/// Writes `text` in the ANSI colour of `level`, if there are colours; debug and trace stay plain.
fn write_coloured(out: &mut Writer<'_>, level: &Level, text: &str) -> fmt::Result {
    let colour = match *level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        _ => return out.write_str(text),
    };
    match out.has_ansi_escapes() {
        true => write!(out, "\x1b[{colour}m{text}\x1b[0m"),
        false => out.write_str(text),
    }
}

/// Writes the fields of an event as text, each escaped.
struct TextFields<'a, 'w> {
    out: &'a mut Writer<'w>,
    is_coloured: bool,
    is_first: bool,
    result: fmt::Result,
}

impl TextFields<'_, '_> {
    fn write(&mut self, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
        if !std::mem::take(&mut self.is_first) {
            self.out.write_char(' ')?;
        }
        match (field.name(), self.is_coloured) {
            ("message", _) => {}
            (name, true) => write!(self.out, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?,
            (name, false) => write!(self.out, "{name}=")?,
        }
        write!(Escaping(&mut *self.out), "{value:?}")
    }
}

impl Visit for TextFields<'_, '_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if self.result.is_ok() {
            self.result = self.write(field, value);
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.record_debug(field, &format_args!("{value}")),
            _ => self.record_debug(field, &value),
        }
    }
}

/// Collects the fields of an event as JSON values.
struct LogFields<'a>(&'a mut Map<String, Value>);

impl Visit for LogFields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().into(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().into(), value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::ids::GroupId;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat, log: impl FnOnce()) -> String {
        logged_with(format, false, log)
    }

    fn logged_with(format: LogFormat, colours: bool, log: impl FnOnce()) -> String {
        let identity = LogIdentity {
            role: "gpu-worker",
            worker: Some(WorkerId::solo(GroupId(1))),
            generation: Some(Generation(2)),
        };
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(colours)
            .with_max_level(Level::TRACE)
            .with_writer(move || writer.clone())
            .event_format(Lines { identity, format })
            .finish();
        tracing::subscriber::with_default(subscriber, log);
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_text_line_names_the_process_and_keeps_fields_readable() {
        let line = logged(LogFormat::Text, || tracing::info!(span = %"0:16", jobs = 3, "serving"));
        assert!(line.contains("INFO gpu-worker 1.0 #2 "), "{line}");
        assert!(line.ends_with("serving span=0:16 jobs=3\n"), "{line}");
    }

    #[test]
    fn a_line_for_a_terminal_has_no_stamps() {
        let line = logged(LogFormat::Terminal, || tracing::warn!(path = %"/x", "disk is slow"));
        assert_eq!(line, "warning: gpu-worker 1.0: disk is slow path=/x\n");
    }

    #[test]
    fn what_a_peer_says_stays_in_its_line() {
        let name = "x\n2026-01-01 ERROR forged\x1b[2J\u{202e}";
        for format in [LogFormat::Text, LogFormat::Terminal, LogFormat::Json] {
            let text = logged_with(format, true, || {
                tracing::warn!(name, shown = %name, debug = ?name, "peer is called {name}");
            });
            assert_eq!(text.lines().count(), 1, "{text:?}");
            let shown = text.replace("\x1b[2K", "").contains("\x1b[2J");
            assert!(!shown && !text.contains("\n2026"), "{text:?}");
            assert!(!text.contains('\u{202e}'), "{text:?}");
            if format == LogFormat::Json {
                let value: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(value["name"], name, "whoever reads it gets what was said");
            } else {
                let said = r"peer is called x\n2026-01-01 ERROR forged\u{1b}[2J\u{202e}";
                assert!(text.contains(said), "{text:?}");
            }
        }
    }

    #[test]
    fn a_coloured_line_clears_what_was_drawn_before_it() {
        let lines = |format| {
            logged_with(format, true, || {
                tracing::error!("lost");
                tracing::debug!("seen");
            })
        };
        let process = "gpu-worker 1.0: ";
        assert_eq!(
            lines(LogFormat::Terminal),
            format!(
                "\r\x1b[2K\x1b[31merror\x1b[0m: {process}lost\n\r\x1b[2Kdebug: {process}seen\n"
            )
        );
        let text = lines(LogFormat::Text);
        assert!(text.contains(" \x1b[31mERROR\x1b[0m gpu-worker 1.0 #2 "), "{text}");
        assert!(text.contains(" DEBUG gpu-worker 1.0 #2 "), "{text}");
    }

    #[test]
    fn a_json_line_is_one_object_with_typed_fields() {
        let line = logged(LogFormat::Json, || tracing::warn!(jobs = 3, text = "a \"b\"\n", "slow"));
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(line.lines().count(), 1);
        assert_eq!(
            (&value["level"], &value["jobs"], &value["rank"]),
            (&"WARN".into(), &3.into(), &"1.0".into())
        );
        assert_eq!((&value["message"], &value["text"]), (&"slow".into(), &"a \"b\"\n".into()));
    }

    #[test]
    fn a_bad_filter_is_named() {
        let config = LogConfig { filter: "info,=,,x=loud".into(), format: LogFormat::Text };
        let identity = LogIdentity { role: "serve", worker: None, generation: None };
        assert!(init_logging(&config, identity).unwrap_err().to_string().contains("x=loud"));
    }
}
