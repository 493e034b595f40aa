//! `sepal convert` and `sepal cache` from outside: what they write is served with the same bits, and
//! what a server uses is left alone.

use std::path::Path;
use std::process::{Command, Output};

use crate::harness::demo::{demo_model, run_session};
use crate::harness::{SEPAL, Sepal, serve_args};
use testkit::hub::StandIn;

/// Runs `sepal ARGS...` with a cache folder.
fn run(cache: &Path, endpoint: &str, args: &[&str]) -> Output {
    Command::new(SEPAL)
        .args(args)
        .env("SEPAL_CACHE", cache)
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", cache)
        .env_remove("HF_TOKEN")
        .output()
        .expect("run sepal")
}

fn said(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&all).into_owned()
}

/// Runs a command that is expected to succeed, and returns what it prints.
fn well(cache: &Path, args: &[&str]) -> String {
    let output = run(cache, "http://127.0.0.1:9", args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", said(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_converted_model_is_served_with_the_bits_of_the_original_and_in_no_other_format() {
    let (place, model) = (tempfile::tempdir().unwrap(), demo_model());
    let (cache, out) = (place.path().join("cache"), place.path().join("demo-nf4"));
    let (model, folder) = (model.to_str().unwrap(), out.to_str().unwrap());
    let types = ["--quant_type", "nf4", "--torch_dtype", "float32"];
    let text = well(&cache, &[&["convert", model, "--out", folder], &types[..]].concat());
    assert!(text.contains("holds blocks 0:8 of 8") && text.contains("sepal serve"), "{text}");

    let original = Sepal::serve(&demo_model(), "demo", &types);
    let expected = run_session(&original.addr(), 4, |_| ()).await;
    assert_eq!(original.terminate().code(), Some(0));
    let converted = Sepal::serve(&out, "demo", &[]);
    let got = run_session(&converted.addr(), 4, |_| ()).await;
    assert!(got == expected, "results differ");
    // Marks of checked files are small.
    let prepared = converted.dir.path().join("cache/prepared");
    let files = std::fs::read_dir(&prepared).into_iter().flatten().flatten();
    let folders = files
        .filter(|entry| entry.path().is_dir())
        .flat_map(|entry| std::fs::read_dir(entry.path()).unwrap().flatten());
    let bytes: u64 = folders.map(|entry| entry.metadata().unwrap().len()).sum();
    assert!(bytes < 4096, "{bytes} bytes were converted again");
    assert_eq!(converted.terminate().code(), Some(0));

    let plan = well(&cache, &["plan", folder, "--json", "--device", "cpu"]);
    let plan: serde_json::Value = serde_json::from_str(&plan).expect("JSON");
    assert_eq!(plan["formats"].as_array().map(Vec::len), Some(1));
    assert_eq!(plan["formats"][0]["quant_type"], "nf4");
    assert_eq!(plan["formats"][0]["blocks"], 8);
    for (flags, words) in [
        (["--quant_type", "int8"], ["converted to nf4", "--quant_type int8"]),
        (["--torch_dtype", "bfloat16"], ["converted for float32", "--torch_dtype bfloat16"]),
    ] {
        let more = [&["--new_swarm"], &flags[..]].concat();
        let mut refused = Sepal::start(&serve_args(&out, "demo", &more));
        assert_eq!(refused.wait().code(), Some(2), "{}", refused.log());
        for word in words {
            assert!(refused.log().contains(word), "{}", refused.log());
        }
    }
}

#[test]
fn a_part_of_a_model_says_which_blocks_it_holds() {
    let (place, model) = (tempfile::tempdir().unwrap(), demo_model());
    let (cache, out) = (place.path().join("cache"), place.path().join("part"));
    let flags = ["--quant_type", "int8", "--blocks", "2:5", "--out", out.to_str().unwrap()];
    well(&cache, &[&["convert", model.to_str().unwrap()], &flags[..]].concat());
    let mut refused = Sepal::start(&serve_args(&out, "demo", &["--new_swarm"]));
    assert_eq!(refused.wait().code(), Some(2), "{}", refused.log());
    let log = refused.log();
    assert!(log.contains("holds blocks 2:5 of 8") && log.contains("--block_indices"), "{log}");
    let planned = |flags: &[&str]| {
        let args = [&["plan", out.to_str().unwrap(), "--device", "cpu"], flags].concat();
        run(&cache, "http://127.0.0.1:9", &args)
    };
    assert!(said(&planned(&[])).contains("holds blocks 2:5 of 8"), "as serve says");
    assert_eq!(planned(&["--block_indices", "3:5"]).status.code(), Some(0));
    let part = Sepal::serve(&out, "demo", &["--block_indices", "3:5"]);
    assert_eq!(part.spans(), ["3:5"]);
    assert_eq!(part.terminate().code(), Some(0));
}

#[test]
fn the_files_of_a_running_server_are_listed_as_used_and_not_pruned() {
    let sepal = Sepal::serve(&demo_model(), "demo", &["--quant_type", "nf4"]);
    let cache = sepal.dir.path().join("cache");
    let entry = || {
        let list: serde_json::Value =
            serde_json::from_str(&well(&cache, &["cache", "ls", "--json"])).expect("JSON");
        let entries = list["entries"].as_array().expect("entries").clone();
        entries.into_iter().find(|entry| entry["format"] == "nf4, bfloat16").expect("nf4")
    };
    let found = entry();
    assert_eq!((&found["blocks"], &found["files_in_use"]), (&"0:8".into(), &8.into()));
    let text = well(&cache, &["cache", "prune", "--max_disk_space", "0"]);
    assert!(text.contains("8 files are in use and stay"), "{text}");
    assert_eq!(entry()["files"], 8);
    assert!(well(&cache, &["cache", "verify"]).contains("0 damaged"));
    let dir = sepal.dir.clone();
    assert_eq!(sepal.terminate().code(), Some(0));
    let text = well(&cache, &["cache", "prune", "--max_disk_space", "0"]);
    assert!(text.starts_with("deleted 8 files"), "{text}");
    assert!(well(&cache, &["cache", "ls"]).contains("nothing is kept"));
    drop(dir);
}

#[test]
fn an_exported_model_of_the_hub_is_served_on_a_machine_without_network() {
    let (place, model) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(demo_model().join(file), model.path().join(file)).unwrap();
    }
    let hub = StandIn::serve("org/demo", model.path());
    let (cache, out) = (place.path().join("cache"), place.path().join("exported"));
    let converted = place.path().join("converted");
    let flags = ["--quant_type", "int8", "--blocks", "0:3", "--out", converted.to_str().unwrap()];
    let output = run(&cache, &hub.endpoint, &[&["convert", "org/demo"], &flags[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let text = well(&cache, &["cache", "export", "org/demo", "--out", out.to_str().unwrap()]);
    assert!(text.contains("blocks 0:3 of 8 of org/demo"), "{text}");
    // Both folders have the name that the model has in the swarm.
    for folder in [&out, &converted] {
        let folder = folder.to_str().unwrap();
        let serve = ["serve", folder, "--new_swarm", "--offline", "--throughput", "1", "--no_upnp"];
        let at =
            ["--block_indices", "0:3", "--threads", "1", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"];
        let sepal = Sepal::start(&[&serve[..], &at].concat());
        sepal.wait_online();
        assert!(sepal.log().contains("org/demo"), "{}", sepal.log());
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}

#[test]
fn bad_input_is_named_in_one_sentence() {
    let (place, model) = (tempfile::tempdir().unwrap(), demo_model());
    let (cache, model) = (place.path().join("cache"), model.to_str().unwrap());
    let out = place.path().join("out");
    let out = out.to_str().unwrap();
    let full = place.path().to_str().unwrap();
    std::fs::create_dir(&cache).unwrap();
    let cases: [(&[&str], i32, &[&str]); 8] = [
        (&["cache", "prune"], 2, &["--max_disk_space", "--older_than", "--model"]),
        (&["cache", "prune", "--older_than", "soon"], 2, &["soon", "30d"]),
        (&["cache", "export", "org/absent", "--out", out], 2, &["org/absent", "sepal cache ls"]),
        (&["cache", "export", "../etc", "--out", out], 2, &["../etc"]),
        (&["convert", model, "--quant_type", "none", "--out", out], 2, &["none", "int8 or nf4"]),
        (&["convert", model, "--quant_type", "nf4", "--out", full], 2, &["not empty", "--out"]),
        (
            &["convert", model, "--quant_type", "nf4", "--blocks", "7:9", "--out", out],
            2,
            &["7:9", "0:8"],
        ),
        (&["convert", "/nowhere", "--quant_type", "nf4", "--out", out], 2, &["/nowhere"]),
    ];
    for (args, code, words) in cases {
        let output = run(&cache, "http://127.0.0.1:9", args);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        for word in words {
            assert!(text.contains(word), "{args:?}: no {word:?} in {text}");
        }
    }
    assert!(!Path::new(out).exists());
}
