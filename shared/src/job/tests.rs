use proptest::prelude::*;

use super::*;

pub(crate) fn limits() -> JobLimits {
    JobLimits {
        arena_bytes: 1 << 20,
        span: Span::new(2, 6).unwrap(),
        hidden: 8,
        dtype: DType::F32,
        kv_pages: 10,
        adapters: 0,
    }
}

pub(crate) fn slot(offset: u64, len: u64) -> SlotRef {
    SlotRef { offset, len }
}

/// Two rows with 17 tokens cached, two tokens to come, the second page of each about to be written.
pub(crate) fn step() -> JobBody {
    JobBody {
        kind: WorkKind::Decode,
        dtype: DType::F32,
        blocks: vec![BlockIndex(2), BlockIndex(3)],
        adapter: None,
        batch: 2,
        tokens: 2,
        hidden: 8,
        pages: StepPages {
            prefixes: vec![17, 17],
            tables: vec![vec![PageId(0), PageId(3)], vec![PageId(0), PageId(4)]],
            copies: vec![PageCopy { source: PageId(3), destination: PageId(4), tokens: 1 }],
        },
        input: slot(0, 128),
        output: slot(128, 128),
        prompts: None,
        output_gradient: None,
        prompt_gradient: None,
    }
}

pub(crate) fn backward() -> JobBody {
    JobBody {
        kind: WorkKind::Backward,
        pages: StepPages::default(),
        prompts: Some(Prompts { slot: slot(1024, 2 * 32), batch: 1, tokens: 1 }),
        output_gradient: Some(slot(256, 128)),
        prompt_gradient: Some(slot(2048, 2 * 2 * 32)),
        ..step()
    }
}

fn refused(change: impl FnOnce(&mut JobBody)) -> JobError {
    let mut job = step();
    change(&mut job);
    JobBody::decode(&job.encode(), &limits()).unwrap_err()
}

#[test]
fn bodies_round_trip() {
    for job in [step(), backward()] {
        assert_eq!(JobBody::decode(&job.encode(), &limits()), Ok(job));
    }
}

#[test]
fn every_truncation_and_any_extra_byte_is_refused() {
    let bytes = backward().encode();
    for cut in 0..bytes.len() {
        assert!(JobBody::decode(&bytes[..cut], &limits()).is_err(), "cut at {cut}");
    }
    let long = [bytes.as_slice(), &[0]].concat();
    assert!(JobBody::decode(&long, &limits()).is_err());
}

#[test]
fn numbers_outside_the_limits_are_named() {
    assert_eq!(refused(|j| j.blocks[1] = BlockIndex(6)), JobError::BlockNotServed { block: 6 });
    assert_eq!(refused(|j| j.blocks[1] = BlockIndex(2)), JobError::BlockNotServed { block: 2 });
    assert_eq!(refused(|j| j.hidden = 16), JobError::WrongHidden { got: 16, want: 8 });
    assert_eq!(refused(|j| j.dtype = DType::Bf16), JobError::WrongDType { got: 1, want: 0 });
    assert_eq!(
        refused(|j| j.adapter = Some(0)),
        JobError::UnknownAdapter { adapter: 0, loaded: 0 }
    );
    assert_eq!(
        refused(|j| j.batch = 0),
        JobError::OutOfBounds { value: 0, limit: u64::from(MAX_ROWS) }
    );
    assert_eq!(
        refused(|j| j.pages.tables[1][1] = PageId(10)),
        JobError::BadPage { page: 10, pages: 10 }
    );
    assert_eq!(refused(|j| j.pages.tables[1][1] = PageId(3)), JobError::SharedPage { page: 3 });
    assert_eq!(refused(|j| j.pages.prefixes[0] = 31), JobError::ShortTable { have: 2, need: 3 });
    assert_eq!(
        refused(|j| j.pages.copies[0].tokens = 17),
        JobError::OutOfBounds { value: 17, limit: 16 }
    );
    assert_eq!(refused(|j| j.output = slot(64, 128)), JobError::Aliased { offset: 64, other: 0 });
    assert_eq!(
        refused(|j| j.input = slot((1 << 20) - 64, 128)),
        JobError::BadSlot { offset: (1 << 20) - 64, len: 128 }
    );
    assert_eq!(
        refused(|j| j.input = slot(u64::MAX - 1, 128)),
        JobError::BadSlot { offset: u64::MAX - 1, len: 128 }
    );
    assert_eq!(
        refused(|j| j.output_gradient = Some(slot(512, 128))),
        JobError::BadSlot { offset: 512, len: 128 }
    );
}

#[test]
fn a_page_that_one_row_writes_and_another_reads_is_refused() {
    // The second row reads, as the first page of its prefix, the page that the first row writes.
    let error = refused(|j| j.pages.tables[1][0] = PageId(3));
    assert_eq!(error, JobError::SharedPage { page: 3 });
    // Also when the reader comes first.
    let error = refused(|j| j.pages.tables[0][0] = PageId(4));
    assert_eq!(error, JobError::SharedPage { page: 4 });
    // A row reads what it writes: the page in which its prefix ends.
    assert!(JobBody::decode(&step().encode(), &limits()).is_ok());
    // A page behind the prefix of the other row is never read.
    let mut job = step();
    job.pages.tables[1].push(PageId(3));
    assert_eq!(JobBody::decode(&job.encode(), &limits()), Ok(job));
}

#[test]
fn a_step_is_of_the_kind_of_its_tokens() {
    assert_eq!(refused(|job| job.kind = WorkKind::Prefill), JobError::BadBody { at: 0 });
    assert_eq!(refused(|job| job.tokens = 17), JobError::BadBody { at: 0 });
}

#[test]
fn descriptors_round_trip_and_name_their_worker() {
    let worker = WorkerId { group: GroupId(3), rank: Rank(1), world_size: WorldSize(4) };
    let descriptor = JobDescriptor {
        id: JobId(7),
        kind: WorkKind::Forward,
        worker,
        worker_generation: Generation(2),
        netd_generation: Generation(5),
        body: slot(64, 128),
        submitted_ns: 11,
    };
    let entry = descriptor.encode();
    assert_eq!(size_of_val(&entry), 64);
    assert_eq!(JobDescriptor::decode(&entry), Ok(descriptor));
    assert_eq!(descriptor.check_worker(worker), Ok(()));
    for other in [
        WorkerId { group: GroupId(2), ..worker },
        WorkerId { rank: Rank(0), ..worker },
        WorkerId { world_size: WorldSize(1), ..worker },
    ] {
        let refused = descriptor.check_worker(other);
        assert!(matches!(refused, Err(JobError::WrongWorker { .. })), "{refused:?}");
    }
}

#[test]
fn a_copy_chain_is_refused() {
    let error = refused(|j| {
        j.pages.copies.push(PageCopy { source: PageId(4), destination: PageId(5), tokens: 1 })
    });
    assert_eq!(error, JobError::SharedPage { page: 4 });
}

#[test]
fn completions_carry_every_error() {
    for code in 1..=17 {
        let error = JobError::from_words(code, 7, 9).unwrap();
        let completion = Completion {
            id: JobId(5),
            worker_generation: Generation(2),
            netd_generation: Generation(3),
            result: Err(error),
            queue_ns: 1,
            compute_ns: 2,
        };
        assert_eq!(Completion::decode(&completion.encode()), Some(completion));
    }
    assert_eq!(JobError::from_words(18, 0, 0), None);
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = JobBody::decode(&bytes, &limits());
    }

    #[test]
    fn no_single_changed_word_panics(at in 0usize..60, word in any::<u32>()) {
        let mut bytes = backward().encode();
        let at = (at * 4) % bytes.len();
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        let _ = JobBody::decode(&bytes, &limits());
    }

    #[test]
    fn no_entry_panics(entry in any::<[u64; 8]>(), fix in any::<bool>()) {
        let mut entry = entry;
        if fix {
            entry[0] = MAGIC | VERSION << 32 | (entry[0] & 7) << 48;
        }
        let _ = JobDescriptor::decode(&entry);
        let _ = Completion::decode(&entry);
    }
}
