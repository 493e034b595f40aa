//! A program that hosts a server with `sepal::Server`: this one. It has a main of its own, since the
//! processes of a server are the hosting program itself, started again.

mod harness;

use std::future::Future;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use futures::StreamExt;
use harness::demo::{demo_model, run_session};
use harness::{DEADLINE, alive, children_of, command_line, serve_args, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sepal::{Builder, Event, Events, ExitReason, LogTo, ProcessState, Server, Span};

/// Has this program host a server in the folder that follows, and print its address.
const HOST: &str = "--host-in";

fn main() {
    // Before `init`, as a program that forgot it.
    let forgot = Server::builder("no model").new_swarm().start().expect_err("init is missing");
    assert!(forgot.to_string().contains("sepal::init()"), "{forgot}");
    sepal::init();
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, folder] = &arguments[..]
        && flag == HOST
    {
        return host(Path::new(folder));
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let run = |name: &str, test: &mut dyn FnMut()| {
        if arguments.iter().skip(1).any(|wanted| !wanted.starts_with('-') && !name.contains(wanted))
        {
            return;
        }
        test();
        println!("test {name} ... ok");
    };
    let on = |test: fn() -> std::pin::Pin<Box<dyn Future<Output = ()>>>| runtime.block_on(test());
    run("a_hosted_server_serves_reports_and_drains", &mut || on(|| Box::pin(serves())));
    run("a_dropped_server_ends", &mut || on(|| Box::pin(dropped())));
    run("a_refused_setting_is_the_sentence_of_serve", &mut refused);
    run("a_server_that_cannot_start_says_why", &mut cannot_start);
    run("a_killed_host_takes_its_server_along", &mut killed_host);
    run("events_are_lines_of_json", &mut events_are_lines_of_json);
}

fn builder(dir: &Path) -> Builder {
    Server::builder(demo_model())
        .devices(["cpu"])
        .new_swarm()
        .limit("host_maddrs", "/ip4/127.0.0.1/tcp/0")
        .limit("dht_prefix", "demo")
        .limit("throughput", 1)
        .limit("threads", 1)
        .runtime_dir(dir.join("sepal"))
        .cache_dir(dir.join("cache"))
        .log(LogTo::Off)
}

/// The first event that `wanted` makes something of.
async fn next<T>(events: &mut Events, wanted: impl Fn(Event) -> Option<T>) -> T {
    let found = async {
        loop {
            let event = events.next().await.expect("the server runs");
            if let Some(found) = wanted(event) {
                return found;
            }
        }
    };
    tokio::time::timeout(DEADLINE, found).await.expect("an event in time")
}

async fn online(events: &mut Events) -> (Span, String) {
    let online = |event| match event {
        Event::Online { span, addrs, .. } => Some((span, addrs)),
        _ => None,
    };
    let (span, addrs) = next(events, online).await;
    (span, addrs.first().expect("an address").clone())
}

async fn worker_is(events: &mut Events, wanted: ProcessState) -> String {
    let state = |event| match event {
        Event::Process { name, state, why, .. } => {
            (name.starts_with("gpu-worker") && state == wanted).then_some(why)
        }
        _ => None,
    };
    next(events, state).await
}

/// Processes of this program that carry the title of a server's process.
fn servers(parent: Pid) -> Vec<Pid> {
    let hosted = |pid: &Pid| command_line(*pid).starts_with("sepal: ");
    children_of(parent).into_iter().filter(hosted).collect()
}

/// Children are listed by the thread that started them.
fn hosted_by(host: Pid) -> Vec<Pid> {
    let threads = std::fs::read_dir(format!("/proc/{host}/task")).into_iter().flatten().flatten();
    let listed =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let text: Vec<String> = listed.collect();
    let pids = text.iter().flat_map(|list| list.split_whitespace()).filter_map(|p| p.parse().ok());
    let pids = pids.map(Pid::from_raw);
    pids.filter(|pid| command_line(*pid).starts_with("sepal: ")).collect()
}

async fn serves() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let log = std::fs::File::create(dir.path().join("log")).expect("a log");
    let started = builder(dir.path()).blocks(0..8).limit("torch_dtype", "float32");
    let mut server = started.log(LogTo::File(log)).start().expect("a server");
    let mut events = server.events();
    let (span, addr) = online(&mut events).await;
    assert_eq!(span, Span::new(0, 8).expect("a span"));
    let expected = run_session(&addr, 6, |_| ()).await;

    // A worker dies in the middle of a session: told, and no bit of it changes.
    let supervisor = *hosted_by(Pid::this()).first().expect("a supervisor");
    let worker =
        || servers(supervisor).into_iter().find(|pid| command_line(*pid).contains("gpu-worker"));
    let outputs = run_session(&addr, 6, |step| {
        if step == 2 {
            kill(worker().expect("a worker"), Signal::SIGKILL).expect("kill the worker");
        }
    });
    assert_eq!(outputs.await, expected);
    let why = worker_is(&mut events, ProcessState::Restarting).await;
    assert!(why.contains("SIGKILL"), "{why}");
    worker_is(&mut events, ProcessState::Ready).await;

    // Waiting may be given up and taken up again; draining comes from anywhere.
    let drainer = server.drainer();
    let early = tokio::time::timeout(Duration::from_millis(50), server.run()).await;
    assert!(early.is_err(), "{early:?}");
    std::thread::spawn(move || drainer.drain()).join().expect("a thread").expect("drain");
    let outcome = server.run().await.expect("an outcome");
    assert_eq!((outcome.reason, outcome.complaint), (Some(ExitReason::Clean), None));
    let ended = |event| matches!(event, Event::Ended { code: 0, .. }).then_some(());
    next(&mut events, ended).await;
    assert_eq!(events.next().await, None);
    assert_eq!(hosted_by(Pid::this()), []);
    server.drainer().drain().expect("draining what has ended does nothing");
    let log = std::fs::read_to_string(dir.path().join("log")).expect("the log");
    assert!(log.contains("online"), "{log}");
}

async fn dropped() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let mut server = builder(dir.path()).start().expect("a server");
    let mut events = server.events();
    online(&mut events).await;
    drop(server);
    let ended = |event| match event {
        Event::Ended { code, .. } => Some(code),
        _ => None,
    };
    assert_eq!(next(&mut events, ended).await, 0);
    wait_for("the processes to end", || hosted_by(Pid::this()).is_empty().then_some(()));
}

fn refused() {
    let dir = tempfile::tempdir().expect("temporary folder");
    for (flag, value, wanted) in [
        ("attn_cache_tokens", "many", "attn_cache_tokens"),
        ("no_such_flag", "1", "no_such_flag"),
        ("block_indices", "5:2", "block_indices"),
    ] {
        let refused = builder(dir.path()).limit(flag, value).start().expect_err(flag);
        assert!(refused.to_string().contains(wanted), "{refused}");
    }
    assert_eq!(hosted_by(Pid::this()), []);
}

fn cannot_start() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let missing = dir.path().join("no-model");
    let mut server = Server::builder(&missing)
        .devices(["cpu"])
        .new_swarm()
        .runtime_dir(dir.path().join("sepal"))
        .log(LogTo::Off)
        .start()
        .expect("a process");
    let outcome = server.wait().expect("an outcome");
    assert_eq!(outcome.reason, Some(ExitReason::BadConfig));
    let complaint = outcome.to_string();
    assert!(complaint.contains("no-model"), "{complaint}");
}

/// What `HOST` does: a server for as long as standard input is open.
fn host(dir: &Path) {
    let mut server = builder(dir).start().expect("a server");
    let mut events = server.events();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    println!("{}", runtime.block_on(online(&mut events)).1);
    server.wait().expect("an outcome");
}

fn killed_host() {
    use std::io::{BufRead, BufReader};
    let dir = tempfile::tempdir().expect("temporary folder");
    let mut host = Command::new(std::env::current_exe().expect("this program"))
        .args([HOST, dir.path().to_str().expect("UTF-8")])
        .stdout(Stdio::piped())
        .spawn()
        .expect("a host");
    let mut addr = String::new();
    BufReader::new(host.stdout.take().expect("a pipe")).read_line(&mut addr).expect("an address");
    assert!(addr.contains("/p2p/"), "{addr:?}");
    let pid = Pid::from_raw(host.id().cast_signed());
    let supervisor = *hosted_by(pid).first().expect("a supervisor");
    let mut processes = servers(supervisor);
    assert!(processes.len() >= 2, "{processes:?}");
    processes.push(supervisor);
    host.kill().expect("kill the host");
    host.wait().expect("wait for the host");
    wait_for("the server to end", || (!processes.iter().any(|pid| alive(*pid))).then_some(()));
    let instances = std::fs::read_dir(dir.path().join("sepal")).expect("the folder of instances");
    let left: Vec<_> = instances.flatten().map(|entry| entry.path()).collect();
    assert!(!left.iter().any(|path| path.join("status").exists()), "{left:?}");
}

/// The same for a program in another language, which starts `sepal serve --events`.
fn events_are_lines_of_json() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let model = demo_model();
    let arguments = serve_args(&model, "demo", &["--new_swarm", "--events", "--device", "cpu"]);
    let mut server = Command::new(harness::SEPAL)
        .args(arguments)
        .env("XDG_RUNTIME_DIR", dir.path())
        .env("SEPAL_CACHE", dir.path().join("cache"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a server");
    let pid = Pid::from_raw(server.id().cast_signed());
    let mut seen = Vec::new();
    for line in
        std::io::BufRead::lines(std::io::BufReader::new(server.stdout.take().expect("a pipe")))
    {
        let event: Event = serde_json::from_str(&line.expect("a line")).expect("an event");
        if matches!(event, Event::Online { .. }) {
            kill(pid, Signal::SIGTERM).expect("stop the server");
        }
        seen.push(event);
    }
    assert_eq!(server.wait().expect("an end").code(), Some(0));
    assert!(matches!(seen.first(), Some(Event::Process { .. })), "{seen:?}");
    assert!(matches!(seen.last(), Some(Event::Ended { code: 0, complaint: None })), "{seen:?}");
    assert!(seen.iter().any(|event| matches!(event, Event::Online { .. })), "{seen:?}");
}
