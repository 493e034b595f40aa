//! Who serves which blocks, read from the records in the DHT. Source: `get_remote_module_infos` and
//! `compute_spans` in `petals/utils/dht.py`.
//!
//! Records are claims of strangers: what does not parse is dropped, the rest is clipped to the
//! model.

use crate::dht::driver::{Dht, DhtError};
use crate::dht::id::DhtId;
use crate::dht::storage::StoredValue;
use crate::wire::msgpack::{Limits, Value};
use crate::wire::records::{ServerInfo, ServerState};
use crate::wire::uid::module_uid;
use p2p::PeerId;
use std::collections::BTreeMap;
use std::ops::Range;
use tracing::debug;

/// The servers of one block with their records, by PeerID in base58.
pub type BlockServers = BTreeMap<String, ServerInfo>;

/// What one server serves.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerSpan {
    /// PeerID in base58.
    pub peer_id: String,
    /// First block, counted from the first block of the view.
    pub start: usize,
    /// One past the last block; not beyond the view, at most `start` if the server's claim is
    /// empty.
    pub end: usize,
    pub info: ServerInfo,
}

/// What was read of the swarm.
#[derive(Clone, Debug, Default)]
pub struct SwarmView {
    /// The servers of each block.
    pub blocks: Vec<BlockServers>,
    /// Records that were left out, since they hold nonsense.
    pub dropped: usize,
}

/// The most that one server counts for in sums, in requests per second; far beyond any link.
pub const MAX_THROUGHPUT: f64 = 1e9;

/// Reads the records of the blocks `blocks` of a model: one set of servers per block.
///
/// # Errors
/// [`DhtError`] if the DHT does not answer. Blocks that nobody serves are empty.
pub async fn read_blocks(
    dht: &Dht,
    prefix: &str,
    blocks: Range<u32>,
) -> Result<Vec<BlockServers>, DhtError> {
    Ok(read(dht, prefix, blocks).await?.blocks)
}

/// The same, with the number of records that were left out.
///
/// # Errors
/// [`DhtError`] if the DHT does not answer.
pub async fn read(dht: &Dht, prefix: &str, blocks: Range<u32>) -> Result<SwarmView, DhtError> {
    let keys = blocks.map(|block| DhtId::of_text(&module_uid(prefix, block))).collect();
    let found = dht.get_many(keys, true).await?;
    let mut view = SwarmView::default();
    for stored in &found {
        let parsed = stored.as_ref().map(parse_counting).unwrap_or_default();
        view.blocks.push(parsed.0);
        view.dropped += parsed.1;
    }
    dht.count_bad_records(view.dropped as u64);
    Ok(view)
}

/// The servers of one block, without the records that readers drop.
#[must_use]
pub fn parse_block(stored: &StoredValue) -> BlockServers {
    parse_counting(stored).0
}

/// The servers of one block, and how many records were dropped.
fn parse_counting(stored: &StoredValue) -> (BlockServers, usize) {
    let StoredValue::Dictionary(dictionary) = stored else {
        debug!("dropped a block record that is no dictionary");
        return (BlockServers::new(), 1);
    };
    let mut dropped = 0;
    let parse = |tag: &[u8], record: &[u8]| {
        let Ok(Value::Str(peer_id)) = Value::decode(tag, Limits::SMALL) else {
            return Err("subkey is no text".into());
        };
        peer_id.parse::<PeerId>().map_err(|error| error.to_string())?;
        let info = ServerInfo::decode(record).map_err(|error| error.to_string())?;
        Ok::<_, String>((peer_id, info))
    };
    let mut servers = BlockServers::new();
    for (tag, timed) in dictionary.iter() {
        match parse(tag, &timed.value) {
            Ok((peer_id, info)) => drop(servers.insert(peer_id, info)),
            Err(reason) => {
                debug!(reason, "dropped a server record");
                dropped += 1;
            }
        }
    }
    (servers, dropped)
}

/// Where every server is or is about to be: the span of each that is at least joining, in PeerID
/// order. One that is online and announces another place as joining is on its way there, and counts
/// there alone.
///
/// # Discrepancies
/// Petals' servers end one place before they announce the next, so that its `compute_spans` never
/// sees both and takes the place that is online.
#[must_use]
pub fn places(blocks: &[BlockServers], first_block: u32) -> Vec<ServerSpan> {
    let mut places = spans(blocks, first_block, ServerState::Joining);
    for place in &mut places {
        let moves_to = |servers: &BlockServers| {
            let info = servers.get(&place.peer_id)?;
            let claim = (info.start_block?, info.end_block?);
            let elsewhere = claim != (place.info.start_block?, place.info.end_block?);
            let moves = info.state == ServerState::Joining && elsewhere;
            moves.then(|| info.clone())
        };
        if place.info.state == ServerState::Online
            && let Some(info) = blocks.iter().find_map(moves_to)
        {
            let Range { start, end } = claimed_range(&info, first_block, 0, blocks.len());
            (place.start, place.end, place.info) = (start, end, info);
        }
        place.info.throughput = place.info.throughput.min(MAX_THROUGHPUT);
    }
    places
}

/// The span of every server that is at least in `min_state`, in PeerID order. `first_block` is the
/// index of the first block of the view in the model.
#[must_use]
pub fn spans(blocks: &[BlockServers], first_block: u32, min_state: ServerState) -> Vec<ServerSpan> {
    let mut spans: BTreeMap<&str, ServerSpan> = BTreeMap::new();
    for (block, servers) in blocks.iter().enumerate() {
        for (peer_id, info) in servers.iter().filter(|(_, info)| info.state >= min_state) {
            match spans.get_mut(peer_id.as_str()) {
                Some(span) if span.info.state > info.state => {}
                Some(span) if span.info.state == info.state => span.end = span.end.max(block + 1),
                _ => {
                    let Range { start, end } =
                        claimed_range(info, first_block, block, blocks.len());
                    spans.insert(
                        peer_id,
                        ServerSpan { peer_id: peer_id.clone(), start, end, info: info.clone() },
                    );
                }
            }
        }
    }
    spans.into_values().collect()
}

/// The blocks that a record claims, or the one it was found under.
fn claimed_range(info: &ServerInfo, first_block: u32, block: usize, count: usize) -> Range<usize> {
    let (Some(start), Some(end)) = (info.start_block, info.end_block) else {
        return block..block + 1;
    };
    let local = |index: u64| {
        usize::try_from(index.saturating_sub(first_block.into())).unwrap_or(usize::MAX).min(count)
    };
    local(start)..local(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dht::storage::Dictionary;
    use testkit::golden;

    const JOINING: ServerState = ServerState::Joining;
    const ONLINE: ServerState = ServerState::Online;

    fn info(state: ServerState, range: Option<Range<u64>>) -> ServerInfo {
        let (start_block, end_block) = (range.as_ref().map(|r| r.start), range.map(|r| r.end));
        ServerInfo { start_block, end_block, ..ServerInfo::new(state, 1.0) }
    }

    fn blocks(servers: &[&[(&str, ServerInfo)]]) -> Vec<BlockServers> {
        let block = |servers: &&[(&str, ServerInfo)]| {
            servers.iter().map(|(p, i)| ((*p).to_owned(), i.clone())).collect()
        };
        servers.iter().map(block).collect()
    }

    fn ranges(spans: &[ServerSpan]) -> Vec<(&str, usize, usize)> {
        spans.iter().map(|span| (span.peer_id.as_str(), span.start, span.end)).collect()
    }

    #[test]
    fn range_of_the_record_is_taken_and_clipped() {
        let one = ("a", info(ONLINE, Some(3..9)));
        let view = blocks(&[&[], std::slice::from_ref(&one), &[]]);
        assert_eq!(ranges(&spans(&view, 2, JOINING)), [("a", 1, 3)]);
        assert_eq!(ranges(&spans(&view, 5, JOINING)), [("a", 0, 3)]);
        let huge = ("a", info(ONLINE, Some(0..u64::MAX)));
        assert_eq!(ranges(&spans(&blocks(&[&[huge]]), 0, JOINING)), [("a", 0, 1)]);
    }

    #[test]
    fn record_without_range_grows_with_the_blocks() {
        let one = [("a", info(ONLINE, None))];
        let view = blocks(&[&[], &one, &one, &[], &one]);
        assert_eq!(ranges(&spans(&view, 0, JOINING)), [("a", 1, 5)]);
    }

    #[test]
    fn higher_state_replaces_and_lower_is_ignored() {
        let (joining, online) = (info(JOINING, Some(0..2)), info(ONLINE, Some(1..3)));
        let view = blocks(&[&[("a", joining.clone())], &[("a", online)], &[("a", joining)]]);
        let both = spans(&view, 0, JOINING);
        assert_eq!((ranges(&both), both[0].info.state), (vec![("a", 1, 3)], ONLINE));
        let offline = blocks(&[&[("b", info(ServerState::Offline, Some(0..1)))]]);
        assert!(spans(&offline, 0, JOINING).is_empty());
    }

    #[test]
    fn one_that_moves_counts_where_it_goes() {
        let (old, new) = (info(ONLINE, Some(0..2)), info(JOINING, Some(2..4)));
        let view = blocks(&[
            &[("a", old.clone()), ("b", old.clone())],
            &[("a", old.clone()), ("b", old)],
            &[("a", new.clone())],
            &[("a", new)],
        ]);
        assert_eq!(ranges(&places(&view, 0)), [("a", 2, 4), ("b", 0, 2)]);
        assert_eq!(
            ranges(&spans(&view, 0, ONLINE)),
            [("a", 0, 2), ("b", 0, 2)],
            "clients go on using its present place"
        );
        let huge = ServerInfo::new(ONLINE, f64::MAX);
        let place = places(&blocks(&[&[("a", huge)]]), 0).remove(0);
        assert_eq!(place.info.throughput, MAX_THROUGHPUT);
    }

    #[test]
    fn reversed_claim_covers_nothing() {
        let claim = ServerInfo { end_block: Some(1), ..info(ONLINE, Some(2..3)) };
        let one = [("a", claim)];
        assert_eq!(ranges(&spans(&blocks(&[&one, &[], &[]]), 0, JOINING)), [("a", 2, 1)]);
    }

    #[test]
    fn golden_block_is_read_and_strangers_are_dropped() {
        let record = &golden::file(golden::DHT_RECORDS)["records"][0];
        let dictionary =
            Dictionary::decode(&golden::bytes(record, "find_result_value_hex")).unwrap();
        let servers = parse_block(&StoredValue::Dictionary(dictionary));
        assert_eq!(servers["QmU9mzn2oH6NqMDjtcU1zR1SCgCeFFbjZGqhxWzo9nrxJk"].end_block, Some(4));
        let two = Dictionary::decode(&golden::msgpack("DictionaryDHTValue")).unwrap();
        assert_eq!(
            parse_block(&StoredValue::Dictionary(two)).len(),
            2,
            "one of them the shortest record there is"
        );
        let stranger = crate::dht::storage::Timed {
            value: ServerInfo::new(ONLINE, 1.0).encode().into(),
            expiration: 1.0,
        };
        let not_a_peer =
            Dictionary::single(Value::str("not a peer").encode().into(), stranger.clone(), None);
        assert!(parse_block(&StoredValue::Dictionary(not_a_peer)).is_empty());
        assert!(parse_block(&StoredValue::Regular(stranger)).is_empty());
    }
}
