//! A safetensors checkpoint as `torch.save` writes it: a zip archive of a pickle (protocol 2) and of the
//! storages, all stored.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};

/// Writes the tensors of the safetensors file `from` to `to`, in the format of torch 1.6 and later.
pub fn write(from: &Path, to: &Path) {
    let bytes = std::fs::read(from).expect("read the checkpoint");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut pickle = b"\x80\x02}(".to_vec();
    let mut archive = Archive::default();
    for (key, (name, tensor)) in tensors.iter().enumerate() {
        let storage = match tensor.dtype() {
            Dtype::F32 => "FloatStorage",
            Dtype::F16 => "HalfStorage",
            Dtype::BF16 => "BFloat16Storage",
            other => panic!("{other:?} is no type of weights"),
        };
        let elements = tensor.shape().iter().product();
        text(&mut pickle, name);
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut pickle, "storage");
        pickle.extend(format!("ctorch\n{storage}\n").bytes());
        text(&mut pickle, &key.to_string());
        text(&mut pickle, "cpu");
        integers(&mut pickle, &[elements]);
        pickle.extend(b"tQ");
        integers(&mut pickle, &[0]);
        let strides = tensor.shape().iter().rev().scan(1, |next, side| {
            let stride = *next;
            *next *= side;
            Some(stride)
        });
        let mut strides: Vec<usize> = strides.collect();
        strides.reverse();
        for sides in [tensor.shape(), &strides] {
            pickle.push(b'(');
            integers(&mut pickle, sides);
            pickle.push(b't');
        }
        pickle.extend(b"\x89ccollections\nOrderedDict\n)RtR");
        archive.add(&format!("archive/data/{key}"), tensor.data());
    }
    pickle.extend(b"u.");
    archive.add("archive/data.pkl", &pickle);
    std::fs::write(to, archive.finish()).expect("write the pickled checkpoint");
}

fn text(pickle: &mut Vec<u8>, text: &str) {
    pickle.push(b'X');
    pickle.extend(u32::try_from(text.len()).expect("short").to_le_bytes());
    pickle.extend(text.bytes());
}

fn integers(pickle: &mut Vec<u8>, values: &[usize]) {
    for value in values {
        pickle.push(b'J');
        pickle.extend(i32::try_from(*value).expect("small").to_le_bytes());
    }
}

/// A zip archive without compression.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    directory: Vec<u8>,
    entries: u16,
}

impl Archive {
    fn add(&mut self, name: &str, data: &[u8]) {
        let word = |value: usize| u32::try_from(value).expect("small").to_le_bytes();
        let at = self.bytes.len();
        // Version, flags, method, time, date; the check sum is left out, as readers of tensors ignore it.
        let mut common: Vec<u8> =
            [20u16, 0, 0, 0, 0].into_iter().flat_map(u16::to_le_bytes).collect();
        common.extend([word(0), word(data.len()), word(data.len())].concat());
        common.extend(u16::try_from(name.len()).expect("short").to_le_bytes());
        common.extend(0u16.to_le_bytes());
        self.bytes.extend([b"PK\x03\x04", &common[..], name.as_bytes(), data].concat());
        self.directory.extend([b"PK\x01\x02\x14\x00", &common[..], &[0; 10]].concat());
        self.directory.extend([&word(at)[..], name.as_bytes()].concat());
        self.entries += 1;
    }

    fn finish(mut self) -> Vec<u8> {
        let word = |value: usize| u32::try_from(value).expect("small").to_le_bytes();
        let (at, len) = (self.bytes.len(), self.directory.len());
        self.bytes.extend(self.directory);
        let count = self.entries.to_le_bytes();
        let end = [b"PK\x05\x06\0\0\0\0", &count[..], &count[..], &word(len), &word(at), b"\0\0"];
        self.bytes.extend(end.concat());
        self.bytes
    }
}
