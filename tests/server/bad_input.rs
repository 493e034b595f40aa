//! Everything an operator or a peer can get wrong: each gives one clear sentence that names the
//! value, the process tree stays as it was, and other sessions go on.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use crate::harness::demo::demo_model;
use crate::harness::peer::{Peer, Session, noise};
use crate::harness::{self, Sepal, children_of, own_loopback, serve_args, wait_for};
use p2p::CallError;
use swarm::wire::messages::Tensor;

const HIDDEN: usize = 192;

/// Runs `sepal serve` that is expected to fail, and returns its exit code and log.
fn refused(args: &[&str]) -> (i32, String) {
    let mut sepal = Sepal::start(args);
    let code = sepal.wait().code().expect("an exit code");
    assert_ne!(code, 0, "{}", sepal.log());
    wait_for("the log to end", || Some(()).filter(|()| !sepal.log().is_empty()));
    (code, sepal.log())
}

/// A copy of the demo model that a test may spoil.
fn model_copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(demo_model().join(name), folder.path().join(name)).unwrap();
    }
    folder
}

fn serve_folder(folder: &Path, more: &[&str]) -> (i32, String) {
    refused(&serve_args(folder, "demo", &[&["--new_swarm"], more].concat()))
}

#[test]
fn spoiled_model_folders_name_the_file_and_the_reason() {
    type Spoil = fn(&Path);
    let cases: [(&str, Spoil, &[&str]); 5] = [
        (
            "no weights",
            |f| std::fs::remove_file(f.join("model.safetensors")).unwrap(),
            &["safetensors"],
        ),
        (
            "truncated weights",
            |f| {
                let bytes = std::fs::read(f.join("model.safetensors")).unwrap();
                std::fs::write(f.join("model.safetensors"), &bytes[..bytes.len() - 1000]).unwrap();
            },
            &["model.safetensors"],
        ),
        (
            "another shape",
            |f| edit_config(f, "\"intermediate_size\": 512", "\"intermediate_size\": 640"),
            &["mlp", "512", "640"],
        ),
        (
            "unknown type",
            |f| edit_config(f, "\"model_type\": \"llama\"", "\"model_type\": \"gpt9\""),
            &["gpt9", "llama"],
        ),
        ("no config", |f| std::fs::remove_file(f.join("config.json")).unwrap(), &["config.json"]),
    ];
    for (name, spoil, words) in cases {
        let folder = model_copy();
        spoil(folder.path());
        let (code, log) = serve_folder(folder.path(), &[]);
        assert_eq!(code, 2, "{name}: {log}");
        for word in words {
            assert!(log.contains(word), "{name}: no {word:?} in {log}");
        }
    }
}

fn edit_config(folder: &Path, from: &str, to: &str) {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn a_missing_folder_and_a_block_range_outside_the_model_are_named() {
    let (code, log) = serve_folder(Path::new("/nonexistent/model"), &[]);
    assert_eq!(code, 2);
    assert!(log.contains("/nonexistent/model"), "{log}");
    let (code, log) = serve_folder(&demo_model(), &["--block_indices", "4:99"]);
    assert_eq!(code, 2);
    assert!(log.contains("4:99") && log.contains('8'), "{log}");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = format!("/ip4/127.0.0.1/tcp/{}", taken.local_addr().unwrap().port());
    let model = demo_model();
    let args = [
        "serve",
        model.to_str().unwrap(),
        "--dht_prefix",
        "demo",
        "--new_swarm",
        "--throughput",
        "1",
    ];
    let (_, log) = refused(&[&args[..], &["--host_maddrs", &addr]].concat());
    assert!(log.contains(&addr), "{log}");
}

#[test]
fn cpus_and_nodes_that_do_not_exist_are_named_beside_those_that_do() {
    let model = demo_model();
    for (flags, words) in [
        (["--cpus", "60000"], ["invalid --cpus 60000: ", "expected CPUs among "]),
        (["--cpus", "1-0"], ["invalid --cpus 1-0: ", "expected CPUs among "]),
        (["--device", "cpu:60000"], ["invalid device cpu:60000: ", "usable CPUs are cpu:"]),
    ] {
        let (code, log) = serve_folder(&model, &flags);
        assert_eq!(code, 2, "{log}");
        assert!(words.iter().all(|word| log.contains(word)), "{flags:?}: {log}");
    }
}

#[test]
fn unreachable_peers_are_named() {
    // Nobody listens there.
    let host = own_loopback();
    let peer = format!("/ip4/{host}/tcp/4321/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY");
    let model = demo_model();
    let (_, log) = refused(&serve_args(&model, "demo", &["--initial_peers", &peer]));
    assert!(log.contains(&peer), "{log}");
}

/// What `session` answers to `frames` of bad requests, each on a session of its own.
async fn error_of(session: &mut Session, hidden: Tensor, position: Option<u32>) -> String {
    match session.step(hidden, position).await {
        Err(CallError::Remote(text)) => text,
        other => panic!("expected an error, got {other:?}"),
    }
}

/// Name of the case, blocks, `max_length`, hidden states, position, and words of the answer.
type BadStep =
    (&'static str, std::ops::Range<u32>, u32, Tensor, Option<u32>, &'static [&'static str]);

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused_by_name_while_another_session_goes_on() {
    let sepal = Sepal::serve(
        &demo_model(),
        "demo",
        &["--block_indices", "0:4", "--torch_dtype", "float32"],
    );
    let children = children_of(sepal.pid());
    let peer = Peer::connect(&sepal.addr(), "demo").await;
    let mut calm = peer.session(0..4, 64).await;
    let mut expected = vec![calm.step(noise(&[1, 3, HIDDEN], 1), None).await.unwrap()];

    let mut not_finite = noise(&[1, 2, HIDDEN], 1);
    let mut bytes = not_finite.buffer.to_vec();
    bytes[4 * HIDDEN..4 * HIDDEN + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    not_finite.buffer = bytes.into();
    let cases: [BadStep; 7] = [
        (
            "block not served",
            4..6,
            16,
            noise(&[1, 1, HIDDEN], 1),
            None,
            &["demo.4", "does not serve"],
        ),
        ("wrong hidden size", 0..4, 16, noise(&[1, 1, 128], 1), None, &["128", "192"]),
        ("max_length over the limit", 0..4, 1 << 20, noise(&[1, 1, HIDDEN], 1), None, &["1048576"]),
        (
            "step over max_length",
            0..4,
            4,
            noise(&[1, 5, HIDDEN], 1),
            None,
            &["5", "4", "Maximum length exceeded"],
        ),
        ("not finite", 0..4, 16, not_finite, None, &["finite"]),
        ("position beyond the prefix", 0..4, 16, noise(&[1, 1, HIDDEN], 1), Some(7), &["7"]),
        ("two dimensions", 0..4, 16, noise(&[1, HIDDEN], 1), None, &["shape"]),
    ];
    for (name, blocks, max_length, hidden, position, words) in cases {
        let mut session = peer.session(blocks, max_length).await;
        let text = error_of(&mut session, hidden, position).await;
        assert!(words.iter().all(|w| text.contains(w)), "{name}: {text}");
        expected.push(calm.step(noise(&[1, 1, HIDDEN], 2), None).await.unwrap());
    }
    for garbage in [vec![0xff; 64], vec![], b"GET / HTTP/1.1\r\n\r\n".to_vec()] {
        let mut session = peer.session(0..4, 16).await;
        assert!(session.raw(garbage).await.is_err());
    }
    let port: u16 = sepal.addr().split('/').nth(4).unwrap().parse().unwrap();
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"\x13/multistream/1.0.0\n\xff\xff\xff\xff"]
    {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
        socket.set_read_timeout(Some(harness::DEADLINE)).unwrap();
        let _ = socket.write_all(garbage);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let _ = socket.read_to_end(&mut Vec::new());
    }
    expected.push(calm.step(noise(&[1, 1, HIDDEN], 3), None).await.unwrap());

    // The same inputs on a session of its own, undisturbed: the same bits.
    let mut again = peer.session(0..4, 64).await;
    let mut repeated = vec![again.step(noise(&[1, 3, HIDDEN], 1), None).await.unwrap()];
    for _ in 0..7 {
        repeated.push(again.step(noise(&[1, 1, HIDDEN], 2), None).await.unwrap());
    }
    repeated.push(again.step(noise(&[1, 1, HIDDEN], 3), None).await.unwrap());
    assert_eq!(expected, repeated);
    calm.close().await;
    again.close().await;
    // Each refusal was counted by its kind, and `sepal status` shows the counts.
    wait_for("the counts on the board", || {
        let status = sepal.status();
        let children = status[0]["children"].as_array()?;
        let netd = children.iter().find(|child| child["role"] == "netd")?;
        let count = |kind: &str| netd["troubles"][kind].as_u64().unwrap_or(0);
        // A block that is not here, and no block at all; two over the length; wrong size, not
        // finite, position, two dimensions, and garbage twice.
        let counted =
            count("not_served") >= 2 && count("too_large") >= 2 && count("malformed") >= 6;
        counted.then_some(())
    });
    assert_eq!(children_of(sepal.pid()), children, "no process was replaced");
    assert_eq!(sepal.terminate().code(), Some(0));
}
