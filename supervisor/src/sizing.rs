//! How many blocks fit into the memory of this machine and of its devices. What blocks need is
//! [`model::sizing`]'s to say; here is the decision. Pure arithmetic but for [`available_bytes`].
//!
//! # Discrepancies
//! Petals counts on all the memory of a device, whoever else uses it, wants `--num_blocks` on a
//! CPU, and checks nothing that the operator asked for.

mod decide;
mod nodes;
mod numa;

use std::path::PathBuf;

use model::sizing::{Machine, Need, Sharing};
use serde::{Deserialize, Serialize};
use shared::config::{Device, KvMirror, NetdConfig, SpanChoice};
use shared::job::MAX_BODY_BYTES;
use shared::model::{ModelFacts, RankShare};
use shared::survey::DeviceMemory;

use crate::placement::DeviceShare;

pub use decide::GroupFit;
pub use nodes::{NodeMemory, node_memory};

/// Values of the exchange buffers of a group: 1 MiB each, of which two stay in a second-level cache.
/// Longer messages cross in pieces.
pub const EXCHANGE_VALUES: usize = 1 << 18;

/// Bytes of the plan log of a group: the largest body of a job, and records for as long as it is
/// computed.
pub const PLAN_LOG_BYTES: usize = 2 * MAX_BODY_BYTES;

/// Bytes of the segment that the ranks of a group share.
pub fn group_bytes(world_size: usize) -> u64 {
    let buffers = 2 * world_size * EXCHANGE_VALUES * size_of::<f32>();
    (buffers + PLAN_LOG_BYTES) as u64
}

/// Bytes of a device through which it exchanges with those of other ranks: two buffers and their
/// flags, in pages of 2 MiB.
const DEVICE_EXCHANGE_BYTES: u64 = 4 << 20;

/// The memory that an instance may use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InstanceMemory {
    /// Bytes that are free or can be freed; `None` when the system does not tell.
    pub available_bytes: Option<u64>,
    /// Workers of the instance.
    pub workers: u64,
    /// Settings that decide over the size of KV cache and arena.
    pub netd: NetdConfig,
    /// Whether KV caches of devices are kept here too.
    pub kv_mirror: KvMirror,
    /// Whether the page of `--web` is served.
    pub has_page: bool,
    /// Devices with memory of their own, once prepare has told of them.
    pub devices: Vec<DeviceMemory>,
    /// The NUMA nodes of workers that stay on one.
    pub nodes: Vec<NodeMemory>,
    /// Where blocks are shared by the ranks of groups, once prepare has told: what each rank of each
    /// group holds of one, nothing where a group is a single worker. All of them are processors, or all
    /// have memory of their own.
    pub ranks: Vec<Vec<RankShare>>,
}

/// What the memory of devices holds of a group of them; most groups are a single device.
struct HeldMemory<'a> {
    /// The one that holds the fewest blocks, or shares of them.
    device: &'a DeviceMemory,
    need: Need,
    blocks: u32,
}

impl InstanceMemory {
    /// What blocks of this model need of the memory of the machine, per worker's share.
    pub fn need(&self, facts: &ModelFacts) -> Need {
        let limits = self.netd.limits(facts);
        let whole = Need::of_machine(facts, &limits, &self.machine());
        if !self.has_ranks() {
            return whole;
        }
        // A block is in one group: the one that needs the most for it decides.
        let most = |bytes: &dyn Fn(&RankShare) -> u64, of_single: u64| {
            let of_group = |ranks: &Vec<RankShare>| match ranks.is_empty() {
                true => of_single,
                false => ranks.iter().map(bytes).fold(0, u64::saturating_add),
            };
            self.ranks.iter().map(of_group).max().unwrap_or(0)
        };
        let page = |rank: &RankShare| facts.of_rank(rank).kv_page_bytes() as u64;
        let pages = u64::from(limits.kv_pages());
        let kv = || most(&|rank| pages.saturating_mul(page(rank)), whole.kv);
        let (weights, kv) = match (self.devices.is_empty(), self.kv_mirror) {
            (true, _) => (most(&|rank| rank.block_bytes, whole.weights), kv()),
            (false, KvMirror::On) => (most(&|rank| rank.copied_bytes, whole.weights), kv()),
            (false, _) => (most(&|rank| rank.copied_bytes, whole.weights), 0),
        };
        let several = self.ranks.iter().filter(|ranks| !ranks.is_empty());
        let common = several.map(|ranks| group_bytes(ranks.len()));
        Need { weights, kv, fixed: common.fold(whole.fixed, u64::saturating_add), ..whole }
    }

    /// Whether ranks share blocks.
    fn has_ranks(&self) -> bool {
        self.ranks.iter().any(|ranks| !ranks.is_empty())
    }

    fn machine(&self) -> Machine {
        Machine {
            workers: self.workers,
            on_devices: self.devices.len() as u64,
            kv_mirror: self.kv_mirror,
            arena_bytes: self.netd.arena_bytes,
            has_page: self.has_page,
        }
    }

    /// What blocks need of the memory of a device, or of that of a rank which has a share of each.
    fn device_need(
        &self,
        facts: &ModelFacts,
        device: &DeviceMemory,
        share: Option<&RankShare>,
    ) -> Need {
        let limits = self.netd.limits(facts);
        match share {
            None => Need::of_device(facts, &limits, device.work_bytes, Sharing::Alone),
            Some(share) => {
                let work = device.work_bytes.saturating_add(DEVICE_EXCHANGE_BYTES);
                Need::of_device(&facts.of_rank(share), &limits, work, Sharing::InGroup)
            }
        }
    }

    /// What each group on devices with memory of their own holds, in the order of the groups.
    fn held<'a>(&'a self, facts: &ModelFacts) -> Vec<HeldMemory<'a>> {
        let held = |(device, share): (&'a DeviceMemory, Option<&RankShare>)| {
            let need = self.device_need(facts, device, share);
            HeldMemory { device, need, blocks: need.most_blocks(device.free_bytes) }
        };
        if self.ranks.is_empty() {
            return self.devices.iter().map(|device| held((device, None))).collect();
        }
        let mut devices = self.devices.iter();
        let of_group = |ranks: &Vec<RankShare>| {
            if ranks.is_empty() {
                return devices.next().map(|device| held((device, None)));
            }
            let ranks = ranks.iter().map(Some);
            let all = devices.by_ref().take(ranks.len()).zip(ranks).map(held);
            all.min_by_key(|rank| rank.blocks)
        };
        self.ranks.iter().filter_map(of_group).collect()
    }

    /// Most blocks that the processors hold together, beside `elsewhere` blocks on devices.
    fn processor_blocks(&self, facts: &ModelFacts, elsewhere: u32) -> u32 {
        let Some(available) = self.available_bytes else {
            return u32::MAX;
        };
        let limits = self.netd.limits(facts);
        let need = Need::of_processors(facts, &limits, &self.machine(), elsewhere.into());
        need.most_blocks(available)
    }

    /// Most blocks that can be served, at most all of the model.
    ///
    /// # Errors
    /// A sentence with the arithmetic, when the blocks asked for do not fit, or not even one does.
    pub fn fit(&self, choice: SpanChoice, facts: &ModelFacts) -> Result<u32, String> {
        let Some(available) = self.available_bytes else {
            return Ok(facts.num_blocks);
        };
        let need = self.need(facts);
        let held = self.held(facts);
        let on_devices = held.iter().map(|of| of.blocks).fold(0, u32::saturating_add);
        let is_mixed = !self.devices.is_empty() && (self.devices.len() as u64) < self.workers;
        let mut most = match is_mixed {
            true => self.processor_blocks(facts, on_devices).saturating_add(on_devices),
            false => need.most_blocks(available),
        };
        most = most.min(facts.num_blocks);
        let wanted = wanted(choice, facts);
        let mut refused = (wanted > most).then(|| {
            let arithmetic = arithmetic(&need, wanted, "arena and processes");
            format!("{arithmetic}, and {} are available", mib(available))
        });
        let smallest = held.iter().min_by_key(|of| of.blocks);
        if let Some(of) = smallest.filter(|_| !is_mixed) {
            let fits = if of.blocks == 0 { 0 } else { on_devices.min(facts.num_blocks) };
            if wanted > fits && fits < most {
                let share = u64::from(wanted).div_ceil(held.len() as u64);
                let share = u32::try_from(share).unwrap_or(u32::MAX);
                let arithmetic = arithmetic(&of.need, share, "work memory");
                let (name, free) = (of.device.device, mib(of.device.free_bytes));
                refused =
                    Some(format!("{arithmetic} on {name}, and {free} of its memory are free"));
            }
            most = most.min(fits);
        }
        match refused {
            None => Ok(most),
            Some(arithmetic) => Err(refusal(wanted, facts, &arithmetic, most)),
        }
    }

    /// Why workers of `wanted` blocks do not fit into the memory of the machine beside those of the
    /// `present` blocks (`None`: there are no workers), if they do not. Of the memory that is
    /// free now they may take what is left of `most_bytes`.
    pub fn no_room_beside(
        &self,
        facts: &ModelFacts,
        present: Option<u64>,
        wanted: u64,
        most_bytes: Option<u64>,
    ) -> Option<String> {
        let need = self.need(facts);
        let taken = present.map_or(0, |blocks| need.total(blocks));
        let left = most_bytes.map(|most| most.saturating_sub(taken));
        let available = within(self.available_bytes, left)?;
        let needed = need.per_block().saturating_mul(wanted);
        (needed > available).then(|| {
            format!("its workers need {needed} bytes beside the present ones and {available} are available")
        })
    }

    /// Most blocks that each of `groups` holds, at most all of the model. Those of processors share
    /// the memory of the machine evenly.
    pub fn most_per_group(&self, facts: &ModelFacts, groups: &[DeviceShare]) -> Vec<u32> {
        let by_machine = self.most_by_machine(facts, groups);
        let on_nodes = |index| self.most_on_nodes(facts, groups, index);
        by_machine.into_iter().enumerate().map(|(index, most)| most.min(on_nodes(index))).collect()
    }

    fn most_by_machine(&self, facts: &ModelFacts, groups: &[DeviceShare]) -> Vec<u32> {
        if !self.has_ranks() {
            let devices: Vec<Device> =
                groups.iter().flat_map(|group| group.devices.iter().copied()).collect();
            return self.most_per_device(facts, &devices);
        }
        if !self.devices.is_empty() {
            return self.held(facts).iter().map(|of| of.blocks.min(facts.num_blocks)).collect();
        }
        let count = u32::try_from(groups.len().max(1)).unwrap_or(u32::MAX);
        let available = self.available_bytes.unwrap_or(u64::MAX);
        let each = self.need(facts).most_blocks(available) / count;
        vec![each.min(facts.num_blocks); groups.len()]
    }

    fn most_per_device(&self, facts: &ModelFacts, devices: &[Device]) -> Vec<u32> {
        let held = |device: &Device| {
            let memory = self.devices.iter().find(|memory| memory.device == *device)?;
            let most = self.device_need(facts, memory, None).most_blocks(memory.free_bytes);
            Some(most.min(facts.num_blocks))
        };
        let held: Vec<Option<u32>> = devices.iter().map(held).collect();
        let processors = held.iter().filter(|most| most.is_none()).count();
        let processors = u32::try_from(processors.max(1)).unwrap_or(u32::MAX);
        let elsewhere = held.iter().flatten().copied().fold(0, u32::saturating_add);
        let each = (self.processor_blocks(facts, elsewhere) / processors).min(facts.num_blocks);
        held.into_iter().map(|most| most.unwrap_or(each)).collect()
    }
}

/// Fewest blocks that are of use for what was asked for.
fn wanted(choice: SpanChoice, facts: &ModelFacts) -> u32 {
    match choice {
        SpanChoice::Fixed(span) => span.end().0 - span.start().0,
        SpanChoice::Count(count) => count.min(facts.num_blocks),
        SpanChoice::All => 1.min(facts.num_blocks),
    }
}

/// Why so many blocks are not served, and what to do.
fn refusal(wanted: u32, facts: &ModelFacts, arithmetic: &str, most: u32) -> String {
    let (blocks, name) = (if wanted == 1 { "block" } else { "blocks" }, &facts.name);
    format!(
        "{wanted} {blocks} of {name} need {arithmetic}: {most} would fit; \
         serve fewer blocks (--num_blocks), lower --attn_cache_tokens or --arena_size, or give --quant_type nf4"
    )
}

/// The sum for so many blocks, as a person would write it; `what` names what does not depend on
/// their number.
fn arithmetic(need: &Need, blocks: u32, what: &str) -> String {
    let graphs = match need.graphs {
        0 => String::new(),
        graphs => format!(" + {} of recorded steps", mib(graphs)),
    };
    format!(
        "{blocks} x ({} of weights + {} of KV cache{graphs}) + {} for {what} = {}",
        mib(need.weights),
        mib(need.kv),
        mib(need.fixed),
        mib(need.total(blocks.into()))
    )
}

/// What is free, at most what the operator allows.
pub fn within(free: Option<u64>, allowed: Option<u64>) -> Option<u64> {
    free.into_iter().chain(allowed).min()
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Memory that this process and its children may still take: `MemAvailable`, which counts the page
/// cache as free, and what is left of the limit of each control group around us.
pub fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let left = |folder: PathBuf| {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        group_left(read("memory.max"), read("memory.current"), read("memory.stat"))
    };
    Some(control_groups().filter_map(left).fold(meminfo(&text)?, u64::min))
}

/// Folders of the control groups around this process, the innermost first.
pub fn control_groups() -> impl Iterator<Item = PathBuf> {
    const ROOT: &str = "/sys/fs/cgroup";
    let group = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = group.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/").to_owned();
    let inner = PathBuf::from(format!("{ROOT}{path}"));
    let outer = |folder: &PathBuf| folder.parent().map(PathBuf::from);
    std::iter::successors(Some(inner), outer).take_while(|folder| folder.starts_with(ROOT))
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What a group's limit leaves; its page cache can be freed.
fn group_left(max: Option<String>, current: Option<String>, stat: Option<String>) -> Option<u64> {
    let max: u64 = max?.trim().parse().ok()?;
    let current: u64 = current?.trim().parse().ok()?;
    let stat = stat.unwrap_or_default();
    let of = |name: &str| {
        stat.lines()
            .find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    // Pages of shared memory count as files but cannot be freed.
    let cache = of("file ").saturating_sub(of("shmem "));
    Some(max.saturating_sub(current.saturating_sub(cache)))
}

/// Memory for requests of peers where nothing is said: a part of what may be used.
pub fn request_memory(max_memory: Option<u64>) -> u64 {
    let free = within(available_bytes(), max_memory).unwrap_or(0);
    (free / 8).clamp(256 << 20, 8 << 30)
}

#[cfg(test)]
pub(crate) mod tests {
    use shared::block::Span;
    use testkit::configs::netd_config;
    use testkit::facts::llama_70b;

    use super::*;

    pub(crate) fn memory(available_bytes: u64) -> InstanceMemory {
        InstanceMemory {
            available_bytes: Some(available_bytes),
            workers: 1,
            netd: NetdConfig {
                attn_cache_tokens: Some(16384),
                arena_bytes: 512 << 20,
                ..netd_config(Vec::new())
            },
            kv_mirror: KvMirror::Auto,
            has_page: false,
            devices: Vec::new(),
            nodes: Vec::new(),
            ranks: Vec::new(),
        }
    }

    #[test]
    fn the_page_and_its_chat_take_memory_from_blocks() {
        let facts = ModelFacts { client_bytes: 1000 << 20, ..llama_70b() };
        let ten = memory((2464 + 10 * 536) << 20);
        let most = |memory: &InstanceMemory| {
            memory.need(&facts).most_blocks(memory.available_bytes.unwrap())
        };
        // 1064 MiB are as much as two blocks, almost.
        assert_eq!((most(&ten), most(&InstanceMemory { has_page: true, ..ten.clone() })), (10, 8));
    }

    #[test]
    fn the_arithmetic_names_every_part() {
        let need = memory(0).need(&llama_70b());
        assert_eq!(
            arithmetic(&need, 2, "arena and processes"),
            "2 x (440.0 MiB of weights + 96.0 MiB of KV cache) + 2464.0 MiB for arena and processes = 3536.0 MiB"
        );
    }

    #[test]
    fn as_many_blocks_as_fit_and_not_one_more() {
        let facts = llama_70b();
        let exactly = |blocks: u64| memory((2464 + blocks * 536) << 20);
        assert_eq!(exactly(7).fit(SpanChoice::All, &facts), Ok(7));
        let one_byte_less =
            InstanceMemory { available_bytes: Some(((2464 + 7 * 536) << 20) - 1), ..exactly(7) };
        assert_eq!(one_byte_less.fit(SpanChoice::All, &facts), Ok(6));
        assert_eq!(exactly(500).fit(SpanChoice::All, &facts), Ok(80));
        let unknown = InstanceMemory { available_bytes: None, ..exactly(1) };
        assert_eq!(unknown.fit(SpanChoice::Count(80), &facts), Ok(80));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_arithmetic() {
        let facts = llama_70b();
        let four = memory((2464 + 4 * 536) << 20);
        for choice in [SpanChoice::Count(5), SpanChoice::Fixed(Span::new(10, 15).unwrap())] {
            let refusal = four.fit(choice, &facts).unwrap_err();
            for part in [
                "5 x (440.0 MiB",
                "= 5144.0 MiB",
                "4608.0 MiB are available",
                "4 would fit",
                "--num_blocks",
            ] {
                assert!(refusal.contains(part), "{refusal}");
            }
        }
        assert_eq!(four.fit(SpanChoice::Count(4), &facts), Ok(4));
        assert_eq!(within(Some(3), Some(2)), Some(2));
        assert_eq!((within(Some(3), None), within(None, None)), (Some(3), None));
        let none = memory(1 << 20).fit(SpanChoice::All, &facts).unwrap_err();
        assert!(none.starts_with("1 block of llama-70b need 1 x"), "{none}");
    }

    #[test]
    fn a_move_on_devices_needs_no_memory_of_the_machine_for_weights() {
        let facts = llama_70b();
        let machine = memory(3 << 30);
        // 10 blocks of 536 MiB do not fit beside others in 3 GiB, nor into what those leave of 5376
        // MiB.
        assert!(machine.no_room_beside(&facts, None, 10, None).is_some());
        assert!(machine.no_room_beside(&facts, Some(4), 1, Some(5376 << 20)).is_none());
        assert!(machine.no_room_beside(&facts, Some(6), 1, Some(5376 << 20)).is_some());
        let on_device = InstanceMemory {
            devices: vec![DeviceMemory { device: Device::Cuda(0), free_bytes: 0, work_bytes: 0 }],
            ..machine.clone()
        };
        assert_eq!(on_device.no_room_beside(&facts, Some(80), 80, Some(4 << 30)), None);
        // But for a mirror of their KV cache: 80 x 96 MiB.
        let mirrored = InstanceMemory { kv_mirror: KvMirror::On, ..on_device };
        assert!(mirrored.no_room_beside(&facts, None, 80, None).is_some());
        assert_eq!(mirrored.no_room_beside(&facts, None, 30, None), None);
    }

    #[test]
    fn blocks_on_a_device_are_counted_in_its_memory() {
        let facts = llama_70b();
        let on_device = |free_bytes: u64, count: u64| InstanceMemory {
            workers: count,
            devices: vec![
                DeviceMemory {
                    device: Device::Cuda(0),
                    free_bytes,
                    work_bytes: 100 << 20,
                };
                count as usize
            ],
            ..memory(4320 << 20)
        };
        // 8192 tokens of a request take 512 + 256 pages of 64 KiB, and 64 MiB of sums.
        let fixed = 256 + 100 + 48 + 64;
        // 180 launches of recorded steps take 64 KiB each, and what one appends two pages.
        let exactly = |blocks: u64, count| {
            on_device((fixed << 20) + blocks * ((536 << 20) + 182 * 65536), count)
        };
        assert_eq!(exactly(7, 1).fit(SpanChoice::All, &facts), Ok(7));
        assert_eq!(exactly(7, 2).fit(SpanChoice::All, &facts), Ok(14));
        assert_eq!(exactly(90, 1).fit(SpanChoice::Count(80), &facts), Ok(80));
        let short = on_device((fixed << 20) + 7 * ((536 << 20) + 182 * 65536) - 1, 1);
        assert_eq!(short.fit(SpanChoice::All, &facts), Ok(6));
        let refusal = short.fit(SpanChoice::Count(7), &facts).unwrap_err();
        for part in [
            "7 blocks of llama-70b need 7 x (440.0 MiB of weights + 96.0 MiB of KV cache + 11.4 MiB of recorded steps) + 468.0 MiB for work memory",
            "on cuda:0, and 4299.6 MiB of its memory are free: 6 would fit",
        ] {
            assert!(refusal.contains(part), "{refusal}");
        }
        // A mirror that must be needs memory of the machine, where 4320 MiB are.
        let mirrored = InstanceMemory { kv_mirror: KvMirror::On, ..exactly(50, 1) };
        assert_eq!(mirrored.fit(SpanChoice::All, &facts), Ok(19));
        let refusal = mirrored.fit(SpanChoice::Count(20), &facts).unwrap_err();
        assert!(refusal.contains("19 would fit"), "{refusal}");
    }

    #[test]
    fn unequal_devices_hold_what_each_has_memory_for() {
        let facts = llama_70b();
        let fixed = 256 + 100 + 48 + 64;
        let block = (536 << 20) + 182 * 65536;
        let with = |ordinal, blocks: u64| DeviceMemory {
            device: Device::Cuda(ordinal),
            free_bytes: (fixed << 20) + blocks * block,
            work_bytes: 100 << 20,
        };
        let two = InstanceMemory {
            workers: 2,
            devices: vec![with(0, 20), with(1, 7)],
            ..memory(4320 << 20)
        };
        let devices = [Device::Cuda(0), Device::Cuda(1)];
        assert_eq!(two.most_per_device(&facts, &devices), [20, 7]);
        assert_eq!(two.fit(SpanChoice::All, &facts), Ok(27));
        let refusal = two.fit(SpanChoice::Count(28), &facts).unwrap_err();
        assert!(refusal.contains("on cuda:1") && refusal.contains("27 would fit"), "{refusal}");
        let none = InstanceMemory { devices: vec![with(0, 20), with(1, 0)], ..two };
        assert!(none.fit(SpanChoice::All, &facts).unwrap_err().contains("on cuda:1"));
        // Two processors share the memory of the machine.
        let machine = InstanceMemory { workers: 2, ..memory((3200 + 8 * 536) << 20) };
        let fixed_two = machine.need(&facts).fixed;
        let machine =
            InstanceMemory { available_bytes: Some(fixed_two + 8 * (536 << 20)), ..machine };
        assert_eq!(machine.most_per_device(&facts, &[Device::Cpu; 2]), [4, 4]);
    }

    #[test]
    fn a_group_needs_the_shares_of_its_ranks_and_what_they_have_in_common() {
        let facts = llama_70b();
        // Norms are in both, and a key/value head too.
        let rank = |kv_heads, mib: u64| RankShare {
            heads: 32,
            kv_heads,
            columns: 14336,
            block_bytes: mib << 20,
            copied_bytes: 60 << 20,
            is_slow: false,
        };
        let whole = InstanceMemory { workers: 2, ..memory(0) };
        let group =
            InstanceMemory { ranks: vec![vec![rank(4, 221), rank(5, 220)]], ..whole.clone() };
        let (one, need) = (whole.need(&facts), group.need(&facts));
        assert_eq!(need.weights, 441 << 20);
        assert_eq!(need.kv, one.kv / 8 * 9);
        // Two buffers of 1 MiB each, and the log.
        assert_eq!(need.fixed - one.fixed, (2 * 2 + 8) << 20);
        let available = need.fixed + 6 * need.per_block();
        let group = |bytes| InstanceMemory { available_bytes: Some(bytes), ..group.clone() };
        let most = |bytes| group(bytes).fit(SpanChoice::All, &facts);
        assert_eq!((most(available), most(available - 1)), (Ok(6), Ok(5)));
        let refusal = group(available).fit(SpanChoice::Count(7), &facts).unwrap_err();
        assert!(
            refusal.contains("7 x (441.0 MiB of weights + 108.0 MiB of KV cache)"),
            "{refusal}"
        );
        let shares = DeviceShare::groups(&[Device::Cpu; 2], 2);
        assert_eq!(group(available).most_per_group(&facts, &shares), [6]);
        // Two groups have one block each of two, and a segment each.
        let two =
            InstanceMemory { ranks: vec![group(0).ranks[0].clone(); 2], workers: 4, ..group(0) };
        let of_two = two.need(&facts);
        assert_eq!((of_two.weights, of_two.kv), (need.weights, need.kv));
        let two = InstanceMemory { available_bytes: Some(of_two.total(6)), ..two };
        let shares = DeviceShare::groups(&[Device::Cpu; 4], 2);
        assert_eq!(two.most_per_group(&facts, &shares), [3, 3]);
    }

    #[test]
    fn a_group_on_devices_needs_a_share_of_each() {
        let facts = llama_70b();
        let rank = |kv_heads, mib: u64| RankShare {
            heads: 8 * kv_heads,
            kv_heads,
            columns: 3584 * kv_heads,
            block_bytes: mib << 20,
            copied_bytes: 60 << 20,
            is_slow: false,
        };
        // A quarter and three quarters: pages of 16 and 48 KiB, 216 launches of recorded steps, which append two pages.
        let block = |kv_heads: u64, mib: u64| {
            ((mib + 12 * kv_heads) << 20) + 216 * 65536 + kv_heads * 16384
        };
        let fixed = |kv_heads: u64| (256 + 100 + 4 + 14 * kv_heads) << 20;
        let card = |ordinal, free_bytes| DeviceMemory {
            device: Device::Cuda(ordinal),
            free_bytes,
            work_bytes: 100 << 20,
        };
        let with = |small: u64, large: u64| InstanceMemory {
            workers: 2,
            devices: vec![
                card(0, fixed(2) + small * block(2, 111)),
                card(1, fixed(6) + large * block(6, 331)),
            ],
            ranks: vec![vec![rank(2, 111), rank(6, 331)]],
            ..memory(64 << 30)
        };
        let groups = DeviceShare::groups(&[Device::Cuda(0), Device::Cuda(1)], 2);
        for (small, large, most) in [(9, 7, 7), (5, 7, 5), (200, 100, 80)] {
            let of = with(small, large);
            assert_eq!(of.fit(SpanChoice::All, &facts), Ok(most));
            assert_eq!(of.most_per_group(&facts, &groups), [most]);
        }
        let refusal = with(9, 7).fit(SpanChoice::Count(8), &facts).unwrap_err();
        let part = "8 x (331.0 MiB of weights + 72.0 MiB of KV cache + 13.6 MiB of recorded steps) + 444.0 MiB for work memory";
        assert!(refusal.contains(part) && refusal.contains("on cuda:1"), "{refusal}");
        assert!(refusal.contains("7 would fit"), "{refusal}");
        // What the workers copy out of the files is in the memory of the machine, and a mirror of
        // all pages that must be.
        let need = |kv_mirror| InstanceMemory { kv_mirror, ..with(9, 7) }.need(&facts);
        assert_eq!((need(KvMirror::Auto).weights, need(KvMirror::Auto).kv), (120 << 20, 0));
        assert_eq!(need(KvMirror::On).kv, 96 << 20);
    }

    #[test]
    fn available_memory_is_what_the_machine_and_the_groups_leave() {
        let text = "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:    42 kB\n";
        assert_eq!(meminfo(text), Some(42 * 1024));
        assert_eq!(meminfo("MemFree: 1 kB"), None);
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(
            group_left(text("1000\n"), text("700\n"), text("anon 300\nfile 400\nshmem 100\n")),
            Some(600)
        );
        assert_eq!(group_left(text("max\n"), text("700\n"), None), None);
        assert_eq!(group_left(text("1000\n"), text("1700\n"), None), Some(0));
        assert!(available_bytes().is_some_and(|bytes| bytes > 0));
    }
}
