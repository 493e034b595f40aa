//! What a process that was started by the superuser gives up: its user, and the rights (man 7 capabilities)
//! that it does not need, for good and for all that it starts.
//!
//! Files of the operator stay reachable by rights, as far as Landlock lets it go; what the user
//! changes is who can be signalled and looked into.

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use tracing::warn;

use super::{Confinement, SandboxSubject, table};

/// What changing the user takes, and what the supervisor needs to end a process of another one.
pub(super) const OF_WHO_CHANGES: [Capability; 3] =
    [Capability::CAP_SETUID, Capability::CAP_SETGID, Capability::CAP_KILL];

/// Gives up what `who` does not need. A process without rights has nothing to give up.
pub(super) fn give_up(who: SandboxSubject, confinement: &Confinement) -> Result<(), String> {
    let failed = |error: CapsError| format!("cannot give up rights: {error}");
    let permitted = caps::read(None, CapSet::Permitted).map_err(failed)?;
    if permitted.is_empty() {
        return Ok(());
    }
    let needed: CapsHashSet = table::rights(who, confinement.has_driver).iter().copied().collect();
    if permitted.contains(&Capability::CAP_SETPCAP) {
        let bounding = caps::read(None, CapSet::Bounding).map_err(failed)?;
        for right in bounding.difference(&needed) {
            caps::drop(None, CapSet::Bounding, *right).map_err(failed)?;
        }
    }
    if OF_WHO_CHANGES.iter().all(|right| permitted.contains(right))
        && let Err(error) = become_user(table::user(who))
    {
        // So it is where only some users exist, in a namespace.
        warn!(%error, "this process keeps its user");
    }
    let kept: CapsHashSet = permitted.intersection(&needed).copied().collect();
    caps::set(None, CapSet::Ambient, &CapsHashSet::new()).map_err(failed)?;
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new()).map_err(failed)?;
    caps::set(None, CapSet::Effective, &kept).map_err(failed)?;
    caps::set(None, CapSet::Permitted, &kept).map_err(failed)
}

/// Becomes the user and the group `number`, in no other group. What is permitted stays permitted.
fn become_user(number: u32) -> nix::Result<()> {
    let (user, group) = (Uid::from_raw(number), Gid::from_raw(number));
    nix::sys::prctl::set_keepcaps(true)?;
    setgroups(&[])?;
    setresgid(group, group, group)?;
    setresuid(user, user, user)
}
