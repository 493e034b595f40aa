//! Tests of the page's files, which a browser tries in `tests/openai/page.mjs`.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path as FilePath, PathBuf};

use axum::body::to_bytes;
use axum::http::HeaderValue;
use flate2::read::GzDecoder;

use super::*;

fn folder() -> PathBuf {
    FilePath::new(env!("CARGO_MANIFEST_DIR")).join("page")
}

fn page() -> &'static Page {
    PAGE.as_ref().unwrap()
}

fn asking(name: header::HeaderName, value: &str) -> HeaderMap {
    HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
}

/// The text of an embedded file.
fn text(path: &str) -> &'static str {
    let (_, bytes) = FILES.iter().find(|(other, _)| *other == path).unwrap();
    std::str::from_utf8(bytes).unwrap()
}

async fn asked_for(version: &str, path: &str, headers: HeaderMap) -> Response {
    file(Path((version.to_owned(), path.to_owned())), headers).await
}

#[test]
fn every_style_and_module_of_the_folder_is_embedded() {
    let mut found = BTreeSet::new();
    for kind in ["css", "js", "vendor"] {
        for entry in std::fs::read_dir(folder().join(kind)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".css") || name.ends_with(".js") {
                found.insert(format!("{kind}/{name}"));
            }
        }
    }
    found.insert("icon.svg".to_owned());
    let embedded: BTreeSet<String> = FILES.iter().map(|(path, _)| (*path).to_owned()).collect();
    assert_eq!(embedded, found);
}

#[test]
fn the_page_names_only_files_that_it_has_and_no_other_origin() {
    let named: Vec<&str> =
        INDEX.split("\"page/").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert!(named.contains(&"js/main.js") && named.len() > 4, "{named:?}");
    assert!(named.iter().all(|path| page().files.contains_key(path)), "{named:?}");
    for (path, _) in FILES.iter().filter(|(path, _)| !path.starts_with("vendor/")) {
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "url(", "@import"] {
            assert!(!text(path).contains(word), "{path}: {word}");
        }
        for line in text(path).lines().filter(|line| line.starts_with("import ")) {
            let from = line.split('"').nth(1).unwrap();
            let target = match from.strip_prefix("../") {
                Some(other) => other.to_owned(),
                None => format!("js/{}", from.strip_prefix("./").unwrap()),
            };
            assert!(page().files.contains_key(target.as_str()), "{path}: {from}");
        }
    }
    for address in
        ["src=\"/", "href=\"/", "src=\"http", "href=\"http", "<style", " style=", " onclick="]
    {
        assert!(!INDEX.contains(address), "{address}");
    }
}

#[test]
fn libraries_are_those_of_their_checksums() {
    let checksums = std::fs::read_to_string(folder().join("vendor/checksums")).unwrap();
    let mut checked = BTreeSet::new();
    for line in checksums.lines() {
        let (sum, name) = line.split_once("  ./").unwrap();
        let bytes = std::fs::read(folder().join("vendor").join(name)).unwrap();
        let hash = Sha256::digest(&bytes);
        let is: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(is, sum, "{name}: gateway/page/vendor/renew writes it anew");
        checked.insert(name.to_owned());
    }
    for (path, _) in FILES {
        let Some(name) = path.strip_prefix("vendor/") else { continue };
        assert!(checked.contains(name), "{name}");
        assert!(checked.contains(&name.replace(".js", ".LICENSE")), "{name}");
    }
}

#[test]
fn the_policy_allows_no_inline_script_and_no_other_origin() {
    for part in [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "require-trusted-types-for 'script'",
    ] {
        assert!(POLICY.contains(part), "{part}");
    }
    for part in ["unsafe", "http", "*", "data:"] {
        assert!(!POLICY.contains(part), "{part}");
    }
    assert_eq!(POLICY.trim_ascii_end().lines().count(), 1);
}

#[tokio::test]
async fn files_are_compressed_and_kept_for_good() {
    let version = page().version.as_str();
    let plain = asked_for(version, "vendor/marked.js", HeaderMap::new()).await;
    assert!(plain.headers().get(header::CONTENT_ENCODING).is_none());
    let caching = plain.headers()[header::CACHE_CONTROL].to_str().unwrap();
    assert!(caching.contains("immutable"), "{caching}");
    let plain = to_bytes(plain.into_body(), usize::MAX).await.unwrap();
    assert_eq!(plain, text("vendor/marked.js"));
    let small =
        asked_for(version, "vendor/marked.js", asking(header::ACCEPT_ENCODING, "br, gzip;q=0.5"))
            .await;
    assert_eq!(small.headers()[header::CONTENT_ENCODING], "gzip");
    let small = to_bytes(small.into_body(), usize::MAX).await.unwrap();
    assert!(small.len() * 2 < plain.len(), "{} of {}", small.len(), plain.len());
    let mut unpacked = Vec::new();
    GzDecoder::new(&small[..]).read_to_end(&mut unpacked).unwrap();
    assert_eq!(unpacked, plain);
    let refused =
        asked_for(version, "vendor/marked.js", asking(header::ACCEPT_ENCODING, "gzip;q=0")).await;
    assert!(refused.headers().get(header::CONTENT_ENCODING).is_none());
}

#[tokio::test]
async fn a_browser_that_has_the_page_gets_nothing_again() {
    let first = index(HeaderMap::new()).await;
    assert_eq!(first.headers()[header::CACHE_CONTROL], "no-cache");
    let tag = first.headers()[header::ETAG].to_str().unwrap().to_owned();
    let html = to_bytes(first.into_body(), usize::MAX).await.unwrap();
    let main = format!("\"page/{}/js/main.js\"", page().version);
    assert!(String::from_utf8_lossy(&html).contains(&main));
    let again = index(asking(header::IF_NONE_MATCH, &tag)).await;
    assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
    let changed = index(asking(header::IF_NONE_MATCH, "W/\"0011223344556677\"")).await;
    assert_eq!(changed.status(), StatusCode::OK);
}

#[tokio::test]
async fn files_of_another_version_and_unknown_ones_are_not_found() {
    let version = page().version.as_str();
    for (version, path) in [
        ("0011223344556677", "js/main.js"),
        (version, "../src/lib.rs"),
        (version, "vendor/checksums"),
    ] {
        let response = asked_for(version, path, HeaderMap::new()).await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND, "{path}");
    }
}
