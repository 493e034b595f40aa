//! Page tables against a model that keeps every row as a plain list of tokens.

use std::collections::HashMap;

use proptest::prelude::*;
use shared::job::JobBody;

use super::*;
use crate::sessions::pool::KvRequest;

/// What a worker would do with plans: pages of 16 cells.
#[derive(Default)]
struct Memory(HashMap<PageId, [Option<u64>; PAGE_TOKENS]>);

impl Memory {
    fn apply(&mut self, plan: &StepPages, rows: &[Vec<u64>]) {
        for copy in &plan.copies {
            let source = self.0[&copy.source];
            let target = self.0.entry(copy.destination).or_insert([None; PAGE_TOKENS]);
            let tokens = copy.tokens as usize;
            target[..tokens].copy_from_slice(&source[..tokens]);
        }
        for (table, tokens) in plan.tables.iter().zip(rows) {
            for (offset, token) in tokens.iter().enumerate() {
                let position = plan.prefixes[0] as usize + offset;
                let page =
                    self.0.entry(table[position / PAGE_TOKENS]).or_insert([None; PAGE_TOKENS]);
                page[position % PAGE_TOKENS] = Some(*token);
            }
        }
    }

    fn row(&self, table: &[PageId], length: usize) -> Vec<u64> {
        let cell = |i: usize| self.0[&table[i / PAGE_TOKENS]][i % PAGE_TOKENS].unwrap();
        (0..length).map(cell).collect()
    }
}

fn tables(rows: u32, max_length: u32) -> SessionTables {
    let pages = KvRequest { blocks: Vec::new(), rows, max_length }.pages() as u32;
    let ids: Vec<PageId> = (0..pages).map(|i| PageId(7 + 3 * i)).collect();
    SessionTables::new(rows as usize, max_length, &ids)
}

#[test]
fn restored_tables_go_on_as_the_tables_before_and_forged_ones_are_refused() {
    let mut before = tables(3, 100);
    before.begin(None, 21, None).unwrap();
    before.commit();
    before.begin(None, 1, Some(&[1, 1, 0])).unwrap();
    before.commit();
    let (rows, pages) = (before.rows().to_vec(), before.pages.clone());
    let restore =
        |rows: Vec<Vec<u32>>, prefix, length| SessionTables::restore(rows, prefix, length, &pages);
    let mut after = restore(rows.clone(), 22, 100).unwrap();
    let plans = [&mut before, &mut after].map(|of| of.begin(Some(17), 9, Some(&[2, 0, 0])));
    let [one, other] = plans.map(Result::unwrap);
    assert_eq!((&one.prefixes, one.copies.len()), (&other.prefixes, other.copies.len()));
    check_plan(&other, 9);
    let mut twice = rows.clone();
    twice[0][1] = twice[0][0];
    let mut beyond = rows.clone();
    beyond[2][0] = pages.len() as u32;
    for (wrong, prefix, length) in [
        (twice, 22, 100),
        (beyond, 22, 100),
        (rows.clone(), 33, 100),
        (rows.clone(), 16, 100),
        (rows.clone(), 22, 21),
        (rows.clone(), 22, 1000),
        (rows[1..].to_vec(), 22, 100),
    ] {
        assert!(restore(wrong, prefix, length).is_none());
    }
}

fn check_plan(plan: &StepPages, tokens: u32) {
    let mut written = Vec::new();
    for table in &plan.tables {
        let range = JobBody::written_pages(plan.prefixes[0], tokens);
        assert_eq!(table.len(), range.end);
        written.extend_from_slice(&table[range]);
    }
    for page in &written {
        let references = plan.tables.iter().flatten().filter(|p| *p == page).count();
        assert_eq!(references, 1, "page {page} is written and shared");
    }
    for copy in &plan.copies {
        assert!((1..=PAGE_TOKENS as u32).contains(&copy.tokens));
        assert!(plan.copies.iter().all(|other| other.source != copy.destination));
    }
}

#[test]
fn decode_appends_to_the_last_page_and_takes_the_next_at_its_end() {
    let mut tables = tables(1, 40);
    for position in 0..40 {
        let plan = tables.begin(None, 1, None).unwrap();
        assert_eq!(
            (plan.prefixes[0], plan.tables[0].len()),
            (position, position as usize / 16 + 1)
        );
        assert_eq!(plan.copies, []);
        tables.commit();
    }
    let error = tables.begin(None, 1, None).unwrap_err();
    let text = "Maximum length exceeded: prefix 40 + current 1 exceeds pre-allocated maximum 40";
    assert_eq!(error.to_string(), text);
}

#[test]
fn a_shared_page_is_copied_for_all_rows_but_one() {
    let mut tables = tables(3, 32);
    tables.begin(None, 5, None).unwrap();
    tables.commit();
    let plan = tables.begin(None, 1, Some(&[1, 1, 1])).unwrap();
    assert_eq!(plan.copies.len(), 2);
    assert!(plan.copies.iter().all(|c| c.tokens == 5 && c.source == plan.copies[0].source));
    check_plan(&plan, 1);
}

#[test]
fn rollback_beyond_the_prefix_and_bad_hypo_ids_name_the_values() {
    let mut tables = tables(2, 32);
    tables.begin(None, 3, None).unwrap();
    tables.commit();
    assert_eq!(
        tables.begin(Some(4), 1, None).unwrap_err(),
        TableError::BeyondPrefix { start: 4, prefix: 3 }
    );
    assert!(matches!(
        tables.begin(None, 1, Some(&[0])),
        Err(TableError::HypoCount { got: 1, rows: 2 })
    ));
    for value in [-1, 2, i64::MAX] {
        let error = tables.begin(None, 1, Some(&[0, value])).unwrap_err();
        assert_eq!(error, TableError::HypoRange { index: 1, value, rows: 2 });
    }
    assert_eq!(tables.prefix(), 3);
}

#[test]
fn a_rolled_back_session_can_be_written_to_its_full_length_again() {
    let mut tables = tables(2, 64);
    tables.begin(None, 64, None).unwrap();
    tables.commit();
    let plan = tables.begin(Some(0), 64, Some(&[0, 0])).unwrap();
    check_plan(&plan, 64);
    tables.commit();
    let plan = tables.begin(Some(63), 1, Some(&[0, 0])).unwrap();
    check_plan(&plan, 1);
}

#[derive(Clone, Debug)]
struct Step {
    roll_back: Option<u64>,
    tokens: u32,
    hypo: Option<Vec<u64>>,
    applied: u32,
    committed: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (
        prop::option::of(any::<u64>()),
        0u32..40,
        prop::option::of(prop::collection::vec(any::<u64>(), 5)),
        0u32..3,
        prop::bool::weighted(0.8),
    );
    prop::collection::vec(step, 1..25).prop_map(|steps| {
        let make = |(roll_back, tokens, hypo, applied, committed)| Step {
            roll_back,
            tokens,
            hypo,
            applied,
            committed,
        };
        steps.into_iter().map(make).collect()
    })
}

proptest! {
    /// Copies and writes through the tables give exactly the plain content, whether a step is done once, twice, or given up
    /// after it was done; no shared page is written; no page is lost.
    #[test]
    fn pages_hold_what_plain_rows_hold(rows in 1usize..6, max_length in 1u32..100, steps in steps()) {
        let mut tables = tables(rows as u32, max_length);
        let mut memory = Memory::default();
        let mut plain: Vec<Vec<u64>> = vec![Vec::new(); rows];
        let mut next_token = 0;
        for step in steps {
            let prefix = u64::from(tables.prefix());
            let start = step.roll_back.map(|value| value % (prefix + 1));
            let hypo: Option<Vec<i64>> = step.hypo.map(|ids| {
                ids[..rows].iter().map(|id| (id % rows as u64) as i64).collect()
            });
            let tokens = step.tokens.max(1);
            let Ok(plan) = tables.begin(start, tokens, hypo.as_deref()) else { continue };
            check_plan(&plan, tokens);
            let written: Vec<Vec<u64>> = (0..rows).map(|_| {
                next_token += 1000;
                (0..u64::from(tokens)).map(|i| next_token + i).collect()
            }).collect();
            for row in &mut plain {
                row.truncate(plan.prefixes[0] as usize);
            }
            let times = if step.committed { step.applied.max(1) } else { step.applied };
            for _ in 0..times {
                memory.apply(&plan, &written);
            }
            if step.committed {
                tables.commit();
                let order = |i: usize| hypo.as_ref().map_or(i, |ids| ids[i] as usize);
                plain = (0..rows).map(|i| [plain[order(i)].clone(), written[i].clone()].concat()).collect();
                for (table, row) in plan.tables.iter().zip(&plain) {
                    prop_assert_eq!(&memory.row(table, row.len()), row);
                }
            } else {
                tables.abort();
            }
            prop_assert_eq!(tables.prefix() as usize, plain[0].len());
            for (table, row) in tables.rows.iter().zip(&plain) {
                let ids: Vec<PageId> = table.iter().map(|&page| tables.page(page)).collect();
                prop_assert_eq!(&memory.row(&ids, row.len()), row);
            }
            let used = tables.refs.iter().filter(|refs| **refs > 0).count();
            prop_assert_eq!(used + tables.free.len(), tables.pages.len());
            let entries = tables.rows.iter().map(Vec::len).sum::<usize>() as u32;
            prop_assert_eq!(tables.refs.iter().sum::<u32>(), entries);
        }
    }
}
