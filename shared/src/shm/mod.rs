//! Shared memory of one instance: what its processes read and write together without calling each
//! other.
//!
//! ```text
//!   board     supervisor owns; every child writes a slot      arena   netd allocates; netd and workers copy in and out
//!   rings     one per (worker, its generation, netd's)        kv      one per worker; that worker alone maps it
//!   group     one per group of several ranks and its generation; each rank writes its own part
//!   sessions  one per run; the present netd alone maps it
//! ```
//!
//! All are sealed memfds, passed by descriptor; see [`segment`].
//!
//! Rules that every module here keeps:
//! - Layouts are `repr(C)`, sized by const asserts and drawn in [`layout`]; offsets, never
//!   pointers.
//! - No Rust reference to payload in a segment. Indexes, flags, counters and ring entries are
//!   atomics (a shared reference to an atomic is sound whatever the other process stores); tensors
//!   go in and out by raw bounded copy. The exception is [`kv::KvMap`], which holds a lock so that
//!   one mapping alone exists.
//! - What the other side wrote is an allegation: it is bounded before it is used, and never trusted
//!   to be consistent.
//! - Nothing depends on `Drop` having run; a process may die between any two stores.
//!
//! `unsafe` is allowed in this folder and `shared::bootstrap` only; every use is behind a safe
//! interface.
//!
//! Under `--cfg loom` only [`ring`], [`group`], [`seqlock`] and what they need is compiled, over
//! loom's atomics.
#![allow(
    unsafe_code,
    reason = "mapping memory that other processes write is the purpose of this module"
)]

pub mod group;
pub mod layout;
pub mod ring;
pub mod seqlock;
mod sync;

#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
pub mod board;
#[cfg(not(loom))]
pub mod doorbell;
#[cfg(not(loom))]
pub mod kv;
#[cfg(not(loom))]
pub mod numa_memory;
#[cfg(not(loom))]
pub mod pair;
#[cfg(not(loom))]
pub mod segment;
#[cfg(not(loom))]
pub mod sessions;
