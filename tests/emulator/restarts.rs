//! What a restart keeps: the blocks of each device stay its blocks, whatever the rates are that were
//! measured since.
//!
//! `.ci/long emulator` runs it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::harness::demo::demo_model;
use crate::harness::{Sepal, serve_args, wait_for};
use serde_json::Value;
use tempfile::TempDir;

/// Two devices with different names, each of which has rates of its own.
const DEVICES: [&str; 5] = ["--new_swarm", "--device", "cpu,emu", "--torch_dtype", "float32"];

/// A start in the folder of the ones before it.
fn start(dir: &Arc<TempDir>, more: &[&str]) -> Sepal {
    let model = demo_model();
    let sepal =
        Sepal::start_in(dir.clone(), &serve_args(&model, "demo", &[&DEVICES, more].concat()));
    sepal.wait_online();
    sepal
}

/// The spans of the workers in the order of the devices, once all are ready.
fn spans(sepal: &Sepal) -> Vec<String> {
    wait_for("two workers", || {
        let workers = sepal.workers().into_iter().filter(|child| child["state"] == "ready");
        let spans: BTreeMap<String, String> = workers
            .filter_map(|worker| {
                let name = worker["worker"].as_str()?;
                Some((name.to_owned(), worker["span"].as_str()?.to_owned()))
            })
            .collect();
        (spans.len() == 2).then(|| spans.into_values().collect())
    })
}

/// Measures both devices once, so that there are rates to change. Three blocks are cut, and no other
/// number of them.
fn measure(dir: &Arc<TempDir>) {
    let model = demo_model();
    let mut args = serve_args(&model, "demo", &[&DEVICES[..], &["--num_blocks", "3"]].concat());
    let throughput = args.iter().position(|arg| *arg == "--throughput").expect("the harness's");
    args[throughput + 1] = "dry_run";
    let mut sepal = Sepal::start_in(dir.clone(), &args);
    assert_eq!(sepal.wait().code(), Some(0), "{}", sepal.log());
}

/// Changes the kept rates of the processor and of the emulator.
fn set_rates(dir: &Path, processor: f64, emulator: f64) {
    let path = dir.join("cache/rates/sepal_throughput_v1.json");
    let text = std::fs::read_to_string(&path).expect("kept rates");
    let mut rates: BTreeMap<String, Value> = serde_json::from_str(&text).expect("JSON");
    assert_eq!(rates.len(), 2, "{text}");
    for (key, rate) in &mut rates {
        let one = if key.contains("emulator") { emulator } else { processor };
        rate["inference_rps"] = one.into();
    }
    let text = serde_json::to_string(&rates).expect("JSON");
    std::fs::write(&path, text).expect("change the rates");
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn a_restart_leaves_every_block_on_its_device_though_the_rates_have_changed() {
    let dir = Arc::new(tempfile::tempdir().expect("temporary folder"));
    measure(&dir);

    set_rates(dir.path(), 3000.0, 1000.0);
    let first = start(&dir, &[]);
    assert_eq!(spans(&first), ["0:6", "6:8"]);
    assert_eq!(first.terminate().code(), Some(0));

    // The emulator is the faster one from here on.
    set_rates(dir.path(), 1000.0, 3000.0);
    let again = start(&dir, &[]);
    assert_eq!(spans(&again), ["0:6", "6:8"], "after an orderly end");
    again.kill();
    let fixed = start(&dir, &["--block_indices", "0:8"]);
    assert_eq!(spans(&fixed), ["0:6", "6:8"], "after a kill, with the blocks given");
    assert_eq!(fixed.terminate().code(), Some(0));

    // Four blocks are cut for the first time, by the rates of now.
    let part = start(&dir, &["--block_indices", "4:8"]);
    assert_eq!(spans(&part), ["4:5", "5:8"]);
    assert_eq!(part.terminate().code(), Some(0));

    // A server that chooses its blocks may choose others, as many of which go to each device.
    set_rates(dir.path(), 3000.0, 1000.0);
    let chosen = start(&dir, &["--num_blocks", "4"]);
    let lengths: Vec<u32> = spans(&chosen).iter().map(|span| length(span)).collect();
    assert_eq!(lengths, [1, 3]);
    assert_eq!(chosen.terminate().code(), Some(0));
}

fn length(span: &str) -> u32 {
    let (start, end) = span.split_once(':').expect("a span");
    let number = |text: &str| text.parse::<u32>().expect("a block");
    number(end) - number(start)
}
