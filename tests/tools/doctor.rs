//! `sepal doctor` from outside: what is wrong with a machine or its settings becomes a problem with
//! advice and an exit code, and the bundle for a bug report has no secrets.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::demo::demo_model;
use crate::harness::{SEPAL, Sepal};
use flate2::read::GzDecoder;
use serde_json::Value;

/// How a run of the doctor ended.
struct Checkup {
    code: i32,
    text: String,
    errors: String,
}

impl Checkup {
    /// Runs `sepal doctor ARGS...` with the folders of a test.
    fn run(dir: &Path, args: &[&str]) -> Checkup {
        Checkup::with(dir, args, &[])
    }

    /// The same with variables.
    fn with(dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Checkup {
        let out = Command::new(SEPAL)
            .arg("doctor")
            .args(args)
            .current_dir(dir)
            .env("HOME", dir)
            .env("XDG_RUNTIME_DIR", dir)
            .env("SEPAL_CACHE", dir.join("cache"))
            .env_remove("HF_TOKEN")
            .env_remove("HF_ENDPOINT")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .output()
            .expect("run sepal doctor");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        let code = out.status.code().expect("an exit code");
        Checkup { code, text: text(out.stdout), errors: text(out.stderr) }
    }

    /// The line of a check.
    fn line(&self, check: &str) -> &str {
        let of_check = |line: &&str| line.get(9..).is_some_and(|rest| rest.starts_with(check));
        let line = self.text.lines().find(of_check);
        line.unwrap_or_else(|| panic!("no {check}:\n{}{}", self.text, self.errors))
    }

    /// Checks that nothing is wrong but what the machine of the test may lack.
    fn is_well(&self) {
        const OF_THE_MACHINE: [&str; 6] =
            ["kernel", "sandbox", "limits", "shared memory", "memory", "tcp"];
        let problems = self.problems();
        let is_of_machine =
            |line: &&str| OF_THE_MACHINE.iter().any(|check| line[9..].starts_with(check));
        assert!(problems.iter().all(is_of_machine), "{}{}", self.text, self.errors);
        assert_eq!(self.code, i32::from(!problems.is_empty()), "{}{}", self.text, self.errors);
    }

    /// The lines of problems, as many as the last line says.
    fn problems(&self) -> Vec<&str> {
        let lines = self.text.lines().filter(|line| line.starts_with("problem  "));
        let problems: Vec<_> = lines.collect();
        let last = self.text.lines().last().unwrap_or_default();
        assert!(last.starts_with(&format!("{} problem", problems.len())), "{}", self.text);
        problems
    }

    /// Whether the line of a check has a status and these words.
    fn is(&self, check: &str, status: &str, words: &[&str]) {
        let line = self.line(check);
        assert!(line.starts_with(status), "{line}");
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
        if status == "problem" {
            assert_eq!(self.code, 1, "{}", self.text);
        }
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("temporary folder")
}

/// The demo model as an argument.
fn model() -> String {
    demo_model().to_str().expect("UTF-8").to_owned()
}

/// Flags of a server on this machine.
const LOCAL: [&str; 4] = ["--device", "cpu", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"];

/// Those, without anything that needs a network.
const OFFLINE: [&str; 5] =
    ["--offline", "--device", "cpu", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"];

#[test]
fn a_machine_that_serves_has_no_problem() {
    let (dir, model) = (folder(), model());
    let well = Checkup::run(dir.path(), &[&[&*model], &OFFLINE[..]].concat());
    well.is_well();
    well.is("model", "ok", &["llama with 8 blocks"]);
    well.is("devices", "ok", &["cpu serve"]);
    well.is("cache folder", "ok", &["will be made"]);
    well.is("settings", "ok", &["no file"]);
    for check in ["swarm", "reachability", "router", "hub", "clock"] {
        well.is(check, "skipped", &[]);
    }
    assert!(!dir.path().join("cache").exists(), "looking changes nothing");

    let json = Checkup::run(dir.path(), &[&["--json", &model], &OFFLINE[..]].concat());
    let findings: Value = serde_json::from_str(&json.text).expect("JSON");
    let findings = findings.as_array().expect("a list");
    assert_eq!(findings.len(), well.text.lines().count() - 1);
    let port = findings.iter().find(|finding| finding["check"] == "port").unwrap();
    assert_eq!((&port["status"], &port["advice"]), (&"ok".into(), &Value::Null));
}

#[test]
fn a_port_in_use_and_a_cache_folder_that_is_a_file_are_problems() {
    let dir = folder();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let addr = format!("/ip4/127.0.0.1/tcp/{port}");
    fs::write(dir.path().join("file"), "").unwrap();
    let cache = dir.path().join("file/cache");
    let cache = cache.to_str().unwrap();
    let args = ["--offline", "--device", "cpu", "--host_maddrs", &addr, "--cache_dir", cache];
    let ill = Checkup::run(dir.path(), &args);
    let pid = format!("pid {}", std::process::id());
    ill.is("port", "problem", &[&port.to_string(), &pid, "--port"]);
    ill.is("cache folder", "problem", &["file is no folder", "--cache_dir"]);
    assert!(ill.problems().len() >= 2, "{}", ill.text);
}

#[test]
fn a_model_that_cannot_be_served_is_a_problem() {
    let dir = folder();
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let of = |model: &str| Checkup::run(dir.path(), &[&[model], &OFFLINE[..]].concat());
    of(empty.to_str().unwrap()).is("model", "problem", &["config.json cannot be read"]);
    of("/nonexistent/model").is("model", "problem", &["/nonexistent/model"]);
    of("org/name").is("model", "skipped", &["org/name"]);
}

#[test]
fn a_broken_file_of_settings_is_a_problem_and_the_rest_is_checked() {
    let (dir, model) = (folder(), model());
    let file = dir.path().join("server.toml");
    let path = file.to_str().unwrap();
    for (text, words) in [
        (
            "port = 5\nnum_bloks = 2\n",
            &["server.toml:2", "num_bloks", "did you mean num_blocks?"][..],
        ),
        ("port = \n", &["server.toml", "line 1"]),
        ("quant_type = \"nf5\"\n", &["nf5", "server.toml:1"]),
        ("update_period = \"often\"\n", &["often", "server.toml:1"]),
        ("bundle = \"x\"\n", &["server.toml:1", "bundle"]),
    ] {
        fs::write(&file, text).unwrap();
        let ill = Checkup::run(dir.path(), &[&[&*model, "--config", path], &OFFLINE[..]].concat());
        ill.is("settings", "problem", words);
        ill.is("model", "ok", &["llama"]);
    }
    fs::write(&file, "public_name = \"x\"\n").unwrap();
    let well = Checkup::run(dir.path(), &[&[&*model, "--config", path], &OFFLINE[..]].concat());
    well.is("settings", "ok", &["server.toml"]);
    let flags = Checkup::run(dir.path(), &["--port", "high"]);
    assert_eq!(flags.code, 2, "{}", flags.errors);
    assert!(flags.errors.contains("high"), "{}", flags.errors);
}

#[test]
fn a_running_server_has_the_name_the_identity_and_the_swarm() {
    let dir = folder();
    let identity = dir.path().join("identity");
    let identity = identity.to_str().unwrap();
    let more = ["--instance", "llama", "--identity_path", identity, "--no_upnp"];
    let server = Sepal::serve(&demo_model(), "demo", &more);
    let model = model();
    let (always, addr) = ([&[&*model, "--no_upnp"], &LOCAL[..]].concat(), server.addr());
    let of = |more: &[&str]| {
        Checkup::run(server.dir.path(), &[&always[..], &["--initial_peers", &addr], more].concat())
    };

    let same = of(&["--instance", "llama"]);
    let pid = format!("supervisor pid {}", server.pid());
    same.is("instances", "problem", &["instance llama runs already", &pid]);
    let twin = of(&["--instance", "other", "--identity_path", identity]);
    twin.is("instances", "problem", &["identity file of its own"]);

    let beside = of(&[]);
    beside.is_well();
    beside.is("instances", "ok", &["running beside: llama"]);
    beside.is("swarm", "ok", &["connected to 1 peers"]);
    beside.is("reachability", "ok", &["peers can dial this machine"]);
    beside.is("clock", "ok", &["of 1 peers"]);
    beside.is("router", "skipped", &[]);
    server.wait_line("checked the reachability of a peer", 1);
    assert_eq!(server.terminate().code(), Some(0));

    let gone = Checkup::run(dir.path(), &[&always[..], &["--initial_peers", &addr]].concat());
    gone.is("swarm", "problem", &["no initial peer answers", "--initial_peers"]);
}

/// A Hub that answers every request with a status and a date.
fn hub(status: &'static str, date: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = move |mut stream: TcpStream| {
        let mut request = [0; 8192];
        let _ = stream.read(&mut request);
        let head = format!(
            "HTTP/1.1 {status}\r\nDate: {date}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        let _ = stream.write_all(head.as_bytes());
    };
    std::thread::spawn(move || listener.incoming().flatten().for_each(answer));
    url
}

#[test]
fn a_hub_that_refuses_the_token_and_tells_another_time_is_a_problem() {
    let dir = folder();
    let url = hub("401 Unauthorized", "Sun, 06 Nov 1994 08:49:37 GMT");
    let args = [&["org/name", "--new_swarm", "--no_upnp"], &LOCAL[..]].concat();
    let env = [("HF_ENDPOINT", &*url), ("HF_TOKEN", "hf_Refused0123456789")];
    let ill = Checkup::with(dir.path(), &args, &env);
    ill.is("hub", "problem", &["refuses the token", "settings/tokens"]);
    ill.is("model", "problem", &["org/name", "--token"]);
    ill.is("clock", "problem", &["ahead of that of the Hub", "timedatectl"]);
    ill.is("swarm", "ok", &["new swarm"]);
    assert!(!ill.text.contains("hf_Refused"), "{}", ill.text);
    let away = Checkup::with(dir.path(), &args, &[("HF_ENDPOINT", "http://127.0.0.1:1")]);
    away.is("hub", "problem", &["does not answer", "HF_ENDPOINT"]);
}

#[test]
fn without_a_model_or_peers_no_swarm_is_dialled() {
    let dir = folder();
    let url = hub("200 OK", "Sun, 06 Nov 1994 08:49:37 GMT");
    let checkup = Checkup::with(dir.path(), &["--device", "cpu"], &[("HF_ENDPOINT", &url)]);
    checkup.is("swarm", "skipped", &["--initial_peers"]);
    checkup.is("hub", "ok", &["no token"]);
}

/// The files of a bundle with their texts.
fn unpack(bundle: &Path) -> Vec<(String, String)> {
    let mut archive = tar::Archive::new(GzDecoder::new(File::open(bundle).expect("the bundle")));
    let mut files = Vec::new();
    for entry in archive.entries().expect("entries") {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("a name").to_str().expect("UTF-8").to_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).expect("a text");
        files.push((name, text));
    }
    files
}

const TOKEN: &str = "hf_Planted0123456789abcdef";

/// No file of a bundle has the token.
fn assert_no_secret(files: &[(String, String)]) {
    let leak = files.iter().find(|(_, text)| text.contains(TOKEN) || text.contains("sesame"));
    assert!(leak.is_none(), "{leak:?}");
}

#[test]
fn a_bundle_has_what_a_report_needs_and_no_secret() {
    let server = Sepal::serve(&demo_model(), "demo", &["--instance", "llama", "--no_upnp"]);
    let dir = server.dir.path();
    let (config, log, bundle) = (dir.join("s.toml"), dir.join("log"), dir.join("report.tar.gz"));
    fs::write(&config, format!("token = \"{TOKEN}\"\npublic_name = \"ours\"\n")).unwrap();
    let lines = format!("worker restarted\nasked with Bearer {TOKEN}\nPASSWORD=sesame\n");
    fs::write(&log, lines).unwrap();
    let model = model();
    let [config, log, path] = [&config, &log, &bundle].map(|path| path.to_str().unwrap());
    let args = [&*model, "--config", config, "--bundle", path, "--log_file", log];
    let well = Checkup::run(dir, &[&args, &OFFLINE[..]].concat());
    well.is_well();
    assert!(well.errors.contains("look through it"), "{}", well.errors);

    let files = unpack(&bundle);
    let text = |name: &str| {
        let file = files.iter().find(|(path, _)| path == &format!("sepal-report/{name}"));
        &file.unwrap_or_else(|| panic!("no {name} in {files:?}")).1
    };
    assert!(text("doctor.txt").contains("llama with 8 blocks"));
    assert!(serde_json::from_str::<Value>(text("doctor.json")).unwrap()[0]["check"] == "settings");
    assert!(text("status.json").contains("\"instance\": \"llama\""), "{}", text("status.json"));
    assert!(text("settings.toml").contains("public_name = \"ours\""));
    assert!(text("config-file.txt").contains("public_name = \"ours\""));
    assert!(text("log.txt").contains("worker restarted"));
    assert!(text("version.txt").starts_with("sepal "));
    assert_no_secret(&files);
    assert_eq!(fs::metadata(&bundle).unwrap().permissions().mode() & 0o777, 0o600);

    let before = fs::read(&bundle).unwrap();
    let again = Checkup::run(dir, &[&args, &OFFLINE[..]].concat());
    assert_eq!((again.code, again.text.as_str()), (2, ""), "nothing is checked");
    assert!(again.errors.contains("report.tar.gz exists already"), "{}", again.errors);
    assert_eq!(fs::read(&bundle).unwrap(), before);
}

#[test]
fn a_bundle_with_a_broken_file_of_settings_has_no_secret_either() {
    let dir = folder();
    let dir = dir.path();
    fs::write(dir.join("s.toml"), format!("token = \"{TOKEN}\"\nprot = 5\n")).unwrap();
    fs::write(dir.join("log"), format!("{TOKEN}\n")).unwrap();
    let args = ["--config", "s.toml", "--bundle", "r.tar.gz", "--log_file", "log"];
    let ill = Checkup::run(dir, &[&args, &OFFLINE[..]].concat());
    ill.is("settings", "problem", &["did you mean port?"]);
    let files = unpack(&dir.join("r.tar.gz"));
    assert!(
        files
            .iter()
            .any(|(name, text)| name.ends_with("config-file.txt") && text.contains("prot = 5"))
    );
    assert_no_secret(&files);

    let nowhere = Checkup::run(dir, &[&["--bundle", "none/r.tar.gz"], &OFFLINE[..]].concat());
    assert_eq!(nowhere.code, 1);
    let said = nowhere.errors.contains("cannot write --bundle none/r.tar.gz");
    assert!(said, "{}", nowhere.errors);
}
