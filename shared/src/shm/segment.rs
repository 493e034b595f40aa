//! Pieces of memory that several processes map. Both kinds are memfds whose size is sealed: they are
//! found by descriptor alone, nobody can shrink them under a reader, and the kernel frees them with
//! their last descriptor and mapping, however a process ends.
//!
//! | | [`SmallSegment`] (board, rings) | [`MemfdSegment`] (arena, kv) |
//! | --- | --- | --- |
//! | made and mapped by | the supervisor, through `shared_memory` | whoever it is for |
//! | memory | reserved at creation | on first touch |
//! | descriptor after mapping | kept by the supervisor alone | kept, for a lock |
//!
//! # Why a memfd lies under the mapping of `shared_memory`
//!
//! `shared_memory` makes objects by name in /dev/shm. Whoever maps such an object for writing holds
//! a right to `ftruncate` it, the kernel seals memfds only, and every process that touches a page
//! cut off this way gets SIGBUS: one faulty child could end the supervisor with the whole tree. A
//! name would also stay behind after SIGKILL. So `shared_memory` makes and owns the supervisor's
//! mapping, its name is removed at once, and a sealed memfd of the same size takes the place of the
//! pages before anybody sees them. Children get the memfd and check its seals.
//!
//! Raw pointers stay in `shm`; everything public is bounded.

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// Every name begins with this.
pub const NAME_PREFIX: &str = "sepal-";

/// Longest name of a segment; a memfd allows 249 bytes.
const MAX_NAME_BYTES: usize = 200;

mod posix_segment;

pub use posix_segment::{SmallSegment, remove_names};

const SEALS: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// Why a segment could not be made or mapped.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The name does not show in `/proc/PID/maps` that the segment belongs to Sepal.
    #[error(
        "segment name {0:?} must begin with {NAME_PREFIX} and hold only letters, digits, \
         '-', '_' and '.'"
    )]
    BadName(String),
    /// The segment has another size than agreed.
    #[error("segment {name} has {actual_bytes} bytes instead of {expected_bytes}")]
    WrongSize {
        /// Name of the segment.
        name: String,
        expected_bytes: u64,
        actual_bytes: u64,
    },
    /// The descriptor is not a memfd whose size is sealed.
    #[error("descriptor of segment {0} is not a memfd with a sealed size")]
    NotSealed(String),
    /// Another mapping of the segment exists that excludes this one.
    #[error("segment {0} is mapped by another process that excludes this one")]
    Busy(String),
    /// A segment is empty or larger than the address space.
    #[error("segment {name} cannot have {bytes} bytes")]
    BadSize {
        /// Name of the segment.
        name: String,
        /// The size asked for.
        bytes: u64,
    },
    #[error("cannot {action} segment {name} of {bytes} bytes")]
    System {
        action: &'static str,
        /// Name of the segment.
        name: String,
        bytes: u64,
        #[source]
        source: io::Error,
    },
}

impl SegmentError {
    /// Whether the machine has no memory for the segment.
    pub fn is_out_of_memory(&self) -> bool {
        let SegmentError::System { source, .. } = self else { return false };
        [libc::ENOMEM, libc::ENOSPC].into_iter().any(|code| source.raw_os_error() == Some(code))
    }
}

/// A copy in or out of a segment would leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {offset} lie outside a segment of {segment_bytes} bytes")]
pub struct OutOfBounds {
    /// Offset of the copy.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Size of the segment.
    pub segment_bytes: u64,
}

/// A segment behind a descriptor. Its size is sealed at creation; it lives as long as a descriptor
/// or a mapping of it.
#[derive(Debug)]
pub struct MemfdSegment {
    fd: OwnedFd,
    len: usize,
    name: String,
}

impl MemfdSegment {
    /// Makes a zeroed segment of `len` bytes. Its memory is taken when touched.
    ///
    /// # Errors
    /// [`SegmentError::BadSize`] when `len` is 0, [`SegmentError::System`] when the system refuses.
    pub fn create(name: &str, len: usize) -> Result<MemfdSegment, SegmentError> {
        check_name(name)?;
        let size = libc::off_t::try_from(len)
            .ok()
            .filter(|&size| size > 0)
            .ok_or_else(|| bad_size(name, len))?;
        let failed = |errno: Errno| system("create", name, len, errno.into());
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(name, flags).map_err(failed)?;
        nix::unistd::ftruncate(&fd, size).map_err(failed)?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS)).map_err(failed)?;
        Ok(MemfdSegment { fd, len, name: name.to_owned() })
    }

    /// The segment behind a descriptor that came from another process. `name` is for messages.
    ///
    /// # Errors
    /// [`SegmentError::NotSealed`] unless its size can neither shrink nor grow any more,
    /// [`SegmentError::WrongSize`] unless it has exactly `expected_len` bytes.
    pub fn from_fd(
        name: &str,
        fd: OwnedFd,
        expected_len: usize,
    ) -> Result<MemfdSegment, SegmentError> {
        check_name(name)?;
        let not_sealed = || SegmentError::NotSealed(name.to_owned());
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS).map_err(|_| not_sealed())?;
        if !SealFlag::from_bits_retain(seals).contains(SEALS) {
            return Err(not_sealed());
        }
        let stat = nix::sys::stat::fstat(&fd)
            .map_err(|errno| system("size", name, expected_len, errno.into()))?;
        if usize::try_from(stat.st_size) != Ok(expected_len) || expected_len == 0 {
            return Err(SegmentError::WrongSize {
                name: name.to_owned(),
                expected_bytes: expected_len as u64,
                actual_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            });
        }
        Ok(MemfdSegment { fd, len: expected_len, name: name.to_owned() })
    }

    /// Size in bytes, more than 0.
    #[allow(clippy::len_without_is_empty, reason = "no segment is empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its name, as `/proc/PID/maps` shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Another descriptor of the same segment, to be sent to a process that may map it.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Maps the whole segment, for reading and writing.
    pub(super) fn map(&self, sharing: Sharing) -> Result<Mapping, SegmentError> {
        let lock = self.lock(sharing)?;
        let mut mapping = self.map_unlocked()?;
        mapping._lock = Some(lock);
        Ok(mapping)
    }

    /// Maps the whole segment, for reading and writing, beside whoever else maps it.
    fn map_unlocked(&self) -> Result<Mapping, SegmentError> {
        let len = NonZeroUsize::new(self.len).ok_or_else(|| bad_size(&self.name, self.len))?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, &self.fd, 0) };
        let base = base.map_err(|errno| system("map", &self.name, self.len, errno.into()))?;
        Ok(Mapping { base: base.cast(), len: self.len, _lock: None })
    }

    /// Takes a lock that lives as long as the returned file: a fresh open file description, so that
    /// it neither passes to nor is shared with other descriptors of the segment, and ends with this
    /// process at the latest.
    fn lock(&self, sharing: Sharing) -> Result<File, SegmentError> {
        let failed = |source| system("lock", &self.name, self.len, source);
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
        let lock = libc::flock {
            l_type: match sharing {
                Sharing::Shared => libc::F_RDLCK as libc::c_short,
                Sharing::Alone => libc::F_WRLCK as libc::c_short,
            },
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => Ok(file),
            Err(Errno::EAGAIN | Errno::EACCES) => Err(SegmentError::Busy(self.name.clone())),
            Err(errno) => Err(failed(errno.into())),
        }
    }
}

impl AsFd for MemfdSegment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Who else may map a memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Others that share as well.
    Shared,
    /// Nobody, in this process or another.
    Alone,
}

/// A mapped memfd; unmapped and unlocked on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    _lock: Option<File>,
}

// SAFETY: the mapping belongs to no thread and stays where it is for the life of the value; who may
// touch it when is the business of the type that holds it (`ArenaMap`: raw copies only; `KvMap`: as
// a borrowed `&mut self` demands).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Size in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// First byte, aligned to a page.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Address of `len` bytes at `offset`, all of them inside the mapping.
    pub(super) fn at(&self, offset: u64, len: usize) -> Result<*mut u8, OutOfBounds> {
        let outside = || OutOfBounds { offset, len: len as u64, segment_bytes: self.len as u64 };
        let start = usize::try_from(offset).map_err(|_| outside())?;
        let end = start.checked_add(len).ok_or_else(outside)?;
        if end > self.len {
            return Err(outside());
        }
        // SAFETY: `start <= end <= self.len`, so that the address is inside the mapping or one past
        // it.
        Ok(unsafe { self.base.as_ptr().add(start) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let base: NonNull<c_void> = self.base.cast();
        // SAFETY: `base` and `len` are what mmap returned, and borrows of the mapping ended with
        // `self`.
        let unmapped = unsafe { munmap(base, self.len) };
        debug_assert!(unmapped.is_ok(), "munmap takes back what mmap gave");
    }
}

/// Numbers of which every bit pattern is a valid value, so that whatever another process left in a
/// segment can be read.
///
/// # Safety
/// The type has no padding, no invalid bit patterns and no pointers, and a size above 0.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

macro_rules! plain {
    ($($number:ty),*) => { $(
        // SAFETY: a number of fixed size, all bit patterns of which are values.
        unsafe impl Plain for $number {}
    )* };
}

plain!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64, half::f16, half::bf16);

fn check_name(name: &str) -> Result<(), SegmentError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.starts_with(NAME_PREFIX) && name.len() <= MAX_NAME_BYTES && name.chars().all(plain) {
        Ok(())
    } else {
        Err(SegmentError::BadName(name.chars().take(MAX_NAME_BYTES).collect()))
    }
}

fn bad_size(name: &str, len: usize) -> SegmentError {
    SegmentError::BadSize { name: name.to_owned(), bytes: len as u64 }
}

fn system(action: &'static str, name: &str, len: usize, source: io::Error) -> SegmentError {
    SegmentError::System { action, name: name.to_owned(), bytes: len as u64, source }
}

#[cfg(test)]
mod tests;
