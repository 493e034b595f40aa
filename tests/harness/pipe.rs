//! A pipe that holds one message: whoever writes to it waits until the message before was read. So a program
//! whose output it takes is never far ahead of the test that reads it.

use std::fs::File;
use std::io::{BufReader, Read, Result};
use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::pipe2;

/// Bytes of a page: what the pipe holds, and the longest message.
const PAGE: usize = 4096;

/// The end that is read, and the one to write to.
pub fn one_message_pipe() -> (BufReader<Messages>, OwnedFd) {
    // In packet mode each message takes a page of the pipe.
    let (from, to) = pipe2(OFlag::O_CLOEXEC | OFlag::O_DIRECT).expect("a pipe");
    fcntl(&to, FcntlArg::F_SETPIPE_SZ(PAGE as i32)).expect("a pipe of one page");
    (BufReader::new(Messages { from: from.into(), message: Vec::new() }), to)
}

/// Reads whole messages: the kernel drops what does not fit into the buffer of a read.
pub struct Messages {
    from: File,
    /// What is left of the last one.
    message: Vec<u8>,
}

impl Read for Messages {
    fn read(&mut self, to: &mut [u8]) -> Result<usize> {
        if self.message.is_empty() {
            self.message.resize(PAGE, 0);
            let read = self.from.read(&mut self.message);
            self.message.truncate(*read.as_ref().unwrap_or(&0));
            read?;
        }
        let count = to.len().min(self.message.len());
        to[..count].copy_from_slice(&self.message[..count]);
        self.message.drain(..count);
        Ok(count)
    }
}
