//! Messages of unary calls: a varint length and a [`PersistentConnectionRequest`].
//!
//! Source: go-libp2p-daemon `persistent_stream.go`; `hivemind/p2p/p2p_daemon_bindings/control.py`.

use std::io;

use bytes::{Bytes, BytesMut};
use futures::io::{AsyncRead, AsyncReadExt};
use libp2p::PeerId;
use prost::Message as _;

use super::{
    error::CallError,
    messages::{
        Call, CallOutcome, CallUnaryRequest, CallUnaryResponse, PersistentConnectionRequest,
    },
};

/// Largest message of a unary call, envelope included; hivemind refuses more on both sides.
pub const MAX_UNARY_BYTES: usize = 4 * 1024 * 1024;

/// Length of a call id: a UUID.
const CALL_ID_BYTES: usize = 16;
/// One read takes this much.
const READ_BYTES: usize = 16 * 1024;

/// Why no message was read.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnaryError {
    /// The stream failed, or ended before the message was complete.
    #[error("cannot read a message")]
    Io(#[from] io::Error),
    /// The announced length exceeds [`MAX_UNARY_BYTES`].
    #[error("message of {0} bytes exceeds {MAX_UNARY_BYTES}")]
    TooLarge(u64),
    /// Not a message of this protocol.
    #[error("{0}")]
    Malformed(&'static str),
}

impl UnaryError {
    fn of_call(self, protocol: &'static str) -> CallError {
        match self {
            Self::Io(error) => CallError::of_stream(&error, protocol),
            Self::TooLarge(bytes) => CallError::TooLarge { bytes, limit: MAX_UNARY_BYTES as u64 },
            Self::Malformed(what) => CallError::Malformed(what),
        }
    }
}

/// A request as it came from a caller.
#[derive(Debug)]
pub(super) struct UnaryRequest {
    pub call_id: Bytes,
    pub data: Bytes,
}

/// Bytes of a request of `data` to `peer`, length included.
///
/// # Errors
///
/// [`CallError::TooLarge`].
pub(super) fn encode_request(
    call_id: [u8; CALL_ID_BYTES],
    peer: PeerId,
    protocol: &str,
    data: Bytes,
) -> Result<Vec<u8>, CallError> {
    let request =
        CallUnaryRequest { peer: peer.to_bytes().into(), proto: protocol.to_owned(), data };
    encode(Bytes::copy_from_slice(&call_id), Call::Request(request))
}

/// Bytes of an answer, length included. `Err` is the text of an error.
///
/// # Errors
///
/// [`CallError::TooLarge`].
pub(super) fn encode_response(
    call_id: Bytes,
    outcome: Result<Bytes, String>,
) -> Result<Vec<u8>, CallError> {
    let outcome = match outcome {
        Ok(data) => CallOutcome::Response(data),
        Err(text) => CallOutcome::Error(text.into()),
    };
    encode(call_id, Call::Response(CallUnaryResponse { outcome: Some(outcome) }))
}

fn encode(call_id: Bytes, call: Call) -> Result<Vec<u8>, CallError> {
    let message = PersistentConnectionRequest { call_id, call: Some(call) };
    let bytes = message.encoded_len();
    if bytes > MAX_UNARY_BYTES {
        return Err(CallError::TooLarge { bytes: bytes as u64, limit: MAX_UNARY_BYTES as u64 });
    }
    Ok(message.encode_length_delimited_to_vec())
}

/// Reads one request. Once its length is known, `reserve` has to agree before more is read; what it
/// returns is handed on.
pub(super) async fn read_request<R, F, T>(
    reader: &mut R,
    reserve: impl FnOnce(usize) -> F,
) -> Result<(UnaryRequest, T), UnaryError>
where
    R: AsyncRead + Unpin,
    F: Future<Output = T>,
{
    let (mut buffer, start, length) = read_length(reader).await?;
    let held = reserve(length).await;
    let message = decode(read_rest(reader, &mut buffer, start, length).await?)?;
    if message.call_id.len() != CALL_ID_BYTES {
        return Err(UnaryError::Malformed("call id is not 16 bytes long"));
    }
    match message.call {
        Some(Call::Request(request)) => {
            Ok((UnaryRequest { call_id: message.call_id, data: request.data }, held))
        }
        _ => Err(UnaryError::Malformed("not a request")),
    }
}

/// Reads the answer to `call_id`, a call of `protocol`.
pub(super) async fn read_response<R>(
    reader: &mut R,
    call_id: [u8; CALL_ID_BYTES],
    protocol: &'static str,
) -> Result<Bytes, CallError>
where
    R: AsyncRead + Unpin,
{
    let message = read_message(reader).await.and_then(decode);
    let message = message.map_err(|error| error.of_call(protocol))?;
    if message.call_id != call_id.as_slice() {
        return Err(CallError::Malformed("answer to another call"));
    }
    match message.call {
        Some(Call::Response(CallUnaryResponse { outcome: Some(CallOutcome::Response(data)) })) => {
            Ok(data)
        }
        Some(Call::Response(CallUnaryResponse { outcome: Some(CallOutcome::Error(text)) })) => {
            Err(CallError::Remote(String::from_utf8_lossy(&text).into_owned()))
        }
        _ => Err(CallError::Malformed("not an answer")),
    }
}

fn decode(message: Bytes) -> Result<PersistentConnectionRequest, UnaryError> {
    PersistentConnectionRequest::decode(message)
        .map_err(|_| UnaryError::Malformed("not a PersistentConnectionRequest"))
}

/// Reads one message. What follows it, which nobody sends, may be read and lost.
async fn read_message<R: AsyncRead + Unpin>(reader: &mut R) -> Result<Bytes, UnaryError> {
    let (mut buffer, start, length) = read_length(reader).await?;
    read_rest(reader, &mut buffer, start, length).await
}

/// Reads until the length is known: what was read, where the message starts, and how long it is.
async fn read_length<R: AsyncRead + Unpin>(
    reader: &mut R,
) -> Result<(BytesMut, usize, usize), UnaryError> {
    let mut buffer = BytesMut::new();
    loop {
        if let Some((start, length)) = length_of(&buffer)? {
            return Ok((buffer, start, length));
        }
        fill(reader, &mut buffer, READ_BYTES).await?;
    }
}

/// Reads the rest of a message.
async fn read_rest<R: AsyncRead + Unpin>(
    reader: &mut R,
    buffer: &mut BytesMut,
    start: usize,
    length: usize,
) -> Result<Bytes, UnaryError> {
    let end = start + length;
    while buffer.len() < end {
        // Never more ahead than was received, or one read.
        let step = (end - buffer.len()).min(buffer.len().max(READ_BYTES));
        fill(reader, buffer, step).await?;
    }
    Ok(buffer.split_to(end).split_off(start).freeze())
}

/// Reads once, at most `step` bytes.
async fn fill<R: AsyncRead + Unpin>(
    reader: &mut R,
    buffer: &mut BytesMut,
    step: usize,
) -> Result<(), UnaryError> {
    let filled = buffer.len();
    buffer.resize(filled + step, 0);
    let count = reader.read(buffer.get_mut(filled..).unwrap_or_default()).await?;
    buffer.truncate(filled + count);
    if count == 0 {
        return Err(UnaryError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(())
}

/// Where the message starts and how long it is, once its varint is complete.
fn length_of(buffer: &[u8]) -> Result<Option<(usize, usize)>, UnaryError> {
    // Four bytes hold 28 bits, more than the limit.
    let mut length = 0;
    for (at, byte) in buffer.iter().take(4).enumerate() {
        length |= usize::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return match length {
                0..=MAX_UNARY_BYTES => Ok(Some((at + 1, length))),
                _ => Err(UnaryError::TooLarge(length as u64)),
            };
        }
    }
    if buffer.len() < 4 { Ok(None) } else { Err(UnaryError::TooLarge(1 << 28)) }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::tests::{block_on, framing_vector};

    /// That of the golden bytes.
    const PROTOCOL: &str = "DHTProtocol.rpc_ping";
    const CALL_ID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    async fn read_request(reader: &mut &[u8]) -> Result<UnaryRequest, UnaryError> {
        super::read_request(reader, async |_| ()).await.map(|(request, ())| request)
    }

    #[test]
    fn nothing_beyond_the_first_read_is_taken_before_its_length_is_reserved() {
        let message = [&[0x80, 0x80, 0x80, 0x02][..], &vec![0; MAX_UNARY_BYTES]].concat();
        let mut reader = message.as_slice();
        let mut asked = 0;
        let reading = super::read_request(&mut reader, |bytes| {
            asked = bytes;
            std::future::pending::<()>()
        });
        assert!(futures::FutureExt::now_or_never(reading).is_none(), "no pool has room");
        assert_eq!(asked, MAX_UNARY_BYTES);
        assert!(reader.len() >= message.len() - READ_BYTES);
    }

    fn golden(name: &str) -> Vec<u8> {
        framing_vector("unary", name, "stream_bytes_hex")
    }

    #[test]
    fn a_request_has_the_bytes_of_p2pd() {
        let bytes = golden("request");
        let request = block_on(read_request(&mut bytes.as_slice())).expect("request");
        assert_eq!(request.call_id, CALL_ID.as_slice());
        let Some(Call::Request(inner)) =
            decode(Bytes::copy_from_slice(&bytes[1..])).expect("message").call
        else {
            panic!("a request")
        };
        let peer = PeerId::from_bytes(&inner.peer).expect("peer");
        assert_eq!(inner.proto, PROTOCOL);
        let again = encode_request(CALL_ID, peer, PROTOCOL, request.data);
        assert_eq!(again.expect("small"), bytes);
    }

    #[test]
    fn answers_have_the_bytes_of_p2pd() {
        let call_id = Bytes::from_static(&CALL_ID);
        let read =
            |name: &str| block_on(read_response(&mut golden(name).as_slice(), CALL_ID, PROTOCOL));

        let data = read("response_ok").expect("data");
        assert_eq!(
            encode_response(call_id.clone(), Ok(data)).expect("small"),
            golden("response_ok")
        );
        assert_eq!(read("response_empty"), Ok(Bytes::new()));
        assert_eq!(
            encode_response(call_id.clone(), Ok(Bytes::new())).expect("small"),
            golden("response_empty")
        );
        let text = "RuntimeError('Remote peer does not serve x.0')".to_owned();
        assert_eq!(read("response_error"), Err(CallError::Remote(text.clone())));
        assert_eq!(encode_response(call_id, Err(text)).expect("small"), golden("response_error"));
    }

    #[test]
    fn an_answer_to_another_call_is_refused() {
        let result =
            block_on(read_response(&mut golden("response_ok").as_slice(), [9; 16], PROTOCOL));
        assert!(matches!(result, Err(CallError::Malformed(_))));
    }

    #[test]
    fn the_limit_counts_the_envelope() {
        let fits =
            |size: usize| encode_response(Bytes::from_static(&CALL_ID), Ok(vec![7; size].into()));
        let envelope = 28;
        let bytes = fits(MAX_UNARY_BYTES - envelope).expect("exactly the limit");
        let data = block_on(read_response(&mut bytes.as_slice(), CALL_ID, PROTOCOL)).expect("read");
        assert_eq!(data.len(), MAX_UNARY_BYTES - envelope);
        assert!(matches!(fits(MAX_UNARY_BYTES - envelope + 1), Err(CallError::TooLarge { .. })));
    }

    #[test]
    fn too_long_lengths_are_refused_before_anything_is_read() {
        for bytes in [&[0x81, 0x80, 0x80, 0x02][..], &[0xff; 4], &[0xff; 30]] {
            let result = block_on(read_message(&mut &*bytes));
            assert!(matches!(result, Err(UnaryError::TooLarge(_))), "{bytes:?}");
        }
    }

    #[test]
    fn requests_without_a_proper_call_id_are_refused() {
        let bytes =
            encode(Bytes::from_static(b"short"), Call::Request(CallUnaryRequest::default()));
        let result = block_on(read_request(&mut bytes.expect("small").as_slice()));
        assert!(matches!(result, Err(UnaryError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in vec(any::<u8>(), 0..100), head in any::<bool>()) {
            let mut all = if head { vec![bytes.len() as u8] } else { Vec::new() };
            all.extend(bytes);
            drop(block_on(read_request(&mut all.as_slice())));
            drop(block_on(read_response(&mut all.as_slice(), CALL_ID, PROTOCOL)));
        }

        #[test]
        fn what_is_encoded_is_read(data in vec(any::<u8>(), 0..40_000)) {
            let bytes = encode_response(Bytes::from_static(&CALL_ID), Ok(data.clone().into())).expect("small");
            let read = block_on(read_response(&mut bytes.as_slice(), CALL_ID, PROTOCOL));
            prop_assert_eq!(read, Ok(Bytes::from(data)));
        }
    }
}
