//! KV pages of one block in device memory, laid out as [`KvPages`](crate::KvPages) lays them out in
//! the host's.

use std::marker::PhantomData;

use super::address::{Address, Floats};
use super::gpu::Gpu;
use super::memory::Memory;
use crate::kv::PageLayout;
use crate::ops::PagePool;

/// All pages of one block, borrowed from the memory of the pool.
#[derive(Debug)]
pub struct Pages<'k> {
    layout: PageLayout,
    pages: usize,
    address: Address,
    mirror: Option<Address>,
    lent: PhantomData<&'k mut ()>,
}

impl<'k> Pages<'k> {
    /// Pages over `memory` from byte `start` on, as many as fit into `bytes`.
    ///
    /// # Panics
    /// When the memory has no such bytes.
    pub fn new<G: Gpu>(
        layout: PageLayout,
        memory: &'k mut Memory<G>,
        start: usize,
        bytes: usize,
    ) -> Self {
        let end = start.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= memory.bytes()), "pages beyond their memory");
        Pages {
            layout,
            pages: bytes / layout.page_bytes().max(1),
            address: memory.address().offset(start),
            mirror: None,
            lent: PhantomData,
        }
    }

    /// Pages over the first `bytes` bytes of a buffer, mirrored in those of another.
    ///
    /// # Panics
    /// When one is shorter.
    pub(crate) fn over(
        layout: PageLayout,
        memory: &'k Floats,
        mirror: Option<&'k Floats>,
        bytes: usize,
    ) -> Self {
        for memory in mirror.into_iter().chain([memory]) {
            assert!(bytes <= memory.len() * 4, "pages beyond their memory");
        }
        Pages {
            layout,
            pages: bytes / layout.page_bytes().max(1),
            address: memory.address(),
            mirror: mirror.map(Floats::address),
            lent: PhantomData,
        }
    }

    /// Writes go to `mirror` too: host memory that the device can write, as long as these pages.
    ///
    /// # Safety
    /// It is registered with the device, and stays so while these pages are used.
    #[must_use]
    pub unsafe fn mirrored(mut self, mirror: Address) -> Self {
        self.mirror = Some(mirror);
        self
    }

    /// Where page 0 begins.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Where page 0 of the mirror begins; [`Address`] 0 when there is none.
    pub fn mirror(&self) -> Address {
        self.mirror.unwrap_or(Address(0))
    }
}

impl PagePool for Pages<'_> {
    fn layout(&self) -> PageLayout {
        self.layout
    }

    fn pages(&self) -> usize {
        self.pages
    }
}
