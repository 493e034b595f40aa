//! SECURITY.md shows the bounds that the code enforces. Not a unit test: some constants are smaller
//! in those.
//!
//! `WRITE=1 cargo test -p netd --test bounds` writes the list.

use std::path::Path;

const BEGIN: &str = "<!-- written by: WRITE=1 cargo test -p netd --test bounds -->\n";
const END: &str = "<!-- end of the bounds -->\n";

#[test]
fn security_md_shows_the_bounds_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../SECURITY.md");
    let text = std::fs::read_to_string(&path).expect("SECURITY.md");
    let (before, rest) = text.split_once(BEGIN).expect("the begin of the list");
    let (shown, after) = rest.split_once(END).expect("the end of the list");
    let list = resource_manager::bounds::list(&netd::bounds::bounds());
    if std::env::var_os("WRITE").is_some() {
        let written = [before, BEGIN, &list, END, after].concat();
        std::fs::write(&path, written).expect("SECURITY.md is writable");
    } else {
        assert_eq!(shown, list, "run WRITE=1 cargo test -p netd --test bounds");
    }
}

#[test]
fn every_bound_has_a_name_of_its_own() {
    let mut names: Vec<String> =
        netd::bounds::bounds().into_iter().map(|bound| bound.what).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}
