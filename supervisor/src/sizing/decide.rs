//! The decision how many blocks are served, and by which devices: the one that `sepal serve` takes and
//! `sepal plan` foretells.

use model::sizing::Need;
use shared::block::Span;
use shared::config::{ServeConfig, SpanChoice};
use shared::model::ModelFacts;
use shared::survey::Survey;

use super::{InstanceMemory, available_bytes, node_memory, within};
use crate::placement::{self, DeviceShare, Placement};

/// What the memory behind one group of devices holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupFit {
    /// What blocks need there: of the device that holds the fewest, or of the machine for processors.
    pub need: Need,
    /// Bytes that the blocks may take there; `None` when the system does not tell.
    pub free_bytes: Option<u64>,
    /// Most blocks of the group.
    pub most: u32,
}

impl InstanceMemory {
    /// The memory that an instance with these settings may use, before its devices are surveyed.
    pub fn of(config: &ServeConfig) -> InstanceMemory {
        InstanceMemory {
            available_bytes: within(available_bytes(), config.max_memory_bytes),
            workers: config.devices.len() as u64,
            netd: config.netd.clone(),
            kv_mirror: config.worker.kv_mirror,
            has_page: config.web.is_some(),
            devices: Vec::new(),
            nodes: node_memory(&config.devices),
            ranks: Vec::new(),
        }
    }

    /// The same once prepare has told of the devices.
    pub fn surveyed(self, survey: &Survey) -> InstanceMemory {
        InstanceMemory { devices: survey.devices.clone(), ranks: survey.ranks.clone(), ..self }
    }

    /// Blocks that are served by what was asked for: as many as that, or as fit.
    ///
    /// # Errors
    /// A sentence with the arithmetic when they do not fit or are not in the model.
    pub fn served(
        &self,
        choice: SpanChoice,
        facts: &ModelFacts,
        groups: &[DeviceShare],
    ) -> Result<u32, String> {
        check_choice(choice, facts)?;
        let most = self.fit_nodes(choice, facts, groups)?;
        let most = self.fit(choice, facts)?.min(most);
        Ok(match choice {
            SpanChoice::Fixed(span) => span.end().0 - span.start().0,
            SpanChoice::Count(count) => count.min(facts.num_blocks),
            SpanChoice::All => most,
        })
    }

    /// How the blocks of `span` are cut among the groups of devices. Before the model is known, memory
    /// bounds no group.
    pub fn placements(
        &self,
        span: Span,
        facts: Option<&ModelFacts>,
        groups: &[DeviceShare],
        decided: &[Vec<u32>],
    ) -> Vec<Placement> {
        let most = facts.map(|facts| self.most_per_group(facts, groups));
        placement::cut(span, groups, &most.unwrap_or_default(), decided)
    }

    /// What the memory behind each of `groups` holds, in their order.
    pub fn fits(&self, facts: &ModelFacts, groups: &[DeviceShare]) -> Vec<GroupFit> {
        let most = self.most_per_group(facts, groups);
        let mut on_devices = self.held(facts).into_iter();
        let of_group = |(group, most): (&DeviceShare, u32)| {
            let is_here = group.devices.iter().all(|device| device.is_processor());
            match if is_here { None } else { on_devices.next() } {
                Some(held) => {
                    GroupFit { need: held.need, free_bytes: Some(held.device.free_bytes), most }
                }
                None => GroupFit { need: self.need(facts), free_bytes: self.available_bytes, most },
            }
        };
        groups.iter().zip(most).map(of_group).collect()
    }
}

/// Whether the blocks asked for exist.
fn check_choice(choice: SpanChoice, facts: &ModelFacts) -> Result<(), String> {
    match choice {
        SpanChoice::Fixed(span) if span.end().0 > facts.num_blocks => Err(format!(
            "invalid --block_indices {span}: expected a range within 0:{}, the blocks of {}",
            facts.num_blocks, facts.name
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use shared::config::Device;
    use shared::survey::DeviceMemory;

    use testkit::facts::llama_70b;

    use super::super::tests::memory;
    use super::*;

    #[test]
    fn what_is_served_is_what_was_asked_for_or_what_fits() {
        let facts = llama_70b();
        let seven = memory((2464 + 7 * 536) << 20);
        let groups = DeviceShare::groups(&[Device::Cpu], 1);
        let served = |choice| seven.served(choice, &facts, &groups);
        assert_eq!(served(SpanChoice::All), Ok(7));
        assert_eq!(served(SpanChoice::Count(3)), Ok(3));
        assert_eq!(served(SpanChoice::Fixed(Span::new(70, 75).unwrap())), Ok(5));
        assert!(served(SpanChoice::Count(8)).unwrap_err().contains("7 would fit"));
        let outside = served(SpanChoice::Fixed(Span::new(79, 81).unwrap())).unwrap_err();
        assert!(outside.contains("79:81") && outside.contains("0:80"), "{outside}");
        assert_eq!(memory(1 << 50).served(SpanChoice::Count(99), &facts, &groups), Ok(80));
    }

    #[test]
    fn each_group_has_the_memory_of_its_devices() {
        let facts = llama_70b();
        let card =
            DeviceMemory { device: Device::Cuda(0), free_bytes: 24 << 30, work_bytes: 100 << 20 };
        let mixed = InstanceMemory { workers: 2, devices: vec![card], ..memory(16 << 30) };
        let groups = DeviceShare::groups(&[Device::Cpu, Device::Cuda(0)], 1);
        let fits = mixed.fits(&facts, &groups);
        assert_eq!((fits[0].free_bytes, fits[1].free_bytes), (Some(16 << 30), Some(24 << 30)));
        let most: Vec<u32> = fits.iter().map(|fit| fit.most).collect();
        assert_eq!(most, mixed.most_per_group(&facts, &groups));
        assert_eq!(fits[1].need.most_blocks(24 << 30), fits[1].most);
        assert_eq!(fits[1].need.fixed, (256 + 100 + 48 + 64) << 20);
    }
}
