use std::path::PathBuf;
use std::time::Duration;

use netd::network_rate::{self, NetworkLink, RateFile};
use shared::block::Span;
use shared::config::{
    Compression, Device, FaultAction, FaultPlan, FaultPoint, KvMirror, QuantChoice, QuantType,
    ServeConfig, SpanChoice, Throughput,
};
use shared::network::{NetworkRate, RateSource};
use supervisor::cache_folder::own_folder;

use super::*;

mod flags;
mod network;
mod sources;

fn run(line: &str, env: &[(&str, &str)]) -> Result<Command, String> {
    let args = std::iter::once("sepal").chain(line.split_whitespace()).map(OsString::from);
    let env =
        |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let env = Env { variables: &env, tmp: Path::new(NO_TMP) };
    parse_in(Path::new(""), args, env).map_err(|error| error.to_string())
}

/// No variables.
fn no_env() -> Env<'static> {
    Env { variables: &|_| None, tmp: Path::new(NO_TMP) }
}

/// Stands for `/tmp`, whose content is not a test's to know.
const NO_TMP: &str = "/nowhere/tmp";

fn serve(line: &str) -> ServeConfig {
    match run(&format!("serve {line}"), &[]) {
        Ok(Command::Serve { config, .. }) => *config,
        other => panic!("{line}: {other:?}"),
    }
}

fn refusal(line: &str) -> String {
    run(line, &[]).expect_err(line)
}

#[test]
fn the_flags_are_well_formed() {
    Sepal::command().debug_assert();
}

#[test]
fn defaults_are_those_of_run_server() {
    let config = serve("/models/llama");
    let netd = &config.netd;
    assert_eq!(config.prepare.model, "/models/llama");
    assert_eq!(netd.initial_peers.len(), 6, "the public swarm");
    assert_eq!(netd.host_maddrs, ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]);
    assert_eq!((netd.span, netd.throughput), (SpanChoice::All, Throughput::Measure));
    let seconds = [
        netd.update_period,
        netd.expiration,
        netd.request_timeout,
        netd.session_timeout,
        netd.step_timeout,
    ];
    assert_eq!(seconds.map(|time| time.as_secs()), [120, 240, 180, 1800, 300]);
    assert_eq!((netd.max_alloc_timeout.as_secs(), netd.startup_timeout.as_secs()), (600, 60));
    assert_eq!((config.devices.as_slice(), config.file_limit), (&[Device::Cpu][..], 4096));
    assert_eq!(config.prepare.dtype, None);
}

#[test]
fn dashes_and_underscores_and_equals_mean_the_same() {
    for line in
        ["--block_indices 2:6", "--block-indices 2:6", "--block_indices=2:6", "--block-indices=2:6"]
    {
        assert_eq!(
            serve(&format!("m {line}")).netd.span,
            SpanChoice::Fixed(Span::new(2, 6).unwrap())
        );
    }
    let peers =
        serve("m --initial-peers /ip4/1.2.3.4/tcp/5/p2p/a-b /ip4/1.2.3.4/tcp/6").netd.initial_peers;
    assert_eq!(peers, ["/ip4/1.2.3.4/tcp/5/p2p/a-b", "/ip4/1.2.3.4/tcp/6"]);
}

#[test]
fn the_model_may_be_given_by_flag_but_not_twice() {
    assert_eq!(serve("--converted_model_name_or_path m").prepare.model, "m");
    assert!(refusal("serve m --converted_model_name_or_path m").contains("cannot be used with"));
    assert!(refusal("serve").contains("MODEL"));
}

#[test]
fn a_model_after_a_list_of_multiaddrs_is_the_model() {
    let config = serve("--initial_peers /ip4/1.2.3.4/tcp/5 /models/llama --num_blocks 2");
    assert_eq!(
        (config.prepare.model.as_str(), config.netd.initial_peers.len()),
        ("/models/llama", 1)
    );
    let line = "generate --initial_peers /dns4/a.b/tcp/5/p2p/Q folder --prompt Hi";
    let Ok(Command::Generate(generate, ..)) = run(line, &[]) else { panic!() };
    assert_eq!((generate.model, generate.client.initial_peers.len()), ("folder".into(), 1));
    assert!(
        refusal("generate --initial_peers /dns4/a.b/tcp/5/p2p/Q --prompt Hi").contains("MODEL")
    );
}

#[test]
fn port_and_public_ip_become_multiaddrs() {
    let netd = serve("m --port 31330 --public_ip 1.2.3.4").netd;
    assert_eq!(netd.host_maddrs, ["/ip4/0.0.0.0/tcp/31330", "/ip6/::/tcp/31330"]);
    assert_eq!(netd.announce_maddrs, ["/ip4/1.2.3.4/tcp/31330"]);
    assert!(refusal("serve m --port 0 --public_ip 1.2.3.4").contains("--port"));
    assert!(
        refusal("serve m --port 1 --host_maddrs /ip4/127.0.0.1/tcp/0")
            .contains("cannot be used with")
    );
}

#[test]
fn what_petals_does_and_this_version_does_not_is_refused_in_a_sentence() {
    for (line, says) in [
        ("--quant_type fp4", "expected none, int8 or nf4"),
        ("--adapters a b a", "twice"),
        ("--adapters=", "path of a folder"),
        ("--compression ZIP", "MEANSTD_16BIT"),
        ("--device cuda:x", "cuda:N"),
        ("--device mps", "cuda:N"),
        ("--device emu:", "cuda:N"),
        ("--torch_dtype int4", "int4"),
        ("--token x --use_auth_token", "cannot be used with"),
        ("--use_auth_token", "huggingface-cli login"),
        ("--revision ../x", "--revision"),
        ("--max_disk_space much", "512MiB"),
        ("-c /no/such/file", "/no/such/file"),
        ("--network_mbps 0", "--network_mbps"),
        ("--network_mbps=nan", "--network_mbps"),
        ("--throughput -1", "--throughput"),
        ("--throughput=nan", "nan"),
        ("--dht_prefix a.b", "a.b"),
        ("--initial_peers 1.2.3.4:5", "1.2.3.4:5"),
        ("--block_indices 4:4", "START:END"),
        ("--update_period 0", "seconds"),
        ("--request_timeout 1e300", "seconds"),
        ("--arena_size 5", "at least"),
        ("--kv_mirror maybe", "expected on, off or auto"),
        ("--new_swarm --initial_peers /ip4/1.2.3.4/tcp/5", "cannot be used with"),
        ("--num_blocks 2 --block_indices 0:2", "cannot be used with"),
        ("--num_blocks 0", "0"),
    ] {
        let error = refusal(&format!("serve m {line}"));
        assert!(error.contains(says), "{line}: {error}");
    }
    for (name, wanted) in
        [("none", QuantType::None), ("int8", QuantType::Int8), ("NF4", QuantType::Nf4)]
    {
        let config = serve(&format!("m --quant_type {name}"));
        assert_eq!(config.prepare.quant_type, QuantChoice::Named(wanted));
    }
    for (line, wanted) in [
        ("m", Compression::None),
        ("m --compression NONE", Compression::None),
        ("m --compression float16", Compression::Float16),
        ("m --compression BLOCKWISE_8BIT", Compression::Blockwise8Bit),
    ] {
        assert_eq!(serve(line).netd.compression, wanted);
    }
    for (line, wanted) in [
        ("m", KvMirror::Auto),
        ("m --kv_mirror on", KvMirror::On),
        ("m --kv_mirror=off", KvMirror::Off),
    ] {
        assert_eq!(serve(line).worker.kv_mirror, wanted);
    }
    let adapters = serve("m --adapters a org/b").prepare.adapters;
    assert_eq!(adapters, ["a", "org/b"]);
    assert_eq!(serve("m --quant_type none --compression NONE --adapters").devices.len(), 1);
}

#[test]
fn flags_without_effect_are_accepted_and_noted() {
    let line = "serve m --num_handlers 8 --prefetch-batches 1 --sender_threads 2";
    let Ok(Command::Serve { notes, .. }) = run(line, &[]) else { panic!() };
    assert_eq!(notes.len(), 3);
    assert!(notes[0].starts_with("--num_handlers has no effect"), "{notes:?}");
}

#[test]
fn the_cache_is_in_the_home_or_else_in_a_folder_of_the_user_in_tmp() {
    let Ok(Command::Serve { config, .. }) = run("serve m", &[("HOME", "/h")]) else { panic!() };
    assert_eq!(config.prepare.cache_dir, PathBuf::from("/h/.cache/sepal"));
    let Ok(Command::Serve { config, .. }) = run("serve m", &[("HOME", "")]) else { panic!() };
    assert_eq!(config.prepare.cache_dir, own_folder(Path::new(NO_TMP)).join("cache"));
}

/// A line for each command, in forms that name no folder.
const EVERY_COMMAND: [&str; 24] = [
    "serve m",
    "config m",
    "plan m",
    "doctor",
    "doctor m",
    "cache ls",
    "cache prune --older_than 1d",
    "cache verify --repair",
    "cache export m --out o",
    "convert m --quant_type nf4 --out o",
    "dht",
    "generate m --initial_peers /ip4/1.2.3.4/tcp/5 --prompt Hi",
    "gateway m --initial_peers /ip4/1.2.3.4/tcp/5",
    "chat m --initial_peers /ip4/1.2.3.4/tcp/5",
    "demo",
    "status",
    "top",
    "pause",
    "resume",
    "restart 0.0",
    "upgrade",
    "completions bash",
    "man --out o",
    "selftest --device cpu --report r",
];

#[test]
fn reading_settings_makes_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let env = Env { variables: &|_| None, tmp: tmp.path() };
    for line in EVERY_COMMAND {
        let args = std::iter::once("sepal").chain(line.split_whitespace()).map(OsString::from);
        let read = parse_in(tmp.path(), args, env);
        assert!(read.is_ok(), "{line}: {read:?}");
        let made: Vec<_> = std::fs::read_dir(tmp.path()).unwrap().collect();
        assert!(made.is_empty(), "{line}: {made:?}");
    }
    let args = ["sepal", "serve", "m"].map(OsString::from);
    reread::read_in(tmp.path(), &args, env).unwrap();
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
}

#[test]
fn a_cache_that_another_user_can_write_to_is_not_read_for_what_is_shown() {
    use std::os::unix::fs::PermissionsExt;
    let tmp = tempfile::tempdir().unwrap();
    let own = own_folder(tmp.path());
    std::fs::create_dir(&own).unwrap();
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o777)).unwrap();
    let env = Env { variables: &|_| None, tmp: tmp.path() };
    let parse =
        |command: &str| parse_in(Path::new(""), ["sepal", command, "m"].map(OsString::from), env);
    let error = parse("config").unwrap_err().to_string();
    assert!(error.contains("--cache_dir") && error.contains("has mode 777"), "{error}");
    let Ok(Command::Doctor(options)) = parse("doctor") else { panic!() };
    assert_eq!((options.config.netd.rates_dir, options.config.worker.rates_dir), (None, None));
}

#[test]
fn folders_and_log_come_from_the_environment_unless_given() {
    let env = [("XDG_RUNTIME_DIR", "/run/user/7"), ("PETALS_CACHE", "/c"), ("SEPAL_LOG", "debug")];
    let Ok(Command::Serve { config, .. }) = run("serve m", &env) else { panic!() };
    assert_eq!(
        (config.runtime_dir, config.prepare.cache_dir),
        ("/run/user/7/sepal".into(), "/c".into())
    );
    assert_eq!(config.log.filter, "debug");
    let Ok(Command::Serve { config, .. }) =
        run("serve m --runtime_dir /r --cache_dir /d --log warn", &env)
    else {
        panic!()
    };
    assert_eq!((config.runtime_dir, config.prepare.cache_dir), ("/r".into(), "/d".into()));
    assert_eq!(config.log.filter, "warn");
    assert_eq!(
        serve("m").runtime_dir,
        PathBuf::from(format!("{NO_TMP}/sepal-{}", nix::unistd::geteuid()))
    );
}

#[test]
fn several_devices_share_the_cores() {
    let config = serve("m --device cpu,cpu");
    assert_eq!(config.devices, [Device::Cpu, Device::Cpu]);
    assert!(config.worker.threads >= 1);
    assert_eq!(serve("m --threads 3").worker.threads, 3);
    assert!(refusal(&format!("serve m --device {}", ["cpu"; 16].join(","))).contains("at most 15"));
}

#[test]
fn faults_read_as_they_are_documented() {
    let fault = |text: &str| serve(&format!("m --inject_fault {text}")).worker.fault;
    let expected = FaultPlan {
        action: FaultAction::Kill,
        point: FaultPoint::Block(2),
        job: 5,
        times: 3,
        rank: None,
    };
    assert_eq!(fault("kill@block:2#5x3"), Some(expected));
    let expected = FaultPlan {
        action: FaultAction::Hang,
        point: FaultPoint::Taken,
        job: 0,
        times: 1,
        rank: None,
    };
    assert_eq!(fault("hang@taken#0"), Some(expected));
    assert_eq!(fault("hang@taken#0r1"), Some(FaultPlan { rank: Some(1), ..expected }));
    let repeat =
        FaultPlan { action: FaultAction::Repeat, point: FaultPoint::Completion, ..expected };
    assert_eq!(fault("repeat@completion#0"), Some(repeat));
    for bad in [
        "kill",
        "kill@taken",
        "melt@taken#1",
        "kill@block:#1",
        "kill@taken#x",
        "kill@taken#1xx",
        "repeat@taken#1",
    ] {
        assert!(
            refusal(&format!("serve m --inject_fault {bad}")).contains("ACTION@POINT#JOB"),
            "{bad}"
        );
    }
}

#[test]
fn the_other_commands_read_their_flags() {
    let Ok(Command::Dht { config: dht, .. }) = run("dht --refresh-period 2.5", &[]) else {
        panic!()
    };
    assert_eq!(
        (dht.refresh_period.as_millis(), dht.host_maddrs.len(), dht.initial_peers.len()),
        (2500, 2, 0)
    );
    let Ok(Command::Dht { config: dht, .. }) = run("dht --port 31337 --public_ip 1.2.3.4", &[])
    else {
        panic!()
    };
    assert_eq!(dht.host_maddrs, ["/ip4/0.0.0.0/tcp/31337", "/ip6/::/tcp/31337"]);
    assert_eq!(dht.announce_maddrs, ["/ip4/1.2.3.4/tcp/31337"]);
    assert!(refusal("dht --public_ip 1.2.3.4").contains("--port"));
    assert!(refusal("dht --port 1 --host_maddrs /ip4/1.2.3.4/tcp/5").contains("cannot be used"));
    let line = "generate m --initial_peers /ip4/1.2.3.4/tcp/5/p2p/Q --prompt Hi --temperature 0.7 --top_k 5 --stats";
    let Ok(Command::Generate(generate, ..)) = run(line, &[]) else { panic!() };
    let sampling = &generate.sampling;
    assert_eq!(
        (
            generate.max_new_tokens,
            sampling.temperature,
            sampling.top_k,
            generate.client.local.speculate
        ),
        (64, Some(0.7), Some(5), 8)
    );
    let more = format!("{line} --logit_bias 5=-100 --logit_bias 6=1.5 --stop END --speculate 0");
    let Ok(Command::Generate(generate, ..)) = run(&more, &[]) else { panic!() };
    assert_eq!(generate.sampling.logit_bias, [(5, -100.0), (6, 1.5)]);
    assert_eq!((generate.stop, generate.client.local.speculate), (vec!["END".to_owned()], 0));
    for (flag, part) in [("--logit_bias 5", "1234=-100"), ("--speculate 65", "0 to 64")] {
        let refused = refusal(&format!("{line} {flag}"));
        assert!(refused.contains(part), "{refused}");
    }
    assert!(refusal("generate m --prompt Hi").contains("initial_peers"));
    let Ok(Command::Demo(demo, _)) = run("demo --keep", &[]) else { panic!() };
    assert!(demo.keep && demo.prompt.is_none());
    let Ok(Command::Status(status)) = run("status --json", &[("XDG_RUNTIME_DIR", "/x")]) else {
        panic!()
    };
    assert!(status.json && status.runtime_dir == std::path::Path::new("/x/sepal"));
}

#[test]
fn every_role_has_its_hidden_command() {
    for role in [Role::Netd, Role::Worker, Role::Prepare] {
        let Ok(Command::Role { role: read, bootstrap: 7 }) =
            run(&format!("{} --bootstrap 7", role.name()), &[])
        else {
            panic!("{}", role.name())
        };
        assert_eq!(read, role);
    }
    let sample = run("sample --ordinal 1 --kernels linear_wgmma_nf4_bf16 --parent 7", &[]);
    let Ok(Command::Sample(sample)) = sample else { panic!("{sample:?}") };
    assert_eq!((sample.ordinal, sample.kernels.len(), sample.parent), (1, 1, 7));
    assert!(!refusal("--help").contains("sample"));
}

#[test]
fn help_is_complete_and_names_the_exit_codes() {
    let help = refusal("serve --help");
    for text in
        ["Exit codes:", "--block_indices", "--num_handlers", "--drain_timeout", "--arena_size"]
    {
        assert!(help.contains(text), "{text}");
    }
    assert!(!help.contains("inject_fault") && !help.contains("sample_timeout"));
}

#[test]
fn matrices_are_nf4_on_cuda_unless_said_otherwise() {
    use shared::config::QuantType::{Int8, Nf4, None as Plain};
    for (line, expected) in [
        ("m --device cuda:0", Nf4),
        ("m --device cpu,cuda:1", Nf4),
        ("m --device cpu", Plain),
        ("m --device emu", Plain),
        ("m --device cuda:0 --quant_type none", Plain),
        ("m --device cuda:0 --quant_type int8", Int8),
    ] {
        let config = serve(line);
        assert_eq!(
            (config.prepare.quant_type.quant_type(), config.automatic),
            (expected, None),
            "{line}"
        );
    }
}

#[test]
fn without_a_device_what_was_asked_for_is_kept_until_there_is_one() {
    use shared::config::AutomaticDevices;
    let config = serve("m");
    assert_eq!(config.automatic, Some(AutomaticDevices::default()));
    let by_device = QuantChoice::ByDevice(QuantType::None);
    assert_eq!((config.devices, config.prepare.quant_type), (vec![Device::Cpu], by_device));
    let config = serve("m --threads 3 --quant_type int8");
    assert_eq!(config.automatic, Some(AutomaticDevices { threads: Some(3) }));
    let int8 = QuantChoice::Named(QuantType::Int8);
    assert_eq!((config.worker.threads, config.prepare.quant_type), (3, int8));
}

#[test]
fn devices_that_share_blocks_are_a_group() {
    for line in ["--tensor_parallel_devices cpu cpu", "--device cpu,cpu --tensor_parallel_size 2"] {
        let config = serve(&format!("m {line}"));
        assert_eq!((&config.devices[..], config.world_size), (&[Device::Cpu; 2][..], 2));
    }
    let emulated = serve("m --tensor_parallel_devices emu emu:1");
    assert_eq!(emulated.devices, [Device::Emulator(0), Device::Emulator(1)]);
    let refused = refusal("serve m --tensor_parallel_devices cpu cuda:1");
    assert!(refused.contains("name devices of one kind"), "{refused}");
    let alone = serve("m --tensor_parallel_devices cuda:1");
    assert_eq!((&alone.devices[..], alone.world_size), (&[Device::Cuda(1)][..], 1));
    let both = refusal("serve m --device cpu --tensor_parallel_devices cpu cpu");
    assert!(both.contains("cannot be used with"), "{both}");
}

#[test]
fn flags_of_dht_without_effect_are_noted() {
    let Ok(Command::Dht { notes, .. }) = run("dht --use_ipfs", &[]) else { panic!() };
    assert!(notes[0].starts_with("--use_ipfs has no effect"), "{notes:?}");
}

#[test]
fn memory_and_the_share_of_one_client_can_be_limited() {
    let config = serve("m --max_kv_share 0.5 --max_memory 4GiB");
    assert_eq!(config.netd.max_kv_share, 0.5);
    assert_eq!(config.max_memory_bytes, Some(4 << 30));
    let default = serve("m");
    assert_eq!(default.netd.max_kv_share, 0.5, "strangers share the public swarm");
    assert_eq!(serve("m --new_swarm").netd.max_kv_share, 1.0);
    assert_eq!(default.max_memory_bytes, None);
    for bad in ["0", "1.5", "nan", "-1"] {
        let args = format!("serve m --max_kv_share={bad}");
        assert!(run(&args, &[]).is_err(), "{bad}");
    }
}
