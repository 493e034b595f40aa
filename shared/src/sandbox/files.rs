//! Files that a process may open, held by Landlock. What is open already stays open.

use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope, path_beneath_rules,
};

use super::{Confinement, SandboxSubject, table};

/// The newest rules that are asked for; older kernels apply what they know.
const RULES: ABI = ABI::V6;

/// Whether the kernel has Landlock.
pub(super) fn is_supported() -> bool {
    Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))
        .and_then(Ruleset::create)
        .is_ok()
}

/// Restricts this thread, and all that it starts, to the files of `who`.
pub(super) fn restrict(who: SandboxSubject, confinement: &Confinement) -> Result<(), String> {
    let status = rules(who, confinement).map_err(|error| error.to_string())?;
    match status {
        RulesetStatus::NotEnforced => Err("is missing".to_owned()),
        _ => Ok(()),
    }
}

fn rules(
    who: SandboxSubject,
    confinement: &Confinement,
) -> Result<RulesetStatus, landlock::RulesetError> {
    let all = AccessFs::from_all(RULES);
    // Starting programs is refused to all; libraries are mapped, not executed.
    let read = AccessFs::from_read(RULES) & !AccessFs::Execute;
    let write = all & !AccessFs::Execute;
    let more = |paths: &[std::path::PathBuf]| paths.to_vec();
    let own = |paths: Vec<&'static str>| paths.into_iter().map(|path| Path::new(path).to_owned());
    let readable =
        own(table::read_by(who, confinement.has_driver)).chain(more(&confinement.readable));
    let writable =
        own(table::written_by(confinement.has_driver)).chain(more(&confinement.writable));
    let mut ruleset = Ruleset::default().handle_access(all)?;
    if !confinement.has_driver {
        // Daemons of a driver listen on sockets of any kind.
        ruleset = ruleset.scope(Scope::from_all(RULES))?;
    }
    // What is not there needs no rule.
    let created = ruleset
        .create()?
        .add_rules(path_beneath_rules(readable, read))?
        .add_rules(path_beneath_rules(writable, write))?;
    Ok(created.restrict_self()?.ruleset)
}
