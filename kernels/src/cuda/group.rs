//! The ranks of a group whose devices share blocks. Kernels exchange by themselves
//! (`kernels/cuda/exchange.cu`); here is the memory through which they do.
//!
//! ```text
//! offer(map)              own exchange memory, and a descriptor of it for the others
//! reach(offers)           whether this device can use the memory of all others
//! join(map, offers, use_peer)   maps the others' memory, or that of the group's segment
//! ```
//! All ranks use the same kind of memory, so they agree on `use_peer` in between. A backend that
//! joined no group exchanges nothing and launches nothing for it.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use shared::shm::group::{DEVICE_FLAG_BYTES, DeviceArea, GroupMap};

use super::sharing::SharedMemory;
use super::{Address, Cuda, Gpu, PooledMemory, bytes_of};
use crate::ops::OpError;
use crate::sizes::exchange as sizes;

/// What a rank tells the others of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// What tells the device from all others, whatever its number is in another process.
    pub uuid: [u8; 16],
    /// Multiprocessors: the smallest number in a group bounds the grid of its exchanges.
    pub multiprocessors: u32,
}

impl DeviceIdentity {
    /// Length of [`to_bytes`](Self::to_bytes).
    pub const BYTES: usize = 20;

    /// The identity for a message to another rank.
    pub fn to_bytes(&self) -> [u8; DeviceIdentity::BYTES] {
        let mut bytes = [0; DeviceIdentity::BYTES];
        bytes[..16].copy_from_slice(&self.uuid);
        bytes[16..].copy_from_slice(&self.multiprocessors.to_le_bytes());
        bytes
    }

    /// The identity in a message of another rank; `None` when it has another length.
    pub fn from_bytes(bytes: &[u8]) -> Option<DeviceIdentity> {
        let (uuid, multiprocessors) = bytes.split_first_chunk::<16>()?;
        let multiprocessors = u32::from_le_bytes(multiprocessors.try_into().ok()?);
        Some(DeviceIdentity { uuid: *uuid, multiprocessors })
    }
}

/// What a rank offers to the others of its group.
#[derive(Debug)]
pub struct Offer {
    pub device: DeviceIdentity,
    /// Its exchange memory in device memory; `None` where the driver cannot share any.
    pub memory: Option<OwnedFd>,
}

/// The memory through which the devices of a group exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Each device reads the memory of the others.
    Device,
    /// All devices read and write registered memory of the host.
    Host,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Device => "device memory",
            Path::Host => "host memory",
        })
    }
}

/// What a backend has of its group.
#[derive(Debug)]
pub(crate) enum Membership<G: Gpu> {
    /// A worker of whole blocks.
    Alone,
    /// Its exchange memory is made, if there is such memory.
    Offered(Option<SharedMemory<G>>),
    Joined(Box<CudaMember<G>>),
}

/// The lanes of exchanges, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lanes {
    /// CTAs of a launch, at most.
    pub(crate) lanes: usize,
    /// Groups of 4 values in a buffer of a lane.
    pub(crate) capacity: usize,
}

impl Lanes {
    /// The lanes of exchange memory of `device_bytes` bytes for each rank, on devices of which the
    /// smallest has so many multiprocessors.
    fn new(device_bytes: usize, multiprocessors: usize) -> Lanes {
        // Two buffers of groups of 16 bytes.
        let groups = device_bytes.saturating_sub(DEVICE_FLAG_BYTES) / 32;
        let most = sizes::MAX_LANES.min(multiprocessors.max(1));
        // A lane of less than a group per thread wastes a CTA.
        let lanes = (groups / sizes::THREADS).clamp(1, most);
        Lanes { lanes, capacity: groups / lanes }
    }
}

/// A rank that exchanges.
#[derive(Debug)]
pub(crate) struct CudaMember<G: Gpu> {
    gpu: Arc<G>,
    area: DeviceArea,
    registered: Vec<Address>,
    /// Own memory, and that of the others.
    _shared: Vec<SharedMemory<G>>,
    /// `uint64_t [TABLE_WORDS]` and `uint32_t [STATE_WORDS]` of the kernels.
    pub(super) table: PooledMemory<G>,
    pub(super) state: PooledMemory<G>,
    pub(crate) lanes: Lanes,
}

impl<G: Gpu> CudaMember<G> {
    pub(super) fn rank(&self) -> usize {
        self.area.rank()
    }

    pub(super) fn world(&self) -> usize {
        self.area.map().shape().world()
    }

    /// Fails once an exchange of the device ended early, or its group was aborted.
    pub(super) fn check(&self) -> Result<(), OpError> {
        Ok(self.area.check()?)
    }
}

impl<G: Gpu> Drop for CudaMember<G> {
    fn drop(&mut self) {
        // A device that does not answer any more does not read any more.
        let _ = self.gpu.wait();
        for &at in &self.registered {
            // SAFETY: registered in `join`; the work of the device is done.
            unsafe { self.gpu.unregister(at) };
        }
    }
}

/// A sentence of `join`.
fn refused(what: &'static str) -> OpError {
    OpError::Shape { op: "join", what }
}

impl<G: Gpu> Cuda<G> {
    /// Makes the exchange memory of this rank, for the others to map. It does not depend on
    /// offers of others, and comes before [`reach`](Self::reach) and [`join`](Self::join).
    ///
    /// # Errors
    /// When the device has no memory for it, or fails.
    pub fn offer(&mut self, map: &Arc<GroupMap>) -> Result<Offer, OpError> {
        self.host("an offer")?;
        // What cannot be shared is no fault: `reach` says no then, and all ranks use host memory.
        let made = SharedMemory::new(&self.gpu, map.shape().device_bytes()).unwrap_or(None);
        let (memory, fd) = made.unzip();
        if let Some(memory) = &memory {
            // Before another rank can write a flag.
            // SAFETY: the memory begins with the flags.
            let done = unsafe { self.gpu.fill(memory.address(), 0, DEVICE_FLAG_BYTES) };
            self.noted(done)?;
            self.wait()?;
        }
        self.group = Membership::Offered(memory);
        let uuid = self.gpu.uuid();
        let uuid = self.noted(uuid)?;
        let multiprocessors = self.gpu.properties().multiprocessors;
        Ok(Offer { device: DeviceIdentity { uuid, multiprocessors }, memory: fd })
    }

    /// Whether this device can use the device memory of all `offers`: those of the other ranks in
    /// their order, `None` in its own place. The ranks use device memory if all of them can.
    pub fn reach(&self, offers: &[Option<Offer>]) -> bool {
        let has_own = matches!(&self.group, Membership::Offered(Some(_)));
        let reaches = |offer: &Offer| offer.memory.is_some() && self.gpu.reaches(offer.device.uuid);
        has_own && offers.iter().flatten().all(reaches)
    }

    /// Exchanges as a rank of the group of `map` from now on, through device memory if `use_peer`:
    /// all ranks call the same operations with the same lengths in the same order. `offers` are
    /// those of [`reach`](Self::reach).
    ///
    /// # Errors
    /// When the offers are not those of all other ranks, memory cannot be mapped or registered, or
    /// the device fails.
    pub fn join(
        &mut self,
        map: Arc<GroupMap>,
        offers: Vec<Option<Offer>>,
        use_peer: bool,
    ) -> Result<Path, OpError> {
        self.host("to join a group")?;
        let Membership::Offered(own) = std::mem::replace(&mut self.group, Membership::Alone) else {
            return Err(refused("a rank offers its memory before it joins, and joins once"));
        };
        let area = DeviceArea::new(map);
        let is_own_place =
            |(rank, offer): (usize, &Option<Offer>)| offer.is_none() == (rank == area.rank());
        if offers.len() != area.map().shape().world()
            || !offers.iter().enumerate().all(is_own_place)
        {
            return Err(refused("the offers are not those of all other ranks"));
        }
        let device = self.gpu.properties().multiprocessors;
        let others = offers.iter().flatten().map(|offer| offer.device.multiprocessors);
        let least = others.fold(device, u32::min) as usize;
        let mut parts = JoinMappings::default();
        let mapped = match use_peer {
            true => parts.map_devices(&self.gpu, &area, own, &offers),
            false => parts.register_host(&self.gpu, &area),
        };
        if let Err(error) = mapped {
            parts.undo(&*self.gpu);
            return Err(error);
        }
        self.exchange_over(area, parts, least)?;
        Ok(if use_peer { Path::Device } else { Path::Host })
    }

    /// [`join`](Self::join) over memory of this device that holds the exchange memory of all ranks,
    /// one after the other. The caller keeps it as long as this exchanges.
    pub(crate) fn join_over(
        &mut self,
        map: Arc<GroupMap>,
        memory: &PooledMemory<G>,
    ) -> Result<(), OpError> {
        let area = DeviceArea::new(map);
        let shape = area.map().shape();
        let of_rank = |rank| memory.address().offset(rank * shape.device_bytes());
        let table = (0..shape.world()).map(of_rank).collect();
        let parts = JoinMappings { table, ..JoinMappings::default() };
        let multiprocessors = self.gpu.properties().multiprocessors as usize;
        self.exchange_over(area, parts, multiprocessors)
    }

    /// A backend over the same device that is in no group and has memory of its own.
    pub(crate) fn beside(&self) -> Cuda<G> {
        let mut other = Cuda::with_pool(Arc::clone(&self.gpu), self.pool.is_exact());
        other.watch = self.watch;
        other
    }

    /// From now on exchanges go through `parts`; the smallest device has `least` multiprocessors.
    fn exchange_over(
        &mut self,
        area: DeviceArea,
        mut parts: JoinMappings<G>,
        least: usize,
    ) -> Result<(), OpError> {
        let mut make = || {
            let table = self.reserve(size_of::<u64>() * sizes::TABLE_WORDS)?;
            let state = self.reserve(size_of::<u32>() * sizes::STATE_WORDS)?;
            parts.register_words(&self.gpu, &area)?;
            Ok::<_, OpError>((table, state))
        };
        let (table, state) = match make() {
            Ok(made) => made,
            Err(error) => {
                parts.undo(&*self.gpu);
                return Err(error);
            }
        };
        let words: Vec<u8> = parts.table.iter().flat_map(|at| at.0.to_le_bytes()).collect();
        let mut member = CudaMember {
            table,
            state,
            lanes: Lanes::new(area.map().shape().device_bytes(), least),
            gpu: Arc::clone(&self.gpu),
            area,
            registered: parts.registered,
            _shared: parts.shared,
        };
        self.upload_bytes(&words, &mut member.table, 0)?;
        self.upload_bytes(bytes_of(&[0u32; sizes::STATE_WORDS]), &mut member.state, 0)?;
        self.group = Membership::Joined(Box::new(member));
        self.wait()
    }

    /// The rank that exchanges, if there is a group.
    pub(crate) fn member(&self) -> Option<&CudaMember<G>> {
        match &self.group {
            Membership::Joined(member) => Some(member),
            Membership::Alone | Membership::Offered(_) => None,
        }
    }

    /// Fails once an exchange ended early; called when the device is done.
    pub(super) fn check_group(&self) -> Result<(), OpError> {
        self.member().map_or(Ok(()), CudaMember::check)
    }
}

/// What a rank maps while it joins.
struct JoinMappings<G: Gpu> {
    registered: Vec<Address>,
    shared: Vec<SharedMemory<G>>,
    table: Vec<Address>,
}

impl<G: Gpu> Default for JoinMappings<G> {
    fn default() -> JoinMappings<G> {
        JoinMappings { registered: Vec::new(), shared: Vec::new(), table: Vec::new() }
    }
}

impl<G: Gpu> JoinMappings<G> {
    /// The device memory of all ranks.
    fn map_devices(
        &mut self,
        gpu: &Arc<G>,
        area: &DeviceArea,
        own: Option<SharedMemory<G>>,
        offers: &[Option<Offer>],
    ) -> Result<(), OpError> {
        let bytes = area.map().shape().device_bytes();
        let mut own = own;
        for offer in offers {
            let memory = match offer {
                None => own.take().ok_or(refused("this device shares no memory"))?,
                Some(offer) => {
                    let fd = offer.memory.as_ref().ok_or(refused("a device shares no memory"))?;
                    SharedMemory::open(gpu, fd.as_fd(), bytes)?
                }
            };
            self.table.push(memory.address());
            self.shared.push(memory);
        }
        Ok(())
    }

    /// The host memory of all ranks.
    fn register_host(&mut self, gpu: &G, area: &DeviceArea) -> Result<(), OpError> {
        let shape = area.map().shape();
        let (start, bytes) = area.exchange_memory();
        // SAFETY: the segment stays mapped until `Member` is dropped, which undoes this before it
        // drops the area; nobody makes references into this memory.
        let at = unsafe { gpu.register(start.as_ptr(), bytes) }?;
        self.registered.push(at);
        self.table.extend((0..shape.world()).map(|rank| at.offset(rank * shape.device_bytes())));
        Ok(())
    }

    /// The words of the group, behind the memory of all ranks that there may be.
    fn register_words(&mut self, gpu: &G, area: &DeviceArea) -> Result<(), OpError> {
        let (start, bytes) = area.words();
        // SAFETY: as in `register_host`; the words are atomics.
        let at = unsafe { gpu.register(start.as_ptr(), bytes) }?;
        self.registered.push(at);
        self.table.resize(sizes::MAX_RANKS, Address(0));
        self.table.extend(area.word_offsets().map(|offset| at.offset(offset)));
        Ok(())
    }

    fn undo(self, gpu: &G) {
        for at in self.registered {
            // SAFETY: registered above; no work uses it.
            unsafe { gpu.unregister(at) };
        }
    }
}

const _: () = assert!(sizes::FLAG_BYTES == DEVICE_FLAG_BYTES);
const _: () = assert!(sizes::MAX_RANKS == shared::shm::group::MAX_RANKS);

#[cfg(all(test, feature = "emu"))]
mod tests;
