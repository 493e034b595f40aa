//! The other ranks of a group whose processors share blocks, as operations see them.

use shared::shm::group::GroupMember;

use crate::ops::{OpError, check_len};

/// Exchanges with the other ranks, if there are any.
#[derive(Debug, Default)]
pub(super) struct CpuGroup {
    member: Option<GroupMember>,
    /// Several parts that cross at once, one behind the other.
    together: Vec<f32>,
}

impl CpuGroup {
    /// Exchanges as `member` from now on.
    pub(super) fn join(&mut self, member: GroupMember) {
        self.member = Some(member);
    }

    /// See [`Backend::all_reduce`](crate::Backend::all_reduce).
    pub(super) fn all_reduce(
        &mut self,
        parts: &mut [&mut [f32]],
        len: usize,
    ) -> Result<(), OpError> {
        let Some(member) = &mut self.member else {
            return Ok(());
        };
        parts.iter().try_for_each(|part| check_len("all-reduce", "part", part.len(), 1, len))?;
        if let [one] = parts {
            return Ok(member.all_reduce(&mut one[..len])?);
        }
        self.together.clear();
        parts.iter().for_each(|part| self.together.extend_from_slice(&part[..len]));
        member.all_reduce(&mut self.together)?;
        for (part, sum) in parts.iter_mut().zip(self.together.chunks_exact(len.max(1))) {
            part[..len].copy_from_slice(sum);
        }
        Ok(())
    }

    /// See [`Backend::broadcast`](crate::Backend::broadcast).
    pub(super) fn broadcast(&mut self, values: &mut [f32], len: usize) -> Result<(), OpError> {
        let Some(member) = &mut self.member else {
            return Ok(());
        };
        check_len("broadcast", "values", values.len(), 1, len)?;
        Ok(member.broadcast_values(&mut values[..len])?)
    }
}
