//! `sepal chat`: the same answers on a terminal.

use crate::harness;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::*;

/// `sepal chat` with the demo model, whose terminal this test is.
fn start(sepal: &Sepal, dir: &Path, template: &str, more: &[&str]) -> Child {
    Command::new(harness::SEPAL)
        .args(["chat", "--initial_peers", &sepal.addr(), "--dht_prefix", "demo"])
        .args(["--temperature", "0", "--torch_dtype", "float32", "--chat_template", template])
        .args(more)
        .arg(demo_model())
        .env("XDG_STATE_HOME", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("run sepal chat")
}

#[test]
fn chat_answers_as_the_gateway_does_and_carries_out_commands() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let template = template(dir.path());
    let gateway = Gateway::start(&sepal.addr(), &["--chat_template", &template]);
    let mut messages =
        vec![json!({"role": "user", "content": "Tell me of a fox.\nAnd of the sea."})];
    let mut said = Vec::new();
    for _ in 0..2 {
        let body =
            json!({"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 0});
        let answer = gateway.done("/v1/chat/completions", &body);
        said.push(answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned());
        messages.push(json!({"role": "assistant", "content": said.last()}));
        messages.push(json!({"role": "user", "content": "Go on."}));
    }
    let saved = dir.path().join("saved.md");
    let input = format!(
        "/stats\nTell me of a fox.\\\nAnd of the sea.\n\nGo on.\n/stats\n/nonsense\n/save {}\n/clear\n",
        saved.display()
    );
    let mut chat = start(&sepal, dir.path(), &template, &["--max_tokens", "12"]);
    chat.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = chat.wait_with_output().expect("sepal chat ends");
    assert!(out.status.success());
    let text = String::from_utf8(out.stdout).expect("UTF-8");
    assert!(text.starts_with("There is no answer yet.\n"), "{text}");
    assert!(text.contains(&format!("{}\n{}\n", said[0], said[1])), "{text}\n{said:?}");
    assert!(text.contains("tokens/s") && text.contains("blocks 0:8"), "{text}");
    assert!(text.contains("/nonsense is no command") && !text.contains('\x1b'), "{text}");
    let saved = std::fs::read_to_string(saved).expect("the saved conversation");
    assert!(saved.contains("## user\n\nGo on.") && saved.contains(&said[1]), "{saved}");
}

/// Reads until `text` has come.
fn read_until(from: &mut impl Read, text: &str) -> String {
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains(text) {
        let mut byte = [0];
        from.read_exact(&mut byte).expect("sepal chat goes on");
        read.push(byte[0]);
    }
    String::from_utf8(read).expect("UTF-8")
}

#[test]
fn ctrl_c_stops_the_answer_and_the_conversation_goes_on() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let mut chat = start(&sepal, dir.path(), &template(dir.path()), &["--max_tokens", "400"]);
    let (mut input, mut output) = (chat.stdin.take().unwrap(), chat.stdout.take().unwrap());
    // A first answer, so that the worker can be stopped within the second.
    input.write_all(b"Tell me of a fox.\n\n/stats\n").unwrap();
    let first = read_until(&mut output, "blocks 0:8\n");
    assert!(first.contains("tokens/s"), "{first}");
    kill(sepal.worker(), Signal::SIGSTOP).expect("stop the worker");
    input.write_all(b"Go on.\n/stats\n").unwrap();
    // Nobody sees from outside when the answer is under way: pressed until it has stopped.
    let pid = Pid::from_raw(chat.id().cast_signed());
    let (released, is_released) = mpsc::sync_channel::<()>(0);
    let pressing = std::thread::spawn(move || {
        while is_released.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout)
        {
            kill(pid, Signal::SIGINT).expect("press Ctrl-C");
        }
    });
    let stopped = read_until(&mut output, "blocks 0:8\n");
    drop(released);
    pressing.join().unwrap();
    assert!(stopped.contains("it was stopped"), "{stopped}");
    kill(sepal.worker(), Signal::SIGCONT).expect("continue the worker");
    input.write_all(b"/clear\nTell me of a fox.\n/stats\n/quit\n").unwrap();
    drop(input);
    let mut rest = String::new();
    output.read_to_string(&mut rest).expect("UTF-8");
    assert!(chat.wait().expect("sepal chat ends").success());
    let answer = first.split('\n').next().unwrap();
    assert!(rest.contains(answer) && rest.contains("tokens/s"), "{rest}\n{answer}");
}
