use std::path::PathBuf;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use shared::figures::server::DeviceFigures;
use shared::figures::{
    AnnouncedFigures, Announcement, Coverage, KvFigures, Latency, Minute, StepPart,
};
use supervisor::instance::LiveInstance;
use supervisor::report::figures::BatchReport;

use super::*;

fn report() -> InstanceReport {
    let netd = ChildReport {
        role: "netd".into(),
        pid: 4710,
        state: "ready".into(),
        phase: "reactor".into(),
        sessions_open: 40,
        troubles: [("malformed".to_owned(), 3), ("failed".to_owned(), 0)].into(),
        ..ChildReport::default()
    };
    let worker = ChildReport {
        role: "gpu-worker".into(),
        worker: Some("0.0".into()),
        device: Some("cuda:0".into()),
        pid: 4711,
        restarts: 2,
        last_death: Some("SIGKILL".into()),
        state: "ready".into(),
        phase: "unit".into(),
        span: Some("4:8".into()),
        jobs_done: 1234,
        batches: vec![
            BatchReport { up_to: Some(1), units: 3 },
            BatchReport { up_to: Some(4), units: 9 },
        ],
        device_figures: Some(DeviceFigures {
            memory_used: Some(70 << 30),
            memory_total: Some(140 << 30),
            celsius: Some(61),
            watts: Some(240.4),
        }),
        ..ChildReport::default()
    };
    let latency = |part: StepPart, p50_ms| Latency { part, p50_ms, p99_ms: 2.0 * p50_ms };
    let session = |number| SessionFigures {
        number,
        span: "4:8".into(),
        rows: 1,
        length: 77,
        max_length: 2048,
        steps: 70,
        age_s: 61.0,
        idle_s: 0.2,
        tokens_per_s: 12.5,
    };
    let figures = Figures {
        minute: Minute {
            seconds: 60.0,
            steps: 600,
            steps_per_s: 10.0,
            tokens_per_s: 11.5,
            mean_batch: 3.2,
            latency: StepPart::ALL
                .into_iter()
                .zip([9.0, 1.0, 2.0, 6.0])
                .map(|(part, ms)| latency(part, ms))
                .collect(),
        },
        sessions: (1..=40).map(session).collect(),
        kv: KvFigures {
            tokens_total: 65536,
            tokens_free: 32768,
            waiting: 1,
            parked: 2,
            ..KvFigures::default()
        },
        peers: 17,
        announced: AnnouncedFigures {
            state: Announcement::Online,
            span: Some("4:8".into()),
            throughput: 120.0,
            ..AnnouncedFigures::default()
        },
        coverage: Some(Coverage {
            age_s: 12.0,
            blocks: (0..80).map(|n| BlockCoverage { servers: n % 12, throughput: 1.0 }).collect(),
        }),
        ..Figures::default()
    };
    InstanceReport {
        build: "1".to_owned(),
        sandbox: String::new(),
        upgrade: None,
        upgrade_failure: None,
        ready: true,
        pause: "no".to_owned(),
        instance: "llama".into(),
        supervisor_pid: 4709,
        started_unix_s: 1,
        children: vec![netd, worker],
        figures,
    }
}

fn view(report: InstanceReport) -> TopState {
    let mut view = TopState::default();
    let live = LiveInstance { name: report.instance.clone(), status_socket: PathBuf::new() };
    view.hear(Ok(vec![(live, report)]));
    view
}

fn press(view: &mut TopState, code: KeyCode) {
    view.key(KeyEvent::new(code, KeyModifiers::NONE));
}

/// The screen of a view, one text per line.
fn screen(view: &TopState, width: u16, height: u16) -> (Vec<String>, Buffer) {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, view)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let line = |y| {
        let cells = (0..width).map(|x| buffer[(x, y)].symbol());
        cells.collect::<String>().trim_end().to_owned()
    };
    ((0..height).map(line).collect(), buffer)
}

fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn everything_that_matters_is_on_eighty_by_twenty_four() {
    let mut view = view(report());
    press(&mut view, KeyCode::Down);
    let (lines, buffer) = screen(&view, 80, 24);
    let all = lines.join("\n");
    assert!(lines[0].starts_with("llama  up ") && lines[0].contains("online 4:8"), "{all}");
    assert!(lines[0].ends_with("throughput 120  peers 17"), "{all}");
    assert!(
        lines[1].starts_with(
            "steps/s 10.0  tokens/s 11.5  batch 3.2  sessions 40  KV 50% of 65536, 1 waiting"
        ),
        "{all}"
    );
    assert_eq!(
        lines[2],
        "p50/p99 ms: total 9.0/18.0  network 1.0/2.0  queue 2.0/4.0  compute 6.0/12.0"
    );
    let rows: Vec<String> = lines.iter().map(|line| words(line)).collect();
    assert!(
        rows.contains(&"gpu-worker 0.0 4711 ready unit 4:8 cuda:0 <=4 1234 2".to_owned()),
        "{all}"
    );
    assert!(all.contains("died last: SIGKILL; 70.0 of 140.0 GiB; 61 °C; 240 W"), "{all}");
    assert!(rows.contains(&"1 4:8 1m01s 77 2048 1 70 12.5 200ms".to_owned()), "{all}");
    assert!(all.contains("12s ago; 7 without a server"), "{all}");
    assert!(lines[21].starts_with("   0 0123456789++0123"), "{all}");
    assert!(lines[22].starts_with("  64 456789++"), "{all}");
    assert!(lines[23].starts_with("q leave"), "{all}");
    // Our own blocks are underlined, no others.
    let is_underlined = |block: u16| {
        let cell = &buffer[(5 + block, 21)];
        cell.modifier.contains(Modifier::UNDERLINED)
    };
    let own: Vec<u16> = (0..64).filter(|block| is_underlined(*block)).collect();
    assert_eq!(own, [4, 5, 6, 7]);
}

#[test]
fn sessions_scroll_and_the_chosen_process_is_shown_in_full() {
    let mut view = view(report());
    press(&mut view, KeyCode::PageDown);
    let (lines, _) = screen(&view, 80, 24);
    let all = lines.join("\n");
    assert!(lines.iter().any(|line| words(line).starts_with("6 4:8 1m01s")), "{all}");
    assert!(!lines.iter().any(|line| words(line).starts_with("5 4:8 1m01s")), "{all}");
    assert!(all.contains("refused: malformed 3") && !all.contains("failed 0"), "{all}");
}

#[test]
fn questions_help_and_silence_are_told() {
    let mut view = view(report());
    let last = |view: &TopState| screen(view, 80, 24).0[23].clone();
    assert!(last(&view).contains("r restart  d drain"), "{}", last(&view));
    press(&mut view, KeyCode::Char('d'));
    assert!(
        last(&view).starts_with("drain this instance until sepal resume? y"),
        "{}",
        last(&view)
    );
    press(&mut view, KeyCode::Char('n'));
    view.hear(Err("the supervisor of instance llama does not answer".into()));
    press(&mut view, KeyCode::Down);
    assert_eq!(last(&view), "the supervisor of instance llama does not answer");
    press(&mut view, KeyCode::Char('?'));
    let help = screen(&view, 80, 24).0.join("\n");
    assert!(help.contains("choose a process") && help.contains("restart the chosen worker"));
    let empty = screen(&TopState::default(), 80, 24).0;
    assert_eq!(empty[0], "no instance runs; waiting for one");
}

#[test]
fn any_size_and_any_text_can_be_drawn() {
    let mut odd = report();
    odd.instance = "\u{1b}[31m".repeat(40);
    odd.children.extend((0..40).map(|_| odd.children[1].clone()).collect::<Vec<_>>());
    odd.children[0].state = "\n\u{7}".to_owned();
    odd.figures.announced.span = Some("9:x".to_owned());
    odd.figures.minute.steps_per_s = f64::NAN;
    if let Some(coverage) = &mut odd.figures.coverage {
        coverage.blocks = vec![BlockCoverage { servers: u32::MAX, throughput: f32::INFINITY }; 256];
    }
    let mut view = view(odd);
    for (width, height) in [(1, 1), (2, 24), (80, 3), (80, 24), (200, 60), (300, 2)] {
        (0..50).for_each(|_| press(&mut view, KeyCode::Down));
        let (lines, _) = screen(&view, width, height);
        assert!(!lines.join("").contains('\u{1b}'));
        press(&mut view, KeyCode::Char('?'));
        screen(&view, width, height);
        press(&mut view, KeyCode::Char('?'));
    }
}
