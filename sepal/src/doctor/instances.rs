//! Other servers of this user: whether one has the name or the identity that a start would take.

use std::path::Path;

use supervisor::instance::live_instances;
use supervisor::report::InstanceReport;
use supervisor::status::ask;

use super::check::CheckVerdict;

/// A server that runs.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveServer {
    pub name: String,
    /// What it says of itself; `None` while it starts or ends.
    pub report: Option<InstanceReport>,
}

/// The servers that run, and what a start would take.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceFacts {
    /// Those that run, or why they cannot be listed.
    pub running: Result<Vec<LiveServer>, String>,
    /// The name asked for (`--instance`).
    pub name: Option<String>,
    /// The PeerID of the identity file asked for, or why it cannot be read.
    pub peer_id: Result<Option<String>, String>,
}

/// Asks each live instance of `folder`.
pub fn observe(folder: &Path) -> Result<Vec<LiveServer>, String> {
    let live = live_instances(folder).map_err(|error| shared::error_chain::with_causes(&error))?;
    let running = |one: supervisor::instance::LiveInstance| LiveServer {
        report: ask(&one.status_socket, true).ok(),
        name: one.name,
    };
    Ok(live.into_iter().map(running).collect())
}

/// The devices that servers use, by name.
pub fn devices(running: &[LiveServer]) -> Vec<String> {
    let reports = running.iter().filter_map(|one| one.report.as_ref());
    let children = reports.flat_map(|report| &report.children);
    children.filter_map(|child| child.device.clone()).collect()
}

/// Whether a start finds its name and its identity free.
pub fn judge(facts: &InstanceFacts) -> CheckVerdict {
    let InstanceFacts { running, name, peer_id } = facts;
    let running = match running {
        Err(why) => {
            return CheckVerdict::problem(why, "run sepal doctor as the user of the server");
        }
        Ok(running) => running,
    };
    let peer_id = match peer_id {
        Err(why) => return CheckVerdict::problem(why, "give another --identity_path"),
        Ok(peer_id) => peer_id.as_deref(),
    };
    let pid = |one: &LiveServer| match &one.report {
        Some(report) => format!("supervisor pid {}", report.supervisor_pid),
        None => "it starts or ends now".to_owned(),
    };
    if let Some(same) = running.iter().find(|one| Some(&one.name) == name.as_ref()) {
        return CheckVerdict::problem(
            format!("instance {} runs already ({})", same.name, pid(same)),
            "stop it or choose another --instance; if it is the server that you ask about, all is well",
        );
    }
    let has_identity = |one: &&LiveServer| {
        let children = one.report.iter().flat_map(|report| &report.children);
        children.filter_map(|child| child.peer_id.as_deref()).any(|id| Some(id) == peer_id)
    };
    if let Some(same) = running.iter().find(has_identity) {
        return CheckVerdict::problem(
            format!("instance {} ({}) has the identity of --identity_path", same.name, pid(same)),
            "give each server an identity file of its own: peers take two servers with one identity for one",
        );
    }
    let names: Vec<&str> = running.iter().map(|one| one.name.as_str()).collect();
    match names.is_empty() {
        true => CheckVerdict::ok("no other server of this user runs"),
        false => CheckVerdict::ok(format!("running beside: {}", names.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;
    use supervisor::instance::Instance;

    fn facts() -> InstanceFacts {
        let children = serde_json::json!([{
            "role": "netd", "worker": null, "pid": 5, "generation": 1, "restarts": 0, "state": "ready",
            "span": null, "phase": "idle", "progress": 0, "jobs_done": 0, "queued_us": 0, "computed_us": 0,
            "sessions_open": 0, "kv_tokens_free": 0, "troubles": {}, "port": 1, "peer_id": "12D3Koo"
        }]);
        let report = InstanceReport {
            instance: "a".into(),
            supervisor_pid: 4,
            started_unix_s: 1,
            children: serde_json::from_value(children).unwrap(),
            ..InstanceReport::default()
        };
        let running = Ok(vec![LiveServer { name: "a".into(), report: Some(report) }]);
        InstanceFacts { running, name: Some("b".into()), peer_id: Ok(None) }
    }

    fn is(facts: &InstanceFacts, status: Status, word: &str) {
        let verdict = judge(facts);
        let text = format!("{} {}", verdict.found, verdict.advice.unwrap_or_default());
        assert_eq!(verdict.status, status, "{text}");
        assert!(text.contains(word), "{text}");
    }

    #[test]
    fn a_second_server_needs_a_name_and_an_identity_of_its_own() {
        is(&facts(), Status::Ok, "running beside: a");
        let same = InstanceFacts { name: Some("a".into()), ..facts() };
        is(&same, Status::Problem, "instance a runs already (supervisor pid 4)");
        let twin = InstanceFacts { peer_id: Ok(Some("12D3Koo".into())), ..facts() };
        is(&twin, Status::Problem, "identity file of its own");
        let other = InstanceFacts { peer_id: Ok(Some("12D3Xyz".into())), ..facts() };
        is(&other, Status::Ok, "beside");
        is(&InstanceFacts { running: Ok(Vec::new()), ..facts() }, Status::Ok, "no other server");
        let bad = InstanceFacts { peer_id: Err("key is no identity".into()), ..facts() };
        is(&bad, Status::Problem, "--identity_path");
        let foreign = InstanceFacts { running: Err("belongs to user 7".into()), ..facts() };
        is(&foreign, Status::Problem, "as the user");
    }

    #[test]
    fn the_devices_of_servers_are_those_of_their_workers() {
        let mut running = facts().running.unwrap();
        assert_eq!(devices(&running), Vec::<String>::new());
        let report = running[0].report.as_mut().unwrap();
        report.children[0].device = Some("cuda:1".into());
        assert_eq!(devices(&running), ["cuda:1"]);
    }

    #[test]
    fn instances_that_say_nothing_are_listed_too() {
        let folder = tempfile::tempdir().unwrap();
        let _claimed = Instance::claim(folder.path(), Some("quiet")).unwrap();
        let expected = LiveServer { name: "quiet".into(), report: None };
        assert_eq!(observe(folder.path()), Ok(vec![expected]));
    }
}
