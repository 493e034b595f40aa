//! A node of the DHT from the command line, to be held against other implementations by hand.
//!
//! `dht_probe ADDRESS|- [set KEY SUBKEY VALUE] [get KEY] [serve SECONDS]...` joins through ADDRESS
//! (`-`: a new swarm), prints its own address, and carries the commands out in turn. VALUE is text;
//! values are printed in a Python-like form.

use hivemind::dht::driver::{Dht, DhtConfig, protocols, unix_now};
use hivemind::dht::id::DhtId;
use hivemind::dht::storage::{Item, StorageLimits, Stored, Timed};
use hivemind::p2p::{Inbound, Keypair, Multiaddr, P2p, P2pConfig, Traversal};
use hivemind::wire::msgpack::{Limits, Value};
use std::time::Duration;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?
        .block_on(probe())
}

async fn probe() -> Result<(), Failure> {
    let mut words = std::env::args().skip(1);
    let mut word = || words.next();
    let initial_peers: Vec<Multiaddr> =
        match word().ok_or("give the address of a peer, or -")?.as_str() {
            "-" => Vec::new(),
            address => vec![address.parse()?],
        };
    let dht = start(initial_peers).await?;
    while let Some(command) = word() {
        let mut next = || word().ok_or(format!("{command} wants more words"));
        match command.as_str() {
            "set" => {
                let (key, subkey, value) = (next()?, Value::str(next()?), Value::str(next()?));
                let timed = Timed { value: value.encode().into(), expiration: unix_now() + 300.0 };
                let item = Item::Entry(subkey.encode().into(), timed);
                println!(
                    "accepted by {:?}",
                    dht.store_many(vec![(DhtId::of_text(&key), item)]).await?
                );
            }
            "get" => {
                let key = next()?;
                for found in dht.get_many(vec![DhtId::of_text(&key)], true).await? {
                    println!("{key}: {}", found.as_ref().map_or("nothing".into(), show));
                }
            }
            "serve" => tokio::time::sleep(Duration::from_secs(next()?.parse()?)).await,
            other => return Err(format!("no command {other}").into()),
        }
    }
    println!("{:?}", dht.stats().await?);
    Ok(())
}

async fn start(initial_peers: Vec<Multiaddr>) -> Result<Dht, Failure> {
    let config = P2pConfig {
        keypair: Keypair::generate_ed25519(),
        listen: vec!["/ip4/127.0.0.1/tcp/0".parse()?],
        announce: Vec::new(),
        initial_peers: initial_peers.clone(),
        kad_server: true,
        protocols: protocols(),
        traversal: Traversal::CLIENT,
        startup_timeout: Duration::from_secs(30),
        max_upload_bytes_per_s: None,
        request_memory: P2pConfig::REQUEST_MEMORY,
    };
    let (p2p, mut inbound) = P2p::start(config).await?;
    for address in p2p.listen_addrs().await {
        println!("listening on {address}/p2p/{}", p2p.peer_id());
    }
    let limits = StorageLimits::default();
    let dht = Dht::start(
        p2p,
        DhtConfig { client_mode: false, initial_peers, num_workers: 8, strict: true, limits },
    );
    let served = dht.clone();
    tokio::spawn(async move {
        while let Some(Inbound::Unary { peer, protocol, request, responder }) = inbound.recv().await
        {
            let dht = served.clone();
            tokio::spawn(async move {
                responder.respond(dht.handle_inbound(protocol, peer, request).await).await
            });
        }
    });
    dht.join().await?;
    Ok(dht)
}

fn show(stored: &Stored) -> String {
    let value = |bytes: &[u8]| match Value::decode(bytes, Limits::SMALL) {
        Ok(value) => value.repr(),
        Err(error) => error.to_string(),
    };
    match stored {
        Stored::Regular(timed) => value(&timed.value),
        Stored::Dictionary(entries) => {
            let entry = |(tag, timed): (&bytes::Bytes, &Timed)| {
                format!("{}: {}", value(tag), value(&timed.value))
            };
            entries.iter().map(entry).collect::<Vec<_>>().join(", ")
        }
    }
}
