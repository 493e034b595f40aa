//! Files made by torch (`tests/golden/torch`), and files that nobody but an attacker or a broken
//! disk makes.

use std::io::Write;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::Value;

use super::pickle::PickleError;
use super::*;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/torch").join(name)
}

fn read_bytes(bytes: &[u8]) -> Result<Header, HeaderError> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    read(&file, bytes.len() as u64)
}

fn read_golden(name: &str) -> Result<(Header, Vec<u8>), HeaderError> {
    let bytes = std::fs::read(golden(name)).unwrap();
    read_bytes(&bytes).map(|header| (header, bytes))
}

fn refusal(bytes: &[u8]) -> String {
    read_bytes(bytes).unwrap_err().to_string()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn every_file_of_torch_gives_its_tensors() {
    let expected: Value =
        serde_json::from_slice(&std::fs::read(golden("expected.json")).unwrap()).unwrap();
    let files = expected.as_object().unwrap();
    assert_eq!(files.len(), 7);
    for (file, tensors) in files {
        let (header, bytes) = read_golden(file).unwrap();
        let tensors = tensors.as_object().unwrap();
        let names: Vec<_> = header.tensors.keys().collect();
        let mut wanted: Vec<_> = tensors.keys().collect();
        wanted.sort();
        assert_eq!(names, wanted, "{file}");
        for (name, wanted) in tensors {
            let info = &header.tensors[name];
            let (begin, end) = info.data_offsets;
            let got = serde_json::json!([
                info.dtype,
                info.shape,
                hex(&bytes[begin as usize..end as usize])
            ]);
            assert_eq!(&got, wanted, "{file} {name}");
        }
    }
}

#[test]
fn what_is_not_read_says_why_and_executes_nothing() {
    let mark = Path::new("/tmp/a-pickle-was-executed");
    let before = mark.exists();
    for (file, says) in [
        ("hostile.bin", "imports posix.system"),
        ("whole-module.bin", "imports torch.nn.modules"),
        ("before-1.6.bin", "before 1.6"),
        ("transposed.bin", "tensor transposed"),
    ] {
        let error = read_golden(file).unwrap_err().to_string();
        assert!(error.contains(says), "{file}: {error}");
    }
    assert_eq!(mark.exists(), before);
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    for file in ["state-dict.bin", "protocol-4.bin", "views.bin"] {
        let bytes = std::fs::read(golden(file)).unwrap();
        for len in 0..bytes.len() {
            let error = refusal(&bytes[..len]);
            assert!(
                error.contains("cut short") || error.contains("damaged"),
                "{file} cut at {len}: {error}"
            );
        }
    }
}

#[test]
fn no_changed_byte_panics_or_leads_outside_of_the_file() {
    for file in ["state-dict.bin", "protocol-2.bin", "parameters.bin"] {
        let good = std::fs::read(golden(file)).unwrap();
        for at in 0..good.len() {
            for flip in [0xff, 0x01, 0x80] {
                let mut bytes = good.clone();
                bytes[at] ^= flip;
                if let Ok(header) = read_bytes(&bytes) {
                    let inside = |t: &TensorInfo| {
                        t.data_offsets.0 <= t.data_offsets.1
                            && t.data_offsets.1 <= bytes.len() as u64
                    };
                    assert!(header.tensors.values().all(inside), "{file} byte {at}");
                }
            }
        }
    }
}

/// An entry of an archive as a test wants it.
#[derive(Clone)]
struct Entry {
    name: &'static str,
    data: Vec<u8>,
    method: u16,
    /// Where the directory says that it is, if not where it is.
    offset: Option<u32>,
    /// Length that the directory tells, if not the true one.
    len: Option<u32>,
}

fn entry(name: &'static str, data: impl Into<Vec<u8>>) -> Entry {
    Entry { name, data: data.into(), method: 0, offset: None, len: None }
}

fn archive(entries: &[Entry]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for entry in entries {
        let (at, len) = (out.len() as u32, entry.data.len() as u32);
        let name = entry.name.as_bytes();
        let told = entry.len.unwrap_or(len);
        let common = |out: &mut Vec<u8>| {
            for half in [20, 0, entry.method, 0, 0] {
                out.extend(u16::to_le_bytes(half));
            }
            for word in [0, told, told] {
                out.extend(word.to_le_bytes());
            }
            out.extend((name.len() as u16).to_le_bytes());
            out.extend(0u16.to_le_bytes());
        };
        out.extend(*b"PK\x03\x04");
        common(&mut out);
        out.extend(name);
        out.extend(&entry.data);
        directory.extend(*b"PK\x01\x02\x14\x00");
        common(&mut directory);
        directory.extend([0; 10]);
        directory.extend(entry.offset.unwrap_or(at).to_le_bytes());
        directory.extend(name);
    }
    let (start, count) = (out.len() as u32, entries.len() as u16);
    out.extend(&directory);
    out.extend(*b"PK\x05\x06\0\0\0\0");
    out.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    out.extend([(directory.len() as u32).to_le_bytes(), start.to_le_bytes()].concat());
    out.extend(0u16.to_le_bytes());
    out
}

/// A pickle of one tensor "w" of `FloatStorage` "0" with these numbers.
fn tensor_pickle(elements: u32, offset: i32, shape: &[u32], strides: &[u32]) -> Vec<u8> {
    let text = |t: &str| [&[0x8c, t.len() as u8], t.as_bytes()].concat();
    let int = |n: u32| [&b"J"[..], &n.to_le_bytes()].concat();
    let sides = |sides: &[u32]| {
        [b"(".to_vec(), sides.iter().flat_map(|n| int(*n)).collect(), b"t".to_vec()].concat()
    };
    [
        b"\x80\x02}".to_vec(),
        text("w"),
        b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text("0"),
        text("cpu"),
        int(elements),
        b"tQ".to_vec(),
        int(offset as u32),
        sides(shape),
        sides(strides),
        b"\x89ccollections\nOrderedDict\n)RtRs.".to_vec(),
    ]
    .concat()
}

fn with_tensor(pickle: Vec<u8>, storage: usize) -> Vec<u8> {
    archive(&[entry("m/data.pkl", pickle), entry("m/data/0", vec![7; storage])])
}

#[test]
fn a_tensor_must_lie_in_its_storage() {
    let tell = |elements, offset, shape: &[u32], strides: &[u32], bytes| {
        read_bytes(&with_tensor(tensor_pickle(elements, offset, shape, strides), bytes))
    };
    let good = tell(8, 2, &[2, 3], &[3, 1], 32).unwrap();
    let (begin, end) = good.tensors["w"].data_offsets;
    assert_eq!((end - begin, &good.tensors["w"].shape), (24, &vec![2, 3]));
    assert!(tell(8, 8, &[0, 3], &[3, 1], 32).is_ok());
    // Sides of one element may have any stride.
    assert!(tell(8, 0, &[1, 8], &[99, 1], 32).is_ok());
    for (elements, offset, shape, strides, bytes, says) in [
        (8, 3, &[2, 3][..], &[3, 1][..], 32, "outside of its storage"),
        (8, 9, &[0, 3], &[3, 1], 32, "outside of its storage"),
        (8, i32::MAX, &[2, 3], &[3, 1], 32, "outside of its storage"),
        (
            8,
            0,
            &[u32::MAX >> 1, u32::MAX >> 1, u32::MAX >> 1],
            &[1, 1, 1],
            32,
            "outside of its storage",
        ),
        (8, 0, &[2, 3], &[1, 2], 32, "without gaps"),
        (8, 0, &[4, 4], &[0, 0], 32, "without gaps"),
        (8, 0, &[2, 3], &[1], 32, "without gaps"),
        (8, 0, &[2, 3], &[3, 1], 31, "storage of 8 elements"),
        (i32::MAX as u32, 0, &[2, 3], &[3, 1], 31, "storage of"),
    ] {
        let error = tell(elements, offset, shape, strides, bytes).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("tensor w"), "{error}");
    }
    for (offset, shape) in [(-1, &[2, 3][..]), (0, &[1, 1, 1, 1, 1, 1, 1, 1, 1])] {
        let error = tell(8, offset, shape, &[1; 9][..shape.len()], 32).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
    }
    let lost = archive(&[entry("m/data.pkl", tensor_pickle(8, 0, &[2], &[1]))]);
    assert!(refusal(&lost).contains("the file lacks"));
}

#[test]
fn archives_that_hide_something_are_refused() {
    let pickle = || entry("m/data.pkl", tensor_pickle(2, 0, &[2], &[1]));
    let storage = || entry("m/data/0", vec![1; 8]);
    assert!(read_bytes(&archive(&[pickle(), storage()])).is_ok());
    let compressed = Entry { method: 8, ..storage() };
    let over = Entry { offset: Some(0), name: "m/data.pkl", ..storage() };
    let long = Entry { len: Some(1 << 30), ..storage() };
    let huge = Entry { len: Some(u32::MAX - 1), ..storage() };
    for (entries, says) in [
        (vec![pickle(), compressed], "compressed"),
        (vec![pickle(), storage(), storage()], "two entries"),
        (vec![pickle(), over], "over another"),
        (vec![pickle(), long], "does not lie in it"),
        (vec![pickle(), huge], "does not lie in it"),
        (vec![pickle(), entry("n/data.pkl", "x"), storage()], "several data.pkl"),
        (vec![storage()], "without data.pkl"),
        (vec![pickle(), storage(), entry("m/byteorder", "big")], "big-endian"),
        (vec![], "without data.pkl"),
    ] {
        let error = refusal(&archive(&entries));
        assert!(error.contains(says), "{error}");
    }
    // Another name in the local header than in the directory.
    let mut renamed = archive(&[pickle(), storage()]);
    renamed[30] = b'n';
    assert!(refusal(&renamed).contains("another name"));
    let long_pickle = entry("m/data.pkl", vec![b'0'; (MAX_PICKLE_BYTES + 1) as usize]);
    assert!(refusal(&archive(&[long_pickle])).contains("the limit is"));
}

#[test]
fn pickles_that_want_more_than_tensors_are_refused() {
    let refused = |pickle: &[u8]| pickle::tensors(pickle).unwrap_err();
    for import in [
        &b"\x80\x02cos\nsystem\n(X\x02\0\0\0idtR."[..],
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x02ctorch\nload\n.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor\n.",
        b"\x80\x02ccollections\nOrderedDict.x\n.",
    ] {
        assert!(matches!(refused(import), PickleError::Import(_)), "{import:?}");
    }
    // INST, OBJ, NEWOBJ, EXT1, PERSID, REDUCE without a callable, a text protocol.
    for opcode in [b'i', b'o', 0x81, 0x92, 0x82, b'P', b'S', b'I', b'F', b'V', b'g', b'p', b'2'] {
        assert_eq!(refused(&[0x80, 2, b'}', opcode]), PickleError::Opcode(opcode));
    }
    for damaged in [
        &b""[..],
        b"\x80\x01.",
        b"\x80\x06.",
        b".",
        b"}",
        b"t.",
        b"(.",
        b"K\x01(.",
        b")R.",
        b"N)R.",
        b"ccollections\nOrderedDict\nK\x01\x85R.",
        b"}K\x01s.",
        b"}(K\x01u.",
        b"NNNs.",
        b"h\x05.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"X\xff\xff\xff\xffa.",
        b"\x8c\x02\xff\xfe.",
        b"K\x01NNNNtQ.",
        b"(NNNNNtQ.",
        b"\x8c\x01aK\x01b.",
    ] {
        assert!(
            matches!(refused(damaged), PickleError::Damaged(_)),
            "{damaged:?}: {:?}",
            refused(damaged)
        );
    }
    for other in
        [&b"K\x01."[..], b"}.", b"].", b"}\x8c\x01aK\x01s.", b"ccollections\nOrderedDict\n)R}b."]
    {
        assert!(matches!(refused(other), PickleError::Content(_)), "{other:?}");
    }
    let one = tensor_pickle(2, 0, &[2], &[1]);
    // The same name twice: the dictionary's entry, then the whole of it once more.
    let entry = &one[3..one.len() - 1];
    let twice = [&one[..3], entry, entry, b"."].concat();
    assert_eq!(refused(&twice), PickleError::Twice("w".to_owned()));
}

#[test]
fn a_dictionary_that_holds_itself_and_one_of_all_memo_opcodes_end() {
    // d = {}; d["d"] = d, and the top is looked at only.
    assert!(pickle::tensors(b"\x80\x02}q\0\x8c\x01dh\0s.").is_err());
    let many = [&b"\x80\x04}"[..], &[0x94; 100_000], b"."].concat();
    assert!(pickle::tensors(&many).is_err());
    let nested =
        [&b"\x80\x02"[..], &vec![b'('; 100_000], b"N", &vec![b't'; 100_000], b"."].concat();
    assert!(pickle::tensors(&nested).is_err());
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read_bytes(&bytes);
        let _ = pickle::tensors(&bytes);
    }

    #[test]
    fn no_opcodes_panic(
        opcodes in prop::collection::vec(
            prop::sample::select(b"(N\x88KMJ\x8aX\x8c)\x85\x86\x87t]ae}sud0q\x94hcQRb\x93.\x80\x95".to_vec()), 0..60),
        operand in 0u8..8,
    ) {
        let bytes: Vec<u8> = opcodes.iter().flat_map(|o| [*o, operand, 0]).collect();
        let _ = pickle::tensors(&opcodes);
        let _ = pickle::tensors(&bytes);
        let _ = read_bytes(&with_tensor(opcodes, 8));
    }

    #[test]
    fn no_directory_panics(at in 0usize..200, bytes in prop::collection::vec(any::<u8>(), 1..9)) {
        let mut file = with_tensor(tensor_pickle(2, 0, &[2], &[1]), 8);
        let at = file.len() - 1 - at % file.len();
        for (to, from) in file[at..].iter_mut().zip(bytes) {
            *to = from;
        }
        if let Ok(header) = read_bytes(&file) {
            prop_assert!(header.tensors.values().all(|t| t.data_offsets.1 <= file.len() as u64));
        }
    }
}
