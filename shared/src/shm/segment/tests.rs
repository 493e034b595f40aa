use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;

use super::*;

fn name(test: &str) -> String {
    format!("sepal-test-{}-segment-{test}", std::process::id())
}

#[test]
fn owner_makes_a_private_file_and_removes_it() {
    let name = name("owner");
    let path = Path::new(SHM_DIR).join(&name);

    let segment = NamedSegment::create(&name, 5000).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!(
        (metadata.permissions().mode() & 0o777, metadata.len()),
        (0o600, 5000)
    );
    let opened = NamedSegment::open(&name, 5000).unwrap();
    drop(opened);
    assert!(path.exists());
    drop(segment);
    assert!(!path.exists());
}

#[test]
fn a_name_is_taken_once_and_found_only_with_its_size() {
    let name = name("once");
    let missing = NamedSegment::open(&name, 64).unwrap_err();
    assert!(matches!(missing, SegmentError::Missing(_)), "{missing}");

    let _segment = NamedSegment::create(&name, 64).unwrap();

    let taken = NamedSegment::create(&name, 64).unwrap_err();
    assert!(matches!(taken, SegmentError::Exists(_)), "{taken}");
    let wrong = NamedSegment::open(&name, 65).unwrap_err();
    assert!(
        matches!(
            wrong,
            SegmentError::WrongSize {
                expected_bytes: 65,
                actual_bytes: 64,
                ..
            }
        ),
        "{wrong}"
    );
}

#[test]
fn leftovers_are_listed_and_removed() {
    let prefix = name("left");
    let (one, two) = (format!("{prefix}-1"), format!("{prefix}-2"));
    // What a killed owner leaves.
    std::mem::forget(NamedSegment::create(&one, 64).unwrap());
    std::mem::forget(NamedSegment::create(&two, 64).unwrap());

    assert_eq!(
        NamedSegment::names_with_prefix(&prefix).unwrap(),
        [one.clone(), two.clone()]
    );
    assert!(NamedSegment::unlink(&one).unwrap());
    assert!(NamedSegment::unlink(&two).unwrap());
    assert!(!NamedSegment::unlink(&two).unwrap());
    assert!(NamedSegment::names_with_prefix(&prefix).unwrap().is_empty());
}

#[test]
fn names_that_are_not_ours_are_refused() {
    for name in [
        "other-1",
        "sepal-../etc",
        "sepal-a/b",
        "sepal-\0",
        &format!("sepal-{}", "x".repeat(200)),
    ] {
        let created = NamedSegment::create(name, 64).unwrap_err();
        assert!(matches!(created, SegmentError::BadName(_)), "{created}");
        assert!(matches!(
            NamedSegment::unlink(name),
            Err(SegmentError::BadName(_))
        ));
        assert!(matches!(
            MemfdSegment::create(name, 64),
            Err(SegmentError::BadName(_))
        ));
    }
}

#[test]
fn a_segment_larger_than_dev_shm_names_what_it_needs() {
    let name = name("large");
    let len = usize::try_from(free_bytes().unwrap()).unwrap() + (1 << 40);

    let error = NamedSegment::create(&name, len).unwrap_err();

    assert!(
        matches!(error, SegmentError::NoRoom { needed_bytes, .. } if needed_bytes == len as u64),
        "{error}"
    );
    assert!(error.to_string().contains(&len.to_string()));
    assert!(!Path::new(SHM_DIR).join(&name).exists());
}

#[test]
fn nobody_can_change_the_size_of_a_memfd() {
    let segment = MemfdSegment::create(&name("sealed"), 8192).unwrap();
    let other = segment.try_clone().unwrap();

    assert_eq!(nix::unistd::ftruncate(&other, 4096), Err(Errno::EPERM));
    assert_eq!(nix::unistd::ftruncate(&other, 16384), Err(Errno::EPERM));
    assert_eq!(
        fcntl(&other, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)),
        Err(Errno::EPERM)
    );
}

#[test]
fn descriptors_that_are_not_what_was_agreed_are_refused() {
    let segment = MemfdSegment::create(&name("agreed"), 8192).unwrap();
    assert_eq!(
        MemfdSegment::from_fd("sepal-x", segment.try_clone().unwrap(), 8192)
            .unwrap()
            .len(),
        8192
    );

    let wrong = MemfdSegment::from_fd("sepal-x", segment.try_clone().unwrap(), 4096).unwrap_err();
    assert!(
        matches!(
            wrong,
            SegmentError::WrongSize {
                actual_bytes: 8192,
                ..
            }
        ),
        "{wrong}"
    );

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
    assert!(matches!(
        MemfdSegment::create("sepal-x", 0),
        Err(SegmentError::BadSize { .. })
    ));
    assert!(matches!(
        NamedSegment::create(&name("empty"), 0),
        Err(SegmentError::BadSize { .. })
    ));
}

#[test]
fn one_mapping_alone_excludes_all_others() {
    let segment = MemfdSegment::create(&name("alone"), 4096).unwrap();
    let same = MemfdSegment::from_fd(
        "sepal-same",
        segment.as_fd().try_clone_to_owned().unwrap(),
        4096,
    )
    .unwrap();

    let first = segment.map(Sharing::Shared).unwrap();
    let second = same.map(Sharing::Shared).unwrap();
    assert!(matches!(
        segment.map(Sharing::Alone),
        Err(SegmentError::Busy(_))
    ));
    drop((first, second));

    let alone = same.map(Sharing::Alone).unwrap();
    assert!(matches!(
        segment.map(Sharing::Alone),
        Err(SegmentError::Busy(_))
    ));
    assert!(matches!(
        segment.map(Sharing::Shared),
        Err(SegmentError::Busy(_))
    ));
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
