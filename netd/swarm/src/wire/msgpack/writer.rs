//! The writer of [`Value`]s: every value in its shortest form, as Python's `msgpack` writes it.

use super::{EXT_TUPLE, Value};

/// Appends the bytes of `value`.
pub(super) fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Nil => out.push(0xc0),
        Value::Bool(value) => out.push(0xc2 + u8::from(*value)),
        Value::Int(value) => integer(*value, out),
        Value::Float(value) => {
            out.push(0xcb);
            out.extend(value.to_be_bytes());
        }
        Value::Str(text) => {
            match u8::try_from(text.len()) {
                Ok(length @ ..32) => out.push(0xa0 | length),
                _ => length([0xd9, 0xda, 0xdb], text.len(), out),
            }
            out.extend(text.as_bytes());
        }
        Value::Bin(bytes) => {
            length([0xc4, 0xc5, 0xc6], bytes.len(), out);
            out.extend(bytes);
        }
        Value::List(items) => list(items, out),
        Value::Tuple(items) => {
            let mut payload = Vec::new();
            list(items, &mut payload);
            extension(EXT_TUPLE, &payload, out);
        }
        Value::Map(entries) => {
            match u8::try_from(entries.len()) {
                Ok(count @ ..16) => out.push(0x80 | count),
                _ => long_length([0xde, 0xdf], entries.len(), out),
            }
            for (key, value) in entries {
                write(key, out);
                write(value, out);
            }
        }
        Value::Ext(kind, payload) => extension(*kind, payload, out),
    }
}

fn list(items: &[Value], out: &mut Vec<u8>) {
    match u8::try_from(items.len()) {
        Ok(count @ ..16) => out.push(0x90 | count),
        _ => long_length([0xdc, 0xdd], items.len(), out),
    }
    items.iter().for_each(|item| write(item, out));
}

fn extension(kind: i8, payload: &[u8], out: &mut Vec<u8>) {
    match payload.len() {
        1 => out.push(0xd4),
        2 => out.push(0xd5),
        4 => out.push(0xd6),
        8 => out.push(0xd7),
        16 => out.push(0xd8),
        other => length([0xc7, 0xc8, 0xc9], other, out),
    }
    out.extend(kind.to_be_bytes());
    out.extend(payload);
}

/// msgpack has no integers outside `i64::MIN..=u64::MAX`; wider ones, which no reader here
/// produces, saturate.
fn integer(value: i128, out: &mut Vec<u8>) {
    match value {
        0..0x80 => out.push(value as u8),
        0x80..=0xff => out.extend([0xcc, value as u8]),
        0x100..=0xffff => marked(0xcd, (value as u16).to_be_bytes(), out),
        0x1_0000..=0xffff_ffff => marked(0xce, (value as u32).to_be_bytes(), out),
        0x1_0000_0000.. => {
            marked(0xcf, u64::try_from(value).unwrap_or(u64::MAX).to_be_bytes(), out);
        }
        -0x20..0 => out.extend((value as i8).to_be_bytes()),
        -0x80..-0x20 => marked(0xd0, (value as i8).to_be_bytes(), out),
        -0x8000..-0x80 => marked(0xd1, (value as i16).to_be_bytes(), out),
        -0x8000_0000..-0x8000 => marked(0xd2, (value as i32).to_be_bytes(), out),
        _ => marked(0xd3, i64::try_from(value).unwrap_or(i64::MIN).to_be_bytes(), out),
    }
}

fn marked<const N: usize>(marker: u8, bytes: [u8; N], out: &mut Vec<u8>) {
    out.push(marker);
    out.extend(bytes);
}

/// A length in the shortest of 1, 2 or 4 bytes, after the marker of that width.
fn length([one, two, four]: [u8; 3], length: usize, out: &mut Vec<u8>) {
    match u8::try_from(length) {
        Ok(length) => out.extend([one, length]),
        Err(_) => long_length([two, four], length, out),
    }
}

/// A length in the shorter of 2 or 4 bytes, after the marker of that width.
fn long_length([two, four]: [u8; 2], length: usize, out: &mut Vec<u8>) {
    match u16::try_from(length) {
        Ok(length) => marked(two, length.to_be_bytes(), out),
        Err(_) => {
            let length = u32::try_from(length).expect("no value of the wire has 4 GiB");
            marked(four, length.to_be_bytes(), out);
        }
    }
}
