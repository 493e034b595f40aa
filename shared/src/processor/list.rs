//! Lists of numbers as the kernel writes them: `0-3,8`.

/// Most CPUs that a list may name; Linux is built for at most 8,192.
pub const MAX_CPUS: u32 = 1 << 16;

/// The numbers of a list, in ascending order and once each; `None` when it is none of the kernel's.
pub fn numbers(list: &str) -> Option<Vec<u32>> {
    let mut is_named = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= MAX_CPUS {
            return None;
        }
        if is_named.len() <= last as usize {
            is_named.resize(last as usize + 1, false);
        }
        is_named.get_mut(first as usize..=last as usize)?.fill(true);
    }
    Some((0..).zip(is_named).filter(|(_, is_named)| *is_named).map(|(n, _)| n).collect())
}

/// A list of ascending numbers, as [`numbers`] reads it.
pub fn shown(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let run = |(first, last): (u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    runs.into_iter().map(run).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read_and_written() {
        for (list, all) in [
            ("0-1\n", vec![0, 1]),
            ("0-2,5,7-8", vec![0, 1, 2, 5, 7, 8]),
            ("5,1-2,2-3", vec![1, 2, 3, 5]),
            ("\n", vec![]),
        ] {
            assert_eq!(numbers(list), Some(all.clone()), "{list}");
            assert_eq!(numbers(&shown(&all)), Some(all), "{list}");
        }
        assert_eq!(shown(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        for bad in ["x", "3-1", "0-4000000000", "1-", "-1", "65536", "0x1", "1 2"] {
            assert_eq!(numbers(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_long_list_takes_no_more_memory_than_a_short_one() {
        let long = "0-65535,".repeat(8 << 10);
        assert_eq!(numbers(&long).map(|all| all.len()), Some(MAX_CPUS as usize));
    }
}
