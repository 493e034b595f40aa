//! The length of a text is one number: of servers, the gateway and `sepal plan`.

use std::process::Command;

use super::*;
use crate::harness::SEPAL;
use crate::harness::demo::{BLOCKS, HIDDEN, copy_of_demo_model};
use crate::harness::peer::{Peer, noise};

#[test]
fn servers_gateway_and_plan_take_texts_of_one_length() {
    let place = tempfile::tempdir().unwrap();
    let folder = copy_of_demo_model(place.path());
    let file = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(80);
    config["rope_scaling"] =
        json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    std::fs::write(&file, config.to_string()).unwrap();

    let plan = Command::new(SEPAL)
        .args(["plan", "--json", "--device", "cpu", "--throughput", "10"])
        .arg(&folder)
        .env("SEPAL_CACHE", place.path())
        .output()
        .expect("run sepal plan");
    let plan: Value = serde_json::from_slice(&plan.stdout).expect("JSON");
    assert_eq!((&plan["max_model_len"], &plan["inference_max_length"]), (&json!(256), &json!(256)));

    let sepal = Sepal::serve(&folder, "demo", &["--torch_dtype", "float32"]);
    crate::harness::block_on(async {
        let peer = Peer::connect(&sepal.addr(), "demo").await;
        let step = noise(&[1, 1, HIDDEN], 1);
        let mut session = peer.session(BLOCKS, 256).await;
        session.step(step.clone(), None).await.expect("a session of 256 tokens");
        session.close().await;
        let mut session = peer.session(BLOCKS, 257).await;
        let refusal = session.step(step, None).await.expect_err("a session of 257 tokens");
        assert!(refusal.to_string().contains("257 tokens, max = 256"), "{refusal}");
    });

    let model = format!("demo={}", folder.display());
    let addr = sepal.addr();
    let args = ["gateway", &model, "--dht_prefix", "demo", "--initial_peers", &addr];
    let own = ["--listen", "0", "--torch_dtype", "float32"];
    let process = Sepal::start(&[&args[..], &own].concat());
    let line = process.wait_line("gateway answers", 1);
    let gateway = Gateway { addr: http::address_in(&line), sepal: process };
    let (_, models) = gateway.get("/v1/models");
    assert_eq!(models["data"][0]["max_model_len"], 256, "{models}");
    assert_eq!(gateway.get("/v1/models/demo").1["max_model_len"], 256);
    let ask = |tokens: usize| completion(&json!({"prompt": vec![5; tokens], "max_tokens": 6}));
    let (status, answer) = gateway.post("/v1/completions", &ask(251));
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")));
    assert!(answer["error"]["message"].as_str().unwrap().contains("256"), "{answer}");
    wait_for("a server", || gateway.post("/v1/completions", &ask(250)).0.eq(&200).then_some(()));
}
