//! Fuzz target of the records of sessions that outlive netd.

use fuzzing::Target;
use p2p::PeerId;
use shared::block::{BlockIndex, Span};
use shared::ids::PageId;

use super::pool::{KvRequest, Pool};
use super::session_record::Record;
use super::table::SessionTables;

fn record(pages: u32, rows: Vec<Vec<u32>>, prefix: u32) -> Record {
    Record {
        peer: PeerId::random(),
        id: "b6e08d8e".into(),
        secret_hash: [7; 32],
        blocks: vec![BlockIndex(3), BlockIndex(4)],
        adapter: None,
        max_length: 32,
        prefix,
        kv_version: 1,
        last_step: 9,
        deadline_ns: u64::MAX,
        pages: (0..pages).map(PageId).collect(),
        rows,
    }
}

/// What a record that was read does to tables and pool, as at the start of a new netd.
#[test]
fn fuzz_session_records() {
    let records = [record(6, vec![vec![0, 1], vec![0, 3]], 20), record(3, vec![vec![]], 0)];
    Target::new("session records", records.map(|record| record.encode())).fuzz(|input| {
        let Some(record) = Record::decode(input) else { return "no record".into() };
        let Record { blocks, max_length, prefix, pages, rows, .. } = record.clone();
        assert_eq!(Record::decode(&record.encode()), Some(record));
        let request = KvRequest { blocks, rows: rows.len() as u32, max_length };
        let mut pool = Pool::new(Span::new(2, 6).expect("a span"), 64, 1024);
        let Ok(grant) = pool.retake(&request, &pages) else { return "no pages".into() };
        let tables = SessionTables::restore(rows, prefix, max_length, grant.pages());
        pool.give_back(grant);
        assert_eq!(pool.free(), pool.budget());
        tables.is_some().to_string()
    });
}
