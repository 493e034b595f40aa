//! Dialer against listener over a pipe, each side against raw bytes, and any bytes at all.

use futures::{
    AsyncReadExt, AsyncWriteExt,
    future::{join, select},
    pin_mut,
};
use proptest::{collection::vec, prelude::*};

use crate::{
    MAX_MESSAGE_BYTES, MAX_PROPOSALS, NegotiationError, ProtocolError, Version,
    dialer_select_proto, listener_select_proto,
    pipe::{drive, pipe},
};

const HEADER: &[u8] = b"\x13/multistream/1.0.0\n";
const BOTH: [Version; 2] = [Version::V1, Version::V1Lazy];

/// Negotiates `proposals` against `served`, then sends a question and an answer over what was
/// agreed on.
fn talk(
    proposals: &[&'static str],
    served: &[&'static str],
    version: Version,
    chunk: usize,
) -> String {
    let (near, far) = pipe(chunk);
    let dialer = async {
        let (name, mut stream) =
            dialer_select_proto(near, proposals.iter().copied(), version).await.expect("dialer");
        stream.write_all(b"question").await.expect("write");
        stream.close().await.expect("close");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.expect("read");
        assert_eq!(answer, b"answer");
        name.to_owned()
    };
    let listener = async {
        let (name, mut stream) =
            listener_select_proto(far, served.iter().copied()).await.expect("listener");
        let mut question = Vec::new();
        stream.read_to_end(&mut question).await.expect("read");
        assert_eq!(question, b"question");
        stream.write_all(b"answer").await.expect("write");
        stream.close().await.expect("close");
        name.to_owned()
    };
    let (dialed, listened) = drive(join(dialer, listener));
    assert_eq!(dialed, listened);
    dialed
}

#[test]
fn first_common_protocol_is_agreed_on_and_data_follows() {
    for version in BOTH {
        for chunk in [1, 2, 7, 4096] {
            assert_eq!(talk(&["/a/1"], &["/a/1"], version, chunk), "/a/1");
            assert_eq!(talk(&["/a/1", "/b/1", "/c/1"], &["/c/1", "/b/1"], version, chunk), "/b/1");
            assert_eq!(talk(&["/a/1", "/c/1"], &["/b/1", "/c/1"], version, chunk), "/c/1");
        }
    }
}

#[test]
fn bare_names_are_agreed_on() {
    let served = ["DHTProtocol.rpc_ping", "TransformerConnectionHandler.rpc_inference", "x"];
    for version in BOTH {
        assert_eq!(talk(&["DHTProtocol.rpc_ping"], &served, version, 3), "DHTProtocol.rpc_ping");
        assert_eq!(talk(&["no.such", "x"], &served, version, 3), "x");
    }
}

#[test]
fn no_common_protocol_fails_on_both_sides() {
    let (near, far) = pipe(4096);
    let dialer = async { dialer_select_proto(near, ["/a", "/b"], Version::V1).await.err() };
    let listener = async { listener_select_proto(far, ["/c"]).await.err() };
    let (dialed, listened) = drive(join(dialer, listener));
    assert!(matches!(dialed, Some(NegotiationError::Failed)));
    assert!(matches!(listened, Some(NegotiationError::Failed)));
}

#[test]
fn lazy_dialer_learns_of_the_rejection_when_it_reads() {
    let (near, far) = pipe(4096);
    let dialer = async {
        let (_, mut stream) =
            dialer_select_proto(near, ["a"], Version::V1Lazy).await.expect("settles at once");
        // These bytes look like no message at all to the listener.
        stream.write_all(&[0xff; 100]).await.expect("write");
        stream.flush().await.expect("flush");
        let first = stream.read(&mut [0; 8]).await.expect_err("rejected");
        let second = stream.read(&mut [0; 8]).await.expect_err("stays rejected");
        stream.write_all(b"x").await.expect_err("stays rejected");
        (first.to_string(), second.to_string())
    };
    let listener = async { listener_select_proto(far, ["b"]).await.err() };
    let ((first, second), listened) = drive(join(dialer, listener));
    assert_eq!(first, second);
    assert!(matches!(listened, Some(NegotiationError::Failed)), "got {listened:?}");
}

#[test]
fn lazy_proposal_leaves_with_the_first_data() {
    // A name without a leading slash is proposed lazily under both versions.
    let cases: [(&str, &[u8], Version); 3] = [
        ("proto", b"\x06proto\n", Version::V1Lazy),
        ("proto", b"\x06proto\n", Version::V1),
        ("/proto", b"\x07/proto\n", Version::V1Lazy),
    ];
    for (name, proposal, version) in cases {
        let (near, mut far) = pipe(4096);
        drive(async {
            let (_, mut stream) =
                dialer_select_proto(near, [name], version).await.expect("settles at once");
            stream.write_all(b"data").await.expect("write");
            let mut seen = [0; 64];
            let count = far.read(&mut seen).await.expect("read");
            assert_eq!(&seen[..count], [HEADER, proposal, b"data"].concat());
            far.write_all(&[HEADER, proposal, b"reply"].concat()).await.expect("write");
            let mut reply = [0; 5];
            stream.read_exact(&mut reply).await.expect("confirmation is not data");
            assert_eq!(&reply, b"reply");
        });
    }
}

#[test]
fn complete_waits_for_the_confirmation() {
    let (near, mut far) = pipe(1);
    drive(async {
        far.write_all(&[HEADER, b"\x02p\n"].concat()).await.expect("write");
        let (_, stream) = dialer_select_proto(near, ["p"], Version::V1Lazy).await.expect("settles");
        stream.complete().await.expect("confirmed");
    });
}

#[test]
fn listener_answers_header_and_first_proposal_in_one_write() {
    let (mut near, far) = pipe(4096);
    drive(async {
        near.write_all(&[HEADER, b"\x02a\n\x02b\n"].concat()).await.expect("write");
        let (name, _stream) = listener_select_proto(far, ["b"]).await.expect("agreed");
        assert_eq!(name, "b");
        let mut seen = [0; 64];
        let count = near.read(&mut seen).await.expect("read");
        assert_eq!(&seen[..count], [HEADER, b"\x03na\n\x02b\n"].concat());
    });
}

#[test]
fn listener_sends_its_header_to_a_dialer_that_waits_for_it() {
    let (mut near, far) = pipe(4096);
    let dialer = async {
        near.write_all(HEADER).await.expect("write");
        let mut header = [0; 20];
        near.read_exact(&mut header).await.expect("read");
        assert_eq!(header, HEADER);
        near.write_all(b"\x03ls\n").await.expect("write");
        let mut answer = [0; 4];
        near.read_exact(&mut answer).await.expect("read");
        assert_eq!(&answer, b"\x03na\n");
        near.write_all(b"\x02a\n").await.expect("write");
    };
    let (name, _) = drive(join(listener_select_proto(far, ["a"]), dialer)).0.expect("agreed");
    assert_eq!(name, "a");
}

/// What a listener makes of a dialer that sends `bytes` and closes.
fn listen_to(bytes: &[u8]) -> Result<&'static str, NegotiationError> {
    let (mut near, far) = pipe(5);
    drive(async {
        near.write_all(bytes).await.expect("write");
        near.close().await.expect("close");
        listener_select_proto(far, ["a", "/b/1"]).await.map(|(name, _)| name)
    })
}

/// What a dialer makes of a listener that sends `bytes` and closes.
fn dial_into(bytes: &[u8], version: Version) -> Result<(), NegotiationError> {
    let (near, mut far) = pipe(5);
    drive(async {
        far.write_all(bytes).await.expect("write");
        far.close().await.expect("close");
        let (_, stream) = dialer_select_proto(near, ["a"], version).await?;
        stream.complete().await.map(drop)
    })
}

#[test]
fn garbage_and_oversize_are_invalid_messages() {
    let long = [HEADER, &[0x81, 0x08], &[b'x'; MAX_MESSAGE_BYTES]].concat();
    let cases: [&[u8]; 7] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x02a\n",
        b"\x00",
        b"\x80\x00",
        b"\xff\xff\xff\xff",
        &[HEADER, HEADER].concat(),
        &long,
    ];
    for bytes in cases {
        let error = listen_to(bytes).expect_err("garbage was accepted");
        assert!(
            matches!(&error, NegotiationError::ProtocolError(ProtocolError::InvalidMessage))
                || matches!(&error, NegotiationError::ProtocolError(ProtocolError::IoError(_))),
            "{bytes:?}: {error:?}"
        );
    }
    for version in BOTH {
        for bytes in [b"\x13/multistream/2.0.0\n".as_slice(), b"\x00", &[HEADER, HEADER].concat()] {
            let error = dial_into(bytes, version).expect_err("garbage was accepted");
            assert!(matches!(error, NegotiationError::ProtocolError(_)), "{bytes:?}: {error:?}");
        }
    }
}

#[test]
fn end_of_stream_between_messages_fails_and_within_one_is_an_io_error() {
    for (bytes, clean) in [
        (b"".as_slice(), true),
        (HEADER, true),
        (&HEADER[..7], false),
        (&[HEADER, b"\x02"].concat(), false),
    ] {
        match (listen_to(bytes), clean) {
            (Err(NegotiationError::Failed), true) => {}
            (Err(NegotiationError::ProtocolError(ProtocolError::IoError(error))), false) => {
                assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
            }
            (other, _) => panic!("{bytes:?}: {other:?}"),
        }
        for version in BOTH {
            // A dialer does not take an end for a refusal.
            match dial_into(bytes, version) {
                Err(NegotiationError::ProtocolError(ProtocolError::IoError(error))) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
                }
                other => panic!("{bytes:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn proposals_are_counted() {
    let ask = |count: usize| [HEADER, &b"\x02z\n".repeat(count), b"\x02a\n"].concat();
    assert_eq!(listen_to(&ask(MAX_PROPOSALS - 1)).expect("within the bound"), "a");
    let error = listen_to(&ask(MAX_PROPOSALS)).expect_err("beyond the bound");
    assert!(matches!(error, NegotiationError::ProtocolError(ProtocolError::TooManyProtocols)));
}

#[test]
fn unusable_names_are_refused_by_dialers_and_ignored_by_listeners() {
    for version in BOTH {
        for name in ["", "na", "two\nlines"] {
            let (near, _far) = pipe(64);
            let result = drive(dialer_select_proto(near, [name], version));
            assert!(matches!(
                result.err(),
                Some(NegotiationError::ProtocolError(ProtocolError::InvalidProtocol))
            ));
        }
        let (near, _far) = pipe(64);
        let none: [&str; 0] = [];
        assert!(matches!(
            drive(dialer_select_proto(near, none, version)).err(),
            Some(NegotiationError::Failed)
        ));
        assert_eq!(talk(&["a"], &["", "two\nlines", "a"], version, 64), "a");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_a_listener_panic_or_hang(start in any::<bool>(), tail in vec(any::<u8>(), 0..300)) {
        let head: &[u8] = if start { HEADER } else { b"" };
        drop(listen_to(&[head, &tail].concat()));
    }

    #[test]
    fn no_bytes_make_a_dialer_panic_or_hang(start in any::<bool>(), tail in vec(any::<u8>(), 0..300)) {
        let head: &[u8] = if start { HEADER } else { b"" };
        for version in BOTH {
            drop(dial_into(&[head, &tail].concat(), version));
        }
    }

    #[test]
    fn any_line_is_a_protocol_name(name in "[^\n]{1,200}", chunk in 1_usize..64) {
        prop_assume!(!["na", "ls", "/multistream/1.0.0"].contains(&name.as_str()));
        for version in BOTH {
            let (near, far) = pipe(chunk);
            let dialer = dialer_select_proto(near, [name.as_str()], version);
            let dialer = async { dialer.await?.1.complete().await };
            let listener = listener_select_proto(far, ["other", name.as_str()]);
            pin_mut!(dialer);
            let both = join(dialer, listener);
            let (dialed, listened) = drive(both);
            prop_assert!(dialed.is_ok());
            prop_assert_eq!(listened.map(|(agreed, _)| agreed).ok(), Some(name.as_str()));
        }
    }
}

#[test]
fn a_silent_remote_keeps_both_sides_waiting() {
    let (near, _silent) = pipe(64);
    let (_mute, far) = pipe(64);
    let never =
        select(dialer_select_proto(near, ["/a"], Version::V1), listener_select_proto(far, ["/a"]));
    pin_mut!(never);
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(std::future::Future::poll(never, &mut cx).is_pending());
}
