//! An internet in network namespaces: a public net, and hosts on it or behind NAT routers of their
//! own.
//!
//! ```text
//!   server 10.1.0.2 ── nat1 5.6.7.1 ─┐                  ┌─ nat2 5.6.7.2 ── client 10.2.0.2
//!                                    ├── 5.6.7.0/24 ────┤
//!   relay 5.6.7.10 ──────────────────┘                  └─ other public hosts
//! ```
//!
//! To be run in a network namespace of the test's own (`tests/nat/run`): it has no way to anywhere
//! else, so the addresses may look public.

use std::io::Write;
use std::process::{Command, Stdio};

/// How a router translates.
#[derive(Clone, Copy, Debug)]
pub enum Nat {
    /// Keeps ports where it can, the same for all destinations: holes can be punched.
    PortPreserving,
    /// A new random port for each connection: they cannot.
    Symmetric,
}

/// The public net; gone with the process that made it.
pub struct Lab;

impl Lab {
    /// # Panics
    /// Outside of `tests/nat/run`, or when the kernel refuses.
    pub fn new() -> Lab {
        assert!(
            std::env::var_os("SEPAL_NAT_LAB").is_some(),
            "start these tests with tests/nat/run: they change the network they run in"
        );
        for name in names() {
            ip(&format!("netns del {name}"));
        }
        ip("netns add net");
        ip("-n net link add br0 type bridge");
        ip("-n net link set br0 up");
        Lab
    }

    /// A public host with the address 5.6.7.`number`.
    pub fn host(&self, name: &str, number: u8) {
        self.plug(name, number);
    }

    /// A host behind a router 5.6.7.`number`; its own address is 10.`number`.0.2.
    pub fn natted(&self, name: &str, number: u8, nat: Nat) {
        let router = format!("nat{number}");
        self.plug(&router, number);
        add(name);
        ip(&format!("link add eth0 netns {name} type veth peer name inside netns {router}"));
        let own = format!("10.{number}.0");
        up(name, "eth0", &format!("{own}.2/24"));
        up(&router, "inside", &format!("{own}.1/24"));
        ip(&format!("-n {name} route add default via {own}.1"));
        run("ip", &format!("netns exec {router} sysctl -qw net.ipv4.ip_forward=1"));
        let ports = match nat {
            Nat::PortPreserving => "",
            Nat::Symmetric => "random,fully-random",
        };
        nft(&router, &ruleset(ports));
    }

    /// Lets only so many kilobytes a second through to and from a host; what is more is lost. An
    /// idle line saves up a second of it.
    pub fn slow(&self, name: &str, kilobytes_per_s: u32) {
        let chain = |hook: &str| {
            format!(
                " chain {hook} {{\n type filter hook {hook} priority 0; policy accept\n \
                 limit rate over {kilobytes_per_s} kbytes/second burst 256 kbytes drop\n }}\n"
            )
        };
        let (input, output) = (chain("input"), chain("output"));
        nft(name, &format!("table ip slow {{\n{input}{output}}}\n"));
    }

    /// Has the router in front of a natted host forward a TCP port to it.
    pub fn forward(router: &str, port: u16, to: &str) {
        let rules = format!(
            "table ip nat {{\n chain pre {{\n type nat hook prerouting priority -100\n iifname \"outside\" tcp dport {port} dnat to {to}\n }}\n}}\n\
             table ip filter {{\n chain through {{\n ct status dnat accept\n }}\n}}\n"
        );
        nft(router, &rules);
    }

    /// Lets the hosts behind a router talk to the router itself.
    pub fn answers_inside(&self, router: &str) {
        nft(router, "table ip filter {\n chain own {\n iifname \"inside\" accept\n }\n}\n");
    }

    /// Pulls the plug of a host or router, or puts it back.
    pub fn plugged(&self, name: &str, plugged: bool) {
        let state = if plugged { "up" } else { "down" };
        // The other end, so that the host keeps its address and routes.
        ip(&format!("-n net link set port_{name} {state}"));
    }

    fn plug(&self, name: &str, number: u8) {
        add(name);
        ip(&format!("link add eth0 netns {name} type veth peer name port_{name} netns net"));
        ip(&format!("-n net link set port_{name} master br0 up"));
        let link = if name.starts_with("nat") { "outside" } else { "eth0" };
        if link != "eth0" {
            ip(&format!("-n {name} link set eth0 name {link}"));
        }
        up(name, link, &format!("5.6.7.{number}/24"));
    }
}

/// The words that run a program in a host.
pub fn at(name: &str) -> [String; 4] {
    ["ip", "netns", "exec", name].map(str::to_owned)
}

/// What home routers do: translate what goes out, let answers in, say nothing to anybody else.
fn ruleset(ports: &str) -> String {
    let translate = format!("masquerade {ports}");
    format!(
        "table ip nat {{\n chain post {{\n type nat hook postrouting priority 100\n oifname \"outside\" {translate}\n }}\n}}\n\
         table ip filter {{\n chain through {{\n type filter hook forward priority 0; policy drop\n iifname \"inside\" accept\n \
         ct state established,related accept\n }}\n chain own {{\n type filter hook input priority 0; policy drop\n \
         ct state established,related accept\n }}\n}}\n"
    )
}

fn add(name: &str) {
    ip(&format!("netns add {name}"));
    ip(&format!("-n {name} link set lo up"));
}

fn up(name: &str, link: &str, addr: &str) {
    ip(&format!("-n {name} addr add {addr} dev {link}"));
    ip(&format!("-n {name} link set {link} up"));
}

fn ip(words: &str) {
    run("ip", words);
}

fn run(program: &str, words: &str) {
    let out = Command::new(program)
        .args(words.split(' '))
        .output()
        .unwrap_or_else(|error| panic!("{program} {words}: {error}"));
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {words}: {text}");
}

fn nft(name: &str, rules: &str) {
    let [ip, rest @ ..] = at(name);
    let mut child = Command::new(ip)
        .args(rest)
        .args(["nft", "-f", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .expect("start nft");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    stdin.write_all(rules.as_bytes()).expect("write the rules");
    drop(stdin);
    assert!(child.wait().expect("wait for nft").success(), "{rules}");
}

fn names() -> Vec<String> {
    let out = Command::new("ip").args(["netns", "list"]).output();
    let text = String::from_utf8(out.expect("run ip netns list").stdout).expect("UTF-8");
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}
