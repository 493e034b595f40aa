//! Bytes that one process replaces now and then and that others read whole, under a sequence lock. The
//! writer never waits, and a reader tries a bounded number of times: a writer that dies half-way, or
//! never ends, costs it nothing more.

use super::layout::{FIGURES_BYTES, Sequenced};
use super::sync::{Ordering, fence};

/// Times that a reader begins again when the bytes are replaced meanwhile.
const TRIES: u32 = if cfg!(loom) { 2 } else { 64 };

/// The bytes are more than fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes do not fit the {FIGURES_BYTES} bytes that they have")]
pub struct DoNotFit(pub u64);

/// Why there are no bytes to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// They were being replaced at every try, perhaps by a process that died.
    #[error("a process replaces the bytes, or died while it did")]
    Busy,
    /// The length is not one that [`Sequenced::write`] writes.
    #[error(transparent)]
    DoNotFit(#[from] DoNotFit),
}

impl Sequenced {
    /// Replaces the bytes. One process alone may call this, on one thread at a time.
    ///
    /// # Errors
    /// The bytes before stay if the new ones do not fit.
    pub fn write(&self, bytes: &[u8]) -> Result<(), DoNotFit> {
        if bytes.len() > FIGURES_BYTES {
            return Err(DoNotFit(bytes.len() as u64));
        }
        let replacing = self.sequence.load(Ordering::Relaxed) | 1;
        self.sequence.store(replacing, Ordering::Relaxed);
        // SYNC POINT seqlock.begin: a reader that sees one of the stores below sees the odd number or
        // a later one when it looks again; pairs with the fence in read().
        fence(Ordering::Release);
        self.len.store(bytes.len() as u64, Ordering::Relaxed);
        for (word, chunk) in self.words.iter().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
        // SYNC POINT seqlock.end: publishes the bytes to the first load in read().
        self.sequence.store(replacing.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// A private copy of the bytes; none before the first [`write`](Self::write).
    ///
    /// # Errors
    /// [`Unreadable`]
    pub fn read(&self) -> Result<Vec<u8>, Unreadable> {
        for _ in 0..TRIES {
            // SYNC POINT seqlock.end: after this load the bytes of that number are visible; pairs with
            // the last store in write().
            let sequence = self.sequence.load(Ordering::Acquire);
            if sequence % 2 == 1 {
                std::hint::spin_loop();
                continue;
            }
            let told = self.len.load(Ordering::Relaxed);
            let len = usize::try_from(told).unwrap_or(usize::MAX);
            let words = self.words.iter().take(len.min(FIGURES_BYTES).div_ceil(8));
            let mut bytes: Vec<u8> =
                words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
            // SYNC POINT seqlock.begin: had a word above come from a later write(), the load below
            // would see another number; pairs with the fence in write().
            fence(Ordering::Acquire);
            if self.sequence.load(Ordering::Relaxed) == sequence {
                if len > FIGURES_BYTES {
                    return Err(DoNotFit(told).into());
                }
                bytes.truncate(len);
                return Ok(bytes);
            }
        }
        Err(Unreadable::Busy)
    }

    /// Drops the bytes. The process that wrote them must have been reaped.
    #[cfg(not(loom))]
    pub(super) fn reset(&self) {
        self.len.store(0, Ordering::Relaxed);
        self.sequence.store(0, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn loom_a_reader_sees_one_version_whole_or_none() {
        loom::model(|| {
            let shared = Arc::new(Sequenced::new());
            shared.write(&[1; 16]).unwrap();
            let writing = thread::spawn({
                let shared = Arc::clone(&shared);
                move || shared.write(&[2; 9]).unwrap()
            });
            if let Ok(bytes) = shared.read() {
                assert!(bytes == [1; 16] || bytes == [2; 9], "{bytes:?}");
            }
            writing.join().unwrap();
            assert_eq!(shared.read(), Ok(vec![2; 9]));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
