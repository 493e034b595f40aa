use std::io::Write;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::*;

const GOOD: &[u8] =
    br#"{"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"__metadata__":{"k":"v"}}"#;

fn read(bytes: &[u8]) -> Result<Header, HeaderError> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    Header::read(&file, bytes.len() as u64)
}

fn file(json: &[u8], data: usize) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json, &vec![0; data]].concat()
}

fn refusal(json: &str, data: usize) -> String {
    read(&file(json.as_bytes(), data)).unwrap_err().to_string()
}

#[test]
fn a_header_tells_tensors_metadata_and_where_the_data_begins() {
    let header = read(&file(GOOD, 8)).unwrap();
    assert_eq!(header.data_start, 8 + GOOD.len() as u64);
    assert_eq!(header.metadata["k"], "v");
    let tensor = &header.tensors["a"];
    assert_eq!((tensor.block_dtype(), tensor.bytes()), (Some(DType::Bf16), 8));
    assert_eq!(tensor.block_elements(DType::Bf16), Some(4));
    assert_eq!(tensor.block_elements(DType::F32), None, "8 bytes are not 4 floats of 32 bits");
}

#[test]
fn data_that_no_tensor_claims_is_refused() {
    let error = read(&file(GOOD, 9)).unwrap_err().to_string();
    assert!(error.contains("no tensor claims"), "{error}");
    let hole = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}"#;
    let error = refusal(hole, 3);
    assert!(error.contains("tensor b begins at 2, but the tensors before it end at 1"), "{error}");
}

#[test]
fn data_that_two_tensors_claim_is_refused() {
    let overlap = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
    let error = refusal(overlap, 3);
    assert!(error.contains("tensor b begins at 1, but the tensors before it end at 2"), "{error}");
}

#[test]
fn entries_are_counted_while_they_are_read() {
    let entry = r#"{"dtype":"U8","shape":[],"data_offsets":[0,0]}"#;
    let tensors: Vec<String> = (0..=MAX_ENTRIES).map(|i| format!("\"{i}\":{entry}")).collect();
    // What follows the entry that is one too many is not even looked at.
    let error = refusal(&format!("{{{},!", tensors.join(",")), 0);
    assert!(error.contains("more than 262144 entries"), "{error}");
    let lines: Vec<String> = (0..=MAX_ENTRIES).map(|i| format!("\"{i}\":\"\"")).collect();
    let error = refusal(&format!("{{\"__metadata__\":{{{},!", lines.join(",")), 0);
    assert!(error.contains("more than 262144 entries"), "{error}");
    let sides = vec!["1"; MAX_DIMENSIONS + 1].join(",");
    let error = refusal(&format!("{{\"a\":{{\"shape\":[{sides},!"), 0);
    assert!(error.contains("more than 64 dimensions"), "{error}");
}

#[test]
fn errors_quote_little_of_a_file() {
    let long = "x".repeat(1 << 20);
    let inverted =
        format!("{{\"{long}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[1,0]}}}}");
    let twice = format!("{{\"__metadata__\":{{\"{long}\":\"\",\"{long}\":\"\"}}}}");
    for json in [inverted, twice, format!("{{\"a\":\"{long}\"}}")] {
        let error = refusal(&json, 0);
        assert!(error.len() < 400, "{} bytes", error.len());
    }
}

/// Types of the reference implementation whose elements have whole bytes.
const DTYPES: [Dtype; 12] = [
    Dtype::BOOL,
    Dtype::U8,
    Dtype::F8_E4M3,
    Dtype::I16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

fn any_name() -> impl Strategy<Value = String> {
    // Few names, so that some appear twice among changed headers.
    prop_oneof!["[a-c]", ".{0,12}"]
}

/// A file as the reference implementation writes it.
fn any_file() -> impl Strategy<Value = Vec<u8>> {
    let tensor = (select(&DTYPES[..]), prop::collection::vec(0usize..4, 0..4));
    let tensors = prop::collection::btree_map(any_name(), tensor, 0..8);
    // Of no tensors and empty metadata its writer makes `{},"__metadata__":{}}`.
    let metadata = prop::option::of(prop::collection::hash_map(any_name(), ".{0,12}", 1..4));
    (tensors, metadata).prop_map(|(tensors, metadata)| {
        let bytes = vec![7; 8 * 27];
        let views = tensors.iter().map(|(name, (dtype, shape))| {
            let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(*dtype, shape.clone(), &bytes[..length]).unwrap())
        });
        safetensors::serialize(views, metadata).unwrap()
    })
}

/// How one entry of a header is changed.
fn any_change() -> impl Strategy<Value = Change> {
    let offset = prop_oneof![0u64..20, (0u64..4).prop_map(|n| u64::MAX - n)];
    let side = prop_oneof![0u64..4, Just(1 << 32), Just(u64::MAX)];
    let odd = select(vec![
        json!(null),
        json!(-1),
        json!(1.5),
        json!("x"),
        json!(["BF16", [2], [0, 4]]),
        json!({"BF16": null}),
        json!([0, 1, 2]),
    ]);
    let field = select(vec!["dtype", "shape", "data_offsets", "more"]);
    prop_oneof![
        (offset.clone(), offset)
            .prop_map(|(begin, end)| Change::Set("data_offsets", json!([begin, end]))),
        prop::collection::vec(side, 0..70).prop_map(|shape| Change::Set("shape", json!(shape))),
        select(vec!["F32", "BF16", "U8", "f32", "F7", ""])
            .prop_map(|word| Change::Set("dtype", json!(word))),
        (field.clone(), odd.clone()).prop_map(|(field, value)| Change::Set(field, value)),
        field.prop_map(Change::Drop),
        odd.prop_map(Change::Replace),
        Just(Change::Repeat),
        any_name().prop_map(Change::Rename),
    ]
}

#[derive(Clone, Debug)]
enum Change {
    Set(&'static str, Value),
    Drop(&'static str),
    Replace(Value),
    Repeat,
    Rename(String),
}

impl Change {
    fn apply(self, at: Index, entries: &mut Vec<(String, Value)>) {
        if entries.is_empty() {
            return;
        }
        let at = at.index(entries.len());
        let (name, value) = &mut entries[at];
        match self {
            Change::Set(field, new) => {
                if let Some(fields) = value.as_object_mut() {
                    fields.insert(field.to_owned(), new);
                }
            }
            Change::Drop(field) => {
                if let Some(fields) = value.as_object_mut() {
                    fields.remove(field);
                }
            }
            Change::Replace(new) => *value = new,
            Change::Repeat => {
                let again = entries[at].clone();
                entries.push(again);
            }
            Change::Rename(new) => *name = new,
        }
    }
}

/// The entries of a header in a form that can hold a name twice.
fn entries(bytes: &[u8]) -> (Vec<(String, Value)>, usize) {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (json, data) = bytes[8..].split_at(header);
    let entries: BTreeMap<String, Value> = serde_json::from_slice(json).unwrap();
    (entries.into_iter().collect(), data.len())
}

fn written(entries: &[(String, Value)]) -> String {
    let entry = |(name, value): &(String, Value)| format!("{}: {value}", json!(name));
    format!("{{{}}}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
}

/// Holds what this reader says of a file against the reference implementation.
fn compare(bytes: &[u8]) -> Result<(), TestCaseError> {
    match (read(bytes), SafeTensors::read_metadata(bytes)) {
        (Ok(ours), Ok((header_len, theirs))) => {
            prop_assert_eq!(ours.data_start, 8 + header_len as u64);
            let metadata: BTreeMap<_, _> =
                theirs.metadata().clone().unwrap_or_default().into_iter().collect();
            prop_assert_eq!(ours.metadata, metadata);
            let tensors: BTreeMap<_, _> = theirs
                .tensors()
                .into_iter()
                .map(|(name, info)| (name, in_our_words(info)))
                .collect();
            prop_assert_eq!(ours.tensors, tensors);
        }
        // Types that are unknown here, and sizes that do not fit the shape, are for the reader of
        // the tensor.
        (Ok(ours), Err(theirs)) => {
            let fits = |info: &TensorInfo| {
                let dtype: Option<Dtype> = serde_json::from_value(json!(info.dtype)).ok();
                let bits = dtype.map(|dtype| dtype.bitsize() as u64);
                let elements = info.shape.iter().try_fold(1u64, |n, &side| n.checked_mul(side));
                bits.zip(elements).and_then(|(bits, n)| n.checked_mul(bits))
                    == Some(8 * info.bytes())
            };
            prop_assert!(!ours.tensors.values().all(fits), "refused by the reference: {}", theirs);
        }
        (Err(ours), Ok(_)) => {
            let ours = ours.to_string();
            let is_stricter = ["appears twice", "more than 64 dimensions", "expected a string"];
            prop_assert!(is_stricter.iter().any(|reason| ours.contains(reason)), "{}", ours);
        }
        (Err(_), Err(_)) => {}
    }
    Ok(())
}

fn in_our_words(info: &safetensors::tensor::TensorInfo) -> TensorInfo {
    let (begin, end) = info.data_offsets;
    TensorInfo {
        dtype: json!(info.dtype).as_str().unwrap().to_owned(),
        shape: info.shape.iter().map(|&side| side as u64).collect(),
        data_offsets: (begin as u64, end as u64),
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        compare(&bytes)?;
    }

    #[test]
    fn a_file_of_the_reference_implementation_is_read_as_it_reads_it(bytes in any_file()) {
        prop_assert!(read(&bytes).is_ok());
        compare(&bytes)?;
    }

    #[test]
    fn a_changed_file_is_accepted_only_as_the_reference_implementation_reads_it(
        bytes in any_file(),
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 0..4),
        length in prop::option::of(any::<Index>()),
    ) {
        let mut bytes = bytes;
        for (at, byte) in changes {
            *at.get_mut(&mut bytes) = byte;
        }
        if let Some(length) = length {
            bytes.truncate(length.index(bytes.len() + 1));
        }
        compare(&bytes)?;
    }

    #[test]
    fn a_changed_header_is_accepted_only_as_the_reference_implementation_reads_it(
        bytes in any_file(),
        changes in prop::collection::vec((any::<Index>(), any_change()), 1..3),
        data in -1i64..2,
    ) {
        let (mut entries, length) = entries(&bytes);
        for (at, change) in changes {
            change.apply(at, &mut entries);
        }
        let length = length.saturating_add_signed(data as isize);
        compare(&file(written(&entries).as_bytes(), length))?;
    }
}
