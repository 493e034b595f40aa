//! Draws a [`View`]. Pure: the same view gives the same screen. Made for 80 x 24 and more; on less, the
//! lower parts are cut off.
//!
//! ```text
//! instance, announcement, peers, uptime           3 lines
//! steps, latency, KV cache
//! processes: one line each, the chosen one in full below
//! sessions: as many as fit
//! coverage of the model's blocks                  up to 5 lines
//! keys, a question, or what the person should know
//! ```

use std::time::{SystemTime, UNIX_EPOCH};

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph, Row, Table, Wrap};
use shared::figures::{Announcement, BlockCoverage, Figures, SessionFigures};
use supervisor::report::{ChildReport, InstanceReport};

use super::state::TopState;
use super::text::{bars, clean, gibibytes, number, short};

/// Most lines of processes; the others are reached by scrolling to them.
const MAX_PROCESSES: usize = 8;
/// Blocks in one line of the coverage.
const BLOCKS_IN_LINE: usize = 64;

const HELP: &str = "\
q, Esc, Ctrl-C   leave
Up, Down         choose a process
PageUp, PageDown scroll the sessions
r                restart the chosen worker, after a question
d                drain this instance (sepal pause), after a question
Left, Right      another instance of this machine

STEPS/S, latency and batch are of the last minute.
latency          time of a step in this server; network is what netd
                 spends on messages, queue and compute are the worker's
blocks           servers of each block that are online, + for more than 9;
                 this server's own blocks are underlined
";

/// Draws all of it.
pub fn draw(frame: &mut Frame<'_>, view: &TopState) {
    let area = frame.area();
    let Some((live, report)) = view.instance() else {
        let text = view.notice().unwrap_or("no instance runs; waiting for one");
        let lines = vec![Line::from(clean(text, 500)), Line::from("q leaves")];
        return frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }), area);
    };
    let coverage = coverage(&report.figures);
    let processes = report.children.len().min(MAX_PROCESSES);
    let heights = [3, processes as u16 + 2, 0, coverage.len() as u16, 1];
    let [header, table, sessions, blocks, footer] = Layout::vertical([
        Constraint::Length(heights[0]),
        Constraint::Length(heights[1]),
        Constraint::Min(2),
        Constraint::Length(heights[3]),
        Constraint::Length(heights[4]),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(summary(&live.name, report, view, header.width)), header);
    draw_processes(frame, report, view, table);
    draw_sessions(frame, &report.figures, view.scrolled(), sessions);
    frame.render_widget(Paragraph::new(coverage), blocks);
    frame.render_widget(Paragraph::new(bottom(view)), footer);
    if view.is_helping() {
        help(frame, area);
    }
}

/// The lines at the top.
fn summary<'a>(name: &str, report: &InstanceReport, view: &TopState, width: u16) -> Vec<Line<'a>> {
    let figures = &report.figures;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let up = short(now.saturating_sub(report.started_unix_s) as f64);
    let announced = &figures.announced;
    let state = announced.state.name();
    let span = announced.span.as_deref().map_or(String::new(), |span| clean(span, 12));
    let (position, count) = view.position();
    let of = if count > 1 { format!(" ({position} of {count})") } else { String::new() };
    let colour = if announced.state == Announcement::Online { Color::Green } else { Color::Yellow };
    let title = Line::from(vec![
        Span::from(clean(name, 24)).bold(),
        Span::from(format!("{of}  up {up}  ")),
        Span::from(state).fg(colour),
        Span::from(format!(
            " {span}  throughput {}  peers {}",
            number(announced.throughput),
            figures.peers
        )),
    ]);
    let minute = &figures.minute;
    let kv = &figures.kv;
    let used = kv.tokens_total.saturating_sub(kv.tokens_free);
    let share = used as f64 * 100.0 / kv.tokens_total.max(1) as f64;
    let rates = format!(
        "steps/s {}  tokens/s {}  batch {}  sessions {}  KV {share:.0}% of {}, {} waiting ",
        number(minute.steps_per_s),
        number(minute.tokens_per_s),
        number(minute.mean_batch),
        report.children.iter().map(|child| child.sessions_open).sum::<u64>(),
        number(kv.tokens_total as f64),
        kv.waiting,
    );
    let left = usize::from(width).saturating_sub(rates.chars().count());
    let graph = bars(view.history(), left.min(60));
    let latency = minute
        .latency
        .iter()
        .map(|of| format!("{} {}/{}", of.part.name(), number(of.p50_ms), number(of.p99_ms)));
    let latency = format!("p50/p99 ms: {}", latency.collect::<Vec<_>>().join("  "));
    let graph = Span::from(graph).fg(Color::Cyan);
    vec![title, Line::from(vec![Span::from(rates), graph]), Line::from(latency)]
}

fn draw_processes(frame: &mut Frame<'_>, report: &InstanceReport, view: &TopState, area: Rect) {
    let heads =
        Row::new(["PROCESS", "PID", "STATE", "PHASE", "BLOCKS", "DEVICE", "BATCH", "JOBS", "RST"]);
    let above = (view.selected() + 1).saturating_sub(MAX_PROCESSES);
    let rows = report.children.iter().enumerate().skip(above).take(MAX_PROCESSES);
    let rows = rows.map(|(index, child)| {
        let style = match (index == view.selected(), child.state.as_str()) {
            (true, _) => Style::new().add_modifier(Modifier::REVERSED),
            (false, "ready" | "gone") => Style::new(),
            (false, "held") => Style::new().fg(Color::Red),
            (false, _) => Style::new().fg(Color::Yellow),
        };
        Row::new(cells(child)).style(style)
    });
    let widths = [16, 8, 9, 10, 9, 8, 6, 9, 4].map(Constraint::Length);
    let [table, detail] = Layout::vertical([Constraint::Min(1), Constraint::Length(1)]).areas(area);
    let heads = heads.style(Style::new().bold());
    frame.render_widget(Table::new(rows, widths).header(heads).column_spacing(0), table);
    let text = view.process().map_or(String::new(), detail_of);
    frame.render_widget(Line::from(clean(&text, usize::from(area.width))).italic(), detail);
}

fn cells(child: &ChildReport) -> [String; 9] {
    let name = match &child.worker {
        Some(worker) => format!("{} {worker}", child.role),
        None => child.role.clone(),
    };
    let units: u64 = child.batches.iter().map(|batch| batch.units).sum();
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let batch = match units {
        0 => "-".to_owned(),
        _ => usual_batch(child),
    };
    [
        clean(&name, 15),
        child.pid.to_string(),
        clean(&child.state, 8),
        clean(&child.phase, 9),
        clean(&or_dash(&child.span), 8),
        clean(&or_dash(&child.device), 7),
        batch,
        number(child.jobs_done as f64),
        child.restarts.to_string(),
    ]
}

/// The size of batch that most decode units had.
fn usual_batch(child: &ChildReport) -> String {
    let usual = child.batches.iter().max_by_key(|batch| batch.units);
    match usual.and_then(|batch| batch.up_to) {
        Some(1) => "1".to_owned(),
        Some(up_to) => format!("<={up_to}"),
        None => ">64".to_owned(),
    }
}

/// What is known of the chosen process beside its line.
fn detail_of(child: &ChildReport) -> String {
    let mut parts = Vec::new();
    if let Some(death) = &child.last_death {
        parts.push(format!("died last: {death}"));
    }
    if let Some(device) = &child.device_figures {
        let memory = device.memory_used.zip(device.memory_total);
        let memory =
            memory.map(|(used, all)| format!("{} of {} GiB", gibibytes(used), gibibytes(all)));
        let celsius = device.celsius.map(|celsius| format!("{celsius} °C"));
        let watts = device.watts.map(|watts| format!("{watts:.0} W"));
        parts.extend([memory, celsius, watts].into_iter().flatten());
    }
    parts.extend(child.note.clone());
    let troubles = child.troubles.iter().filter(|(_, count)| **count > 0);
    let troubles: Vec<String> = troubles.map(|(kind, count)| format!("{kind} {count}")).collect();
    if !troubles.is_empty() {
        parts.push(format!("refused: {}", troubles.join(", ")));
    }
    parts.join("; ")
}

fn draw_sessions(frame: &mut Frame<'_>, figures: &Figures, scrolled: usize, area: Rect) {
    let heads =
        Row::new(["SESSION", "BLOCKS", "AGE", "LENGTH", "OF", "ROWS", "STEPS", "TOKENS/S", "IDLE"]);
    let row = |of: &SessionFigures| {
        Row::new([
            of.number.to_string(),
            clean(&of.span, 9),
            short(of.age_s),
            of.length.to_string(),
            of.max_length.to_string(),
            of.rows.to_string(),
            of.steps.to_string(),
            number(of.tokens_per_s),
            short(of.idle_s),
        ])
    };
    let rows = figures.sessions.iter().skip(scrolled).map(row);
    let widths = [9, 10, 8, 8, 8, 6, 9, 10, 8].map(Constraint::Length);
    let heads = heads.style(Style::new().bold());
    frame.render_widget(Table::new(rows, widths).header(heads).column_spacing(0), area);
}

/// The blocks of the model, each with the number of its servers.
fn coverage<'a>(figures: &Figures) -> Vec<Line<'a>> {
    let Some(coverage) = &figures.coverage else {
        return vec![Line::from("BLOCKS of the model: reading the swarm").bold()];
    };
    let own = figures.announced.span.as_deref().and_then(|span| {
        let (start, end) = span.split_once(':')?;
        Some(start.parse::<usize>().ok()?..end.parse::<usize>().ok()?)
    });
    let missing = coverage.blocks.iter().filter(|block| block.servers == 0).count();
    let title = format!(
        "BLOCKS of the model, servers of each, {} ago; {missing} without a server",
        short(coverage.age_s)
    );
    let mut lines = vec![Line::from(title).bold()];
    for (line, blocks) in coverage.blocks.chunks(BLOCKS_IN_LINE).enumerate() {
        let first = line * BLOCKS_IN_LINE;
        let mut spans = vec![Span::from(format!("{first:>4} "))];
        spans.extend(blocks.iter().enumerate().map(|(index, block)| {
            let is_own = own.as_ref().is_some_and(|own| own.contains(&(first + index)));
            cell(block, is_own)
        }));
        lines.push(Line::from(spans));
    }
    lines
}

fn cell<'a>(block: &BlockCoverage, is_own: bool) -> Span<'a> {
    let (text, colour) = match block.servers {
        0 => ("0".to_owned(), Color::Red),
        1 => ("1".to_owned(), Color::Yellow),
        many @ 2..10 => (many.to_string(), Color::Green),
        _ => ("+".to_owned(), Color::Green),
    };
    let style = Style::new().fg(colour);
    Span::styled(text, if is_own { style.add_modifier(Modifier::UNDERLINED) } else { style })
}

/// The last line.
fn bottom<'a>(view: &TopState) -> Line<'a> {
    if let Some(request) = view.asked() {
        return Line::from(format!("{request}? y to do it, any other key to leave it")).bold();
    }
    if let Some(notice) = view.notice() {
        return Line::from(clean(notice, 200)).fg(Color::Yellow);
    }
    let more = if view.position().1 > 1 { "  ←→ instance" } else { "" };
    Line::from(format!("q leave  ? help  ↑↓ process  PgUp/PgDn sessions{more}  r restart  d drain"))
        .dim()
}

fn help(frame: &mut Frame<'_>, area: Rect) {
    let height = (HELP.lines().count() as u16 + 1).min(area.height);
    let box_area = Rect { height, ..area };
    frame.render_widget(Clear, box_area);
    frame.render_widget(Paragraph::new(format!("{HELP}\nany key goes back")), box_area);
}

#[cfg(test)]
mod tests;
