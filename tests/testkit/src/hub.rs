//! A stand-in for the Hub's HTTP interface on a port of this machine: `HEAD` and `GET` of
//! `/ORG/NAME/resolve/REVISION/FILE` with ranges, tokens, and the troubles that a test asks for.
//! One thread for each connection, one request for each connection.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};
use shared::config::{HubConfig, PrepareConfig};

use crate::configs::prepare_config;

/// Commit of everything in the stand-in.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request that was answered with a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Got {
    pub file: String,
    pub range: Option<Range<u64>>,
}

/// What goes wrong.
#[derive(Default)]
pub struct Troubles {
    /// Requests without this token are refused with 401.
    pub token: Option<String>,
    /// Every request with a body is cut off after so many bytes, so many times.
    pub cut_after: Option<(usize, usize)>,
    /// So many requests are answered with 503.
    pub unavailable: usize,
    /// The sums of files are those of something else.
    pub wrong_sums: bool,
    /// Bodies come in this many pieces, each after the first once it is asked for; see
    /// [`StandIn::send_when_asked`].
    pub pieces: Option<(usize, Arc<Mutex<Receiver<()>>>)>,
    /// Ranges are answered with the whole file, whose length is not said.
    pub no_ranges: bool,
    /// The commit that it names instead of [`COMMIT`].
    pub commit: Option<String>,
    /// What it names the content instead of its sum.
    pub etag: Option<String>,
}

#[derive(Default)]
struct Served {
    files: BTreeMap<String, Vec<u8>>,
    troubles: Troubles,
    got: Vec<Got>,
}

/// The stand-in; its threads end with the process.
#[derive(Clone)]
pub struct StandIn {
    pub endpoint: String,
    state: Arc<Mutex<Served>>,
}

impl StandIn {
    /// Serves the files of `folder`, and of folders in it, as those of the model `repo`.
    pub fn serve(repo: &str, folder: &Path) -> StandIn {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files = files_below(folder).into_iter().map(|path| {
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap();
            (format!("/{repo}/resolve/{name}"), std::fs::read(&path).unwrap())
        });
        let state = Arc::new(Mutex::new(Served { files: files.collect(), ..Served::default() }));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                std::thread::spawn(move || answer(stream, &state));
            }
        });
        StandIn { endpoint, state }
    }

    /// Settings of `model` of this Hub.
    pub fn prepare_config(&self, model: &str, cache_dir: impl AsRef<Path>) -> PrepareConfig {
        let endpoint = Some(self.endpoint.clone());
        let hub = HubConfig { endpoint, ..HubConfig::default() };
        PrepareConfig { hub, ..prepare_config(model, cache_dir) }
    }

    pub fn trouble(&self, set: impl FnOnce(&mut Troubles)) {
        set(&mut self.state.lock().unwrap().troubles);
    }

    /// Bodies come in so many pieces from now on: each after the first once a message is sent, or never
    /// if the sender is gone before.
    #[allow(dead_code, reason = "other tests include this file")]
    pub fn send_when_asked(&self, pieces: usize) -> SyncSender<()> {
        let (ask, asked) = sync_channel(pieces);
        self.trouble(|troubles| troubles.pieces = Some((pieces, Arc::new(Mutex::new(asked)))));
        ask
    }

    /// Requests with a body so far, and forgets them.
    pub fn take_got(&self) -> Vec<Got> {
        std::mem::take(&mut self.state.lock().unwrap().got)
    }
}

/// All files of a folder and of those in it.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

struct Request {
    is_head: bool,
    path: String,
    token: Option<String>,
    range: Option<Range<u64>>,
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?, words.next()?.to_owned());
    let mut request = Request { is_head: method == "HEAD", path, token: None, range: None };
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(": ")?;
        match name.to_lowercase().as_str() {
            "authorization" => request.token = value.strip_prefix("Bearer ").map(str::to_owned),
            "range" => {
                let (start, end) = value.strip_prefix("bytes=")?.split_once('-')?;
                request.range = Some(start.parse().ok()?..end.parse::<u64>().ok()? + 1);
            }
            _ => {}
        }
    }
    Some(request)
}

fn answer(mut stream: TcpStream, state: &Mutex<Served>) -> Option<()> {
    let request = read(&stream)?;
    let mut state = state.lock().unwrap();
    let refuse = |stream: &mut TcpStream, status: &str| {
        write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").ok()
    };
    if state.troubles.unavailable > 0 {
        state.troubles.unavailable -= 1;
        return refuse(&mut stream, "503 Service Unavailable");
    }
    if state.troubles.token.is_some() && state.troubles.token != request.token {
        return refuse(&mut stream, "401 Unauthorized");
    }
    // Any revision has the same files.
    let (before, after) = request.path.split_once("/resolve/")?;
    let file = after.split_once('/')?.1.to_owned();
    let Some(body) = state.files.get(&format!("{before}/resolve/{file}")).cloned() else {
        return refuse(&mut stream, "404 Not Found");
    };
    let mut sum = Sha256::new();
    sum.update(if state.troubles.wrong_sums { b"other" } else { body.as_slice() });
    let etag: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let etag = state.troubles.etag.clone().unwrap_or(etag);
    let commit = state.troubles.commit.clone().unwrap_or_else(|| COMMIT.to_owned());
    let range = request.range.filter(|_| !state.troubles.no_ranges);
    let part = match &range {
        Some(range) => body.get(range.start as usize..(range.end as usize).min(body.len()))?,
        None => body.as_slice(),
    };
    let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
    // Who streams a whole file may not know its length.
    let is_streamed = state.troubles.no_ranges && !request.is_head;
    let length = match is_streamed {
        true => String::new(),
        false => format!("Content-Length: {}\r\n", part.len()),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\n{length}X-Repo-Commit: {commit}\r\nETag: \"{etag}\"\r\nAccept-Ranges: bytes\r\nConnection: close\r\n\r\n"
    )
    .ok()?;
    if request.is_head {
        return Some(());
    }
    state.got.push(Got { file, range });
    let mut length = part.len();
    if let Some((after, times)) = state.troubles.cut_after
        && times > 0
        && length > after
    {
        length = after;
        state.troubles.cut_after = Some((after, times - 1));
    }
    let part = part[..length].to_vec();
    let pieces = state.troubles.pieces.clone();
    drop(state);
    let count = pieces.as_ref().map_or(1, |(count, _)| *count);
    for (number, piece) in part.chunks(part.len().div_ceil(count).max(1)).enumerate() {
        if let Some((_, asked)) = pieces.as_ref().filter(|_| number > 0) {
            asked.lock().unwrap().recv().ok()?;
        }
        stream.write_all(piece).ok()?;
    }
    Some(())
}
