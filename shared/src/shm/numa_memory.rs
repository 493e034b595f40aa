//! Memory of one NUMA node: where the pages of a process are taken from.

use std::io;

use nix::libc;

/// Most nodes that a mask of the kernel has room for here; Linux is built for at most 1024.
const MAX_NODES: u32 = 1024;

/// Has this thread, and the threads that it will start, take memory from `node` while it has some,
/// else from others. Pages that exist stay where they are. Holds for segments too, whose pages come
/// from the node of the process that touches them first.
///
/// # Errors
/// When the system refuses, for example because there is no such node.
pub fn prefer_node(node: u32) -> io::Result<()> {
    if node >= MAX_NODES {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let bits = libc::c_ulong::BITS;
    let mut mask = [0 as libc::c_ulong; (MAX_NODES / 32) as usize];
    if let Some(word) = mask.get_mut((node / bits) as usize) {
        *word = 1 << (node % bits);
    }
    // The kernel leaves out the last of the bits that it is told of.
    let bits = libc::c_ulong::from(MAX_NODES) + 1;
    // SAFETY: the kernel reads `bits` bits of the mask, which has twice as many, and writes no
    // memory of this process.
    let done = unsafe {
        libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, mask.as_ptr(), bits)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_does_not_exist_is_refused() {
        std::thread::spawn(|| {
            assert!(prefer_node(MAX_NODES).is_err());
            assert!(prefer_node(MAX_NODES - 1).is_err());
        })
        .join()
        .unwrap();
    }
}
