use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::test_skips::ignored;

const DEADLINE: Duration = Duration::from_secs(60);

fn name(test: &str) -> String {
    format!("sepal-test-{}-segment-{test}", std::process::id())
}

#[test]
fn a_small_segment_is_shared_by_descriptor_and_has_no_name() {
    let made = SmallSegment::create(&name("shared"), 5000).unwrap();
    let opened = SmallSegment::open("sepal-x", made.try_clone().unwrap(), 5000).unwrap();
    let last = |segment: &SmallSegment| segment.base().as_ptr().wrapping_add(4999);
    // SAFETY: the mapping has 5000 bytes, and no reference into it exists.
    unsafe { last(&made).write_volatile(7) };
    // SAFETY: as above.
    assert_eq!(unsafe { last(&opened).read_volatile() }, 7);
    assert!(opened.try_clone().is_err());
    drop(made);
    // SAFETY: as above; a mapping outlives its maker.
    assert_eq!(unsafe { last(&opened).read_volatile() }, 7);

    // Another test may be making one right now, whose name goes at once.
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps().contains(&name("shared")));
    wait_until("no mapping has a name", || !maps().contains("sepal-mapping-"));
    let ours = format!("sepal-mapping-{}-", std::process::id());
    let names = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().path());
    let is_ours = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&ours);
    let mut left: Vec<_> = names.filter(is_ours).collect();
    wait_until("every name is gone", || {
        left.retain(|path| path.exists());
        left.is_empty()
    });
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < DEADLINE, "waited in vain until {what}");
        std::thread::yield_now();
    }
}

#[test]
fn nobody_can_change_the_size_of_a_small_segment() {
    let made = SmallSegment::create(&name("fixed"), 5000).unwrap();
    let other = made.try_clone().unwrap();
    assert_eq!(nix::unistd::ftruncate(&other, 0), Err(Errno::EPERM));
    assert_eq!(nix::unistd::ftruncate(&other, 8192), Err(Errno::EPERM));
    // Not through the mapping either, for those who may open it.
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        if line.contains(&name("fixed")) {
            let range = line.split(' ').next().unwrap();
            match OpenOptions::new().write(true).open(format!("/proc/self/map_files/{range}")) {
                Ok(file) => assert!(file.set_len(0).is_err()),
                Err(error) => ignored(
                    "shm::segment::tests::nobody_can_change_the_size_of_a_small_segment",
                    &format!("through /proc/self/map_files: {error}"),
                ),
            }
        }
    }
    let wrong = SmallSegment::open("sepal-x", other, 4096).unwrap_err();
    assert!(matches!(wrong, SegmentError::WrongSize { actual_bytes: 5000, .. }), "{wrong}");
}

#[test]
fn names_of_killed_makers_are_removed() {
    // No process has the id 0, and no other run of this test makes the same name.
    let left = Path::new("/dev/shm").join(format!("sepal-mapping-0-{}", std::process::id()));
    std::fs::write(&left, "").unwrap();
    remove_names().unwrap();
    assert!(!left.exists());
}

#[test]
fn names_that_are_not_ours_are_refused() {
    for name in
        ["other-1", "sepal-../etc", "sepal-a/b", "sepal-\0", &format!("sepal-{}", "x".repeat(200))]
    {
        let created = SmallSegment::create(name, 64).unwrap_err();
        assert!(matches!(created, SegmentError::BadName(_)), "{created}");
        assert!(matches!(MemfdSegment::create(name, 64), Err(SegmentError::BadName(_))));
    }
}

#[test]
fn nobody_can_change_the_size_of_a_memfd() {
    let segment = MemfdSegment::create(&name("sealed"), 8192).unwrap();
    let other = segment.try_clone().unwrap();

    assert_eq!(nix::unistd::ftruncate(&other, 4096), Err(Errno::EPERM));
    assert_eq!(nix::unistd::ftruncate(&other, 16384), Err(Errno::EPERM));
    assert_eq!(fcntl(&other, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)), Err(Errno::EPERM));
}

#[test]
fn descriptors_that_are_not_what_was_agreed_are_refused() {
    let segment = MemfdSegment::create(&name("agreed"), 8192).unwrap();
    assert_eq!(
        MemfdSegment::from_fd("sepal-x", segment.try_clone().unwrap(), 8192).unwrap().len(),
        8192
    );

    let wrong = MemfdSegment::from_fd("sepal-x", segment.try_clone().unwrap(), 4096).unwrap_err();
    assert!(matches!(wrong, SegmentError::WrongSize { actual_bytes: 8192, .. }), "{wrong}");

    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let plain = MemfdSegment::from_fd("sepal-x", file.into(), 8192).unwrap_err();
    assert!(matches!(plain, SegmentError::NotSealed(_)), "{plain}");

    let open = memfd_create("sepal-open", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&open, 8192).unwrap();
    let unsealed = MemfdSegment::from_fd("sepal-x", open, 8192).unwrap_err();
    assert!(matches!(unsealed, SegmentError::NotSealed(_)), "{unsealed}");
}

#[test]
fn empty_segments_are_refused() {
    assert!(matches!(MemfdSegment::create("sepal-x", 0), Err(SegmentError::BadSize { .. })));
    assert!(matches!(SmallSegment::create(&name("empty"), 0), Err(SegmentError::BadSize { .. })));
}

#[test]
fn one_mapping_alone_excludes_all_others() {
    let segment = MemfdSegment::create(&name("alone"), 4096).unwrap();
    let same =
        MemfdSegment::from_fd("sepal-same", segment.as_fd().try_clone_to_owned().unwrap(), 4096)
            .unwrap();

    let first = segment.map(Sharing::Shared).unwrap();
    let second = same.map(Sharing::Shared).unwrap();
    assert!(matches!(segment.map(Sharing::Alone), Err(SegmentError::Busy(_))));
    drop((first, second));

    let alone = same.map(Sharing::Alone).unwrap();
    assert!(matches!(segment.map(Sharing::Alone), Err(SegmentError::Busy(_))));
    assert!(matches!(segment.map(Sharing::Shared), Err(SegmentError::Busy(_))));
    drop(alone);
    assert!(segment.map(Sharing::Shared).is_ok());
}

proptest! {
    #[test]
    fn no_range_leaves_the_mapping(
        offset in prop_oneof![0_u64..9000, any::<u64>()],
        len in prop_oneof![0_usize..9000, any::<usize>()],
    ) {
        let segment = MemfdSegment::create("sepal-test-bounds", 8192).unwrap();
        let mapping = segment.map(Sharing::Shared).unwrap();
        let inside = u128::from(offset) + len as u128 <= 8192;
        prop_assert_eq!(mapping.at(offset, len).is_ok(), inside);
    }
}
