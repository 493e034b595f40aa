//! Which bytes of the arena are in use. Pure bookkeeping in netd's memory: no other process
//! allocates or frees, and nothing of it lies in the arena, so that no worker can damage it.
//!
//! ```text
//!   0                            small_bytes                                      total_bytes
//!   +------+------+---  ---+------+------------------------+---------------------------+
//!   | slot | slot |  ...   | slot |  short: first fit      |  bulk: first fit          |
//!   +------+------+---  ---+------+------------------------+---------------------------+
//!   fixed slots, short steps        larger short steps      prefill, forward, backward
//!   of few rows
//! ```
//!
//! Bulk never occupies a small slot or the region of short steps, so that a flood of long requests
//! leaves short steps their memory. A slot is freed when its job was answered or its worker was
//! reaped, explicitly, never on drop: forgetting one is visible in [`ArenaAllocator::slots_in_use`], and freeing one twice is refused.

mod first_fit;

use std::collections::HashMap;

use first_fit::FirstFit;

/// Every slot starts at a multiple of this, a cache line, so that slots of two jobs never share
/// one.
pub const SLOT_ALIGN: u64 = 64;

/// How an arena is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaPlan {
    small_slots: u64,
    small_slot_bytes: u64,
    short_bytes: u64,
    bulk_bytes: u64,
}

impl ArenaPlan {
    /// An arena of `total_bytes` with `small_slots` slots of `small_slot_bytes` (rounded up to
    /// [`SLOT_ALIGN`]), `short_bytes` for larger short steps and the rest in bulk (both rounded
    /// down).
    ///
    /// # Errors
    /// [`PlanError`] when there are no small slots or no bytes for bulk.
    pub fn new(
        total_bytes: u64,
        small_slots: u32,
        small_slot_bytes: u64,
        short_bytes: u64,
    ) -> Result<ArenaPlan, PlanError> {
        let refused = PlanError { total_bytes, small_slots, small_slot_bytes, short_bytes };
        let slot_bytes = small_slot_bytes.checked_next_multiple_of(SLOT_ALIGN).ok_or(refused)?;
        let small_slots = u64::from(small_slots);
        let small_bytes = small_slots.checked_mul(slot_bytes).ok_or(refused)?;
        let short_bytes = short_bytes - short_bytes % SLOT_ALIGN;
        let rest = total_bytes.checked_sub(small_bytes).ok_or(refused)?;
        let rest = rest.checked_sub(short_bytes).ok_or(refused)?;
        let bulk_bytes = rest - rest % SLOT_ALIGN;
        if small_bytes == 0 || bulk_bytes == 0 {
            return Err(refused);
        }
        Ok(ArenaPlan { small_slots, small_slot_bytes: slot_bytes, short_bytes, bulk_bytes })
    }

    /// Bytes of one small slot, after rounding.
    pub fn small_slot_bytes(&self) -> u64 {
        self.small_slot_bytes
    }

    /// Where the small slots end and the region of short steps begins.
    fn small_bytes(&self) -> u64 {
        self.small_slots * self.small_slot_bytes
    }

    /// Where bulk begins.
    fn bulk_start(&self) -> u64 {
        self.small_bytes() + self.short_bytes
    }
}

/// An arena cannot be divided as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an arena of {total_bytes} bytes cannot hold {small_slots} slots of {small_slot_bytes} \
     bytes, {short_bytes} bytes for short steps and a bulk region; raise --arena_size"
)]
pub struct PlanError {
    /// Size of the arena.
    pub total_bytes: u64,
    /// Small slots asked for.
    pub small_slots: u32,
    /// Bytes of each.
    pub small_slot_bytes: u64,
    /// Bytes of the region of short steps.
    pub short_bytes: u64,
}

/// Where in an arena a slot lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// The fixed slots, for short steps of few rows.
    Small,
    /// Larger short steps.
    Short,
    /// Everything else.
    Bulk,
}

/// The right to a piece of the arena, until it is given back with [`ArenaAllocator::free`]. Copies
/// name the same piece; what travels to a worker is the offset and the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a slot is in use until it is freed"]
pub struct Slot {
    offset: u64,
    len: u64,
    serial: u64,
}

impl Slot {
    /// Offset in the arena in bytes, a multiple of [`SLOT_ALIGN`].
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length asked for, in bytes.
    #[allow(clippy::len_without_is_empty, reason = "no slot is empty")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocError {
    /// Not now: wait until slots are freed.
    #[error("no {len} bytes free in the {region:?} region of the arena ({free_bytes} free in all)")]
    Exhausted {
        region: Region,
        /// Bytes asked for.
        len: u64,
        /// Bytes free there, possibly in pieces.
        free_bytes: u64,
    },
    /// Never: the region is smaller than that even when empty.
    #[error(
        "{len} bytes never fit the {region:?} region of the arena, which holds at \
         most {max_bytes} in one piece"
    )]
    TooLarge {
        region: Region,
        /// Bytes asked for.
        len: u64,
        /// Largest slot of the empty region.
        max_bytes: u64,
    },
    /// A slot of no bytes was asked for.
    #[error("a slot of 0 bytes cannot be allocated")]
    Empty,
}

/// A slot that is not in use here: freed before, or of another allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot of {len} bytes at {offset} is not in use in this arena")]
pub struct NotInUse {
    pub offset: u64,
    pub len: u64,
}

/// The allocator of one arena. netd only.
#[derive(Debug)]
pub struct ArenaAllocator {
    plan: ArenaPlan,
    /// Offsets of free small slots; the last one freed is reused first, while it is warm.
    small_free: Vec<u64>,
    short: FirstFit,
    bulk: FirstFit,
    /// Slots in use: offset -> what was handed out.
    in_use: HashMap<u64, Slot>,
    serial: u64,
}

impl ArenaAllocator {
    /// An allocator of an arena of which nothing is in use.
    pub fn new(plan: ArenaPlan) -> ArenaAllocator {
        ArenaAllocator {
            plan,
            small_free: (0..plan.small_slots)
                .rev()
                .map(|slot| slot * plan.small_slot_bytes)
                .collect(),
            short: FirstFit::new(plan.small_bytes(), plan.short_bytes),
            bulk: FirstFit::new(plan.bulk_start(), plan.bulk_bytes),
            in_use: HashMap::new(),
            serial: 0,
        }
    }

    /// A slot for `len` bytes in `region`.
    ///
    /// # Errors
    /// [`AllocError::TooLarge`] when `len` is more than the largest slot of the empty region,
    /// [`AllocError::Exhausted`] when no free piece is large enough now.
    pub fn allocate(&mut self, region: Region, len: u64) -> Result<Slot, AllocError> {
        if len == 0 {
            return Err(AllocError::Empty);
        }
        let max_bytes = match region {
            Region::Small => self.plan.small_slot_bytes,
            Region::Short => self.plan.short_bytes,
            Region::Bulk => self.plan.bulk_bytes,
        };
        let reserved = len.checked_next_multiple_of(SLOT_ALIGN).filter(|&bytes| bytes <= max_bytes);
        let Some(reserved) = reserved else {
            return Err(AllocError::TooLarge { region, len, max_bytes });
        };
        let offset = match region {
            Region::Small => self.small_free.pop(),
            Region::Short => self.short.take(reserved),
            Region::Bulk => self.bulk.take(reserved),
        };
        match offset {
            Some(offset) => Ok(self.hand_out(offset, len)),
            None => Err(AllocError::Exhausted { region, len, free_bytes: self.free_bytes(region) }),
        }
    }

    /// Gives `slot` back.
    ///
    /// # Errors
    /// [`NotInUse`] when it was given back before or is not of this allocator; nothing changes
    /// then.
    pub fn free(&mut self, slot: Slot) -> Result<(), NotInUse> {
        if self.in_use.get(&slot.offset) != Some(&slot) {
            return Err(NotInUse { offset: slot.offset, len: slot.len });
        }
        self.in_use.remove(&slot.offset);
        let reserved = slot.len.next_multiple_of(SLOT_ALIGN);
        if slot.offset < self.plan.small_bytes() {
            self.small_free.push(slot.offset);
        } else if slot.offset < self.plan.bulk_start() {
            self.short.give_back(slot.offset, reserved);
        } else {
            self.bulk.give_back(slot.offset, reserved);
        }
        Ok(())
    }

    /// Slots handed out and not given back.
    pub fn slots_in_use(&self) -> usize {
        self.in_use.len()
    }

    /// Bytes free in `region`, possibly in pieces.
    pub fn free_bytes(&self, region: Region) -> u64 {
        match region {
            Region::Small => self.small_free.len() as u64 * self.plan.small_slot_bytes,
            Region::Short => self.short.free_bytes(),
            Region::Bulk => self.bulk.free_bytes(),
        }
    }

    /// How the arena is divided.
    pub fn plan(&self) -> &ArenaPlan {
        &self.plan
    }

    fn hand_out(&mut self, offset: u64, len: u64) -> Slot {
        self.serial += 1;
        let slot = Slot { offset, len, serial: self.serial };
        self.in_use.insert(offset, slot);
        slot
    }
}

#[cfg(test)]
mod tests;
