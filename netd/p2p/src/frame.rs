//! Frames of RPC streams: marker, length, payload.
//!
//! ```text
//!   0        1                        9
//!   +--------+------------------------+----------------- - -
//!   | marker | length, big endian u64 | payload
//!   +--------+------------------------+----------------- - -
//!   marker 0  one request or response
//!   marker 1  from the caller: end of input; from the callee: an error, payload RPCError
//! ```
//!
//! Source: `hivemind/p2p/p2p_daemon.py` (`P2P.send_protobuf`, `receive_protobuf`, `send_raw_data`).

use std::io;

use bytes::Bytes;
use futures::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use prost::Message as _;
use tokio::time::timeout;

use super::{limits::WRITE_STALL_TIMEOUT, messages::RpcError};

/// Default bound of one frame. An inference step of any size is one frame: batch × tokens × hidden
/// × 4 bytes and its prompts. Memory grows with what was received, not with what was announced.
pub const DEFAULT_MAX_FRAME_BYTES: u64 = 1 << 30;

const HEADER_BYTES: usize = 9;
const MESSAGE: u8 = 0;
const CONTROL: u8 = 1;
/// One read takes this much; also what yamux puts into one of its own frames.
pub(super) const READ_AHEAD_BYTES: usize = 16 * 1024;
/// First allocation for a payload; doubled as data arrives.
const FIRST_PAYLOAD_BYTES: usize = 64 * 1024;

/// What a frame is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// One request or response.
    Message(Bytes),
    /// End of input or error, depending on who sent it.
    Control(Bytes),
}

/// Why there is no next frame.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("cannot read a frame")]
    Io(#[from] io::Error),
    /// The stream ended within a frame.
    #[error("end of stream within a frame")]
    Cut,
    /// The first byte of a frame is neither 0 nor 1.
    #[error("unknown frame marker {0}")]
    Marker(u8),
    /// The announced length exceeds the bound.
    #[error("frame of {bytes} bytes exceeds {limit}")]
    TooLarge { bytes: u64, limit: u64 },
}

/// Takes frames off a byte stream. [`next`](Self::next) may be dropped at any time and called
/// again.
#[derive(Debug)]
pub(super) struct FrameReader<R> {
    inner: R,
    limit: u64,
    /// Bytes read and not yet taken: `ahead[start..end]`.
    ahead: Vec<u8>,
    start: usize,
    end: usize,
    partial: Option<Partial>,
}

/// A frame whose header is known.
#[derive(Debug)]
struct Partial {
    marker: u8,
    length: usize,
    /// `payload[..filled]` was received.
    payload: Vec<u8>,
    filled: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(super) fn new(inner: R) -> Self {
        Self {
            inner,
            limit: DEFAULT_MAX_FRAME_BYTES,
            ahead: Vec::new(),
            start: 0,
            end: 0,
            partial: None,
        }
    }

    /// Changes the bound of frames whose header is yet to come.
    pub(super) fn set_limit(&mut self, bytes: u64) {
        self.limit = bytes;
    }

    /// The stream, for reading what is not worth keeping.
    pub(super) fn inner_mut(&mut self) -> &mut R {
        &mut self.inner
    }

    /// The stream; bytes read ahead are lost.
    pub(super) fn into_inner(self) -> R {
        self.inner
    }

    /// The length of the next frame, of whose payload no more than what was read ahead is here; `None`
    /// if the stream ended between two frames. May be dropped, and called again for the same frame.
    pub(super) async fn announced(&mut self) -> Result<Option<usize>, FrameError> {
        loop {
            if let Some(partial) = &self.partial {
                return Ok(Some(partial.length));
            }
            self.partial = self.take_header()?;
            if self.partial.is_none() && self.read_ahead().await? == 0 {
                return if self.start == self.end { Ok(None) } else { Err(FrameError::Cut) };
            }
        }
    }

    /// Bytes of the frame that were received, its header apart.
    pub(super) fn received(&self) -> usize {
        self.partial.as_ref().map_or(0, |partial| partial.filled)
    }

    /// The next frame; `None` if the stream ended between two frames.
    pub(super) async fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        if self.announced().await?.is_none() {
            return Ok(None);
        }
        loop {
            if let Some(done) = self.partial.take_if(|partial| partial.filled == partial.length) {
                let payload = Bytes::from(done.payload);
                return Ok(Some(match done.marker {
                    MESSAGE => Frame::Message(payload),
                    _ => Frame::Control(payload),
                }));
            }
            let Some(partial) = &mut self.partial else {
                return Ok(None);
            };
            partial.grow();
            let room = partial.payload.get_mut(partial.filled..).unwrap_or_default();
            let ready = self.ahead.get(self.start..self.end).unwrap_or_default();
            let count = if ready.is_empty() {
                self.inner.read(room).await?
            } else {
                let count = ready.len().min(room.len());
                room.iter_mut().zip(ready).for_each(|(to, from)| *to = *from);
                self.start += count;
                count
            };
            if count == 0 {
                return Err(FrameError::Cut);
            }
            partial.filled += count;
        }
    }

    /// Takes a header off what was read, if it is complete.
    fn take_header(&mut self) -> Result<Option<Partial>, FrameError> {
        let ready = self.ahead.get(self.start..self.end).unwrap_or_default();
        let Some((&[marker, a, b, c, d, e, f, g, h], _)) = ready.split_first_chunk() else {
            // The marker alone shows that a peer speaks something else.
            return match ready.first() {
                Some(&marker) if marker > CONTROL => Err(FrameError::Marker(marker)),
                _ => Ok(None),
            };
        };
        if marker > CONTROL {
            return Err(FrameError::Marker(marker));
        }
        let bytes = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let too_large = FrameError::TooLarge { bytes, limit: self.limit };
        let length = match usize::try_from(bytes) {
            Ok(length) if bytes <= self.limit => length,
            _ => return Err(too_large),
        };
        self.start += HEADER_BYTES;
        Ok(Some(Partial { marker, length, payload: Vec::new(), filled: 0 }))
    }

    /// Reads once; zero at the end of the stream.
    async fn read_ahead(&mut self) -> io::Result<usize> {
        if self.ahead.is_empty() {
            self.ahead = vec![0; READ_AHEAD_BYTES];
        }
        self.ahead.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let count = self.inner.read(self.ahead.get_mut(self.end..).unwrap_or_default()).await?;
        self.end += count;
        Ok(count)
    }
}

impl Partial {
    /// Makes room for at least one more byte; at most as much again as was received.
    fn grow(&mut self) {
        if self.filled == self.payload.len() {
            let room = self.payload.len().saturating_mul(2).max(FIRST_PAYLOAD_BYTES);
            self.payload.resize(room.min(self.length), 0);
        }
    }
}

/// Sends one request or response and flushes. Header and start of the payload leave together.
///
/// # Errors
///
/// If the stream fails or the peer takes no byte for [`WRITE_STALL_TIMEOUT`].
pub(super) async fn write_message<W>(writer: &mut W, payload: &[u8]) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    write_frame(writer, MESSAGE, payload).await
}

/// Sends the caller's end of input.
pub(super) async fn write_end<W: AsyncWrite + Unpin>(writer: &mut W) -> io::Result<()> {
    write_frame(writer, CONTROL, &[]).await
}

/// Sends the callee's error.
pub(super) async fn write_error<W>(writer: &mut W, text: &str) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    let error = RpcError { message: Some(text.to_owned()) };
    write_frame(writer, CONTROL, &error.encode_to_vec()).await
}

async fn write_frame<W>(writer: &mut W, marker: u8, payload: &[u8]) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    let together = payload.len().min(READ_AHEAD_BYTES - HEADER_BYTES);
    let (first, rest) = payload.split_at(together);
    let mut head = Vec::with_capacity(HEADER_BYTES + together);
    head.push(marker);
    head.extend_from_slice(&(payload.len() as u64).to_be_bytes());
    head.extend_from_slice(first);
    write_all(writer, &head).await?;
    write_bytes(writer, rest).await
}

/// Writes everything and flushes, as long as the peer keeps taking bytes.
pub(super) async fn write_bytes<W>(writer: &mut W, bytes: &[u8]) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    write_all(writer, bytes).await?;
    flush(writer).await
}

/// Writes everything as long as the peer keeps taking bytes.
pub(super) async fn write_all<W>(writer: &mut W, mut bytes: &[u8]) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    while !bytes.is_empty() {
        match timeout(WRITE_STALL_TIMEOUT, writer.write(bytes)).await?? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => bytes = bytes.get(count..).unwrap_or_default(),
        }
    }
    Ok(())
}

/// Flushes as long as the connection makes progress.
pub(super) async fn flush<W: AsyncWrite + Unpin>(writer: &mut W) -> io::Result<()> {
    timeout(WRITE_STALL_TIMEOUT, writer.flush()).await?
}

/// The text of an error frame of a callee.
pub(super) fn error_text(payload: Bytes) -> String {
    match RpcError::decode(payload) {
        Ok(error) => error.message.unwrap_or_default(),
        Err(_) => "error frame that cannot be decoded".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::Pin,
        task::{Context, Poll},
    };

    use futures::io::Cursor;
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::tests::{block_on, framing_vector, unhex};

    /// Gives `bytes` in pieces of at most `chunk`, with a pause before each.
    struct Dribble<'a> {
        bytes: &'a [u8],
        chunk: usize,
        paused: bool,
    }

    impl AsyncRead for Dribble<'_> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buffer: &mut [u8],
        ) -> Poll<io::Result<usize>> {
            self.paused = !self.paused;
            if self.paused {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let count = self.bytes.len().min(self.chunk).min(buffer.len());
            let (now, later) = self.bytes.split_at(count);
            buffer[..count].copy_from_slice(now);
            self.bytes = later;
            Poll::Ready(Ok(count))
        }
    }

    fn frames_of(bytes: &[u8], chunk: usize) -> (Vec<Frame>, Option<FrameError>) {
        let mut reader = FrameReader::new(Dribble { bytes, chunk, paused: false });
        let mut frames = Vec::new();
        loop {
            match block_on(reader.next()) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => return (frames, None),
                Err(error) => return (frames, Some(error)),
            }
        }
    }

    #[test]
    fn frames_have_the_bytes_of_hivemind() {
        let mut out = Cursor::new(Vec::new());
        block_on(async {
            write_message(&mut out, &unhex("0a03612e301a0180")).await.expect("write");
            write_message(&mut out, b"").await.expect("write");
            write_end(&mut out).await.expect("write");
            write_error(&mut out, "boom").await.expect("write");
            write_error(&mut out, "").await.expect("write");
        });
        let names = [
            "message",
            "empty_request_end_of_session",
            "end_of_stream",
            "error",
            "error_empty_text",
        ];
        let golden: Vec<u8> =
            names.iter().flat_map(|name| framing_vector("stream", name, "bytes_hex")).collect();
        assert_eq!(out.into_inner(), golden);

        let (frames, error) = frames_of(&golden, 4);
        assert!(error.is_none());
        assert_eq!(frames.len(), 5);
        assert_eq!(frames[1], Frame::Message(Bytes::new()));
        assert_eq!(frames[2], Frame::Control(Bytes::new()));
        let Frame::Control(payload) = &frames[3] else { panic!("an error") };
        assert_eq!(error_text(payload.clone()), "boom");
    }

    #[test]
    fn unknown_markers_are_refused_at_the_first_byte() {
        let (frames, error) = frames_of(b"GET / HTTP/1.1", 1);
        assert!(frames.is_empty());
        assert!(matches!(error, Some(FrameError::Marker(b'G'))));
    }

    #[test]
    fn an_announced_length_costs_no_memory_and_the_bound_holds() {
        let mut reader = FrameReader::new(Cursor::new(unhex("000000000040000001")));
        let error = block_on(reader.next()).expect_err("one byte more than the bound");
        assert!(matches!(error, FrameError::TooLarge { bytes: 0x4000_0001, .. }));

        let mut reader = FrameReader::new(Cursor::new(unhex("000000000040000000aa")));
        assert!(matches!(block_on(reader.next()), Err(FrameError::Cut)));
        let partial = reader.partial.expect("kept");
        assert_eq!(partial.payload.len(), FIRST_PAYLOAD_BYTES);

        let mut reader = FrameReader::new(Cursor::new(unhex("00ffffffffffffffff")));
        reader.set_limit(u64::MAX);
        assert!(block_on(reader.next()).is_err());
    }

    #[test]
    fn end_of_stream_is_clean_only_between_frames() {
        let golden = framing_vector("stream", "message", "bytes_hex");
        for cut in 1..golden.len() {
            let (frames, error) = frames_of(&golden[..cut], 3);
            assert!(frames.is_empty());
            assert!(matches!(error, Some(FrameError::Cut)), "cut at {cut}: {error:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(
            bytes in vec(prop_oneof![3 => Just(0_u8), 1 => any::<u8>()], 0..200),
            chunk in 1_usize..40,
        ) {
            drop(frames_of(&bytes, chunk));
        }

        #[test]
        fn what_is_written_is_read(
            sizes in vec(prop_oneof![0_usize..40, 16_300_usize..16_500, 60_000_usize..200_000], 0..5),
            chunk in 1000_usize..70_000,
        ) {
            let payloads: Vec<Vec<u8>> =
                sizes.iter().map(|size| (0..*size).map(|at| at as u8).collect()).collect();
            let mut out = Cursor::new(Vec::new());
            block_on(async {
                for payload in &payloads {
                    write_message(&mut out, payload).await.expect("write");
                }
            });
            let (frames, error) = frames_of(&out.into_inner(), chunk);
            prop_assert!(error.is_none());
            let expected: Vec<Frame> =
                payloads.into_iter().map(|payload| Frame::Message(payload.into())).collect();
            prop_assert_eq!(frames, expected);
        }
    }
}
