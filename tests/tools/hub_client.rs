//! A client that names a model of the Hub downloads what it computes itself and nothing else.

use std::path::Path;
use std::process::{Command, Output};

use crate::harness::demo::demo_model;
use crate::harness::{self, SEPAL, Sepal};
use testkit::hub::{Got, StandIn};

/// The prefix under which servers announce this model of the Hub by themselves.
const PREFIX: &str = "demo-hf";
const PROMPT: &str = "There was once a fox";

/// Runs `sepal generate org/demo FLAGS...` with a cache folder of its own.
fn generate(sepal: &Sepal, cache: &Path, endpoint: &str, flags: &[&str]) -> Output {
    Command::new(SEPAL)
        .args(["generate", "--initial_peers", &sepal.addr(), "--torch_dtype", "float32"])
        .args(["--prompt", PROMPT, "--max_new_tokens", "8", "org/demo"])
        .args(flags)
        .env("SEPAL_CACHE", cache)
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", cache)
        .env_remove("HF_TOKEN")
        .output()
        .expect("run sepal generate")
}

fn text(output: &Output) -> &str {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = std::str::from_utf8(&output.stdout).expect("UTF-8");
    text.trim_end_matches('\n').strip_prefix(PROMPT).expect("the prompt first")
}

#[test]
fn a_client_downloads_its_own_tensors_once_and_writes_the_same_text() {
    let sepal = Sepal::serve(&demo_model(), PREFIX, &[]);
    let expected = harness::generate(&sepal, &demo_model(), PREFIX, "float32", PROMPT, 8);
    let (hub, cache) = (StandIn::serve("org/demo", &demo_model()), tempfile::tempdir().unwrap());
    let first = generate(&sepal, cache.path(), &hub.endpoint, &[]);
    assert_eq!(text(&first), expected);
    let of_weights = |got: &Got| got.file.ends_with(".safetensors");
    let got: Vec<Got> = hub.take_got().into_iter().filter(of_weights).collect();
    let bytes: u64 = got.iter().map(|got| got.range.as_ref().map_or(u64::MAX, range_bytes)).sum();
    let whole = std::fs::metadata(demo_model().join("model.safetensors")).unwrap().len();
    println!("{bytes} of {whole} bytes of the weights were downloaded");
    assert!(bytes < whole / 2, "{bytes} of {whole}: {got:?}");

    let again = generate(&sepal, cache.path(), &hub.endpoint, &[]);
    assert_eq!(text(&again), expected);
    assert!(hub.take_got().iter().filter(|got| of_weights(got)).all(|got| {
        got.range.as_ref().is_some_and(|range| range.end - range.start <= 16 << 10)
    }));
    let offline = generate(&sepal, cache.path(), "http://127.0.0.1:9", &["--offline"]);
    assert_eq!(text(&offline), expected);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_pickled_checkpoint_is_read_from_a_folder_and_downloaded_once_from_the_hub() {
    let sepal = Sepal::serve(&demo_model(), PREFIX, &[]);
    let expected = harness::generate(&sepal, &demo_model(), PREFIX, "float32", PROMPT, 8);
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo_model()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "json") {
            std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let (from, to) = (demo_model().join("model.safetensors"), "pytorch_model.bin");
    harness::pickled::write(&from, &folder.path().join(to));
    let local = harness::generate(&sepal, folder.path(), PREFIX, "float32", PROMPT, 8);
    assert_eq!(local, expected);

    let (hub, cache) = (StandIn::serve("org/demo", folder.path()), tempfile::tempdir().unwrap());
    assert_eq!(text(&generate(&sepal, cache.path(), &hub.endpoint, &[])), expected);
    assert!(hub.take_got().iter().any(|got| got.file == to));
    assert_eq!(text(&generate(&sepal, cache.path(), &hub.endpoint, &[])), expected);
    assert!(hub.take_got().iter().all(|got| got.file != to));
    let offline = generate(&sepal, cache.path(), "http://127.0.0.1:9", &["--offline"]);
    assert_eq!(text(&offline), expected);
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn a_model_that_cannot_be_had_is_named_in_one_sentence() {
    let sepal = Sepal::serve(&demo_model(), PREFIX, &[]);
    let empty = tempfile::tempdir().unwrap();
    std::fs::write(empty.path().join("config.json"), r#"{"model_type": "gpt2"}"#).unwrap();
    let (hub, cache) = (StandIn::serve("org/demo", empty.path()), tempfile::tempdir().unwrap());
    let refused = |endpoint: &str, flags: &[&str]| {
        let output = generate(&sepal, cache.path(), endpoint, flags);
        let errors = String::from_utf8(output.stderr).expect("UTF-8");
        let line = errors.lines().last().unwrap_or_default().to_owned();
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(line.starts_with("sepal: "), "{errors}");
        line
    };
    let offline = refused("http://127.0.0.1:9", &["--offline"]);
    assert!(offline.contains("HF_HUB_OFFLINE"), "{offline}");
    assert!(refused(&hub.endpoint, &[]).contains("gpt2"));
    assert_eq!(sepal.terminate().code(), Some(0));
}

fn range_bytes(range: &std::ops::Range<u64>) -> u64 {
    range.end - range.start
}
