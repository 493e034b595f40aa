//! The record of a session that outlives netd: what the next generation needs to go on with it, as
//! bytes in a segment ([`shared::shm::sessions`]). Pure.
//!
//! The generation before wrote it, and it is read as the bytes of a stranger all the same: every
//! count is bounded before memory is taken for it, and [`super::table::SessionTables::restore`] and
//! the pool check the pages.

use p2p::PeerId;
use shared::block::BlockIndex;
use shared::ids::PageId;
use shared::job::MAX_ROWS;

/// Most bytes of the session id.
const MAX_ID_BYTES: usize = 512;
/// Most bytes of a PeerID.
const MAX_PEER_BYTES: usize = 64;
/// Most blocks of a session.
const MAX_BLOCKS: usize = 4096;
/// Most pages of a session; a record of more does not fit.
const MAX_PAGES: usize = 32 << 10;

/// A session between two steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub peer: PeerId,
    /// The id that the client gave it.
    pub id: String,
    /// SHA-256 of the secret that netd gave the client.
    pub secret_hash: [u8; 32],
    /// Its blocks, in the order in which they run.
    pub blocks: Vec<BlockIndex>,
    /// Adapter, by index.
    pub adapter: Option<u32>,
    /// Largest number of tokens.
    pub max_length: u32,
    /// Tokens that were written and answered.
    pub prefix: u32,
    /// Which pages the workers had ([`shared::control::WorkerUp::kv_version`]).
    pub kv_version: u64,
    /// Hash of the id of the last step that `prefix` includes.
    pub last_step: u64,
    /// End of the session at the latest, in nanoseconds of CLOCK_MONOTONIC.
    pub deadline_ns: u64,
    /// All pages that it was granted.
    pub pages: Vec<PageId>,
    /// Per row the pages in order of position, as indexes into `pages`.
    pub rows: Vec<Vec<u32>>,
}

impl Record {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut bytes = |value: &[u8]| {
            put(&mut out, value.len());
            out.extend_from_slice(value);
        };
        bytes(self.id.as_bytes());
        bytes(&self.peer.to_bytes());
        out.extend_from_slice(&self.secret_hash);
        for word in [self.kv_version, self.last_step, self.deadline_ns] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        for word in [self.adapter.unwrap_or(u32::MAX), self.max_length, self.prefix] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let mut words = |values: &mut dyn ExactSizeIterator<Item = u32>| {
            put(&mut out, values.len());
            values.for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
        };
        words(&mut self.blocks.iter().map(|block| block.0));
        words(&mut self.pages.iter().map(|page| page.0));
        words(&mut self.rows.iter().map(|row| row.len() as u32));
        self.rows.iter().for_each(|row| words(&mut row.iter().copied()));
        out
    }

    /// The record behind bytes; `None` for anything else than [`Self::encode`] makes.
    pub fn decode(bytes: &[u8]) -> Option<Record> {
        let mut reader = SessionReader(bytes);
        let id = String::from_utf8(reader.bytes(MAX_ID_BYTES)?.to_vec()).ok()?;
        let peer = PeerId::from_bytes(reader.bytes(MAX_PEER_BYTES)?).ok()?;
        let secret_hash = reader.array()?;
        let [kv_version, last_step, deadline_ns] = [reader.long()?, reader.long()?, reader.long()?];
        let [adapter, max_length, prefix] = [reader.word()?, reader.word()?, reader.word()?];
        let blocks = reader.words(MAX_BLOCKS)?.into_iter().map(BlockIndex).collect();
        let pages = reader.words(MAX_PAGES)?.into_iter().map(PageId).collect();
        let lengths = reader.words(MAX_ROWS as usize)?;
        let rows: Vec<Vec<u32>> =
            lengths.iter().map(|_| reader.words(MAX_PAGES)).collect::<Option<_>>()?;
        let agree = rows.iter().zip(&lengths).all(|(row, length)| row.len() as u32 == *length);
        let adapter = (adapter != u32::MAX).then_some(adapter);
        (agree && reader.0.is_empty()).then_some(Record {
            peer,
            id,
            secret_hash,
            blocks,
            adapter,
            max_length,
            prefix,
            kv_version,
            last_step,
            deadline_ns,
            pages,
            rows,
        })
    }
}

fn put(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
}

/// What is not read yet.
struct SessionReader<'a>(&'a [u8]);

impl<'a> SessionReader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn word(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn count(&mut self, most: usize) -> Option<usize> {
        usize::try_from(self.word()?).ok().filter(|count| *count <= most)
    }

    fn bytes(&mut self, most: usize) -> Option<&'a [u8]> {
        let count = self.count(most)?;
        self.take(count)
    }

    fn words(&mut self, most: usize) -> Option<Vec<u32>> {
        let count = self.count(most)?;
        let bytes = self.take(count.checked_mul(4)?)?;
        Some(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(pages: Vec<u32>, rows: Vec<Vec<u32>>, words: [u32; 3]) -> Record {
        let [adapter, max_length, prefix] = words;
        Record {
            peer: PeerId::random(),
            id: "b6e08d8e".into(),
            secret_hash: [7; 32],
            blocks: vec![BlockIndex(3), BlockIndex(4)],
            adapter: (adapter != u32::MAX).then_some(adapter),
            max_length,
            prefix,
            kv_version: u64::from(adapter) << 17,
            last_step: 9,
            deadline_ns: u64::MAX,
            pages: pages.into_iter().map(PageId).collect(),
            rows,
        }
    }

    proptest! {
        #[test]
        fn records_are_read_back_and_damaged_ones_never_panic(
            pages in prop::collection::vec(any::<u32>(), 0..40),
            rows in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..9), 0..5),
            words: [u32; 3], cut in 0usize..400, at in 0usize..400, byte: u8,
        ) {
            let record = record(pages, rows, words);
            let mut bytes = record.encode();
            prop_assert_eq!(Record::decode(&bytes), Some(record));
            if cut < bytes.len() {
                prop_assert_eq!(Record::decode(&bytes[..cut]), None);
            }
            bytes.push(0);
            prop_assert_eq!(Record::decode(&bytes), None);
            if let Some(target) = bytes.get_mut(at) {
                *target = byte;
            }
            let _ = Record::decode(&bytes);
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Record::decode(&bytes);
        }
    }
}
