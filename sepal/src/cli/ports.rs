//! `--port` and `--public_ip`, which are short for multiaddrs (`run_server.py`).

use std::net::Ipv4Addr;

use clap::Args;

/// Short forms of `--host_maddrs` and `--announce_maddrs`.
#[derive(Clone, Copy, Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct PortArgs {
    /// Listen on this port on all addresses [default: a free port]
    #[arg(long, value_name = "PORT", conflicts_with = "host_maddrs")]
    port: Option<u16>,
    /// Announce only this address; requires --port
    #[arg(long, value_name = "IPV4", requires = "port", conflicts_with = "announce_maddrs")]
    public_ip: Option<Ipv4Addr>,
}

impl PortArgs {
    /// Where to listen, unless `host_maddrs` say so, and what to announce.
    ///
    /// # Errors
    /// A sentence, for an address without a port that leads to it.
    pub fn fill(
        self,
        host_maddrs: &mut Vec<String>,
        announce_maddrs: &mut Vec<String>,
    ) -> Result<(), String> {
        let port = self.port.unwrap_or(0);
        if host_maddrs.is_empty() {
            *host_maddrs = vec![format!("/ip4/0.0.0.0/tcp/{port}"), format!("/ip6/::/tcp/{port}")];
        }
        match self.public_ip {
            Some(ip) if port == 0 => {
                return Err(format!(
                    "--public_ip {ip} requires --port with the port that leads to this server"
                ));
            }
            Some(ip) => *announce_maddrs = vec![format!("/ip4/{ip}/tcp/{port}")],
            None => {}
        }
        Ok(())
    }
}
