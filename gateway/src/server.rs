//! The process: loads the models, listens, and ends in order.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum_server::Handle;
use axum_server::accept::NoDelayAcceptor;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use hyper_util::rt::TokioTimer;
use p2p::task;
use shared::bootstrap::{die_with_parent, hear_sigterm};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::sanitize_text::escaped;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::api::{self, KeysError};
use crate::config::GatewayConfig;
use crate::engine::{Engine, EngineError};

/// Threads for HTTP and the network; heads have their own.
const THREADS: usize = 2;
/// A caller has this long for the head of its request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Texts under way have this long to end after a signal.
const DRAIN: Duration = Duration::from_secs(20);

/// Why the gateway ends.
#[derive(Debug, thiserror::Error)]
enum GatewayError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error("cannot listen on {address}; choose another address with --listen")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("cannot use the certificate {certificate} with the key {key}; both must be PEM")]
    Tls { certificate: PathBuf, key: PathBuf, source: std::io::Error },
    #[error("cannot start the gateway")]
    Runtime(#[from] std::io::Error),
}

impl GatewayError {
    fn exit_reason(&self) -> ExitReason {
        match self {
            GatewayError::Engine(error) if !error.is_of_settings() => ExitReason::Failed,
            GatewayError::Listen { .. } => ExitReason::Busy,
            GatewayError::Runtime(_) => ExitReason::Failed,
            _ => ExitReason::BadConfig,
        }
    }
}

/// Runs the gateway until SIGTERM or SIGINT, or until the server ends that it belongs to.
pub fn run_command(config: &GatewayConfig) -> ExitReason {
    if let Some(server) = &config.engine.server
        && let Err(error) = die_with_parent(server.pid).and_then(|()| hear_sigterm())
    {
        eprintln!("sepal: {error}");
        return error.exit_reason();
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(run(config)),
        Err(error) => Err(error.into()),
    };
    match ended {
        Ok(()) => ExitReason::Clean,
        Err(error) => {
            eprintln!("sepal: {}", escaped(&with_causes(&error)));
            error.exit_reason()
        }
    }
}

async fn run(config: &GatewayConfig) -> Result<(), GatewayError> {
    let listener = listen(config)?;
    let address = listener.local_addr()?;
    let tls = match config.tls() {
        Some((certificate, key)) => Some(acceptor(certificate, key).await?),
        None => None,
    };
    let engine = Arc::new(Engine::start(&config.engine).await?);
    let router = api::router(engine.clone(), config)?;
    for view in engine.views() {
        let view = Arc::clone(view);
        task::spawn(async move { view.keep_up().await });
    }
    for model in engine.models() {
        let model = Arc::clone(model);
        task::spawn(async move { model.close_idle().await });
    }
    let handle = Handle::new();
    // From here on a signal ends the gateway in order; whoever reads the next line may send one.
    let signals = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    task::spawn(end_at_signal(handle.clone(), signals));
    let scheme = if tls.is_some() { "https" } else { "http" };
    println!(
        "The gateway answers at {scheme}://{address}/v1 and shows the swarm at {scheme}://{address}/"
    );
    tracing::info!(%address, scheme, "gateway answers");
    serve(listener, router, tls, handle).await?;
    engine.leave().await;
    Ok(())
}

/// The socket that callers come to. The supervisor of a server passes it in place of standard input.
fn listen(config: &GatewayConfig) -> Result<TcpListener, GatewayError> {
    let listener = match config.engine.server {
        Some(_) => TcpListener::from(std::io::stdin().as_fd().try_clone_to_owned()?),
        None => TcpListener::bind(config.listen)
            .map_err(|source| GatewayError::Listen { address: config.listen, source })?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<RustlsAcceptor<NoDelayAcceptor>>,
    handle: Handle<SocketAddr>,
) -> Result<(), std::io::Error> {
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    let mut server = axum_server::from_tcp(listener)?.handle(handle);
    server.http_builder().http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    match tls {
        // Pieces of a text are small, and none waits for the acknowledgement of the one before.
        None => server.acceptor(NoDelayAcceptor::new()).serve(service).await,
        Some(acceptor) => server.acceptor(acceptor).serve(service).await,
    }
}

async fn acceptor(
    certificate: &Path,
    key: &Path,
) -> Result<RustlsAcceptor<NoDelayAcceptor>, GatewayError> {
    // Fails if another part of the process has installed it already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = RustlsConfig::from_pem_file(certificate, key).await.map_err(|source| {
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        GatewayError::Tls { certificate, key, source }
    })?;
    Ok(RustlsAcceptor::new(config).acceptor(NoDelayAcceptor::new()))
}

/// Stops listening at the first signal; texts under way may end.
async fn end_at_signal(handle: Handle<SocketAddr>, signals: [Signal; 2]) {
    let [mut terminate, mut interrupt] = signals;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("shutting down");
    handle.graceful_shutdown(Some(DRAIN));
}
