//! What is asked of the network: rates, the hub, the monitor, the router.

use super::sources::folder_with;
use super::*;

#[test]
fn the_hub_is_asked_as_the_flags_and_its_own_variables_say() {
    let hub = |line: &str, env: &[(&str, &str)]| match run(&format!("serve m {line}"), env) {
        Ok(Command::Serve { config, .. }) => config.prepare.hub.clone(),
        other => panic!("{line}: {other:?}"),
    };
    let token =
        |hub: &shared::config::HubConfig| hub.token.as_ref().map(|token| token.reveal().to_owned());
    assert_eq!(hub("", &[]), shared::config::HubConfig::default());
    let given =
        hub("--token a --revision v1.0 --max_disk_space 1.5GB --offline", &[("HF_TOKEN", "b")]);
    assert_eq!((token(&given), given.offline), (Some("a".into()), true));
    assert_eq!(
        (given.revision.as_deref(), given.max_disk_bytes),
        (Some("v1.0"), Some(1_500_000_000))
    );
    assert!(!format!("{given:?}").contains("\"a\""));
    let env = [("HF_TOKEN", "b"), ("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://localhost:1")];
    let given = hub("", &env);
    assert_eq!((token(&given), given.offline), (Some("b".into()), true));
    assert_eq!(given.endpoint.as_deref(), Some("http://localhost:1"));
    let (folder, _) = folder_with("token", "saved\n");
    let home = [("HF_HOME", folder.path().to_str().unwrap()), ("HF_TOKEN", "b")];
    assert_eq!(token(&hub("--use_auth_token", &home)), Some("saved".into()));
    assert_eq!(token(&hub("", &home[..1])), Some("saved".into()));
}

#[test]
fn throughput_is_kept_measured_again_or_only_measured() {
    let config = serve("m --new_swarm --cache_dir /c --network_mbps 1000");
    assert_eq!((config.netd.throughput, config.worker.measure_anew), (Throughput::Measure, false));
    assert_eq!(
        (config.netd.link_bits_per_s, config.worker.rates_dir),
        (Some(1e9), Some("/c/rates".into()))
    );
    assert_eq!(config.netd.rates_dir, Some("/c/rates".into()));
    let config = serve("m --throughput eval");
    assert_eq!((config.netd.throughput, config.worker.measure_anew), (Throughput::Anew, true));
    assert_eq!(config.netd.initial_peers.len(), 6);
    let config = serve("m --throughput dry_run");
    assert_eq!((config.netd.throughput, config.worker.measure_anew), (Throughput::DryRun, true));
    assert!(config.netd.initial_peers.is_empty(), "nobody sees a dry run");
    let config = serve("m --throughput dry_run --initial_peers /ip4/1.2.3.4/tcp/1");
    assert_eq!(config.netd.initial_peers.len(), 1, "it may measure with them");
    assert_eq!(config.netd.host_maddrs, ["/ip4/127.0.0.1/tcp/0"]);
    assert_eq!(serve("m --throughput 2.5").netd.throughput, Throughput::Fixed(2.5));
}

#[test]
fn the_network_is_measured_unless_the_operator_knows_better() {
    let netd = |line: &str| serve(&format!("m --new_swarm {line}")).netd;
    let default = netd("");
    assert_eq!((default.link_bits_per_s, default.network_test), (None, None));
    let down = "https://speed.example/down?bytes=9";
    let both = |up: &str| Some((down.to_owned(), up.to_owned()));
    assert_eq!(netd(&format!("--network_test_url {down}")).network_test, both(down));
    let up = "http://speed.example/up";
    assert_eq!(netd(&format!("--network_test_url {down} {up}")).network_test, both(up));
    for bad in
        ["--network_test_url speed.example", "--network_test_url https://", "--network_mbps 0"]
    {
        let error = run(&format!("serve m --new_swarm {bad}"), &[]).unwrap_err();
        assert!(error.contains("--network_"), "{bad}: {error}");
    }
    assert!(run(&format!("serve m --network_mbps 5 --network_test_url {down}"), &[]).is_err());
    assert_eq!((default.max_upload_bits_per_s, default.relay_bits_per_s), (None, None));
    assert_eq!(netd("--max_upload_mbps 2.5").max_upload_bits_per_s, Some(2.5e6));
    assert_eq!(netd("--relay_mbps 2.5").relay_bits_per_s, Some(2.5e6));
    let dht = |line: &str| match run(&format!("dht {line}"), &[]) {
        Ok(Command::Dht { config, .. }) => config.relay_bits_per_s,
        other => panic!("{line}: {other:?}"),
    };
    assert_eq!((dht(""), dht("--relay_mbps 2.5")), (100e6, 2.5e6));
    for bad in ["0", "-1", "nan", "inf", "1e12"] {
        for (command, flag) in
            [("serve m", "max_upload_mbps"), ("serve m", "relay_mbps"), ("dht", "relay_mbps")]
        {
            let error = run(&format!("{command} --{flag}={bad}"), &[]).unwrap_err();
            assert!(error.contains(&format!("for '--{flag} <MBPS>'")), "{bad}: {error}");
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let rates = folder.path().join("rates");
    std::fs::create_dir(&rates).unwrap();
    let shown = |more: &str| {
        let line = format!("config m --new_swarm --cache_dir {} {more}", folder.path().display());
        match run(&line, &[]) {
            Ok(Command::ShowConfig(text)) => text,
            other => panic!("{other:?}"),
        }
    };
    let link = NetworkLink::of_system();
    let rate = |bits_per_s, source| {
        network_rate::of(None, Some(NetworkRate { bits_per_s, source }), &link)
    };
    let says = |text: String, rate: NetworkRate| {
        let expected =
            format!("# network_mbps is not set; in force: {} ({})", rate.mbps(), rate.source);
        assert!(text.contains(&expected), "{expected}: {text}");
    };
    says(shown(""), network_rate::of(None, None, &link));
    let kept = rate(5e6, RateSource::Peers);
    RateFile::new(&rates).keep(&link, kept).unwrap();
    says(shown(""), kept);
    says(shown("--throughput eval"), network_rate::of(None, None, &link));
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
    assert_eq!(monitor(&format!("m --skip_reachability_check --reachability_monitor {own}")), None);
    assert!(run("serve m --reachability_monitor health.petals.dev", &[]).is_err());
}

#[test]
fn strangers_of_the_public_swarm_aim_no_dials_at_private_nets() {
    let dials = |line: &str| serve(line).netd.dials_private_nets;
    assert!(!dials("m"));
    assert!(dials("m --dial_private_nets on"));
    assert!(dials("m --new_swarm"));
    assert!(dials("m --initial_peers /ip4/1.2.3.4/tcp/1"));
    assert!(!dials("m --new_swarm --dial_private_nets off"));
    assert!(run("serve m --dial_private_nets maybe", &[]).is_err());
}

#[test]
fn the_router_is_asked_unless_told_otherwise_and_statistics_are_told_when_asked_for() {
    let netd = serve("m --new_swarm").netd;
    assert!(netd.use_upnp && netd.stats_report_interval.is_none());
    let netd = serve("m --new_swarm --no_upnp --stats_report_interval 1.5").netd;
    assert!(!netd.use_upnp);
    assert_eq!(netd.stats_report_interval, Some(Duration::from_millis(1500)));
    assert!(run("serve m --stats_report_interval 0", &[]).is_err());
}
