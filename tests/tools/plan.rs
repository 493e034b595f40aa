//! `sepal plan` from outside: it foretells what `sepal serve` serves, fetches no weights, and says in
//! one sentence what is wrong.

use std::path::Path;
use std::process::{Command, Output};

use crate::harness::demo::demo_model;
use crate::harness::{SEPAL, Sepal};
use serde_json::Value;
use testkit::hub::StandIn;

/// Runs `sepal plan ARGS...` with a cache folder of its own.
fn plan_in(cache: &Path, endpoint: &str, args: &[&str]) -> Output {
    Command::new(SEPAL)
        .arg("plan")
        .args(args)
        .env("SEPAL_CACHE", cache)
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", cache)
        .env_remove("HF_TOKEN")
        .output()
        .expect("run sepal plan")
}

/// What `sepal plan MODEL --json` prints.
fn json(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"))
}

fn demo_plan(flags: &[&str]) -> Value {
    let (model, cache) = (demo_model(), tempfile::tempdir().unwrap());
    let args = [&[model.to_str().unwrap(), "--json", "--threads", "1"], flags].concat();
    json(&plan_in(cache.path(), "http://127.0.0.1:9", &args))
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

/// Plans and serves with the same flags, and compares the blocks.
fn assert_foretold(flags: &[&str], wanted: u64) {
    let plan = demo_plan(flags);
    let formats = plan["formats"].as_array().expect("formats");
    let of_serve = formats.iter().find(|format| format["is_default"] == true);
    let foretold = number(of_serve.expect("a default"), "blocks");
    assert_eq!(foretold, wanted, "{plan}");
    let sepal = Sepal::serve(&demo_model(), "demo", flags);
    let served: u64 = sepal
        .spans()
        .iter()
        .map(|span| {
            let (start, end) = span.split_once(':').expect("a span");
            end.parse::<u64>().expect("a number") - start.parse::<u64>().expect("a number")
        })
        .sum();
    assert_eq!(served, foretold, "{flags:?}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
fn the_blocks_that_are_planned_are_those_that_are_served() {
    let tokens = ["--attn_cache_tokens", "4096"];
    for quant in ["none", "int8", "nf4"] {
        let flags = [&tokens[..], &["--quant_type", quant, "--device", "cpu"]].concat();
        let plan = demo_plan(&flags);
        let formats = plan["formats"].as_array().expect("formats");
        assert_eq!(formats.len(), 1, "a named format is planned alone");
        assert_eq!((&formats[0]["quant_type"], number(&formats[0], "blocks")), (&quant.into(), 8));
        // Memory for five blocks, and a byte less.
        let group = &formats[0]["groups"][0];
        let block = number(group, "weights_bytes") + number(group, "kv_bytes");
        let five = number(group, "workspace_bytes") + 5 * block;
        for (bytes, wanted) in [(five, 5), (five - 1, 4)] {
            let bytes = bytes.to_string();
            assert_foretold(&[&flags[..], &["--max_memory", &bytes]].concat(), wanted);
        }
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn the_blocks_on_devices_with_memory_of_their_own_are_foretold_too() {
    let flags = ["--attn_cache_tokens", "4096", "--device", "emu,emu:1", "--quant_type", "nf4"];
    let plan = demo_plan(&flags);
    let group = &plan["formats"][0]["groups"][0];
    let parts = ["weights_bytes", "kv_bytes", "recorded_bytes"];
    let block: u64 = parts.iter().map(|part| number(group, part)).sum();
    let three = (number(group, "workspace_bytes") + 3 * block).to_string();
    assert_foretold(&[&flags[..], &["--device_memory", &three]].concat(), 6);
}

#[test]
fn of_the_hub_only_headers_and_small_files_are_read() {
    let (cache, model) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(demo_model().join(file), model.path().join(file)).unwrap();
    }
    let hub = StandIn::serve("org/demo", model.path());
    let whole = std::fs::read(model.path().join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap());
    let args = ["org/demo", "--json", "--device", "cpu", "--network_mbps", "80"];
    let plan = json(&plan_in(cache.path(), &hub.endpoint, &args));
    let got = hub.take_got();
    let weights = got.iter().filter(|one| one.file == "model.safetensors");
    let ends: Vec<u64> = weights.map(|one| one.range.as_ref().expect("a range").end).collect();
    assert!(!ends.is_empty() && ends.iter().all(|end| *end <= header), "{got:?}");

    assert_eq!(
        (&plan["model"], &plan["commit"]),
        (&"org/demo".into(), &testkit::hub::COMMIT.into())
    );
    let formats = plan["formats"].as_array().expect("formats");
    let names: Vec<&str> = formats.iter().filter_map(|of| of["quant_type"].as_str()).collect();
    assert_eq!(names, ["none", "int8", "nf4"]);
    for format in formats {
        assert_eq!(number(format, "blocks"), 8);
        // All blocks but neither embeddings nor head, each with a header.
        let bytes = number(format, "download_bytes");
        assert!(bytes > whole.len() as u64 / 2 && bytes < whole.len() as u64, "{format}");
        assert_eq!(format["download_s"].as_f64(), Some(bytes as f64 / 1e7));
        assert_eq!(format["throughput_origin"], "estimated");
        assert!(format["estimate_basis"].as_str().is_some_and(|basis| basis.contains("GB/s")));
        assert!(format["throughput_rps"].as_f64().is_some_and(|rps| rps > 0.0));
    }
    let text = plan_in(cache.path(), &hub.endpoint, &["org/demo", "--device", "cpu"]);
    assert_eq!(text.status.code(), Some(0));
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    for part in ["org/demo at 0123456789ab: llama, 8 blocks", "none *", "8 of 8", "(estimated)"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_measured_rate_replaces_the_estimate_and_gives_what_serve_announces() {
    let (model, cache) = (demo_model(), tempfile::tempdir().unwrap());
    let folder = cache.path().to_str().unwrap();
    let flags =
        ["--device", "cpu", "--threads", "1", "--cache_dir", folder, "--network_mbps", "100"];
    let model = model.to_str().unwrap();
    let serve = ["serve", model, "--dht_prefix", "demo", "--new_swarm", "--no_upnp"];
    let mut dry = Sepal::start(&[&serve, &flags[..], &["--throughput", "dry_run"]].concat());
    assert_eq!(dry.wait().code(), Some(0), "{}", dry.log());
    let line = dry.wait_line("ending the dry run", 1);
    let announced = line
        .split(" throughput=")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next().and_then(|word| word.parse::<f64>().ok()));
    let plan = json(&plan_in(cache.path(), "", &[&[model, "--json"], &flags[..]].concat()));
    let format = &plan["formats"][0];
    assert_eq!(
        (&format["throughput_origin"], &format["is_default"]),
        (&"measured".into(), &true.into())
    );
    let planned = format["throughput_rps"].as_f64().expect("a number");
    let announced = announced.expect("a number");
    assert!((planned - announced).abs() <= 0.06, "{planned} and {announced}");
}

#[test]
fn what_is_wrong_is_said_in_one_sentence() {
    let spoiled = |spoil: fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(demo_model().join(file), folder.path().join(file)).unwrap();
        }
        spoil(folder.path());
        folder
    };
    let no_config = spoiled(|f| std::fs::remove_file(f.join("config.json")).unwrap());
    let short = spoiled(|f| {
        let bytes = std::fs::read(f.join("model.safetensors")).unwrap();
        std::fs::write(f.join("model.safetensors"), &bytes[..100]).unwrap();
    });
    let unknown = spoiled(|f| {
        std::fs::write(f.join("config.json"), r#"{"model_type": "gpt9"}"#).unwrap();
    });
    let hub = StandIn::serve("org/gated", &demo_model());
    hub.trouble(|troubles| troubles.token = Some("secret".to_owned()));
    let path = |folder: &tempfile::TempDir| folder.path().to_str().unwrap().to_owned();
    let demo = demo_model().to_str().unwrap().to_owned();
    let cases: [(&str, &[&str], i32, &[&str]); 9] = [
        ("/nonexistent/model", &[], 2, &["/nonexistent/model", "org/name"]),
        ("org/gated", &[], 2, &["org/gated", "401", "--token"]),
        (&path(&no_config), &[], 2, &["config.json", "missing"]),
        (&path(&short), &[], 2, &["model.safetensors", "cut short"]),
        (&path(&unknown), &[], 2, &["gpt9", "llama"]),
        (&demo, &["--device", "cuda:99"], 2, &["cuda:99", "--device cpu"]),
        (&demo, &["--quant_type", "fp4"], 2, &["fp4", "none, int8 or nf4"]),
        (&demo, &["--device", "cpu", "--block_indices", "4:99"], 2, &["4:99", "0:8"]),
        (&demo, &["--device", "cpu", "--max_memory", "1MiB"], 2, &["1 block", "0 would fit"]),
    ];
    for (model, flags, code, words) in cases {
        let cache = tempfile::tempdir().unwrap();
        let output = plan_in(cache.path(), &hub.endpoint, &[&[model], flags].concat());
        let said = [&output.stdout[..], &output.stderr[..]].concat();
        let said = String::from_utf8_lossy(&said);
        assert_eq!(output.status.code(), Some(code), "{model} {flags:?}: {said}");
        for word in words {
            assert!(said.contains(word), "{model} {flags:?}: no {word:?} in {said}");
        }
    }
    let cache = tempfile::tempdir().unwrap();
    let nobody = plan_in(cache.path(), "http://127.0.0.1:9", &["org/gated", "--offline"]);
    let said = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert_eq!(nobody.status.code(), Some(2), "{said}");
    assert!(said.lines().count() == 1 && said.contains("--offline"), "{said}");
}
