//! What the ranks of a group tell each other of their devices before they compute: in each round,
//! one message of every rank to every other. What another rank sends is an allegation, and goes
//! through the `read` of the round.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shared::bootstrap::{PeerError, PeerMessage, PeerSocket};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::ids::Rank;
use shared::shm::board::BoardWriter;
use shared::shm::group::{GroupError, GroupMap};

use crate::executor::Exit;

/// Longest wait for the message of another rank. Longer than a rank may load without a beat, so that
/// the supervisor ends the one that is waited for before this one gives up.
const PEER_LIMIT: Duration = Duration::from_secs(180);

/// Between two looks at the abort of the group.
const POLL: Duration = Duration::from_millis(20);

/// How long the supervisor may take to end the group after a rank has ended.
const ABORT_LIMIT: Duration = Duration::from_secs(5);

/// The sockets to the other ranks.
#[derive(Debug)]
pub(super) struct Peers {
    /// In the order of ranks, without this one.
    sockets: Vec<(Rank, PeerSocket)>,
    map: Arc<GroupMap>,
    board: Arc<BoardWriter>,
}

impl Peers {
    /// `sockets` lead to all ranks but `own`, in their order.
    pub(super) fn new(
        own: Rank,
        sockets: Vec<OwnedFd>,
        map: &Arc<GroupMap>,
        board: &Arc<BoardWriter>,
    ) -> Peers {
        let others = (0..).map(Rank).filter(|rank| *rank != own);
        let sockets = others.zip(sockets.into_iter().map(PeerSocket::from)).collect();
        Peers { sockets, map: Arc::clone(map), board: Arc::clone(board) }
    }

    /// Sends a message to every other rank, and gives what `read` makes of theirs in the order of
    /// all ranks; `None` stands for this one.
    ///
    /// # Errors
    /// [`ExitReason::GroupAborted`] when the group ended, another reason when a rank says nothing
    /// in time or nothing that can be read.
    pub(super) fn round<T>(
        &self,
        bytes: &[u8],
        fd: Option<BorrowedFd<'_>>,
        read: impl Fn(PeerMessage) -> Option<T>,
    ) -> Result<Vec<Option<T>>, Exit> {
        for (rank, socket) in &self.sockets {
            socket.send(bytes, fd).or_else(|error| self.fault(*rank, &error))?;
        }
        let mut said: Vec<Option<T>> = Vec::with_capacity(self.sockets.len() + 1);
        for (rank, socket) in &self.sockets {
            // The place of this rank, where it comes between two others.
            if usize::from(rank.0) > said.len() {
                said.push(None);
            }
            let message = self.hear(*rank, socket)?;
            let meant = read(message).ok_or_else(|| {
                failed(format!("rank {rank} of the group told nonsense of its device"))
            })?;
            said.push(Some(meant));
        }
        said.resize_with(self.sockets.len() + 1, || None);
        Ok(said)
    }

    /// The next message of a rank. This rank beats while it waits.
    fn hear(&self, rank: Rank, socket: &PeerSocket) -> Result<PeerMessage, Exit> {
        let start = Instant::now();
        self.map.show_wait(Some(rank));
        let heard = loop {
            self.board.progress();
            match self.map.check_abort().map(|()| socket.recv(POLL)) {
                Err(aborted) => break Err(aborted.into()),
                Ok(Ok(Some(message))) => break Ok(message),
                Ok(Ok(None)) if start.elapsed() < PEER_LIMIT => {}
                Ok(Ok(None)) => {
                    let waited = PEER_LIMIT.as_secs();
                    break Err(failed(format!(
                        "rank {rank} of the group told nothing of its device for {waited} s"
                    )));
                }
                Ok(Err(error)) => match self.fault(rank, &error) {
                    Ok(()) => {}
                    Err(end) => break Err(end),
                },
            }
        };
        self.map.show_wait(None);
        heard
    }

    /// What a failure means. A rank that has ended ends the group: the supervisor has the first
    /// word, so that it blames the rank that died.
    fn fault(&self, rank: Rank, error: &PeerError) -> Result<(), Exit> {
        match error {
            PeerError::Closed => {
                let start = Instant::now();
                while self.map.check_abort().is_ok() && start.elapsed() < ABORT_LIMIT {
                    self.board.progress();
                    std::thread::sleep(POLL);
                }
                Err(GroupError::Aborted.into())
            }
            other => {
                Err(failed(format!("cannot hear rank {rank} of the group: {}", with_causes(other))))
            }
        }
    }
}

fn failed(message: String) -> Exit {
    Exit { reason: ExitReason::Failed, message }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use shared::control::Role;
    use shared::ids::{Generation, GroupId, WorldSize};
    use shared::shm::group::{GroupOwner, GroupShape};

    use super::*;
    use crate::harness::{Seat, unique};

    const WORLD: usize = 3;

    const DEADLINE: Duration = Duration::from_secs(60);

    /// A group of three, and what each rank has of it.
    fn ranks() -> (GroupOwner, Vec<Peers>) {
        let (group, peers, _) = ranks_on_boards();
        (group, peers)
    }

    /// The same with the board of each rank.
    fn ranks_on_boards() -> (GroupOwner, Vec<Peers>, Vec<Seat>) {
        let shape = GroupShape {
            group: GroupId(0),
            generation: Generation(1),
            world_size: WorldSize(WORLD as u16),
            exchange_values: 16,
            log_bytes: 64,
        };
        let group = GroupOwner::create(&unique("peers"), &shape).unwrap();
        let mut ends: Vec<Vec<OwnedFd>> = (0..WORLD).map(|_| Vec::new()).collect();
        for lower in 0..WORLD {
            for higher in lower + 1..WORLD {
                let (one, other) = PeerSocket::pair().unwrap();
                ends[lower].push(one);
                ends[higher].push(other);
            }
        }
        let seats: Vec<Seat> = (0..WORLD).map(|_| Seat::of(Role::Worker, Generation(1))).collect();
        let peers = |(rank, sockets): (usize, Vec<OwnedFd>)| {
            let Seat { board, seat } = &seats[rank];
            let rank = Rank(rank as u16);
            let (segment, bells) = (group.try_clone().unwrap(), group.doorbells().unwrap());
            let map = GroupMap::open(segment, bells, &shape, rank).unwrap();
            let board = BoardWriter::open(board.try_clone().unwrap(), seat, Generation(1));
            Peers::new(rank, sockets, &map, &Arc::new(board.unwrap()))
        };
        let peers = ends.into_iter().enumerate().map(peers).collect();
        (group, peers, seats)
    }

    fn number(message: PeerMessage) -> Option<u8> {
        message.bytes.first().copied().filter(|_| message.fd.is_none())
    }

    #[test]
    fn every_rank_hears_every_other_in_each_round() {
        let (_group, peers) = ranks();
        let run = |(rank, peers): (usize, Peers)| {
            thread::spawn(move || {
                let round = |at: u8| peers.round(&[at + rank as u8], None, number).unwrap();
                [round(10), round(20)]
            })
        };
        let threads: Vec<_> = peers.into_iter().enumerate().map(run).collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            let expected = [10, 20].map(|at| {
                (0..3u8).map(|of| (usize::from(of) != rank).then_some(at + of)).collect::<Vec<_>>()
            });
            assert_eq!(thread.join().unwrap(), expected, "rank {rank}");
        }
    }

    #[test]
    fn the_end_of_a_rank_is_the_end_of_the_group_and_the_supervisor_says_so_first() {
        let (group, mut peers, seats) = ranks_on_boards();
        drop(peers.remove(1));
        let first = peers.remove(0);
        let waiting = thread::spawn(move || first.round(&[1], None, number));
        // It beats for as long as it waits for the supervisor's word.
        let beats = || seats[0].board.view().child_snapshot(0).unwrap().progress;
        let start = Instant::now();
        while beats() < 3 {
            assert!(start.elapsed() < DEADLINE, "{} beats", beats());
            thread::yield_now();
        }
        group.abort().unwrap();
        assert_eq!(waiting.join().unwrap().unwrap_err().reason, ExitReason::GroupAborted);
    }

    #[test]
    fn a_silent_rank_is_named_and_an_abort_ends_the_wait() {
        let (group, mut peers) = ranks();
        let (last, _silent) = (peers.remove(2), peers.remove(1));
        let waiting = thread::spawn(move || last.round(&[1], None, number));
        // Rank 2 hears it, and then waits for rank 1.
        peers[0].sockets[1].1.send(&[2], None).unwrap();
        let start = Instant::now();
        while group.waits()[2] != Some(Rank(1)) {
            assert!(start.elapsed() < PEER_LIMIT, "{:?}", group.waits());
            thread::yield_now();
        }
        group.abort().unwrap();
        assert_eq!(waiting.join().unwrap().unwrap_err().reason, ExitReason::GroupAborted);
        assert_eq!(group.waits()[2], None);
    }

    #[test]
    fn nonsense_of_a_rank_ends_this_one() {
        let (_group, mut peers) = ranks();
        let (_third, second) = (peers.remove(2), peers.remove(1));
        second.sockets[0].1.send(&[0; 300], None).unwrap();
        let end = peers[0].round(&[1], None, number).unwrap_err();
        assert!(end.message.starts_with("cannot hear rank 1 of the group"), "{}", end.message);
        second.sockets[0].1.send(b"x", None).unwrap();
        let end = peers[0].hear(Rank(1), &peers[0].sockets[0].1).map(|_| ());
        assert_eq!(end, Ok(()));
        second.sockets[0].1.send(b"x", None).unwrap();
        let end = peers[0].round(&[1], None, |_| None::<u8>).unwrap_err();
        assert_eq!(end.message, "rank 1 of the group told nonsense of its device");
    }
}
