//! Fuzz targets of the frames of RPC streams, and of those that connections consist of.

use futures::{FutureExt, io::Cursor};
use fuzzing::Target;

use super::frame::{Frame, FrameReader, error_text};
use super::muxer;
use super::tests::framing_vector;

#[test]
fn fuzz_frames() {
    let names = ["message", "empty_request_end_of_session", "end_of_stream", "error"];
    let mut seeds: Vec<Vec<u8>> =
        names.iter().map(|name| framing_vector("stream", name, "bytes_hex")).collect();
    seeds.push(seeds.concat());
    Target::new("frames", seeds).fuzz(|input| {
        let mut reader = FrameReader::new(Cursor::new(input));
        reader.set_limit(64 << 10);
        let mut told = String::new();
        loop {
            // A cursor never waits.
            match reader.next().now_or_never().expect("ready") {
                Ok(Some(Frame::Message(_))) => told.push('m'),
                Ok(Some(Frame::Control(payload))) => told.push_str(&error_text(payload)),
                Ok(None) => return told,
                Err(error) => return told + &error.to_string(),
            }
        }
    });
}

#[test]
fn fuzz_connections() {
    // A header of 12 bytes opens a stream.
    Target::new("connections", muxer::tests::frames())
        .with_bound(2 << 20, 512)
        .fuzz(muxer::tests::heard_of);
}
