//! Whole versions, or none.

use super::*;

#[test]
fn what_was_written_last_is_read_whole() {
    let shared = Sequenced::new();
    assert_eq!(shared.read(), Ok(Vec::new()));
    shared.write(&[7; FIGURES_BYTES]).unwrap();
    assert_eq!(shared.read(), Ok(vec![7; FIGURES_BYTES]));
    assert_eq!(shared.write(&[8; FIGURES_BYTES + 1]), Err(DoNotFit(FIGURES_BYTES as u64 + 1)));
    assert_eq!(shared.read(), Ok(vec![7; FIGURES_BYTES]));
    shared.write(b"figures").unwrap();
    assert_eq!(shared.read(), Ok(b"figures".to_vec()));
    shared.reset();
    assert_eq!(shared.read(), Ok(Vec::new()));
}

#[test]
fn a_writer_that_died_or_lies_ends_no_reader() {
    let shared = Sequenced::new();
    shared.sequence.store(3, Ordering::Relaxed);
    assert_eq!(shared.read(), Err(Unreadable::Busy));
    // Whoever writes next makes the number even again.
    shared.write(b"x").unwrap();
    assert_eq!(shared.read(), Ok(b"x".to_vec()));
    shared.len.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(shared.read(), Err(DoNotFit(u64::MAX).into()));
}

#[test]
fn a_reader_beside_a_writer_sees_no_mixture() {
    let shared = Sequenced::new();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let Ok(bytes) = shared.read() else { continue };
                let first = bytes.first().copied().unwrap_or(0);
                assert_eq!(bytes, vec![first; usize::from(first)]);
            }
        });
        for round in 0..20_000_u32 {
            let byte = (round % 251) as u8;
            shared.write(&vec![byte; usize::from(byte)]).unwrap();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
