//! KV pages of one block in device memory, laid out as [`KvPages`](crate::KvPages) lays them out in
//! the host's.

use std::marker::PhantomData;
use std::ops::Range;

use super::address::{Address, Floats};
use super::gpu::Gpu;
use super::memory::PooledMemory;
use crate::kv::PageLayout;
use crate::ops::PagePool;

/// Where kernels put a second copy of what they append (`outbox.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outlet {
    /// The outbox; [`Address`] 0 when there is none.
    pub address: Address,
    /// The block of the span, where the step says which one its unit begins with; else 0.
    pub block: usize,
}

impl Outlet {
    /// There is none.
    pub const NONE: Outlet = Outlet { address: Address(0), block: 0 };
}

/// All pages of one block, borrowed from the memory of the pool.
#[derive(Debug)]
pub struct Pages<'k> {
    layout: PageLayout,
    pages: usize,
    address: Address,
    outlet: Outlet,
    lent: PhantomData<&'k mut ()>,
}

impl<'k> Pages<'k> {
    /// Pages over `memory` from byte `start` on, as many as fit into `bytes`.
    ///
    /// # Panics
    /// When the memory has no such bytes.
    pub fn new<G: Gpu>(
        layout: PageLayout,
        memory: &'k mut PooledMemory<G>,
        start: usize,
        bytes: usize,
    ) -> Self {
        let end = start.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= memory.bytes()), "pages beyond their memory");
        Pages {
            layout,
            pages: bytes / layout.page_bytes().max(1),
            address: memory.address().offset(start),
            outlet: Outlet::NONE,
            lent: PhantomData,
        }
    }

    /// Pages of several blocks whose pages follow each other in `memory`, `bytes` bytes each.
    ///
    /// # Panics
    /// When the memory has no such bytes.
    pub(super) fn each<G: Gpu>(
        layout: PageLayout,
        memory: &'k mut PooledMemory<G>,
        blocks: Range<usize>,
        bytes: usize,
    ) -> Vec<Self> {
        let of = |index: usize| {
            let pages = Pages::new(layout, memory, index * bytes, bytes);
            // The memory stays borrowed as a whole, and blocks have different parts of it.
            Pages { lent: PhantomData, ..pages }
        };
        blocks.map(of).collect()
    }

    /// Pages over the first `bytes` bytes of a buffer. What is appended goes to `outbox` too, which
    /// has a slot for each token.
    ///
    /// # Panics
    /// When the buffer is shorter.
    pub(crate) fn over(
        layout: PageLayout,
        memory: &'k Floats,
        outbox: Option<&'k Floats>,
        bytes: usize,
    ) -> Self {
        assert!(bytes <= memory.len() * 4, "pages beyond their memory");
        Pages {
            layout,
            pages: bytes / layout.page_bytes().max(1),
            address: memory.address(),
            outlet: outbox
                .map_or(Outlet::NONE, |outbox| Outlet { address: outbox.address(), block: 0 }),
            lent: PhantomData,
        }
    }

    /// What is appended goes to `outlet` too.
    ///
    /// # Safety
    /// It has a slot for each token that is appended, and lives while these pages are used.
    #[must_use]
    pub(super) unsafe fn with_outlet(mut self, outlet: Outlet) -> Self {
        self.outlet = outlet;
        self
    }

    /// Where page 0 begins.
    pub fn address(&self) -> Address {
        self.address
    }

    /// What recorded launches over these pages name.
    pub(super) fn place(&self) -> (Address, Outlet) {
        (self.address, self.outlet)
    }

    /// Where what is appended goes too.
    pub fn outlet(&self) -> Outlet {
        self.outlet
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
