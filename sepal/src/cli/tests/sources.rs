//! Flags, environment and files together.

use super::*;

/// A folder with one file of settings.
pub(super) fn folder_with(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
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
    let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
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
        ("SEPAL_HOST_MADDRS", "/ip4/127.0.0.1/tcp/1 /ip4/127.0.0.1/tcp/2"),
    ];
    let line = format!("serve --config {} --update-period 30", file.display());
    let Ok(Command::Serve { config, notes }) = run(&line, &env) else { panic!() };
    let netd = &config.netd;
    let seconds =
        [netd.update_period, netd.request_timeout, netd.session_timeout, netd.step_timeout];
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
        ("public_name", r#"public_name = "a \"name\" \\" # SEPAL_PUBLIC_NAME"#.to_owned()),
        ("step_timeout", format!("step_timeout = 7 # {}:1", file.display())),
        ("update_period", "update_period = 120 # default".to_owned()),
        ("expiration", "expiration = 240 # default".to_owned()),
        ("new_swarm", "new_swarm = false # default".to_owned()),
        ("cache_dir", "cache_dir = \"/h/.cache/sepal\" # default".to_owned()),
        (
            "announce_maddrs",
            format!("announce_maddrs = [\"/ip4/1.2.3.4/tcp/5\"] # {}:2", file.display()),
        ),
    ] {
        assert_eq!(line_of(&text, name), expected);
    }
    let without = text.replace("\nhost_maddrs", "\n# host_maddrs");
    let (_folder, again) = folder_with("again.toml", &without);
    let shown_again = show(&format!("--config {}", again.display()), &[]);
    for name in ["model", "port", "public_name", "step_timeout", "expiration", "cache_dir"] {
        let value = |text: &str| line_of(text, name).split(" # ").next().map(str::to_owned);
        assert_eq!(value(&shown_again), value(&text), "{name}");
    }
    let secret = show("m --token hf_secret", &[]);
    assert!(!secret.contains("hf_secret") && secret.contains("token is set"), "{secret}");
}

#[test]
fn a_setting_yields_to_a_higher_one_that_excludes_it() {
    let (_folder, file) = folder_with(
        "s.toml",
        "initial_peers = ['/ip4/1.2.3.4/tcp/5']\nnum_blocks = 2\nmodel = 'other'\nport = 9\n",
    );
    let line = format!("--config {} --block_indices 0:1 --new_swarm", file.display());
    let config = serve(&format!("m {line} --host_maddrs /ip4/127.0.0.1/tcp/0"));
    assert_eq!(config.netd.span, SpanChoice::Fixed(Span::new(0, 1).unwrap()));
    assert!(config.netd.initial_peers.is_empty());
    assert_eq!(config.netd.host_maddrs, ["/ip4/127.0.0.1/tcp/0"]);
    assert_eq!(config.prepare.model, "m");
    let swallowed = format!("--config {} --initial_peers /ip4/1.2.3.4/tcp/7 mine", file.display());
    assert_eq!(serve(&swallowed).prepare.model, "mine");
}

#[test]
fn a_wrong_value_is_refused_with_the_place_it_comes_from() {
    let refused = |line: &str, env: &[(&str, &str)]| run(line, env).expect_err(line);
    let error = refused("serve m", &[("SEPAL_PORT", "high")]);
    assert!(error.contains("high") && error.contains("port is set by SEPAL_PORT"), "{error}");
    let error = refused("serve m", &[("SEPAL_DHT_PREFIX", "a.b")]);
    assert!(error.contains("a.b") && error.contains("SEPAL_DHT_PREFIX"), "{error}");
    let error = refused("serve m", &[("SEPAL_NEW_SWARM", "perhaps")]);
    assert!(error.contains("perhaps") && error.contains("true or false"), "{error}");
    let (_folder, file) = folder_with("s.toml", "num_bloks = 2\n");
    let error = refused(&format!("serve m --config {}", file.display()), &[]);
    assert!(error.contains("s.toml") && error.contains("num_bloks"), "{error}");
    let (_folder, file) = folder_with("s.toml", "num_blocks = 2\nblock_indices = '0:2'\n");
    let error = refused(&format!("serve m --config {}", file.display()), &[]);
    assert!(error.contains("cannot be used with"), "{error}");
}

#[test]
fn an_unknown_setting_is_named_with_its_line_and_the_nearest_one() {
    let refused = |name: &str, text: &str| {
        let (_folder, file) = folder_with(name, text);
        run(&format!("serve m --config {}", file.display()), &[]).expect_err(text)
    };
    for (name, text, expected) in [
        (
            "a.toml",
            "port = 1\n\nnum-bloks = 2\n",
            "a.toml:3: there is no setting \"num_bloks\"; did you mean num_blocks?",
        ),
        (
            "a.yml",
            "# ours\nNum_Blocks: 2\n",
            "a.yml:2: there is no setting \"Num_Blocks\"; did you mean num_blocks?",
        ),
        ("a.yml", "intial_peer: /ip4/1.2.3.4/tcp/5\n", "did you mean initial_peers?"),
        ("a.yml", "modle: gpt2\n", "did you mean model?"),
        (
            "a.yml",
            "colour: red\n",
            "a.yml:1: there is no setting \"colour\"; see sepal serve --help",
        ),
        (
            "a.yml",
            "config: b.yml\n",
            "a.yml:1: there is no setting \"config\"; it is for the command line alone",
        ),
        (
            "a.toml",
            "port = 1\nnew_swarm = \"perhaps\"\n",
            "a.toml:2: new_swarm is a switch; give true or false",
        ),
    ] {
        let error = refused(name, text);
        assert!(error.contains(expected), "{text:?}: {error}");
    }
    // Values that are wrong are named with their line too, whoever finds out.
    for (text, value, line) in [
        ("model = 'm'\nport = 99999\n", "99999", "port is set by"),
        ("model = 'm'\nnetwork_mbps = -3\n", "-3", "network_mbps is set by"),
        ("model = 'm'\nquant_type = 'nf5'\n", "nf5", "quant_type is set by"),
    ] {
        let error = refused("v.toml", text);
        let place = error.contains("v.toml:2");
        assert!(place && error.contains(value) && error.contains(line), "{text:?}: {error}");
    }
}

#[test]
fn config_yml_of_the_working_folder_is_read_as_by_petals() {
    let (folder, _) = folder_with(
        "config.yml",
        "# ours\nnum_blocks: 3\ninitial_peers: [/ip4/1.2.3.4/tcp/5]\nnew-swarm: false\n",
    );
    let args = ["sepal", "serve", "m"].map(OsString::from);
    let Ok(Command::Serve { config, .. }) = parse_in(folder.path(), args, no_env()) else {
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
