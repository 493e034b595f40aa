//! Makes an input of a corpus and a script of edits. Pure: the same script makes the same input.

/// Longest input that edits may make of shorter ones.
const MAX_INPUT_BYTES: usize = 1 << 17;

/// Numbers at which decoders change their mind.
const BORDERS: [u64; 16] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    1_000_000_000_000_000,
    0x7fff_ffff_ffff_ffff,
    0xffff_ffff_ffff_ffff,
];

/// The input that `script` makes of `corpus`.
///
/// # Panics
/// If the corpus is empty.
#[must_use]
pub fn input(corpus: &[Vec<u8>], script: &[u8]) -> Vec<u8> {
    let mut script = Script(script);
    let first = script.below(corpus.len());
    let mut input = corpus[first].clone();
    // Few edits reach deeper than many.
    let edits = 1 + script.below(8);
    for _ in 0..edits {
        let Some(kind) = script.next() else { break };
        edit(&mut input, corpus, kind, &mut script);
        input.truncate(MAX_INPUT_BYTES);
    }
    input
}

fn edit(input: &mut Vec<u8>, corpus: &[Vec<u8>], kind: u8, script: &mut Script<'_>) {
    let at = script.below(input.len() + 1);
    match kind % 11 {
        0 => change(input, at, |byte| byte ^ 1 << script.below(8)),
        1 => change(input, at, |_| script.next().unwrap_or(0xff)),
        2 => change(input, at, |byte| byte.wrapping_add(script.next().unwrap_or(1) % 16)),
        3 => change(input, at, |byte| byte.wrapping_sub(script.next().unwrap_or(1) % 16)),
        4 | 5 => overwrite(input, at, &number(script)),
        6 => input.truncate(at),
        7 => {
            let end = (at + 1 + script.below(32)).min(input.len());
            input.drain(at..end.max(at));
        }
        8 => insert(input, at, &number(script)),
        9 => {
            let (from, count) = (script.below(input.len() + 1), 1 + script.below(64));
            let piece = input[from..(from + count).min(input.len())].to_vec();
            (0..1 + script.below(16)).for_each(|_| insert(input, at, &piece));
        }
        _ => {
            let other = &corpus[script.below(corpus.len())];
            let from = script.below(other.len() + 1);
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
    }
}

fn change(input: &mut [u8], at: usize, new: impl FnOnce(u8) -> u8) {
    if let Some(byte) = input.get_mut(at) {
        *byte = new(*byte);
    }
}

fn overwrite(input: &mut [u8], at: usize, bytes: &[u8]) {
    input.iter_mut().skip(at).zip(bytes).for_each(|(old, new)| *old = *new);
}

fn insert(input: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if input.len() < MAX_INPUT_BYTES {
        input.splice(at..at, bytes.iter().copied());
    }
}

/// A number at or beside a border, in a width and an order of bytes, or in decimals.
fn number(script: &mut Script<'_>) -> Vec<u8> {
    let value = BORDERS[script.below(BORDERS.len())];
    let value = match script.below(4) {
        0 => value.wrapping_sub(1),
        1 => value.wrapping_add(1),
        _ => value,
    };
    let (little, big) = (value.to_le_bytes(), value.to_be_bytes());
    match script.below(9) {
        0 => little[..1].to_vec(),
        1 => little[..2].to_vec(),
        2 => little[..4].to_vec(),
        3 => little.to_vec(),
        4 => big[6..].to_vec(),
        5 => big[4..].to_vec(),
        6 => big.to_vec(),
        7 => varint(value),
        _ => value.to_string().into_bytes(),
    }
}

/// As protobuf and postcard write it.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// What is not read yet of a script. A script that has ended chooses the first of everything.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// A number below `count`, which is at least 1.
    fn below(&mut self, count: usize) -> usize {
        let mut value = usize::from(self.next().unwrap_or(0));
        if count > 0x100 {
            value = value << 8 | usize::from(self.next().unwrap_or(0));
        }
        if count > 0x1_0000 {
            value = value << 8 | usize::from(self.next().unwrap_or(0));
        }
        value % count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_script_gives_the_first_of_the_corpus() {
        let corpus = vec![b"first".to_vec(), b"second".to_vec()];
        assert_eq!(input(&corpus, &[]), b"first");
        assert_eq!(input(&corpus, &[1]), b"second");
    }

    #[test]
    fn every_kind_of_edit_works_at_every_position_of_short_inputs() {
        let corpus = vec![Vec::new(), vec![7], vec![1, 2, 3]];
        let mut changed = 0;
        for first in 0..3 {
            for kind in 0..11 {
                for at in 0..4 {
                    for value in [0, 1, 77, 255] {
                        let script = [first, 0, kind, at, value, value, value, value];
                        let made = input(&corpus, &script);
                        changed += usize::from(made != corpus[usize::from(first)]);
                    }
                }
            }
        }
        assert!(changed > 200, "{changed} of 528 inputs differ from the corpus");
    }

    #[test]
    fn copies_of_copies_stay_bounded() {
        let corpus = vec![vec![1; 4000]];
        let script = [[7, 9, 0, 0, 0, 0, 255, 15].as_slice(); 8].concat();
        assert!(input(&corpus, &script).len() <= MAX_INPUT_BYTES);
    }
}
