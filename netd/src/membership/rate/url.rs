//! Measures with a service that the operator named (`--network_test_url`): what comes from one
//! address by GET, and how fast bytes go to another by POST. Nobody is asked without that.

use std::time::Duration;

use tokio::time::{Instant, timeout};
use tracing::info;

use super::meter::Meter;
use super::serve::chunk;
use super::{CHUNK_BYTES, MAX_TIME};
use crate::http::{self, HttpError};

/// Bytes taken at most.
const MAX_DOWNLOAD_BYTES: u64 = 128 << 20;
/// Bytes sent, in two attempts: the second only if the first took less than a second.
const UPLOADS_BYTES: [usize; 2] = [2 << 20, 64 << 20];
/// A shorter upload is tried again with more bytes.
const SHORT: Duration = Duration::from_secs(1);
/// Bound of a request.
const LIMIT: Duration = Duration::from_secs(20);

/// Bits per second from `download` and to `upload`, the slower way.
///
/// # Errors
/// [`HttpError`], also when the service sends next to nothing.
pub async fn with_service(download: &str, upload: &str) -> Result<f64, UrlError> {
    let failed = |url: &str| {
        let url = url.to_owned();
        move |source| UrlError { url, source }
    };
    let down = down(download).await.map_err(failed(download))?;
    let down = down.ok_or_else(|| UrlError::empty(download))?;
    let up = up(upload).await.map_err(failed(upload))?;
    info!(
        download_mbps = down / 1e6,
        upload_mbps = up / 1e6,
        service = download,
        "measured the network with --network_test_url"
    );
    Ok(down.min(up))
}

/// A service that cannot be measured with.
#[derive(Debug, thiserror::Error)]
#[error("cannot measure the network with {url}: {source}")]
pub struct UrlError {
    url: String,
    source: HttpError,
}

impl UrlError {
    fn empty(url: &str) -> UrlError {
        UrlError { url: url.to_owned(), source: HttpError::Status(reqwest::StatusCode::NO_CONTENT) }
    }
}

async fn down(url: &str) -> Result<Option<f64>, HttpError> {
    let client = http::client(LIMIT)?;
    let mut answer = http::pieces(&client, url).await?;
    let (start, mut meter, mut received) = (Instant::now(), Meter::default(), 0);
    let transfer = async {
        while received < MAX_DOWNLOAD_BYTES
            && let Some(piece) = answer.chunk().await?
        {
            received += piece.len() as u64;
            meter.add(start.elapsed(), piece.len() as u64);
        }
        Ok::<_, HttpError>(())
    };
    if let Ok(ended) = timeout(MAX_TIME, transfer).await {
        ended?;
    }
    Ok(meter.bits_per_s(start.elapsed()))
}

/// The whole time counts, with that of the connection and of the answer: when bytes have arrived is
/// not told.
async fn up(url: &str) -> Result<f64, HttpError> {
    let client = http::client(LIMIT)?;
    let mut rate = 0.0;
    for bytes in UPLOADS_BYTES {
        let start = Instant::now();
        let count = bytes / CHUNK_BYTES;
        http::post(&client, url, chunk(), count).await?;
        let took = start.elapsed().max(Duration::from_millis(1));
        rate = (bytes * 8) as f64 / took.as_secs_f64();
        if took > SHORT {
            break;
        }
    }
    Ok(rate)
}
