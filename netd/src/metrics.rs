//! The endpoint of `--metrics`: `/metrics` for Prometheus, `/livez` and `/readyz` for who starts
//! and watches servers.
//!
//! ```text
//! supervisor ── listening socket, passed to each generation of netd ──> http ──> text
//!                                                                        │        ├── Telemetry (this process)
//!                                                                     Service     └── board (workers, supervisor)
//! ```
//!
//! The supervisor owns the listening socket: the port is taken once, before anything else starts, and
//! stays while netd is replaced. A request that comes meanwhile waits for the next generation, which
//! finds on the board what workers and supervisor counted; the counters of netd itself begin at zero,
//! as Prometheus expects of a process that was started again.

pub(crate) mod http;
mod text;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use p2p::task;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::rpc::Service;
use crate::telemetry::Telemetry;

/// Serves on `socket`, which listens, until the daemon ends.
pub fn start(
    socket: OwnedFd,
    telemetry: Arc<Telemetry>,
    service: watch::Receiver<Option<Arc<Service>>>,
) {
    let socket = std::net::TcpListener::from(socket);
    let listener = socket.set_nonblocking(true).and_then(|()| TcpListener::from_std(socket));
    match listener {
        Ok(listener) => {
            info!(addr = ?listener.local_addr().ok(), "serving metrics");
            let pages = Arc::new(text::Pages::new(telemetry, service));
            task::spawn(http::serve(listener, pages));
        }
        Err(error) => warn!(%error, "cannot serve metrics"),
    }
}
