//! The board and rings: made and mapped by the supervisor through `shared_memory`, mapped by
//! children from a descriptor.

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::mman::shm_unlink;
use shared_memory::{Shmem, ShmemConf, ShmemError};

use super::*;

/// Names in /dev/shm begin with this while `shared_memory` makes a mapping.
const MAPPING_PREFIX: &str = "sepal-mapping-";

const SHM_DIR: &str = "/dev/shm";

/// A small segment, mapped for reading and writing.
pub struct SmallSegment {
    memory: SmallMemory,
    len: usize,
    name: String,
}

enum SmallMemory {
    /// Made here, with the memfd for those that may map it too.
    Made(Shmem, MemfdSegment),
    /// Made by another process.
    Opened(Mapping),
}

// SAFETY: the mapping stays where it is for the life of the value and belongs to no thread;
// `SmallSegment` itself gives out only its address, length, name and descriptor.
unsafe impl Send for SmallSegment {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for SmallSegment {}

impl SmallSegment {
    /// Makes and maps a zeroed segment of `len` bytes with its memory reserved. `name` is what
    /// `/proc/PID/maps` shows.
    ///
    /// # Errors
    /// [`SegmentError::BadSize`] when `len` is 0, [`SegmentError::System`] when the system refuses.
    pub fn create(name: &str, len: usize) -> Result<SmallSegment, SegmentError> {
        let sealed = MemfdSegment::create(name, len)?;
        let size = libc::off_t::try_from(len).map_err(|_| bad_size(name, len))?;
        // Memory is taken now, so that its lack is an error here and no death at the first touch.
        fallocate(&sealed, FallocateFlags::empty(), 0, size)
            .map_err(|errno| system("reserve", name, len, errno.into()))?;
        SmallSegment::made(sealed)
    }

    /// Maps a segment that this process made before it became another executable. As at its creation,
    /// descriptors of it can be handed on.
    ///
    /// # Errors
    /// As [`MemfdSegment::from_fd`], and [`SegmentError::System`] when the system refuses.
    pub fn adopt(name: &str, fd: OwnedFd, len: usize) -> Result<SmallSegment, SegmentError> {
        SmallSegment::made(MemfdSegment::from_fd(name, fd, len)?)
    }

    fn made(sealed: MemfdSegment) -> Result<SmallSegment, SegmentError> {
        let (name, len) = (sealed.name.clone(), sealed.len);
        let shmem = nameless_mapping(&name, len)?;
        lay_under(&shmem, &sealed)?;
        Ok(SmallSegment { memory: SmallMemory::Made(shmem, sealed), len, name })
    }

    /// Maps the segment behind a descriptor that came from its maker; the descriptor is closed.
    /// `name` is for messages.
    ///
    /// # Errors
    /// As [`MemfdSegment::from_fd`], and [`SegmentError::System`] when the system refuses.
    pub fn open(name: &str, fd: OwnedFd, len: usize) -> Result<SmallSegment, SegmentError> {
        let mapping = MemfdSegment::from_fd(name, fd, len)?.map_unlocked()?;
        Ok(SmallSegment { memory: SmallMemory::Opened(mapping), len, name: name.to_owned() })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Another descriptor of the segment, to be sent to a process that may map it.
    ///
    /// # Errors
    /// When the process is out of descriptors, or did not make the segment.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        match &self.memory {
            SmallMemory::Made(_, sealed) => sealed.try_clone(),
            SmallMemory::Opened(_) => Err(io::Error::other("only its maker hands a segment on")),
        }
    }

    /// First byte of the mapping, aligned to a page; all bytes of the segment are mapped while
    /// `self` lives.
    pub(in crate::shm) fn base(&self) -> NonNull<u8> {
        match &self.memory {
            SmallMemory::Made(shmem, _) => {
                NonNull::new(shmem.as_ptr()).expect("a mapping is not at address 0")
            }
            SmallMemory::Opened(mapping) => mapping.base(),
        }
    }
}

impl std::fmt::Debug for SmallSegment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SmallSegment")
            .field("name", &self.name)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A mapping of `shared_memory` whose name is gone.
fn nameless_mapping(name: &str, len: usize) -> Result<Shmem, SegmentError> {
    for number in 0u32.. {
        let id = format!("{MAPPING_PREFIX}{}-{number}", std::process::id());
        match ShmemConf::new().os_id(&id).size(len).create() {
            Ok(mut shmem) => {
                // Nobody opens it by its name, and the next who gets this process id may use it.
                shmem.set_owner(false);
                match shm_unlink(id.as_str()) {
                    Ok(()) | Err(Errno::ENOENT) => return Ok(shmem),
                    Err(errno) => {
                        return Err(system("remove the name of", name, len, errno.into()));
                    }
                }
            }
            // Another thread makes one right now, or a process of this id was killed between the
            // two calls.
            Err(ShmemError::MappingIdExists) => {}
            Err(error) => return Err(shmem_error(name, len, error)),
        }
    }
    Err(system("name", name, len, Errno::EEXIST.into()))
}

/// Has the pages of `sealed` take the place of those of `shmem`, which was mapped with that size.
fn lay_under(shmem: &Shmem, sealed: &MemfdSegment) -> Result<(), SegmentError> {
    let len = NonZeroUsize::new(sealed.len).ok_or_else(|| bad_size(&sealed.name, sealed.len))?;
    let address = NonZeroUsize::new(shmem.as_ptr().addr());
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
    // SAFETY: the range is exactly the mapping that `shmem` owns and that nobody has a reference
    // into yet; `shmem` unmaps the same range when it is dropped, whatever lies there.
    let mapped = unsafe { mmap(address, len, protection, flags, sealed, 0) };
    mapped.map_err(|errno| system("map", &sealed.name, sealed.len, errno.into()))?;
    Ok(())
}

/// Removes the names in /dev/shm that processes left which were killed while they made a mapping.
/// Names of live processes may go too: nothing is opened by them.
///
/// # Errors
/// When /dev/shm cannot be read.
pub fn remove_names() -> io::Result<()> {
    for entry in std::fs::read_dir(SHM_DIR)?.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with(MAPPING_PREFIX) {
            // Somebody else may have removed it.
            let _ = shm_unlink(name.as_os_str());
        }
    }
    Ok(())
}

fn shmem_error(name: &str, len: usize, error: ShmemError) -> SegmentError {
    let source = match error {
        ShmemError::MapCreateFailed(code) | ShmemError::UnknownOsError(code) => {
            io::Error::from_raw_os_error(code.cast_signed())
        }
        other => io::Error::other(other),
    };
    system("create", name, len, source)
}
