use shared::block::Span;
use shared::config::{
    Compression, Device, FaultAction, FaultPlan, FaultPoint, KvMirror, QuantType, SpanChoice,
    Throughput,
};

use shared::network::{Link, NetworkRate, RateFile, RateSource};

use super::*;

fn run(line: &str, env: &[(&str, &str)]) -> Result<Command, String> {
    let args = std::iter::once("sepal")
        .chain(line.split_whitespace())
        .map(OsString::from);
    let env = |name: &str| {
        env.iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    };
    parse(args, &env).map_err(|error| error.to_string())
}

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
    assert_eq!(
        (netd.span, netd.throughput),
        (SpanChoice::All, Throughput::Measure)
    );
    let seconds = [
        netd.update_period,
        netd.expiration,
        netd.request_timeout,
        netd.session_timeout,
        netd.step_timeout,
    ];
    assert_eq!(
        seconds.map(|time| time.as_secs()),
        [120, 240, 180, 1800, 300]
    );
    assert_eq!(
        (
            netd.max_alloc_timeout.as_secs(),
            netd.startup_timeout.as_secs()
        ),
        (600, 60)
    );
    assert_eq!(
        (config.devices.as_slice(), config.file_limit),
        (&[Device::Cpu][..], 4096)
    );
    assert_eq!(config.prepare.dtype, None);
}

#[test]
fn dashes_and_underscores_and_equals_mean_the_same() {
    for line in [
        "--block_indices 2:6",
        "--block-indices 2:6",
        "--block_indices=2:6",
        "--block-indices=2:6",
    ] {
        assert_eq!(
            serve(&format!("m {line}")).netd.span,
            SpanChoice::Fixed(Span::new(2, 6).unwrap())
        );
    }
    let peers = serve("m --initial-peers /ip4/1.2.3.4/tcp/5/p2p/a-b /ip4/1.2.3.4/tcp/6")
        .netd
        .initial_peers;
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
        (
            config.prepare.model.as_str(),
            config.netd.initial_peers.len()
        ),
        ("/models/llama", 1)
    );
    let line = "generate --initial_peers /dns4/a.b/tcp/5/p2p/Q folder --prompt Hi";
    let Ok(Command::Generate(generate, _)) = run(line, &[]) else {
        panic!()
    };
    assert_eq!(
        (generate.model, generate.initial_peers.len()),
        ("folder".into(), 1)
    );
    assert!(
        refusal("generate --initial_peers /dns4/a.b/tcp/5/p2p/Q --prompt Hi").contains("MODEL")
    );
}

#[test]
fn port_and_public_ip_become_multiaddrs() {
    let netd = serve("m --port 31330 --public_ip 1.2.3.4").netd;
    assert_eq!(
        netd.host_maddrs,
        ["/ip4/0.0.0.0/tcp/31330", "/ip6/::/tcp/31330"]
    );
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
        ("--quant_type fp4", "use none, int8 or nf4"),
        ("--adapters a b a", "twice"),
        ("--adapters=", "no name"),
        ("--compression ZIP", "MEANSTD_16BIT"),
        ("--device cuda:x", "cuda:N"),
        ("--device mps", "cuda:N"),
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
        ("--block_indices 4:4", "start:end"),
        ("--update_period 0", "seconds"),
        ("--request_timeout 1e300", "seconds"),
        ("--arena_size 5", "at least"),
        ("--kv_mirror maybe", "neither on, off nor auto"),
        (
            "--new_swarm --initial_peers /ip4/1.2.3.4/tcp/5",
            "cannot be used with",
        ),
        ("--num_blocks 2 --block_indices 0:2", "cannot be used with"),
        ("--num_blocks 0", "0"),
    ] {
        let error = refusal(&format!("serve m {line}"));
        assert!(error.contains(says), "{line}: {error}");
    }
    for (name, wanted) in [
        ("none", QuantType::None),
        ("int8", QuantType::Int8),
        ("NF4", QuantType::Nf4),
    ] {
        let config = serve(&format!("m --quant_type {name}"));
        assert_eq!(config.prepare.quant_type, wanted);
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
    assert_eq!(
        serve("m --quant_type none --compression NONE --adapters")
            .devices
            .len(),
        1
    );
}

#[test]
fn flags_without_effect_are_accepted_and_noted() {
    let line = "serve m --num_handlers 8 --prefetch-batches 1 --sender_threads 2";
    let Ok(Command::Serve { notes, .. }) = run(line, &[]) else {
        panic!()
    };
    assert_eq!(notes.len(), 3);
    assert!(
        notes[0].starts_with("--num_handlers has no effect"),
        "{notes:?}"
    );
}

#[test]
fn folders_and_log_come_from_the_environment_unless_given() {
    let env = [
        ("XDG_RUNTIME_DIR", "/run/user/7"),
        ("PETALS_CACHE", "/c"),
        ("SEPAL_LOG", "debug"),
    ];
    let Ok(Command::Serve { config, .. }) = run("serve m", &env) else {
        panic!()
    };
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
    assert_eq!(
        (config.runtime_dir, config.prepare.cache_dir),
        ("/r".into(), "/d".into())
    );
    assert_eq!(config.log.filter, "warn");
    assert_eq!(
        serve("m").runtime_dir,
        PathBuf::from(format!("/tmp/sepal-{}", nix::unistd::geteuid()))
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
    };
    assert_eq!(fault("kill@block:2#5x3"), Some(expected));
    let expected = FaultPlan {
        action: FaultAction::Hang,
        point: FaultPoint::Taken,
        job: 0,
        times: 1,
    };
    assert_eq!(fault("hang@taken#0"), Some(expected));
    for bad in [
        "kill",
        "kill@taken",
        "melt@taken#1",
        "kill@block:#1",
        "kill@taken#x",
        "kill@taken#1xx",
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
        (
            dht.refresh_period.as_millis(),
            dht.host_maddrs.len(),
            dht.initial_peers.len()
        ),
        (2500, 2, 0)
    );
    let line = "generate m --initial_peers /ip4/1.2.3.4/tcp/5/p2p/Q --prompt Hi --temperature 0.7 --top_k 5 --stats";
    let Ok(Command::Generate(generate, _)) = run(line, &[]) else {
        panic!()
    };
    assert_eq!(
        (
            generate.max_new_tokens,
            generate.temperature,
            generate.top_k
        ),
        (64, Some(0.7), Some(5))
    );
    assert!(refusal("generate m --prompt Hi").contains("initial_peers"));
    let Ok(Command::Demo(demo, _)) = run("demo --keep", &[]) else {
        panic!()
    };
    assert!(demo.keep && demo.prompt.is_none());
    let Ok(Command::Status(status)) = run("status --json", &[("XDG_RUNTIME_DIR", "/x")]) else {
        panic!()
    };
    assert!(status.json && status.runtime_dir == std::path::Path::new("/x/sepal"));
}

#[test]
fn every_role_has_its_hidden_command() {
    for role in [Role::Netd, Role::Worker, Role::Prepare] {
        let Ok(Command::Role {
            role: read,
            bootstrap: 7,
        }) = run(&format!("{} --bootstrap 7", role.name()), &[])
        else {
            panic!("{}", role.name())
        };
        assert_eq!(read, role);
    }
}

#[test]
fn help_is_complete_and_names_the_exit_codes() {
    let help = refusal("serve --help");
    for text in [
        "Exit codes:",
        "--block_indices",
        "--num_handlers",
        "--drain_timeout",
        "--arena_size",
    ] {
        assert!(help.contains(text), "{text}");
    }
    assert!(!help.contains("inject_fault"));
}

/// A folder with one file of settings.
fn folder_with(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

fn show(line: &str, env: &[(&str, &str)]) -> String {
    match run(&format!("config {line}"), env) {
        Ok(Command::ShowConfig(text)) => text,
        other => panic!("{line}: {other:?}"),
    }
}

/// The line of `text` about a setting, with single spaces.
fn line_of(text: &str, name: &str) -> String {
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{name} ")));
    let words: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
    words.join(" ")
}

#[test]
fn a_flag_goes_before_the_environment_before_the_file_before_the_default() {
    let (_folder, file) = folder_with(
        "settings.toml",
        "update_period = 50\nrequest_timeout = 51\nsession_timeout = 52\nnew_swarm = true\nmodel = 'm'\n",
    );
    let env = [
        ("SEPAL_UPDATE_PERIOD", "40"),
        ("SEPAL_REQUEST_TIMEOUT", "41"),
        (
            "SEPAL_HOST_MADDRS",
            "/ip4/127.0.0.1/tcp/1 /ip4/127.0.0.1/tcp/2",
        ),
    ];
    let line = format!("serve --config {} --update-period 30", file.display());
    let Ok(Command::Serve { config, notes }) = run(&line, &env) else {
        panic!()
    };
    let netd = &config.netd;
    let seconds = [
        netd.update_period,
        netd.request_timeout,
        netd.session_timeout,
        netd.step_timeout,
    ];
    assert_eq!(seconds.map(|time| time.as_secs()), [30, 41, 52, 300]);
    assert_eq!((netd.initial_peers.len(), netd.host_maddrs.len()), (0, 2));
    assert_eq!(config.prepare.model, "m");
    assert!(notes[0].contains("settings.toml"), "{notes:?}");
}

#[test]
fn config_shows_each_setting_and_where_it_comes_from_and_reads_it_back() {
    let (_folder, file) = folder_with(
        "settings.toml",
        "step_timeout = 7\nannounce_maddrs = ['/ip4/1.2.3.4/tcp/5']\n",
    );
    let env = [("SEPAL_PUBLIC_NAME", "a \"name\" \\"), ("HOME", "/h")];
    let text = show(&format!("m --config {} --port 31330", file.display()), &env);
    for (name, expected) in [
        ("model", "model = \"m\" # flag".to_owned()),
        ("port", "port = 31330 # flag".to_owned()),
        (
            "public_name",
            r#"public_name = "a \"name\" \\" # SEPAL_PUBLIC_NAME"#.to_owned(),
        ),
        (
            "step_timeout",
            format!("step_timeout = 7 # {}", file.display()),
        ),
        ("update_period", "update_period = 120 # default".to_owned()),
        ("expiration", "expiration = 240 # default".to_owned()),
        ("new_swarm", "new_swarm = false # default".to_owned()),
        (
            "cache_dir",
            "cache_dir = \"/h/.cache/sepal\" # default".to_owned(),
        ),
        (
            "announce_maddrs",
            format!(
                "announce_maddrs = [\"/ip4/1.2.3.4/tcp/5\"] # {}",
                file.display()
            ),
        ),
    ] {
        assert_eq!(line_of(&text, name), expected);
    }
    let without = text.replace("\nhost_maddrs", "\n# host_maddrs");
    let (_folder, again) = folder_with("again.toml", &without);
    let shown_again = show(&format!("--config {}", again.display()), &[]);
    for name in [
        "model",
        "port",
        "public_name",
        "step_timeout",
        "expiration",
        "cache_dir",
    ] {
        let value = |text: &str| line_of(text, name).split(" # ").next().map(str::to_owned);
        assert_eq!(value(&shown_again), value(&text), "{name}");
    }
    let secret = show("m --token hf_secret", &[]);
    assert!(
        !secret.contains("hf_secret") && secret.contains("token is set"),
        "{secret}"
    );
}

#[test]
fn a_setting_yields_to_a_higher_one_that_excludes_it() {
    let (_folder, file) = folder_with(
        "s.toml",
        "initial_peers = ['/ip4/1.2.3.4/tcp/5']\nnum_blocks = 2\nmodel = 'other'\nport = 9\n",
    );
    let line = format!(
        "--config {} --block_indices 0:1 --new_swarm",
        file.display()
    );
    let config = serve(&format!("m {line} --host_maddrs /ip4/127.0.0.1/tcp/0"));
    assert_eq!(
        config.netd.span,
        SpanChoice::Fixed(Span::new(0, 1).unwrap())
    );
    assert!(config.netd.initial_peers.is_empty());
    assert_eq!(config.netd.host_maddrs, ["/ip4/127.0.0.1/tcp/0"]);
    assert_eq!(config.prepare.model, "m");
    let swallowed = format!(
        "--config {} --initial_peers /ip4/1.2.3.4/tcp/7 mine",
        file.display()
    );
    assert_eq!(serve(&swallowed).prepare.model, "mine");
}

#[test]
fn a_wrong_value_is_refused_with_the_place_it_comes_from() {
    let refused = |line: &str, env: &[(&str, &str)]| run(line, env).expect_err(line);
    let error = refused("serve m", &[("SEPAL_PORT", "high")]);
    assert!(
        error.contains("high") && error.contains("port is set by SEPAL_PORT"),
        "{error}"
    );
    let error = refused("serve m", &[("SEPAL_DHT_PREFIX", "a.b")]);
    assert!(
        error.contains("a.b") && error.contains("SEPAL_DHT_PREFIX"),
        "{error}"
    );
    let error = refused("serve m", &[("SEPAL_NEW_SWARM", "perhaps")]);
    assert!(
        error.contains("perhaps") && error.contains("true or false"),
        "{error}"
    );
    let (_folder, file) = folder_with("s.toml", "num_bloks = 2\n");
    let error = refused(&format!("serve m --config {}", file.display()), &[]);
    assert!(
        error.contains("s.toml") && error.contains("num_bloks"),
        "{error}"
    );
    let (_folder, file) = folder_with("s.toml", "num_blocks = 2\nblock_indices = '0:2'\n");
    let error = refused(&format!("serve m --config {}", file.display()), &[]);
    assert!(error.contains("cannot be used with"), "{error}");
}

#[test]
fn config_yml_of_the_working_folder_is_read_as_by_petals() {
    let (folder, _) = folder_with(
        "config.yml",
        "# ours\nnum_blocks: 3\ninitial_peers: [/ip4/1.2.3.4/tcp/5]\nnew-swarm: false\n",
    );
    let args = ["sepal", "serve", "m"].map(OsString::from);
    let Ok(Command::Serve { config, .. }) = parse_in(folder.path(), args, &|_| None) else {
        panic!()
    };
    assert_eq!(config.netd.span, SpanChoice::Count(3));
    assert_eq!(config.netd.initial_peers, ["/ip4/1.2.3.4/tcp/5"]);
}

#[test]
fn switches_of_the_environment_go_on_and_off() {
    for (text, on) in [("true", true), ("1", true), ("off", false), ("No", false)] {
        let Ok(Command::Serve { config, .. }) = run("serve m", &[("SEPAL_NEW_SWARM", text)]) else {
            panic!("{text}")
        };
        assert_eq!(config.netd.initial_peers.is_empty(), on, "{text}");
    }
}

#[test]
fn the_hub_is_asked_as_the_flags_and_its_own_variables_say() {
    let hub = |line: &str, env: &[(&str, &str)]| match run(&format!("serve m {line}"), env) {
        Ok(Command::Serve { config, .. }) => config.prepare.hub.clone(),
        other => panic!("{line}: {other:?}"),
    };
    let token =
        |hub: &shared::config::HubConfig| hub.token.as_ref().map(|token| token.reveal().to_owned());
    assert_eq!(hub("", &[]), shared::config::HubConfig::default());
    let given = hub(
        "--token a --revision v1.0 --max_disk_space 1.5GB --offline",
        &[("HF_TOKEN", "b")],
    );
    assert_eq!((token(&given), given.offline), (Some("a".into()), true));
    assert_eq!(
        (given.revision.as_deref(), given.max_disk_bytes),
        (Some("v1.0"), Some(1_500_000_000))
    );
    assert!(!format!("{given:?}").contains("\"a\""));
    let env = [
        ("HF_TOKEN", "b"),
        ("HF_HUB_OFFLINE", "1"),
        ("HF_ENDPOINT", "http://localhost:1"),
    ];
    let given = hub("", &env);
    assert_eq!((token(&given), given.offline), (Some("b".into()), true));
    assert_eq!(given.endpoint.as_deref(), Some("http://localhost:1"));
    let (folder, _) = folder_with("token", "saved\n");
    let home = [
        ("HF_HOME", folder.path().to_str().unwrap()),
        ("HF_TOKEN", "b"),
    ];
    assert_eq!(token(&hub("--use_auth_token", &home)), Some("saved".into()));
    assert_eq!(token(&hub("", &home[..1])), Some("saved".into()));
}

#[test]
fn throughput_is_kept_measured_again_or_only_measured() {
    let config = serve("m --new_swarm --cache_dir /c --network_mbps 1000");
    assert_eq!(
        (config.netd.throughput, config.worker.measure_anew),
        (Throughput::Measure, false)
    );
    assert_eq!(
        (config.netd.link_bits_per_s, config.worker.rates_dir),
        (Some(1e9), Some("/c".into()))
    );
    assert_eq!(config.netd.rates_dir, Some("/c".into()));
    let config = serve("m --throughput eval");
    assert_eq!(
        (config.netd.throughput, config.worker.measure_anew),
        (Throughput::Anew, true)
    );
    assert_eq!(config.netd.initial_peers.len(), 6);
    let config = serve("m --throughput dry_run");
    assert_eq!(
        (config.netd.throughput, config.worker.measure_anew),
        (Throughput::DryRun, true)
    );
    assert!(
        config.netd.initial_peers.is_empty(),
        "nobody sees a dry run"
    );
    let config = serve("m --throughput dry_run --initial_peers /ip4/1.2.3.4/tcp/1");
    assert_eq!(
        config.netd.initial_peers.len(),
        1,
        "it may measure with them"
    );
    assert_eq!(config.netd.host_maddrs, ["/ip4/127.0.0.1/tcp/0"]);
    assert_eq!(
        serve("m --throughput 2.5").netd.throughput,
        Throughput::Fixed(2.5)
    );
}

#[test]
fn the_network_is_measured_unless_the_operator_knows_better() {
    let netd = |line: &str| serve(&format!("m --new_swarm {line}")).netd;
    let default = netd("");
    assert_eq!(
        (default.link_bits_per_s, default.network_test),
        (None, None)
    );
    let down = "https://speed.example/down?bytes=9";
    let both = |up: &str| Some((down.to_owned(), up.to_owned()));
    assert_eq!(
        netd(&format!("--network_test_url {down}")).network_test,
        both(down)
    );
    let up = "http://speed.example/up";
    assert_eq!(
        netd(&format!("--network_test_url {down} {up}")).network_test,
        both(up)
    );
    for bad in [
        "--network_test_url speed.example",
        "--network_test_url https://",
        "--network_mbps 0",
    ] {
        let error = run(&format!("serve m --new_swarm {bad}"), &[]).unwrap_err();
        assert!(error.contains("--network_"), "{bad}: {error}");
    }
    assert!(
        run(
            &format!("serve m --network_mbps 5 --network_test_url {down}"),
            &[]
        )
        .is_err()
    );

    let folder = tempfile::tempdir().unwrap();
    let shown = |more: &str| {
        let line = format!(
            "config m --new_swarm --cache_dir {} {more}",
            folder.path().display()
        );
        match run(&line, &[]) {
            Ok(Command::ShowConfig(text)) => text,
            other => panic!("{other:?}"),
        }
    };
    let link = Link::of_system();
    let rate =
        |bits_per_s, source| NetworkRate::of(None, Some(NetworkRate { bits_per_s, source }), &link);
    let says = |text: String, rate: NetworkRate| {
        let expected = format!(
            "# network_mbps is not set; in force: {} ({})",
            rate.mbps(),
            rate.source
        );
        assert!(text.contains(&expected), "{expected}: {text}");
    };
    says(shown(""), NetworkRate::of(None, None, &link));
    let kept = rate(5e6, RateSource::Peers);
    RateFile::new(folder.path()).keep(&link, kept).unwrap();
    says(shown(""), kept);
    says(
        shown("--throughput eval"),
        NetworkRate::of(None, None, &link),
    );
    assert!(shown("--network_mbps 7").contains("network_mbps = 7 "));
    assert!(shown("--throughput 1").contains("network_mbps is not set; not needed"));
}

#[test]
fn the_monitor_is_asked_in_the_public_swarm_or_when_named() {
    let monitor = |line: &str| serve(line).netd.monitor;
    let public = Some("https://health.petals.dev".to_owned());
    assert_eq!(monitor("m"), public);
    assert_eq!(monitor("m --skip_reachability_check"), None);
    assert_eq!(monitor("m --new_swarm"), None);
    assert_eq!(monitor("m --initial_peers /ip4/1.2.3.4/tcp/1"), None);
    let own = "http://127.0.0.1:8080";
    assert_eq!(
        monitor(&format!("m --new_swarm --reachability_monitor {own}")).as_deref(),
        Some(own)
    );
    assert_eq!(
        monitor(&format!(
            "m --skip_reachability_check --reachability_monitor {own}"
        )),
        None
    );
    assert!(run("serve m --reachability_monitor health.petals.dev", &[]).is_err());
}

#[test]
fn the_router_is_asked_unless_told_otherwise_and_statistics_are_told_when_asked_for() {
    let netd = serve("m --new_swarm").netd;
    assert!(netd.use_upnp && netd.stats_report_interval.is_none());
    let netd = serve("m --new_swarm --no_upnp --stats_report_interval 1.5").netd;
    assert!(!netd.use_upnp);
    assert_eq!(
        netd.stats_report_interval,
        Some(Duration::from_millis(1500))
    );
    assert!(run("serve m --stats_report_interval 0", &[]).is_err());
}

#[test]
fn devices_for_tensor_parallelism_share_the_span() {
    let Ok(Command::Serve { config, notes }) =
        run("serve m --tensor_parallel_devices cpu cpu", &[])
    else {
        panic!()
    };
    assert_eq!(config.devices, [Device::Cpu, Device::Cpu]);
    assert!(
        notes
            .iter()
            .any(|note| note.contains("blocks are not split")),
        "{notes:?}"
    );
}

#[test]
fn flags_of_dht_without_effect_are_noted() {
    let Ok(Command::Dht { notes, .. }) = run("dht --use_ipfs", &[]) else {
        panic!()
    };
    assert!(
        notes[0].starts_with("--use_ipfs has no effect"),
        "{notes:?}"
    );
}

#[test]
fn every_flag_of_petals_is_in_the_table_with_a_test_that_exists() {
    const RUN_SERVER: &str = "converted_model_name_or_path config public_name token use_auth_token num_blocks block_indices \
         dht_prefix port public_ip no_auto_relay host_maddrs announce_maddrs daemon_startup_timeout compression num_handlers \
         prefetch_batches sender_threads inference_max_length min_batch_size max_batch_size max_chunk_size_bytes \
         attn_cache_tokens cache_dir max_disk_space device torch_dtype max_alloc_timeout revision throughput update_period \
         expiration request_timeout session_timeout step_timeout initial_peers new_swarm increase_file_limit \
         stats_report_interval custom_module_path identity_path balance_quality mean_balance_check_period quant_type \
         tensor_parallel_devices skip_reachability_check adapters";
    const RUN_DHT: &str = "initial_peers host_maddrs announce_maddrs use_ipfs identity_path no_relay use_auto_relay refresh_period";
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let table = std::fs::read_to_string(root.join("supervisor/FLAGS.md")).unwrap();
    let (server, dht) = table.split_once("## run_dht").unwrap();
    for (name, flags, rows) in [("serve", RUN_SERVER, server), ("dht", RUN_DHT, dht)] {
        let command = Sepal::command();
        let command = command.find_subcommand(name).unwrap();
        for flag in flags.split_whitespace() {
            let known = command
                .get_arguments()
                .any(|arg| arg.get_long() == Some(flag));
            assert!(known, "sepal {name} does not know --{flag}");
            let named = |row: &&str| {
                row.split(['`', ' ', ','])
                    .any(|word| word == format!("--{flag}"))
            };
            let row = rows
                .lines()
                .find(|row| row.starts_with("| `") && named(row));
            let row = row.unwrap_or_else(|| panic!("FLAGS.md has no row for --{flag} of {name}"));
            let test: Vec<&str> = row.rsplit('|').nth(1).unwrap().split('`').collect();
            let [_, file, _, function, _] = test[..] else {
                panic!("{row}")
            };
            let text = std::fs::read_to_string(root.join(file))
                .unwrap_or_else(|error| panic!("{file}: {error}"));
            assert!(text.contains(&format!("fn {function}(")), "{row}");
        }
    }
}

#[test]
fn memory_and_the_share_of_one_client_can_be_limited() {
    let config = serve("m --max_kv_share 0.5 --max_memory 4GiB");
    assert_eq!(config.netd.max_kv_share, 0.5);
    assert_eq!(config.max_memory_bytes, Some(4 << 30));
    let default = serve("m");
    assert_eq!(default.netd.max_kv_share, 1.0);
    assert_eq!(default.max_memory_bytes, None);
    for bad in ["0", "1.5", "nan", "-1"] {
        let args = format!("serve m --max_kv_share={bad}");
        assert!(run(&args, &[]).is_err(), "{bad}");
    }
}
