use std::collections::BTreeSet;

use serde_json::Value as Json;

use super::server::ServerFigures;
use super::*;
use crate::shm::layout::FIGURES_BYTES;

/// What only people are shown, with a reason for each: text, rows of unbounded labels, the past.
const SHOWN: [&str; 7] =
    ["minute", "sessions", "restarts", "coverage", "metrics", "web", "announced.span"];

/// Figures whose numbers all differ.
fn numbered() -> Figures {
    let mut next = 1000;
    let mut figures = serde_json::to_value(Figures {
        served: ServedFigures {
            requests: WorkKind::ALL.map(|kind| (kind, 0)).into(),
            tokens: WorkKind::ALL.map(|kind| (kind, 0)).into(),
            pushed: PushedStep::ALL.map(|outcome| (outcome, 0)).into(),
            ..ServedFigures::default()
        },
        clients: ClientFigures {
            refused: Trouble::ALL.map(|kind| (kind, 0)).into(),
            ..ClientFigures::default()
        },
        ..Figures::default()
    })
    .unwrap();
    number(&mut figures, &mut next);
    serde_json::from_value(figures).unwrap()
}

fn number(json: &mut Json, next: &mut u32) {
    match json {
        Json::Number(number) => {
            *next += 1;
            *number = (*next).into();
        }
        Json::Object(fields) => fields.values_mut().for_each(|value| number(value, next)),
        _ => {}
    }
}

/// All numbers, by the path of their fields.
fn numbers(path: &str, json: &Json, found: &mut Vec<(String, f64)>) {
    if SHOWN.contains(&path) {
        return;
    }
    match json {
        Json::Number(number) => found.push((path.to_owned(), number.as_f64().unwrap())),
        Json::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                numbers(&path, value, found);
            }
        }
        _ => {}
    }
}

#[test]
fn every_number_is_a_metric_or_is_named_here_as_shown_to_people_alone() {
    let figures = numbered();
    let page = Page::of(&figures);
    let samples = page.families().iter().flat_map(|family| &family.samples);
    let values: Vec<&Value> = samples.map(|sample| &sample.value).collect();
    let mut fields = Vec::new();
    numbers("", &serde_json::to_value(&figures).unwrap(), &mut fields);
    assert!(fields.len() > 40, "{fields:?}");
    for (path, number) in fields {
        let count = values.iter().filter(|value| ***value == Value::Number(number)).count();
        assert_eq!(count, 1, "{path} is in {count} metrics");
    }
}

#[test]
fn every_metric_has_a_name_of_its_own_and_a_line_of_help() {
    let mut page = Page::of(&numbered());
    ServerFigures::default().export(&mut page);
    let mut names = BTreeSet::new();
    for Family { metric, samples } in page.families() {
        assert!(names.insert(metric.name), "{} comes twice", metric.name);
        assert!(metric.name.starts_with("sepal_"), "{}", metric.name);
        let help = metric.help();
        assert!(help.split_whitespace().count() > 1, "{} has no help", metric.name);
        assert!(!help.contains(['\n', '`', '[']) && !help.ends_with('.'), "{help}");
        for (index, sample) in samples.iter().enumerate() {
            let is_same = |other: &Sample| other.labels == sample.labels;
            assert!(!samples[..index].iter().any(is_same), "{}: {sample:?} twice", metric.name);
        }
    }
    // Those of workers are known before there is one.
    assert!(names.contains("sepal_worker_jobs") && names.contains("sepal_device_power"));
}

#[test]
fn the_figures_of_the_largest_server_fit() {
    let session = SessionFigures {
        number: u64::MAX,
        span: "4000:4096".to_owned(),
        rows: u32::MAX,
        length: u32::MAX,
        max_length: u32::MAX,
        steps: u64::MAX,
        age_s: 123_456.789_012_345,
        idle_s: 123_456.789_012_345,
        tokens_per_s: 1_234.567_890_123,
    };
    let block = BlockCoverage { servers: 99_999, throughput: 12_345.678 };
    let figures = Figures {
        sessions: vec![session; MAX_SESSIONS],
        coverage: Some(Coverage { age_s: 12.345_678_901, blocks: vec![block; MAX_COVERED_BLOCKS] }),
        ..numbered()
    };
    let bytes = figures.encode();
    println!("the figures of the largest server have {} bytes", bytes.len());
    assert!(bytes.len() <= FIGURES_BYTES / 4 * 3, "{} bytes", bytes.len());
    assert_eq!(Figures::decode(&bytes).unwrap(), figures);
}

#[test]
fn fields_of_another_build_are_left_out_or_zero() {
    let figures = Figures::decode(br#"{"peers": 3, "unheard_of": [1], "kv": {"parked": 2}}"#);
    let kv = KvFigures { parked: 2, ..KvFigures::default() };
    assert_eq!(figures.unwrap(), Figures { peers: 3, kv, ..Figures::default() });
    for bad in ["", "3", "{\"peers\": null}", "{\"kv\": {\"wait_s\": 1e999}}"] {
        assert!(Figures::decode(bad.as_bytes()).is_err(), "{bad}");
    }
}
