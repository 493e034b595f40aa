//! The two directions of a connection's socket: frames in pieces as they come, and frames that were written but not sent.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use futures::io::{AsyncRead, AsyncWrite};

use super::header::{FrameKind, HEADER_BYTES, Header};

/// Frames are taken from the streams only up to this size: what a stream queues later with little data leaves soon.
const MAX_UNSENT_BYTES: usize = 64 << 10;
/// One read of data.
const PIECE_BYTES: usize = 16 << 10;
/// Frames and pieces that are read before other tasks have their turn.
const MAX_READS: usize = 64;

/// A socket with the frames that are half read and half written.
#[derive(Debug)]
pub(super) struct FramedSocket<C> {
    socket: C,
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    /// The frame whose data comes, and how much of it is missing.
    frame: Option<(Header, usize)>,
    /// `unsent[sent..]` is to be sent.
    unsent: Vec<u8>,
    sent: usize,
    is_flushed: bool,
}

impl<C: AsyncRead + AsyncWrite + Unpin> FramedSocket<C> {
    pub(super) fn new(socket: C) -> Self {
        Self {
            socket,
            header: [0; HEADER_BYTES],
            header_filled: 0,
            frame: None,
            unsent: Vec::new(),
            sent: 0,
            is_flushed: true,
        }
    }

    /// Sends what there is to send; ready when all of it is with the kernel.
    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        next_frame: impl Fn(&mut Vec<u8>) -> bool,
    ) -> Poll<io::Result<()>> {
        loop {
            while self.unsent.len() - self.sent < MAX_UNSENT_BYTES && next_frame(&mut self.unsent) {
                self.is_flushed = false;
            }
            let rest = self.unsent.get(self.sent..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            match Pin::new(&mut self.socket).poll_write(cx, rest)? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(count) => self.sent += count,
                Poll::Pending => return Poll::Pending,
            }
            if self.sent >= MAX_UNSENT_BYTES || self.sent == self.unsent.len() {
                self.unsent.drain(..self.sent);
                self.sent = 0;
            }
        }
        if !self.is_flushed {
            self.is_flushed = Pin::new(&mut self.socket).poll_flush(cx)?.is_ready();
        }
        if self.is_flushed { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Receives what has come, and says which streams the peer opens. Ready with `Ok` if there may be more.
    pub(super) fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        mut with: impl FnMut(ReceivedFrame) -> io::Result<()>,
    ) -> Poll<io::Result<()>> {
        for _ in 0..MAX_READS {
            let count = match &self.frame {
                None => self.poll_header(cx, &mut with),
                Some(_) => self.poll_piece(cx, &mut with),
            };
            match count? {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                Poll::Ready(_) => {}
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_header(
        &mut self,
        cx: &mut Context<'_>,
        with: &mut impl FnMut(ReceivedFrame) -> io::Result<()>,
    ) -> io::Result<Poll<usize>> {
        let room = self.header.get_mut(self.header_filled..).unwrap_or_default();
        let Poll::Ready(count) = Pin::new(&mut self.socket).poll_read(cx, room)? else {
            return Ok(Poll::Pending);
        };
        self.header_filled += count;
        if self.header_filled == HEADER_BYTES {
            self.header_filled = 0;
            let header = Header::decode(self.header)?;
            with(ReceivedFrame::Header(header))?;
            match (header.kind, header.length as usize) {
                (FrameKind::Data, 0) => with(ReceivedFrame::Data(header, Vec::new(), true))?,
                (FrameKind::Data, length) => self.frame = Some((header, length)),
                _ => {}
            }
        }
        Ok(Poll::Ready(count))
    }

    fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
        with: &mut impl FnMut(ReceivedFrame) -> io::Result<()>,
    ) -> io::Result<Poll<usize>> {
        let Some((header, missing)) = self.frame else {
            return Ok(Poll::Pending);
        };
        let mut piece = vec![0; missing.min(PIECE_BYTES)];
        let Poll::Ready(count) = Pin::new(&mut self.socket).poll_read(cx, &mut piece)? else {
            return Ok(Poll::Pending);
        };
        let missing = missing.saturating_sub(count);
        self.frame = (missing > 0).then_some((header, missing));
        if count > 0 {
            let is_most = count > piece.len() / 2;
            piece.truncate(count);
            // A piece keeps no memory that it does not fill.
            let piece = if is_most { piece } else { piece.as_slice().to_vec() };
            with(ReceivedFrame::Data(header, piece, missing == 0))?;
        }
        Ok(Poll::Ready(count))
    }

    /// Closes the socket when everything is sent.
    pub(super) fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_close(cx)
    }
}

/// What a socket brings.
#[derive(Debug)]
pub(super) enum ReceivedFrame {
    /// The header of a frame.
    Header(Header),
    /// Data of a frame, and whether it is the last.
    Data(Header, Vec<u8>, bool),
}
