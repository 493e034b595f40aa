//! The swarm's page: one file, which loads nothing from anywhere.

use axum::http::header;
use axum::response::{IntoResponse, Response};

const PAGE: &str = include_str!("page.html");

/// The page. Only its own script and style run, by a number that is new each time.
pub(super) async fn page() -> Response {
    let nonce = uuid::Uuid::new_v4().simple().to_string();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
    ];
    (headers, PAGE.replace("{{nonce}}", &nonce)).into_response()
}
