//! The page: a place to talk, with the swarm behind a tab. Its files lie in `gateway/page` and are embedded as they
//! are; they load nothing from anywhere else.
//!
//! The first page names its files below `page/VERSION/`, where VERSION is a hash over all of them: browsers keep
//! them for good, and modules find each other by relative paths below the path of any proxy.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::LazyLock;

use axum::body::Bytes;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flate2::{Compression, GzBuilder};
use sha2::{Digest, Sha256};

use super::error::ApiError;
use super::request;

const INDEX: &str = include_str!("../../page/index.html");
/// What the page may do, as browsers enforce it: neither inline scripts nor styles, no other origin, no text as HTML.
const POLICY: &str = include_str!("../../page/policy.txt");
/// Bytes of the hash in paths.
const VERSION_BYTES: usize = 8;

/// The embedded files by their paths below `page/`.
macro_rules! files {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_bytes!(concat!("../../page/", $path)))),*]
    };
}

const FILES: &[(&str, &[u8])] = files![
    "css/base.css",
    "css/code.css",
    "css/swarm.css",
    "css/talk.css",
    "icon.svg",
    "js/answer.js",
    "js/api.js",
    "js/conversations.js",
    "js/dom.js",
    "js/main.js",
    "js/markdown.js",
    "js/messages.js",
    "js/servers.js",
    "js/settings.js",
    "js/store.js",
    "js/swarm.js",
    "js/talk.js",
    "vendor/highlight.js",
    "vendor/marked.js",
    "vendor/purify.js",
];

/// All files, compressed at the first request for one.
static PAGE: LazyLock<io::Result<Page>> = LazyLock::new(Page::prepare);

/// The page as it is served.
struct Page {
    /// Hash of all files, in hexadecimal digits.
    version: String,
    index: PageFile,
    files: BTreeMap<&'static str, PageFile>,
}

/// A file in memory, plain and compressed.
struct PageFile {
    media_type: &'static str,
    plain: Bytes,
    gzip: Bytes,
}

impl Page {
    fn prepare() -> io::Result<Page> {
        let mut hash = Sha256::new();
        hash.update(INDEX);
        for (path, bytes) in FILES {
            hash.update(path);
            hash.update(bytes);
        }
        let hash = hash.finalize();
        let version: String =
            hash.iter().take(VERSION_BYTES).map(|byte| format!("{byte:02x}")).collect();
        let index = INDEX.replace("\"page/", &format!("\"page/{version}/"));
        let file = |(path, bytes): &(&'static str, &'static [u8])| {
            Ok((*path, PageFile::new(path, Bytes::from_static(bytes))?))
        };
        let files = FILES.iter().map(file).collect::<io::Result<_>>()?;
        Ok(Page { version, index: PageFile::new("index.html", index.into())?, files })
    }
}

impl PageFile {
    fn new(path: &str, plain: Bytes) -> io::Result<PageFile> {
        let media_type = match path.rsplit_once('.') {
            Some((_, "css")) => "text/css; charset=utf-8",
            Some((_, "js")) => "text/javascript; charset=utf-8",
            Some((_, "svg")) => "image/svg+xml",
            _ => "text/html; charset=utf-8",
        };
        let mut gzip = GzBuilder::new().write(Vec::new(), Compression::default());
        gzip.write_all(&plain)?;
        Ok(PageFile { media_type, gzip: gzip.finish()?.into(), plain })
    }

    /// The file, compressed for those who take that; nothing for those who have it.
    fn respond(&self, asked: &HeaderMap, version: &str, caching: &'static str) -> Response {
        // Weak: both forms of the file have it.
        let tag = format!("W/\"{version}\"");
        let headers = [
            (header::CONTENT_TYPE, self.media_type),
            (header::CONTENT_SECURITY_POLICY, POLICY.trim_ascii_end()),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, caching),
            (header::VARY, "accept-encoding"),
            (header::ETAG, tag.as_str()),
        ];
        if names(asked, header::IF_NONE_MATCH, &tag) {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        match names(asked, header::ACCEPT_ENCODING, "gzip") {
            true => {
                (headers, [(header::CONTENT_ENCODING, "gzip")], self.gzip.clone()).into_response()
            }
            false => (headers, self.plain.clone()).into_response(),
        }
    }
}

/// Whether a header lists `wanted`; with a weight, that of more than nothing.
fn names(headers: &HeaderMap, name: header::HeaderName, wanted: &str) -> bool {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|item| {
        let (item, weight) = item.split_once(';').unwrap_or((item, ""));
        let weight = weight.trim().strip_prefix("q=").map(str::parse::<f32>);
        item.trim() == wanted && !matches!(weight, Some(Ok(0.0)))
    })
}

/// The page, prepared outside of the reactor.
async fn prepared() -> Result<&'static Page, ApiError> {
    let page = request::outside(|| PAGE.as_ref()).await?;
    page.map_err(|error| ApiError::not_found(format!("cannot prepare the page: {error}")))
}

/// The first page; browsers ask each time whether theirs is the newest.
pub(super) async fn index(headers: HeaderMap) -> Response {
    match prepared().await {
        Ok(page) => page.index.respond(&headers, &page.version, "no-cache"),
        Err(error) => error.into_response(),
    }
}

/// One of its files, which never changes under its path.
pub(super) async fn file(
    Path((version, path)): Path<(String, String)>,
    headers: HeaderMap,
) -> Response {
    let page = match prepared().await {
        Ok(page) => page,
        Err(error) => return error.into_response(),
    };
    match page.files.get(path.as_str()).filter(|_| page.version == version) {
        Some(file) => file.respond(&headers, &version, "public, max-age=31536000, immutable"),
        None => ApiError::not_found("the page has no such file; load it again".to_owned())
            .into_response(),
    }
}

#[cfg(test)]
mod tests;
