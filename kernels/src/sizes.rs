//! Constants that the `.cu` files export (`EXPORT` in `cuda/ptx.h`): sizes of tiles and bytes of
//! dynamic shared memory, one module per file. `build.rs` takes them from the manifest of the
//! images.
#![allow(dead_code, reason = "several files export what they share")]

include!(concat!(env!("OUT_DIR"), "/sizes.rs"));
