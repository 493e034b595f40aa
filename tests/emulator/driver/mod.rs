//! The whole server on `--device cuda:N`, with a `libcuda.so` whose devices are the emulator
//! (`kernels/cuda/emu/driver.cpp`): the probe, the images that the executable carries, registered
//! memory, graphs and errors of the driver, as on a machine with cards.
//!
//! `.ci/long emulator` runs all of it.

mod failures;

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

use crate::harness::demo::{demo_model, run_session};
use crate::harness::golden::{self, Golden};
use crate::harness::{SEPAL, Sepal, alive, children_of, command_line, rank, serve_args, wait_for};
use kernels::cuda::emu::DRIVER_FOLDER;
use nix::sys::signal::{Signal, kill};

const STEPS: usize = 4;

/// `sepal`, where that library is the driver, with settings for it.
fn with_driver(settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(SEPAL);
    command.env("LD_LIBRARY_PATH", DRIVER_FOLDER);
    command.envs(settings.iter().copied());
    if settings.iter().any(|(name, _)| name.starts_with("EMU_CUDA_FAIL_")) {
        // The stand-in notes its faults in files that no worker of a server may write.
        command.env("SEPAL_SANDBOX", "off");
    }
    command
}

/// Starts a server of the demo model.
fn start(device: &str, settings: &[(&str, &str)], more: &[&str]) -> Sepal {
    start_in(folder(), with_driver(settings), device, more)
}

fn folder() -> Arc<tempfile::TempDir> {
    Arc::new(tempfile::tempdir().expect("temporary folder"))
}

/// Starts a server of the demo model in a folder.
fn start_in(
    folder: Arc<tempfile::TempDir>,
    command: Command,
    device: &str,
    more: &[&str],
) -> Sepal {
    let model = demo_model();
    let dtype: &[&str] = match more.contains(&"--torch_dtype") {
        true => &[],
        false => &["--torch_dtype", "bfloat16"],
    };
    let quant: &[&str] = match more.contains(&"--quant_type") {
        true => &[],
        false => &["--quant_type", "none"],
    };
    let more = [&["--new_swarm", "--device", device], dtype, quant, more].concat();
    let args = serve_args(&model, "demo", &more);
    Sepal::start_by(command, folder, &args)
}

fn serve(device: &str, settings: &[(&str, &str)]) -> Sepal {
    let sepal = start(device, settings, &[]);
    sepal.wait_online();
    sepal
}

/// What a session of a few steps gets.
async fn run(sepal: &Sepal, between: impl FnMut(usize)) -> Vec<Vec<f32>> {
    run_session(&sepal.addr(), STEPS, between).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_card_gives_the_bits_of_the_emulator_and_its_worker_may_be_killed() {
    let emulator = serve("emu", &[]);
    let expected = run(&emulator, |_| ()).await;
    assert_eq!(emulator.terminate().code(), Some(0));
    // The second may not write memory of the host: its KV cache is mirrored through other memory.
    for settings in [&[][..], &[("EMU_CUDA_REGISTER", "0")]] {
        let sepal = serve("cuda:0", settings);
        let first = sepal.worker();
        let got = run(&sepal, |step| {
            if step == 2 {
                kill(sepal.worker(), Signal::SIGKILL).expect("the worker is there");
            }
        })
        .await;
        assert_ne!(sepal.worker(), first, "the worker was replaced");
        assert!(got == expected, "a card differs from the emulator");
        let slow = sepal.log().matches("mirroring the KV cache more slowly").count();
        assert_eq!(slow, 2 * settings.len(), "once per worker");
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}

/// A driver that overlaps no launches, and one that is too old to record that they overlap.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn without_overlapping_launches_a_card_gives_the_same_bits() {
    const REFUSED: &str = "driver overlaps no launches";
    let sepal = serve("cuda:0", &[]);
    let expected = run(&sepal, |_| ()).await;
    assert!(!sepal.log().contains(REFUSED), "{}", sepal.log());
    assert_eq!(sepal.terminate().code(), Some(0));
    for (setting, warnings) in
        [(("EMU_CUDA_FAIL", "cuLaunchKernelEx:1:0"), 1), (("EMU_CUDA_VERSION", "12020"), 0)]
    {
        let sepal = serve("cuda:0", &[setting]);
        assert!(run(&sepal, |_| ()).await == expected, "{setting:?}: results differ");
        assert_eq!(sepal.log().matches(REFUSED).count(), warnings, "{setting:?}");
        assert_eq!(sepal.terminate().code(), Some(0));
    }
}

/// UUIDs of the emulated cards: `emulated card` and their number, in ASCII.
const UUIDS: [&str; 2] =
    ["GPU-656d756c-6174-6564-2063-617264202030", "GPU-656d756c-6174-6564-2063-617264202031"];

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn a_card_is_found_by_its_uuid_and_an_ambiguous_one_is_refused() {
    let settings = [("EMU_CUDA_DEVICES", "2")];
    let sepal = serve(&format!("cuda:{}", UUIDS[1]), &settings);
    assert_eq!(sepal.workers()[0]["device"], "cuda:1", "{}", sepal.status());
    // Devices are counted along the bus, whatever the driver's default.
    let environment = std::fs::read(format!("/proc/{}/environ", sepal.worker())).expect("/proc");
    let order = b"CUDA_DEVICE_ORDER=PCI_BUS_ID";
    assert!(environment.split(|byte| *byte == 0).any(|variable| variable == order));
    assert_eq!(sepal.terminate().code(), Some(0));

    for (uuid, said) in [("GPU-656d", "more than one"), ("GPU-07", "no CUDA device")] {
        let mut refused = start(&format!("cuda:{uuid}"), &settings, &[]);
        assert_eq!(refused.wait().code(), Some(2), "{}", refused.log());
        let log = refused.log();
        assert!(log.contains(said) && UUIDS.iter().all(|uuid| log.contains(uuid)), "{log}");
    }
}

/// What `sepal doctor` finds of a device: its status, and the sentence.
fn checkup(device: &str) -> (String, String) {
    let folder = folder();
    let out = with_driver(&[])
        .args(["doctor", "--offline", "--json", "--device", device])
        .env("XDG_RUNTIME_DIR", folder.path())
        .env("SEPAL_CACHE", folder.path().join("cache"))
        .output()
        .expect("run sepal doctor");
    let findings: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let mut findings = findings.as_array().expect("a list").iter();
    let of_devices = findings.find(|finding| finding["check"] == "devices");
    let finding = of_devices.expect("the check of the devices");
    let text = |key: &str| finding[key].as_str().unwrap_or_default().to_owned();
    (text("status"), text("found"))
}

#[test]
#[ignore = "every kernel of a card: .ci/long emulator"]
fn the_doctor_tests_a_card() {
    let (status, found) = checkup("cuda:0");
    assert_eq!(status, "ok", "{found}");
    assert!(found.contains("cuda:0") && found.contains("passes its test"), "{found}");
}

#[test]
fn the_doctor_names_a_card_that_is_not_there() {
    let (status, found) = checkup("cuda:1");
    assert_eq!(status, "problem", "{found}");
    let (status, found) = checkup("cuda:GPU-07");
    assert!(status == "problem" && found.contains("GPU-07"), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn two_cards_share_the_blocks() {
    let settings = [("EMU_CUDA_DEVICES", "2")];
    let one = serve("cuda:0", &[]);
    let expected = run(&one, |_| ()).await;
    assert_eq!(one.terminate().code(), Some(0));
    let two = serve("cuda:0,cuda:1", &settings);
    let got = run(&two, |_| ()).await;
    assert!(got == expected, "two cards differ from one");
    assert_eq!(two.spans(), ["0:4", "4:8"]);
    assert_eq!(two.terminate().code(), Some(0));
}

/// Starts two ranks of a tiny Llama.
fn start_ranks(devices: &str, settings: &[(&str, &str)]) -> Sepal {
    let model = Golden::of("llama").folder;
    let flags = ["--new_swarm", "--device", devices, "--tensor_parallel_size", "2"];
    let types = ["--torch_dtype", "float32", "--quant_type", "none"];
    let args = serve_args(&model, "golden", &[&flags[..], &types].concat());
    let sepal = Sepal::start_by(with_driver(settings), folder(), &args);
    sepal.wait_online();
    sepal
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn two_cards_share_every_block_with_peer_access_and_without() {
    const JOINED: &str = "exchanging sums with the other ranks";
    let emulator = start_ranks("emu:0,emu:1", &[]);
    let expected = golden::run_session(&emulator.addr(), STEPS, |_| ()).await;
    assert_eq!(emulator.terminate().code(), Some(0));
    let folder = folder();
    let struck = folder.path().join("struck");
    let struck = struck.to_str().expect("UTF-8");
    let two = ("EMU_CUDA_DEVICES", "2");
    let (device, host) =
        ("path=device memory", "no peer access between all devices path=host memory");
    // The last: one of the ranks cannot map the memory of the other.
    let cases = [
        ("cuda:0,cuda:1", &[two][..], device),
        ("cuda:0,cuda:1", &[two, ("EMU_CUDA_PEERS", "0")], host),
        ("cuda:0,cuda:1", &[two, ("EMU_CUDA_SHARING", "0")], host),
        ("cuda:0,cuda:0", &[], device),
        (
            "cuda:0,cuda:1",
            &[
                two,
                ("EMU_CUDA_FAIL", "cuMemImportFromShareableHandle:999:0"),
                ("EMU_CUDA_FAIL_ONCE", struck),
            ],
            host,
        ),
    ];
    for (devices, settings, path) in cases {
        let sepal = start_ranks(devices, settings);
        let first = rank(&sepal, 1);
        let got = golden::run_session(&sepal.addr(), STEPS, |step| {
            if step == 2 {
                kill(rank(&sepal, 1), Signal::SIGKILL).expect("a rank");
            }
        })
        .await;
        assert_ne!(rank(&sepal, 1), first, "{settings:?}: the rank was replaced");
        assert!(got == expected, "{devices}, {settings:?}: the bits differ");
        let log = sepal.log();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(JOINED)).collect();
        assert!(lines[..2].iter().all(|line| line.contains(path)), "{settings:?}: {lines:?}");
        let crowded = log.matches("ranks of a group share one CUDA device").count();
        assert_eq!(crowded, usize::from(devices == "cuda:0,cuda:0"), "{log}");
        assert_eq!(sepal.terminate().code(), Some(0));
    }
    assert!(std::path::Path::new(struck).exists(), "the fault never struck");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn an_error_that_stays_ends_the_worker_and_no_session() {
    let calm = serve("cuda:0", &[]);
    let expected = run(&calm, |_| ()).await;
    assert_eq!(calm.terminate().code(), Some(0));
    let folder = tempfile::tempdir().expect("temporary folder");
    let struck = folder.path().join("struck");
    let sepal = serve(
        "cuda:0",
        &[
            // In the second decode step of eight blocks.
            ("EMU_CUDA_FAIL", "cuGraphLaunch:719:12"),
            ("EMU_CUDA_FAIL_ONCE", struck.to_str().expect("UTF-8")),
        ],
    );
    let (first, netd) = (sepal.worker(), sepal.netd());
    let got = run(&sepal, |_| ()).await;
    assert!(struck.exists(), "the fault never struck");
    assert_ne!(sepal.worker(), first, "the worker was replaced");
    assert_eq!(sepal.netd(), netd);
    assert!(got == expected, "results differ after an error");
    let log = sepal.log();
    assert!(log.contains("CUDA_ERROR_LAUNCH_FAILED (719)"), "{log}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// What the log has once for each sample that is taken.
const SAMPLING: &str = "sampling warpgroups";

/// A kernel that fails or never ends does so in a process of its own.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_server_whose_warpgroups_fault_or_hang_serves_by_warps() {
    let calm = serve("cuda:0", &[]);
    let expected = run(&calm, |_| ()).await;
    let how = "products of many rows and attention of many tokens how=by warpgroups";
    assert!(calm.log().contains(how), "{}", calm.log());
    assert_eq!(calm.log().matches(SAMPLING).count(), 1, "{}", calm.log());
    assert_eq!(calm.terminate().code(), Some(0));
    let cases = [
        (
            "linear_wgmma_plain_bf16:719",
            "its process ended with exit status: 10 after launching linear_wgmma_plain_bf16",
        ),
        (
            "linear_wgmma_plain_bf16:hang",
            "it did not end within 60s after launching linear_wgmma_plain_bf16",
        ),
    ];
    for (faulty, what) in cases {
        // Sound kernels of the sample have as long, on a loaded machine too.
        let (folder, limit) = (folder(), ["--sample_timeout", "60"]);
        // The second start has no faulty kernel, but the verdict about one.
        for settings in [&[("EMU_CUDA_FAULTY", faulty)][..], &[]] {
            let sepal = start_in(folder.clone(), with_driver(settings), "cuda:0", &limit);
            sepal.wait_online();
            let first = sepal.worker();
            let got = run(&sepal, |_| ()).await;
            assert!(got == expected, "{faulty}: results differ");
            assert_eq!(sepal.worker(), first, "{faulty}: the worker was replaced");
            assert!(children_of(first).is_empty(), "{faulty}: the worker started a process");
            let children: Vec<_> = children_of(sepal.pid()).into_iter().map(command_line).collect();
            assert_eq!(children.len(), 2, "netd and the worker: {children:?}");
            let log = sepal.log();
            let alone = "by warpgroups, except by warps: linear_wgmma_plain_bf16 (";
            let cost = "takes up to 2.0 times as long (computed)";
            let more = "`sepal selftest --device cuda:0` tells more";
            for part in ["warpgroups are not used", alone, what, cost, more] {
                assert_eq!(log.matches(part).count(), 1, "{faulty}, {part}: {log}");
            }
            assert!(!log.contains("), "), "no other kernel falls back: {log}");
            let status = sepal.status().to_string();
            assert!(status.contains(&format!("prefill {alone}")), "{status}");
            assert_eq!(log.matches(SAMPLING).count(), settings.len(), "{faulty}: {log}");
            assert_eq!(sepal.terminate().code(), Some(0));
        }
    }
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn a_verdict_about_warpgroups_is_kept_for_its_device_driver_and_build() {
    let folder = folder();
    // Whether a server goes by warpgroups, and how many samples it took.
    let starts = |command: Command| {
        let sepal = start_in(folder.clone(), command, "cuda:0", &[]);
        sepal.wait_online();
        let log = sepal.log();
        assert_eq!(sepal.terminate().code(), Some(0));
        (!log.contains("warpgroups are not used"), log.matches(SAMPLING).count())
    };
    let faulty = [("EMU_CUDA_FAULTY", "attention_wgmma_bf16_d128:719")];
    assert_eq!(starts(with_driver(&faulty)), (false, 1));
    assert_eq!(starts(with_driver(&[])), (false, 0), "the verdict is kept");
    // Another driver.
    let driver = [("EMU_CUDA_VERSION", "12010")];
    assert_eq!(starts(with_driver(&driver)), (true, 1));
    assert_eq!(starts(with_driver(&driver)), (true, 0));
    // Another build: the same bytes in another file.
    let copy = folder.path().join("another sepal");
    std::fs::copy(SEPAL, &copy).expect("a copy of the executable");
    let mut another = Command::new(&copy);
    another.env("LD_LIBRARY_PATH", DRIVER_FOLDER).envs(driver);
    assert_eq!(starts(another), (true, 1));
    // A file that is damaged. The fault shows that the sample is taken, and that nothing else of
    // the file is believed.
    let mut kept = std::fs::read_dir(folder.path().join("cache/selftest")).expect("the folder");
    let file = kept.next().expect("a verdict").expect("a readable folder").path();
    assert!(kept.next().is_none(), "one file for each device");
    assert_eq!(starts(with_driver(&driver)), (true, 1));
    for damaged in ["", "{\"of\":", "\"SameBits\""] {
        std::fs::write(&file, damaged).expect("the verdict");
        let settings = [driver[0], faulty[0]];
        assert_eq!(starts(with_driver(&settings)), (false, 1), "{damaged}");
    }
}

/// A sample is taken before the supervisor has anything to drain.
#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn a_signal_ends_the_supervisor_during_a_sample_and_the_sample_with_it() {
    let settings = [("EMU_CUDA_FAULTY", "linear_wgmma_plain_bf16:hang")];
    let mut sepal = start("cuda:0", &settings, &["--sample_timeout", "1000"]);
    let sample = wait_for("the sample", || {
        let children = children_of(sepal.pid());
        children.into_iter().find(|child| command_line(*child).contains("sample --ordinal 0"))
    });
    sepal.signal(Signal::SIGTERM);
    assert_eq!(sepal.wait().signal(), Some(Signal::SIGTERM as i32), "{}", sepal.log());
    wait_for("the sample to end", || (!alive(sample)).then_some(()));
    assert!(!sepal.log().contains("not used"), "{}", sepal.log());
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn a_card_without_warpgroups_is_not_sampled() {
    let sepal = serve("cuda:0", &[("EMU_CUDA_ARCH", "89")]);
    let log = sepal.log();
    assert!(log.contains("attention of many tokens how=by warps\n"), "{log}");
    assert!(!log.contains(SAMPLING), "{log}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// A kernel falls back alone, also one of another format and dtype, and its worker lives on.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn a_format_whose_kernel_faults_is_served_by_warps() {
    let flags = ["--quant_type", "int8", "--torch_dtype", "float16"];
    let calm = start("cuda:0", &[], &flags);
    calm.wait_online();
    let expected = run(&calm, |_| ()).await;
    assert_eq!(calm.terminate().code(), Some(0));
    let settings = [("EMU_CUDA_FAULTY", "linear_wgmma_int8_f16:719")];
    let sepal = start("cuda:0", &settings, &flags);
    sepal.wait_online();
    let first = sepal.worker();
    let got = run(&sepal, |_| ()).await;
    assert!(got == expected, "results differ");
    assert_eq!(sepal.worker(), first, "the worker was replaced");
    let log = sepal.log();
    let alone = "by warpgroups, except by warps: linear_wgmma_int8_f16 (";
    assert!(log.contains(alone) && !log.contains("), "), "{log}");
    assert_eq!(sepal.terminate().code(), Some(0));
}

/// What a sample does not show ends a process of the worker once.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
async fn after_a_fault_of_its_device_a_worker_goes_by_warps() {
    let folder = folder();
    let struck = folder.path().join("struck");
    let settings = [
        ("EMU_CUDA_FAIL", "cuGraphLaunch:719:12"),
        ("EMU_CUDA_FAIL_ONCE", struck.to_str().expect("UTF-8")),
    ];
    let sepal = serve("cuda:0", &settings);
    run(&sepal, |_| ()).await;
    let log = sepal.log();
    for part in
        ["CUDA_ERROR_LAUNCH_FAILED (719)", "an earlier process of this worker failed on its device"]
    {
        assert!(log.contains(part), "{part}: {log}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn selftest_names_the_kernel_of_warpgroups_that_fails() {
    let done = with_driver(&[("EMU_CUDA_FAULTY", "linear_wgmma_nf4:719")])
        .args(["selftest", "--device", "cuda:0", "--quick"])
        .output()
        .expect("the executable");
    let (table, said) = (text(&done.stdout), text(&done.stderr));
    assert_eq!(done.status.code(), Some(10), "{table}{said}");
    let fault = "kernel linear_wgmma_nf4_bf16: cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED (719)";
    for part in [
        "by warpgroups, except by warps: linear_wgmma_nf4_bf16 (its process ended with exit status: 10",
        fault,
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
    // All else is checked and measured.
    assert!(table.contains("kernels: sm_90a"), "{table}");
    assert!(!table.contains("WRONG"), "{table}");
    assert!(table.contains("block nf4 decode"), "{table}");
    assert!(said.contains("warpgroups fail on this device"), "{said}");
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn a_sample_is_taken_for_whoever_waits_for_it_alone() {
    let done = with_driver(&[])
        .args(["sample", "--ordinal", "0", "--kernels", "linear_wgmma_nf4_bf16", "--parent", "1"])
        .output()
        .expect("the executable");
    assert_eq!(done.status.code(), Some(13), "{}", text(&done.stderr));
    assert_eq!(text(&done.stdout), "");
}

fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn what_does_not_fit_into_a_card_or_needs_another_one_is_said_at_start() {
    let refused = |device: &str, settings: &[(&str, &str)], parts: &[&str]| {
        let mut sepal = start(device, settings, &["--num_blocks", "8"]);
        assert_eq!(sepal.wait().code(), Some(2), "{}", sepal.log());
        let log = sepal.log();
        for part in parts {
            assert!(log.contains(part), "{part}: {log}");
        }
    };
    let little = [("EMU_CUDA_MEMORY", "67108864")];
    let parts = ["8 blocks of ", "on cuda:0, and 64.0 MiB of its memory are free"];
    refused("cuda:0", &little, &parts);
    refused("cuda:1", &[], &["no CUDA device 1: there are 1"]);
    let old = [("EMU_CUDA_ARCH", "75")];
    let parts = ["has compute capability 7.5; at least 8.0 is needed"];
    refused("cuda:0", &old, &parts);
    let stopped = [("EMU_CUDA_FAIL", "cuInit:100")];
    refused("cuda:0", &stopped, &["CUDA_ERROR_NO_DEVICE (100)"]);
}

/// But those with warpgroups, which the test of the kernel that fails goes through.
#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn selftest_runs_on_every_kind_of_card() {
    for (architecture, image) in [("80", "sm_80"), ("89", "sm_89"), ("120", "sm_120")] {
        let done = with_driver(&[("EMU_CUDA_ARCH", architecture)])
            .args(["selftest", "--device", "cuda:0", "--quick"])
            .output()
            .expect("the executable");
        let table = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "{table}");
        assert!(table.contains(&format!("kernels: {image}")), "{table}");
        assert!(!table.contains("WRONG"), "{table}");
        assert!(table.contains("block nf4 decode"), "{table}");
    }
}

/// Starts a server of the demo model without naming a device, in a folder.
fn start_automatically(folder: &Arc<tempfile::TempDir>, settings: &[(&str, &str)]) -> Sepal {
    let model = demo_model();
    let args = serve_args(&model, "demo", &["--new_swarm", "--torch_dtype", "bfloat16"]);
    Sepal::start_by(with_driver(settings), folder.clone(), &args)
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn without_a_device_every_card_that_passes_its_test_serves() {
    let folder = folder();
    let cards = [("EMU_CUDA_DEVICES", "2")];
    let chosen = "that passed their test devices=\"cuda:0,cuda:1\" quant_type=\"nf4\"";
    let first = start_automatically(&folder, &cards);
    first.wait_online();
    let log = first.log();
    for part in ["testing a CUDA device", SAMPLING] {
        assert_eq!(log.matches(part).count(), 2, "{part}: {log}");
    }
    assert_eq!(log.matches(chosen).count(), 1, "{log}");
    assert_eq!(first.terminate().code(), Some(0));
    // The outcome is kept.
    let second = start_automatically(&folder, &cards);
    second.wait_online();
    let log = second.log();
    for part in ["testing a CUDA device", SAMPLING] {
        assert!(!log.contains(part), "{part}: {log}");
    }
    assert!(log.contains(chosen), "{log}");
    assert_eq!(second.terminate().code(), Some(0));
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn without_a_device_a_card_serves_whose_warpgroups_fail_in_part() {
    let settings = [("EMU_CUDA_FAULTY", "linear_wgmma_nf4_bf16:719")];
    let sepal = start_automatically(&folder(), &settings);
    sepal.wait_online();
    let log = sepal.log();
    for part in ["devices=\"cuda:0\"", "by warpgroups, except by warps: linear_wgmma_nf4_bf16 ("] {
        assert!(log.contains(part), "{part}: {log}");
    }
    assert_eq!(sepal.terminate().code(), Some(0));
}

#[test]
#[ignore = "larger shapes on the emulator: .ci/long emulator"]
fn without_a_device_the_cpu_serves_where_no_card_passes_its_test() {
    let folder = folder();
    // No kernel of a sample.
    let settings = [("EMU_CUDA_FAULTY", "layernorm:719")];
    for _ in 0..2 {
        let sepal = start_automatically(&folder, &settings);
        sepal.wait_online();
        let log = sepal.log();
        for part in ["serving on the CPU", "device not used", "kinds of operations are wrong"] {
            assert!(log.contains(part), "{part}: {log}");
        }
        assert_eq!(sepal.terminate().code(), Some(0));
    }
    let kept = std::fs::read_dir(folder.path().join("cache/selftest")).expect("kept").count();
    assert_eq!(kept, 2, "one verdict about warpgroups and one about all kernels");
    let old = start_automatically(&folder, &[("EMU_CUDA_ARCH", "75")]);
    old.wait_online();
    assert!(old.log().contains("compute capability 7.5"), "{}", old.log());
    assert_eq!(old.terminate().code(), Some(0));
}
