//! What an instance needs of a memory: of a device that has its own, or of the machine. Weights as
//! they are served, KV cache with the pages that rounding and copies take, recorded decode steps,
//! and what does not depend on the number of blocks.
//!
//! What netd counts as well, because it admits requests by it, is in [`shared::model::ModelFacts`]:
//! the bytes of a page and those that a worker keeps for gradients.

use shared::config::KvMirror;
use shared::limits::{Limits, POOL_ROWS};
use shared::model::{MAX_STEP_TOKENS, ModelFacts, PAGE_TOKENS};

/// What supervisor, netd and prepare need beside the arena (measured: 60 MB together).
const PROCESSES_BYTES: u64 = 96 << 20;

/// What the process of the page needs beside the tensors of a client: tokenizer, connections, sessions.
const PAGE_BYTES: u64 = 64 << 20;

/// What a worker needs beside weights, KV cache, states of whole requests and what it keeps for
/// gradients: the largest pieces, scores, code.
const WORKER_BYTES: u64 = 96 << 20;

/// What a worker takes of its device that is neither weights, KV cache nor recordings, nor for a
/// unit: code of kernels, rounding to pages of the driver. Not measured yet.
const DEVICE_BYTES: u64 = 256 << 20;

/// Device memory of one launch in a CUDA graph, as old drivers take it: 33 MB more for 500 more
/// kernels in a row (NVIDIA developer forums, topic 244901, driver 470). Newer ones take about 10
/// KB (NVIDIA/cccl, pull request 3768). Not measured here; workers log what it was.
pub const GRAPH_LAUNCH_BYTES: u64 = 64 << 10;

/// What is needed of a memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Weights of one block.
    pub weights: u64,
    /// KV cache of one block.
    pub kv: u64,
    /// Recorded decode steps of one block, and what the largest appends.
    pub graphs: u64,
    /// Whatever the number of blocks is.
    pub fixed: u64,
}

/// The workers and segments that share the memory of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Workers of the instance.
    pub workers: u64,
    /// Those of them whose device has a memory of its own.
    pub on_devices: u64,
    /// Whether KV caches of devices are kept in the memory of the machine too.
    pub kv_mirror: KvMirror,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Whether a page with a chat runs beside, which is a client of the model.
    pub has_page: bool,
}

impl Need {
    /// What blocks need of the memory of a device, whose worker takes `work_bytes` for the largest
    /// unit ([`work_bytes`](super::work_bytes)). Of a rank of a group, `facts` are those of its share
    /// ([`ModelFacts::of_rank`]).
    pub fn of_device(
        facts: &ModelFacts,
        limits: &Limits,
        work_bytes: u64,
        sharing: Sharing,
    ) -> Need {
        Need {
            weights: facts.block_bytes,
            kv: kv_block_bytes(facts, limits),
            graphs: graph_block_bytes(facts, sharing).saturating_add(step_kv_bytes(facts)),
            fixed: DEVICE_BYTES
                .saturating_add(work_bytes)
                .saturating_add(request_bytes(facts, limits)),
        }
    }

    /// What blocks that are spread evenly over all workers need of the memory of the machine.
    /// Weights and pages of blocks on devices are there, except for a mirror that must be.
    pub fn of_machine(facts: &ModelFacts, limits: &Limits, machine: &Machine) -> Need {
        let here = machine.workers.saturating_sub(machine.on_devices);
        let with_pages = match machine.kv_mirror {
            KvMirror::On => machine.workers,
            KvMirror::Off | KvMirror::Auto => here,
        };
        let share = |bytes: u64, workers: u64| match machine.on_devices {
            0 => bytes,
            _ => bytes.saturating_mul(workers).div_ceil(machine.workers.max(1)),
        };
        Need {
            weights: share(facts.block_bytes, here),
            kv: share(kv_block_bytes(facts, limits), with_pages),
            graphs: 0,
            fixed: machine_bytes(facts, limits, machine),
        }
    }

    /// What blocks on processors need of the memory of the machine, beside `elsewhere` blocks on
    /// devices.
    pub fn of_processors(
        facts: &ModelFacts,
        limits: &Limits,
        machine: &Machine,
        elsewhere: u64,
    ) -> Need {
        let kv = kv_block_bytes(facts, limits);
        let mirrored = if machine.kv_mirror == KvMirror::On { elsewhere } else { 0 };
        Need {
            weights: facts.block_bytes,
            kv,
            graphs: 0,
            fixed: machine_bytes(facts, limits, machine)
                .saturating_add(kv.saturating_mul(mirrored)),
        }
    }

    /// What blocks need of the memory of a NUMA node from workers with these shares of them: copies of
    /// the weights, and pages. `facts` are those of the whole model.
    pub fn of_node(facts: &ModelFacts, limits: &Limits, shares: &[ModelFacts]) -> Need {
        let sum = |bytes: &dyn Fn(&ModelFacts) -> u64| {
            shares.iter().map(bytes).fold(0, u64::saturating_add)
        };
        Need {
            weights: sum(&|share| share.block_bytes),
            kv: sum(&|share| kv_block_bytes(share, limits)),
            graphs: 0,
            fixed: sum(&|_| worker_bytes(facts, limits)),
        }
    }

    /// Bytes for so many blocks.
    pub fn total(&self, blocks: u64) -> u64 {
        self.per_block().saturating_mul(blocks).saturating_add(self.fixed)
    }

    /// Bytes for one more block.
    pub fn per_block(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.graphs)
    }

    /// Most blocks that find what they need in so many bytes.
    pub fn most_blocks(&self, available: u64) -> u32 {
        let blocks = match (available.checked_sub(self.fixed), self.per_block()) {
            (None, _) => 0,
            (Some(_), 0) => u64::MAX,
            (Some(rest), per_block) => rest / per_block,
        };
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }
}

/// Whether a device has whole blocks, or shares them with the other ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Whole blocks.
    Alone,
    /// A share of each: its sums cross to the other ranks, by launches of their own.
    InGroup,
}

/// Launches of a recorded decode step of one block: at most so many, and so many with adapters.
const LAUNCHES: [u64; 2] = [15, 32];

/// Exchanges of a decode step of one block, each a launch: what `o` and `down` give, and of a mixture
/// the choice of rank 0; with adapters also what lies between the factors of those of `o` and
/// `down`.
const EXCHANGES: [u64; 2] = [3, 5];

/// Bytes that the recorded decode steps of one block take of a CUDA device at most: recordings for
/// 1, 2, 4 ... 32 tokens, by itself and within a run of blocks, and where there are adapters by
/// itself with them, at [`GRAPH_LAUNCH_BYTES`] a launch.
pub fn graph_block_bytes(facts: &ModelFacts, sharing: Sharing) -> u64 {
    let exchanges = match sharing {
        Sharing::Alone => [0, 0],
        Sharing::InGroup => EXCHANGES,
    };
    let [plain, adapted] = [LAUNCHES[0] + exchanges[0], LAUNCHES[1] + exchanges[1]];
    let launches = 2 * plain + if facts.adapters.is_empty() { 0 } else { adapted };
    6 * launches * GRAPH_LAUNCH_BYTES
}

/// What the largest recorded step appends to one block, on its way to the mirror.
pub fn step_kv_bytes(facts: &ModelFacts) -> u64 {
    MAX_STEP_TOKENS.div_ceil(PAGE_TOKENS) as u64 * facts.kv_page_bytes() as u64
}

/// KV cache of one block.
fn kv_block_bytes(facts: &ModelFacts, limits: &Limits) -> u64 {
    u64::from(limits.kv_pages()).saturating_mul(facts.kv_page_bytes() as u64)
}

/// What the processes need of the memory of the machine, however many blocks they serve.
fn machine_bytes(facts: &ModelFacts, limits: &Limits, machine: &Machine) -> u64 {
    let workers = machine.workers.saturating_mul(worker_bytes(facts, limits));
    let page = if machine.has_page { PAGE_BYTES.saturating_add(facts.client_bytes) } else { 0 };
    let others = machine.arena_bytes.saturating_add(PROCESSES_BYTES).saturating_add(page);
    others.saturating_add(workers)
}

/// What a worker on processors needs beside weights and KV cache.
fn worker_bytes(facts: &ModelFacts, limits: &Limits) -> u64 {
    WORKER_BYTES
        .saturating_add(facts.gradient_bytes(limits.max_batch_size))
        .saturating_add(states_bytes(facts, limits))
}

/// Bytes that a worker takes for the largest requests, however many blocks they go through, in f32:
/// the hidden states of the one of each kind that is begun (prefill, forward, backward), the
/// gradient of the states, and those of keys and values; and pages of one block.
fn states_bytes(facts: &ModelFacts, limits: &Limits) -> u64 {
    let kv = u64::from(facts.kv_heads) * u64::from(facts.head_dim) * 2;
    let floats = 4 * u64::from(facts.hidden_size) + kv;
    let pages = kv * facts.dtype.size_bytes() as u64;
    u64::from(limits.max_batch_size).saturating_mul(4 * floats + pages)
}

/// What the largest request takes of a device while it is computed: pages of one block, of its own,
/// and the sums of the gradients of its keys and values.
fn request_bytes(facts: &ModelFacts, limits: &Limits) -> u64 {
    let tokens = u64::from(limits.max_batch_size);
    let pages = tokens.div_ceil(PAGE_TOKENS as u64) + u64::from(POOL_ROWS);
    let sums = tokens * u64::from(facts.kv_heads) * u64::from(facts.head_dim) * 2 * 4;
    pages.saturating_mul(facts.kv_page_bytes() as u64).saturating_add(sums)
}

#[cfg(test)]
mod tests {
    use testkit::facts::llama_70b;

    use super::*;

    const LIMITS: Limits =
        Limits { inference_max_length: 8192, attn_cache_tokens: 16384, max_batch_size: 8192 };

    /// 16384 tokens are 1024 pages, and 512 more are for rounding and copies; a page of 16 tokens
    /// has 64 KiB.
    const KV: u64 = 1536 * 65536;

    fn machine(workers: u64, on_devices: u64, kv_mirror: KvMirror) -> Need {
        let machine =
            Machine { workers, on_devices, kv_mirror, arena_bytes: 512 << 20, has_page: false };
        Need::of_machine(&llama_70b(), &LIMITS, &machine)
    }

    #[test]
    fn the_memory_of_the_machine_holds_everything_that_processors_serve() {
        // 8192 tokens: the input of a block with a page for each; states four times, sums of keys
        // and values, pages of a block.
        let worker = 96 + (128 + 512) + 4 * 256 + 64 + 32;
        let need = Need { weights: 440 << 20, kv: KV, graphs: 0, fixed: (512 + 96 + worker) << 20 };
        assert_eq!(machine(1, 0, KvMirror::Auto), need);
        let of_two = Need { fixed: (512 + 96 + 2 * worker) << 20, ..need };
        assert_eq!(machine(2, 0, KvMirror::Auto), of_two);
        assert_eq!(need.total(2), (2 * 536 + 2464) << 20);
        assert_eq!(need.most_blocks(need.total(2)), 2);
        assert_eq!(need.most_blocks(need.total(2) - 1), 1);
        assert_eq!(need.most_blocks(need.fixed - 1), 0);
    }

    #[test]
    fn blocks_on_devices_need_the_machine_for_their_mirror_alone() {
        let need = |on_devices, mirror| {
            let Need { weights, kv, .. } = machine(2, on_devices, mirror);
            (weights, kv)
        };
        assert_eq!(need(2, KvMirror::Auto), (0, 0));
        assert_eq!(need(2, KvMirror::On), (0, KV));
        assert_eq!(need(1, KvMirror::Off), (220 << 20, KV / 2));
        assert_eq!(need(1, KvMirror::On), (220 << 20, KV));
        let machine = Machine {
            workers: 2,
            on_devices: 1,
            kv_mirror: KvMirror::On,
            arena_bytes: 0,
            has_page: false,
        };
        let alone = Need::of_processors(&llama_70b(), &LIMITS, &machine, 0);
        let beside = Need::of_processors(&llama_70b(), &LIMITS, &machine, 3);
        assert_eq!((alone.weights, alone.kv), (440 << 20, KV));
        assert_eq!(beside.fixed - alone.fixed, 3 * KV);
        let unmirrored = Machine { kv_mirror: KvMirror::Off, ..machine };
        assert_eq!(Need::of_processors(&llama_70b(), &LIMITS, &unmirrored, 3), alone);
    }

    #[test]
    fn a_device_holds_blocks_recordings_and_the_largest_request() {
        let need = Need::of_device(&llama_70b(), &LIMITS, 100 << 20, Sharing::Alone);
        // 180 launches of recorded steps take 64 KiB each, and so do 16 of the 32 tokens that a step
        // appends. 8192 tokens of a request take 512 + 256
        // pages of 64 KiB, and 64 MiB of sums.
        let fixed = (256 + 100 + 48 + 64) << 20;
        assert_eq!(need, Need { weights: 440 << 20, kv: KV, graphs: 182 << 16, fixed });
        let facts = ModelFacts { adapters: vec!["lora".into()], ..llama_70b() };
        let graphs = |sharing| graph_block_bytes(&facts, sharing);
        assert_eq!(graphs(Sharing::Alone), 372 << 16, "steps with adapters have 32 launches");
        assert_eq!(graphs(Sharing::InGroup), 438 << 16, "and 2 x 3 + 5 exchanges");
    }

    #[test]
    fn sizes_beyond_all_memory_saturate() {
        let facts = ModelFacts { block_bytes: u64::MAX, ..llama_70b() };
        let need = Need::of_device(&facts, &LIMITS, u64::MAX, Sharing::InGroup);
        assert_eq!((need.total(80), need.most_blocks(u64::MAX)), (u64::MAX, 0));
    }
}
