//! What is asked: bad requests, keys and rates, TLS, a model that nobody serves whole.

use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::*;

#[test]
fn bad_requests_get_errors_in_the_shape_of_the_api_and_others_go_on() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &["--max_body", "64KiB"]);
    let path = "/v1/completions";
    let bad = |more: Value| (path, completion(&more).to_string());
    let chat = |more: Value| {
        let mut body = json!({"model": "demo", "messages": [{"role": "user", "content": "x"}]});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        ("/v1/chat/completions", body.to_string())
    };
    let long = json!({"prompt": vec![5; 2040], "max_tokens": 64});
    let cases = [
        (bad(json!({"model": "gpt-4"})), 404, "there are: demo"),
        ((path, "{".to_owned()), 400, "cannot read the body"),
        ((path, "[]".to_owned()), 400, "cannot read the body"),
        (bad(json!({"n": 0})), 400, "invalid n 0"),
        (bad(json!({"n": 1000})), 400, "1 to 16"),
        (bad(json!({"temperature": -1})), 400, "invalid temperature"),
        (bad(json!({"top_p": 7})), 400, "top-p 7"),
        (bad(json!({"max_tokens": 0})), 400, "max_tokens"),
        (bad(json!({"max_tokens": -5})), 400, "max_tokens"),
        (bad(json!({"logit_bias": {"x": 1}})), 400, "logit_bias"),
        (bad(json!({"frequency_penalty": 9})), 400, "frequency penalty 9"),
        (bad(json!({"prompt": ""})), 400, "empty"),
        (bad(json!({"prompt": [99999]})), 400, "outside the vocabulary"),
        (bad(json!({"prompt": ["a", ""]})), 400, "empty"),
        (bad(json!({"prompt": vec!["a"; 17]})), 400, "17 prompts"),
        (bad(json!({"prompt": ["a", "b", "c"], "n": 6})), 400, "3 prompts with n 6"),
        (bad(json!({"logprobs": 99})), 400, "0 to 20"),
        (bad(long), 400, "2048"),
        (bad(json!({"prompt": "x".repeat(80_000)})), 413, "more than 65536 bytes"),
        (chat(json!({})), 400, "no chat template"),
        (chat(json!({"tools": {"type": "function"}})), 400, "tools is a map"),
        (chat(json!({"chat_template_kwargs": []})), 400, "chat_template_kwargs is a sequence"),
        (chat(json!({"messages": [{"role": "user", "content": 7}]})), 400, "content is a number"),
        (("/v1/nothing", "{}".to_owned()), 404, "/v1/chat/completions"),
    ];
    for ((path, body), expected, part) in cases {
        let (status, answer) = gateway.ask("POST", path, "", &body);
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        let message = answer["error"]["message"].as_str().expect("a message");
        assert_eq!((status, message.contains(part)), (expected, true), "{body:.80}: {answer}");
        assert!(answer["error"]["type"].is_string(), "{answer}");
    }
    assert_eq!(gateway.ask("GET", path, "", "").0, 405);
    let (_, answer) = gateway.post(path, &completion(&json!({"prompt": vec![5; 2048]})));
    assert_eq!(answer["error"]["code"], "context_length_exceeded");
    gateway.done(path, &completion(&json!({})));
}

#[test]
fn keys_and_rates_are_held() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "# mine\nsecret-key-0123456789\n").unwrap();
    let keys = keys.display().to_string();
    let process = started(&sepal.addr(), &["--api_keys", &keys, "--requests_per_minute", "3"]);
    let line = process.wait_line("gateway answers", 1);
    let gateway = Gateway { addr: http::address_in(&line), sepal: process };
    for headers in
        ["", "Authorization: Bearer secret-key-012345678\r\n", "Authorization: secret\r\n"]
    {
        let (status, body) = gateway.ask("GET", "/v1/models", headers, "");
        assert_eq!(status, 401, "{body}");
        assert!(body.contains("invalid_api_key"), "{body}");
    }
    let good = "Authorization: Bearer secret-key-0123456789\r\n";
    let ask = || gateway.ask("GET", "/v1/models", good, "").0;
    assert_eq!([ask(), ask(), ask()], [200; 3]);
    // The next one comes too soon, unless it takes 20 s.
    wait_for("a refusal", || (ask() == 429).then_some(()));
    assert_eq!(gateway.get("/livez").0, 200);
}

#[test]
fn a_hole_is_named_with_what_would_fill_it_and_the_page_escapes_what_servers_say() {
    let sepal = serve(&["--block_indices", "0:5"]);
    let gateway = Gateway::start(&sepal.addr(), &["--route_timeout", "0.5"]);
    let (status, answer) = gateway.post("/v1/completions", &completion(&json!({})));
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(status, 503, "{answer}");
    assert!(message.contains("blocks 5:8") && message.contains("--block_indices 5:8"), "{message}");
    assert_eq!(gateway.get("/readyz").0, 503);
    let (_, state) = gateway.get("/api/v1/state");
    assert_eq!(state["models"][0]["holes"], json!([[5, 8]]));
    assert_eq!(state["models"][0]["servers"][0]["public_name"], "<script>alert(1)</script>");

    let (status, page) = gateway.ask("GET", "/", "", "");
    assert_eq!(status, 200);
    assert!(!page.contains("alert(1)") && !page.contains("<style"), "{page}");
    let script = page.split('"').find(|part| part.ends_with("/js/main.js")).expect("a script");
    let (status, script) = gateway.ask("GET", &format!("/{script}"), "", "");
    assert!(status == 200 && script.contains("import "), "{script}");
    let joined = Sepal::join(&sepal, &demo_model(), "demo", &["--block_indices", "5:8"]);
    // A busy machine may need more than that half of a second.
    wait_for("a text", || {
        let (status, _) = gateway.post("/v1/completions", &completion(&json!({})));
        (status == 200).then_some(())
    });
    wait_for("readiness", || (gateway.get("/readyz").0 == 200).then_some(()));
    drop(joined);
}

/// A gateway that starts with these flags, without looking at its answers.
fn started(peer: &str, more: &[&str]) -> Sepal {
    let model = format!("demo={}", demo_model().display());
    let args = ["gateway", &model, "--dht_prefix", "demo", "--initial_peers", peer];
    Sepal::start(&[&args[..], &["--listen", "0"], more].concat())
}

#[test]
fn a_certificate_makes_it_https_and_a_wrong_one_is_refused_by_name() {
    let sepal = serve(&[]);
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (certificate, key) = (path("certificate.pem"), path("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.key_pair.serialize_pem()).unwrap();
    let flags = ["--tls_cert", &certificate, "--tls_key", &key];
    let gateway = started(&sepal.addr(), &flags);
    let line = gateway.wait_line("gateway answers", 1);
    assert!(line.contains("https"), "{line}");
    let addr = http::address_in(&line);

    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("versions").with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1").expect("an address");
    let connection = ClientConnection::new(Arc::new(config), name).expect("a client");
    let socket = TcpStream::connect(&addr).expect("connect");
    let mut stream = StreamOwned::new(connection, socket);
    stream.write_all(&http::request("GET", "/v1/models", "", "")).expect("send");
    let mut answer = String::new();
    // Whether the end of the connection is announced does not matter here.
    let _ = std::io::Read::read_to_string(&mut stream, &mut answer);
    assert!(answer.contains("200 OK") && answer.contains("\"id\":\"demo\""), "{answer}");

    // Without TLS there is no answer, and others are served all the same.
    assert_eq!(http::exchange(&addr, &http::request("GET", "/v1/models", "", "")).0, 0);
    assert_eq!(gateway.terminate().code(), Some(0));

    std::fs::write(&key, "no key").unwrap();
    let mut refused = started(&sepal.addr(), &flags);
    assert_eq!(refused.wait().code(), Some(2));
    let line = refused.wait_line("cannot use the certificate", 1);
    assert!(line.contains(&certificate) && line.contains(&key), "{line}");
}

#[test]
fn pages_of_allowed_origins_may_send_the_headers_that_they_ask_for() {
    let sepal = serve(&[]);
    let gateway = Gateway::start(&sepal.addr(), &["--cors_origin", "https://Chat.example.org/"]);
    let asked =
        "authorization,content-type,x-stainless-arch,x-stainless-retry-count,x-new-tomorrow";
    let preflight = |origin: &str| {
        let headers = format!(
            "Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\n\
             Access-Control-Request-Headers: {asked}\r\n"
        );
        gateway.raw("OPTIONS", "/v1/chat/completions", &headers, "").to_lowercase()
    };
    let answer = preflight("https://chat.example.org");
    assert!(answer.contains(" 200 "), "{answer}");
    assert!(
        answer.contains("access-control-allow-origin: https://chat.example.org\r\n"),
        "{answer}"
    );
    assert!(answer.contains(&format!("access-control-allow-headers: {asked}\r\n")), "{answer}");
    assert!(!preflight("https://other.example.org").contains("access-control-allow-origin"));
    // Errors, too, can be read by the page.
    let refused = gateway.raw("GET", "/v1/models/x", "Origin: https://chat.example.org\r\n", "");
    assert!(refused.to_lowercase().contains("access-control-allow-origin"), "{refused}");
    assert!(refused.contains("model_not_found"), "{refused}");
}

#[test]
fn callers_behind_a_trusted_proxy_are_told_apart() {
    let sepal = serve(&[]);
    let limit = ["--requests_per_minute", "1"];
    let asked = |process: &Sepal, from: &str| {
        let addr = http::address_in(&process.wait_line("gateway answers", 1));
        let headers = format!("X-Forwarded-For: {from}\r\n");
        http::exchange(&addr, &http::request("GET", "/v1/models", &headers, "")).0
    };
    let trusting =
        started(&sepal.addr(), &[&limit[..], &["--trusted_proxy", "127.0.0.0/8"]].concat());
    assert_eq!(asked(&trusting, "1.2.3.4"), 200);
    assert_eq!(asked(&trusting, "1.2.3.5"), 200);
    let other = started(&sepal.addr(), &[&limit[..], &["--trusted_proxy", "10.0.0.1"]].concat());
    assert_eq!(asked(&other, "1.2.3.4"), 200);
    // Within a minute.
    wait_for("a refusal", || (asked(&other, "1.2.3.6") == 429).then_some(()));
}
