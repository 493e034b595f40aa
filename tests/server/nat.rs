//! Servers behind NATs, in network namespaces that these tests make. They are ignored unless
//! `tests/nat/run` runs them, which makes the namespaces first and says so where the machine does
//! not allow that.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::harness::demo::{Golden, demo_model, golden};
use crate::harness::lab::{self, Lab, Nat};
use crate::harness::{DEADLINE, SEPAL, Sepal, root, wait_for};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

const RELAY_PORT: u16 = 31337;

/// A text of the demo model and how it goes on, by transformers.
fn first_golden() -> Golden {
    golden("float32").swap_remove(0)
}

fn folder() -> Arc<tempfile::TempDir> {
    Arc::new(tempfile::tempdir().expect("temporary folder"))
}

/// A bootstrap node on a public host that relays for others.
fn relay(host: &str, number: u8, dir: Arc<tempfile::TempDir>, more: &[&str]) -> Sepal {
    let listen = format!("/ip4/5.6.7.{number}/tcp/{RELAY_PORT}");
    let identity = dir.path().join("relay.key");
    let identity = identity.to_str().unwrap().to_owned();
    let mut args = vec!["dht", "--host_maddrs", &listen, "--identity_path", &identity];
    args.extend(["--refresh_period", "1", "--log", "info,netd=debug"]);
    args.extend(more);
    Sepal::start_at(host, dir, &args)
}

/// Its full address.
fn address(relay: &Sepal, number: u8) -> String {
    // "network node started peer_id=…"
    let line = relay.wait_line("network node started", 1);
    let peer = line
        .split(|c: char| !c.is_ascii_alphanumeric())
        .find(|word| word.starts_with("12D3") || word.starts_with("Qm"))
        .expect("a PeerID");
    format!("/ip4/5.6.7.{number}/tcp/{RELAY_PORT}/p2p/{peer}")
}

fn server(host: &str, peers: &[&str], more: &[&str]) -> Sepal {
    let model = demo_model();
    let mut args = vec!["serve", model.to_str().unwrap(), "--dht_prefix", "demo"];
    args.extend(["--throughput", "1", "--threads", "1", "--torch_dtype", "float32"]);
    args.extend(["--log", "info,netd=debug", "--initial_peers"]);
    args.extend(peers);
    args.extend(more);
    Sepal::start_at(host, folder(), &args)
}

/// What a client on `host` adds to the prompt; the whole way of a user.
fn generate(host: &str, peer: &str) -> Result<String, String> {
    let prompt = first_golden().prompt;
    let [program, rest @ ..] = lab::at(host);
    let out = Command::new(program)
        .args(rest)
        .args([SEPAL, "generate", "--initial_peers", peer, "--dht_prefix", "demo"])
        .args(["--torch_dtype", "float32", "--max_new_tokens"])
        .args(["40", "--prompt", &prompt])
        .arg(demo_model())
        .stdin(Stdio::null())
        .output()
        .expect("run sepal generate");
    if !out.status.success() {
        return Err(String::from_utf8_lossy(&out.stderr).into_owned());
    }
    let text = String::from_utf8(out.stdout).expect("UTF-8");
    let text = text.trim_end_matches('\n').strip_prefix(&prompt);
    Ok(text.expect("the prompt comes first").to_owned())
}

/// A public host for a relay, and a server and a client behind a NAT each.
fn behind_nats(nat: Nat) -> Lab {
    let lab = Lab::new();
    lab.host("relay", 10);
    lab.natted("server", 1, nat);
    lab.natted("client", 2, nat);
    lab
}

fn assert_golden(host: &str, peer: &str) {
    let expected = first_golden().text;
    let text = generate(host, peer).unwrap_or_else(|error| panic!("{error}"));
    assert!(
        !text.is_empty() && (expected.starts_with(&text) || text.starts_with(&expected)),
        "{text:?} is not the beginning of {expected:?}"
    );
}

#[test]
#[ignore = "needs network namespaces: tests/nat/run"]
fn a_server_behind_a_symmetric_nat_is_reached_through_a_relay() {
    let _lab = behind_nats(Nat::Symmetric);
    let relay = relay("relay", 10, folder(), &[]);
    let peer = address(&relay, 10);
    let server = server("server", &[&peer], &[]);
    server.wait_line("via relays", 1);
    server.wait_line("reachable through a relay", 1);
    server.wait_online();
    assert_golden("client", &peer);
    assert!(!server.log().contains("hole punched, connected directly"), "symmetric");
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
#[ignore = "needs network namespaces: tests/nat/run"]
fn behind_port_preserving_nats_a_hole_is_punched() {
    let _lab = behind_nats(Nat::PortPreserving);
    let relay = relay("relay", 10, folder(), &[]);
    let peer = address(&relay, 10);
    let server = server("server", &[&peer], &[]);
    server.wait_line("reachable through a relay", 1);
    server.wait_online();
    // The way may be left only after the first text came over the relay.
    wait_for("a punched hole", || {
        assert_golden("client", &peer);
        server.log().contains("hole punched, connected directly").then_some(())
    });
}

#[test]
#[ignore = "needs network namespaces: tests/nat/run"]
fn a_relay_that_dies_is_replaced_by_another_of_the_swarm() {
    let lab = Lab::new();
    lab.host("relay", 10);
    lab.host("other", 11);
    lab.host("third", 12);
    lab.host("client", 20);
    lab.natted("server", 1, Nat::Symmetric);
    let first = relay("relay", 10, folder(), &[]);
    let peer = address(&first, 10);
    let mut relays = vec![(10, peer.clone(), first)];
    for (host, number) in [("other", 11), ("third", 12)] {
        let next = relay(host, number, folder(), &["--initial_peers", &peer]);
        relays.push((number, address(&next, number), next));
    }
    let peers: Vec<&str> = relays.iter().map(|(_, addr, _)| addr.as_str()).collect();
    let server = server("server", &peers, &[]);
    server.wait_online();
    let reserved_at = |count: usize| {
        let line = server.wait_line("reachable through a relay", count);
        let number = |relay: &&(u8, String, Sepal)| line.contains(&format!("/5.6.7.{}/", relay.0));
        relays.iter().find(number).expect("one of the three").0
    };
    let used = [reserved_at(1), reserved_at(2)];
    assert_ne!(used[0], used[1]);
    // One that it uses dies: the third takes over.
    let index = relays.iter().position(|relay| relay.0 == used[0]);
    relays[index.expect("one of the three")].2.signal(Signal::SIGKILL);
    let unused = relays.iter().find(|relay| !used.contains(&relay.0));
    let (number, last, _) = unused.expect("two of three are used");
    assert_eq!(reserved_at(3), *number);
    assert_golden("client", last);
}

#[test]
#[ignore = "needs network namespaces: tests/nat/run"]
fn after_an_outage_the_server_is_found_again() {
    let lab = Lab::new();
    lab.host("relay", 10);
    lab.host("client", 20);
    lab.host("server", 30);
    let dir = folder();
    let first = relay("relay", 10, dir.clone(), &[]);
    let peer = address(&first, 10);
    let server = server("server", &[&peer], &["--update_period", "2"]);
    server.wait_online();
    assert_golden("client", &peer);

    // The only bootstrap node dies and comes back with nothing but its key.
    drop(first);
    let again = relay("relay", 10, dir, &[]);
    assert_eq!(address(&again, 10), peer, "same key, same address");
    let expected = first_golden().text;
    let text =
        wait_for("the server in the new bootstrap's swarm", || generate("client", &peer).ok());
    assert!(!text.is_empty() && expected.starts_with(&text), "{text:?}");

    // The server's own cable, for longer than its records live: 4 s.
    lab.plugged("server", false);
    std::thread::sleep(Duration::from_secs(6));
    lab.plugged("server", true);
    let text = wait_for("the server after its cable is back", || generate("client", &peer).ok());
    assert!(!text.is_empty() && expected.starts_with(&text), "{text:?}");
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
#[ignore = "needs network namespaces: tests/nat/run"]
fn the_rate_of_a_slow_line_is_measured_with_a_peer() {
    let lab = Lab::new();
    lab.host("relay", 10);
    lab.host("server", 30);
    let relay = relay("relay", 10, folder(), &[]);
    let peer = address(&relay, 10);
    // 16 Mbit/s.
    lab.slow("server", 2000);
    let model = demo_model();
    let args = ["serve", model.to_str().unwrap(), "--dht_prefix", "demo"];
    let more = ["--threads", "1", "--initial_peers", &peer];
    let server = Sepal::start_at("server", folder(), &[&args[..], &more].concat());
    let line = server.wait_line("measured with servers of the swarm", 1);
    let mbps = line.split("mbps=").nth(1);
    let mbps = mbps.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    // Lossy lines carry less than they could. In the first second they carry more: what the filter
    // saves up is a second's worth and its burst.
    assert!(mbps.is_some_and(|mbps| (0.5..36.0).contains(&mbps)), "{line}");
}

/// A router that forwards ports when asked (UPnP), as far as libp2p asks: run in its namespace by
/// the test below.
#[test]
#[ignore = "a program for the router of another test"]
fn obliging_router() {
    let (inside, outside) = ([10, 1, 0, 1], "5.6.7.1");
    let Ok(router) = std::env::var("SEPAL_NAT_ROUTER") else {
        return;
    };
    let search = UdpSocket::bind("0.0.0.0:1900").unwrap();
    let group = Ipv4Addr::new(239, 255, 255, 250);
    search.join_multicast_v4(&group, &inside.into()).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::from(inside), 5000)).unwrap();
    std::thread::spawn(move || {
        let mut question = [0; 1500];
        while let Ok((_, asker)) = search.recv_from(&mut question) {
            let kind = "urn:schemas-upnp-org:device:InternetGatewayDevice:1";
            let answer = format!(
                "HTTP/1.1 200 OK\r\nST: {kind}\r\nLOCATION: http://10.1.0.1:5000/root.xml\r\n\r\n"
            );
            search.send_to(answer.as_bytes(), asker).unwrap();
        }
    });
    println!("obliging");
    for mut stream in listener.incoming().map_while(Result::ok) {
        let mut request = String::new();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut length = 0;
        while reader.read_line(&mut request).is_ok_and(|count| count > 2) {
            let line = request.lines().last().unwrap_or_default().to_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let body = String::from_utf8(body).unwrap();
        let service = "urn:schemas-upnp-org:service:WANIPConnection:1";
        let of = |tag: &str| {
            let rest = body.split_once(&format!("<{tag}>")).unwrap().1;
            rest.split_once('<').unwrap().0.to_owned()
        };
        let answer = if request.starts_with("GET /root.xml") {
            format!(
                "<root><device><deviceList><device><serviceList><service><serviceType>{service}</serviceType>\
                 <controlURL>/control</controlURL><SCPDURL>/scpd.xml</SCPDURL></service></serviceList></device></deviceList></device></root>"
            )
        } else if request.starts_with("GET /scpd.xml") {
            let arguments = [
                "NewRemoteHost",
                "NewExternalPort",
                "NewProtocol",
                "NewInternalPort",
                "NewInternalClient",
                "NewEnabled",
                "NewPortMappingDescription",
                "NewLeaseDuration",
            ];
            let arguments: String = arguments
                .iter()
                .map(|name| {
                    format!("<argument><name>{name}</name><direction>in</direction></argument>")
                })
                .collect();
            format!(
                "<scpd><actionList><action><name>AddPortMapping</name><argumentList>{arguments}</argumentList></action></actionList></scpd>"
            )
        } else if body.contains("GetExternalIPAddress") {
            response(
                "GetExternalIPAddress",
                &format!("<NewExternalIPAddress>{outside}</NewExternalIPAddress>"),
            )
        } else if body.contains("AddPortMapping") {
            let port = of("NewExternalPort").parse().unwrap();
            let to = format!("{}:{}", of("NewInternalClient"), of("NewInternalPort"));
            Lab::forward(&router, port, &to);
            response("AddPortMapping", "")
        } else {
            response("DeletePortMapping", "")
        };
        let length = answer.len();
        let head =
            format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
        stream.write_all((head + &answer).as_bytes()).unwrap();
    }
}

fn response(action: &str, inner: &str) -> String {
    format!(
        "<?xml version=\"1.0\"?><s:Envelope xmlns:s=\"http://schemas.xmlsoap.org/soap/envelope/\"><s:Body>\
         <u:{action}Response xmlns:u=\"urn:schemas-upnp-org:service:WANIPConnection:1\">{inner}</u:{action}Response>\
         </s:Body></s:Envelope>"
    )
}

/// A process that ends with its owner.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs network namespaces: tests/nat/run"]
fn a_router_that_forwards_a_port_when_asked_makes_the_server_reachable() {
    let lab = Lab::new();
    lab.host("relay", 10);
    lab.host("client", 20);
    lab.natted("server", 1, Nat::Symmetric);
    lab.answers_inside("nat1");
    let [program, rest @ ..] = lab::at("nat1");
    let mut router = Command::new(program)
        .args(rest)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "nat::obliging_router", "--ignored", "--nocapture"])
        .env("SEPAL_NAT_ROUTER", "nat1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start the router");
    let lines = BufReader::new(router.stdout.take().expect("stdout is piped")).lines();
    let _router = Ended(router);
    let mut lines = lines.map_while(Result::ok);
    assert!(lines.any(|line| line.contains("obliging")));

    let relay = relay("relay", 10, folder(), &[]);
    let peer = address(&relay, 10);
    let server = server("server", &[&peer], &[]);
    server.wait_line("router forwards a port to this node", 1);
    let line = server.wait_line("server is accessible", 1);
    assert!(line.contains("directly"), "{line}");
    server.wait_online();
    assert_golden("client", &peer);
    assert!(!server.log().contains("reachable through a relay"));
}

/// Python of the virtual environment with the real Petals: `tests/interop/setup.sh`.
fn python() -> PathBuf {
    let venv = std::env::var_os("INTEROP_VENV").expect("INTEROP_VENV names a folder with Petals");
    PathBuf::from(venv).join("bin/python")
}

/// A bootstrap node of the real Petals, which relays as hivemind's daemon does.
struct PetalsBootstrap {
    child: Child,
    addr: String,
}

impl PetalsBootstrap {
    fn start(host: &str, number: u8) -> PetalsBootstrap {
        let [program, rest @ ..] = lab::at(host);
        let listen = format!("/ip4/5.6.7.{number}/tcp/{RELAY_PORT}");
        let mut child = Command::new(program)
            .args(rest)
            .arg(python())
            .args(["-m", "petals.cli.run_dht", "--host_maddrs", &listen])
            .env("HIVEMIND_COLORS", "false")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start run_dht");
        let log = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let (sender, found) = mpsc::sync_channel(1);
        std::thread::spawn(move || {
            let mut addr = None;
            for line in log.lines().map_while(Result::ok) {
                let word = line.split_whitespace().find(|w| w.contains("/p2p/"));
                addr = addr.or(word.map(str::to_owned));
                // Its first report: it answers by now.
                if line.contains("Local storage contains") && addr.is_some() {
                    let _ = sender.try_send(addr.take());
                }
            }
        });
        let addr = found.recv_timeout(DEADLINE).expect("run_dht reports");
        let addr = addr.expect("run_dht tells where it is");
        PetalsBootstrap { child, addr }
    }
}

impl Drop for PetalsBootstrap {
    fn drop(&mut self) {
        // It has children, which outlive it.
        let _ = killpg(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

/// A text through the real Petals client; it must equal that of local transformers.
fn petals_client(host: &str, peer: &str) {
    let [program, rest @ ..] = lab::at(host);
    let folder = root().join("tests/interop");
    let out = Command::new(program)
        .args(rest)
        .arg(python())
        .arg(folder.join("petals_client_check.py"))
        .args(["--initial-peers", peer, "--dht-prefix", "demo", "--model"])
        .arg(demo_model())
        .args(["--only", "generate.greedy", "--skip", "generate.greedy_batch"])
        .current_dir(folder)
        .output()
        .expect("run the Petals client");
    let text = String::from_utf8_lossy(&out.stdout);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}\n{errors}");
}

#[test]
#[ignore = "needs network namespaces and Petals: tests/nat/run"]
fn with_petals_its_client_reaches_a_server_behind_a_nat() {
    let _lab = behind_nats(Nat::Symmetric);
    let relay = relay("relay", 10, folder(), &[]);
    let peer = address(&relay, 10);
    let server = server("server", &[&peer], &[]);
    server.wait_line("reachable through a relay", 1);
    server.wait_online();
    petals_client("client", &peer);
}

#[test]
#[ignore = "needs network namespaces and Petals: tests/nat/run"]
fn with_petals_its_bootstrap_node_relays_for_a_server_behind_a_nat() {
    let _lab = behind_nats(Nat::Symmetric);
    let relay = PetalsBootstrap::start("relay", 10);
    let server = server("server", &[&relay.addr], &[]);
    server.wait_line("via relays", 1);
    server.wait_line("reachable through a relay", 1);
    server.wait_online();
    // One text: that relay gives a circuit 128 KiB and two minutes.
    assert_golden("client", &relay.addr);
}
