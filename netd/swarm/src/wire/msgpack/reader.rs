//! The bounded reader of [`Value`]s.

use super::{EXT_TUPLE, Limits, MsgpackError, Value};

/// Reads exactly one value.
pub(super) fn read(bytes: &[u8], limits: Limits) -> Result<Value, MsgpackError> {
    let mut values_left = limits.max_values;
    let mut reader = MsgpackReader { rest: bytes, limits, values_left: &mut values_left };
    let value = reader.value(1)?;
    match reader.rest.len() {
        0 => Ok(value),
        n => Err(MsgpackError::Trailing(n)),
    }
}

struct MsgpackReader<'a, 'c> {
    rest: &'a [u8],
    limits: Limits,
    values_left: &'c mut usize,
}

impl<'a> MsgpackReader<'a, '_> {
    fn value(&mut self, depth: usize) -> Result<Value, MsgpackError> {
        if depth > self.limits.max_depth {
            return Err(MsgpackError::TooLarge { limit: self.limits.max_depth, what: "levels" });
        }
        *self.values_left = self
            .values_left
            .checked_sub(1)
            .ok_or(MsgpackError::TooLarge { limit: self.limits.max_values, what: "values" })?;
        let [marker] = self.array()?;
        Ok(match marker {
            0x00..=0x7f => Value::Int(marker.into()),
            0x80..=0x8f => self.map(usize::from(marker & 0x0f), depth)?,
            0x90..=0x9f => Value::List(self.items(usize::from(marker & 0x0f), depth)?),
            0xa0..=0xbf => self.text(usize::from(marker & 0x1f))?,
            0xc0 => Value::Nil,
            0xc1 => return Err(MsgpackError::Malformed("reserved marker 0xc1")),
            0xc2 => Value::Bool(false),
            0xc3 => Value::Bool(true),
            0xc4..=0xc6 => {
                let length = self.length(1 << (marker - 0xc4))?;
                Value::Bin(self.take(length)?.to_vec())
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (marker - 0xc7))?;
                self.extension(length, depth)?
            }
            0xca => Value::Float(f32::from_be_bytes(self.array()?).into()),
            0xcb => Value::Float(f64::from_be_bytes(self.array()?)),
            0xcc => Value::Int(u8::from_be_bytes(self.array()?).into()),
            0xcd => Value::Int(u16::from_be_bytes(self.array()?).into()),
            0xce => Value::Int(u32::from_be_bytes(self.array()?).into()),
            0xcf => Value::Int(u64::from_be_bytes(self.array()?).into()),
            0xd0 => Value::Int(i8::from_be_bytes(self.array()?).into()),
            0xd1 => Value::Int(i16::from_be_bytes(self.array()?).into()),
            0xd2 => Value::Int(i32::from_be_bytes(self.array()?).into()),
            0xd3 => Value::Int(i64::from_be_bytes(self.array()?).into()),
            0xd4..=0xd8 => self.extension(1 << (marker - 0xd4), depth)?,
            0xd9..=0xdb => {
                let length = self.length(1 << (marker - 0xd9))?;
                self.text(length)?
            }
            0xdc | 0xdd => {
                let count = self.length(2 << (marker - 0xdc))?;
                Value::List(self.items(count, depth)?)
            }
            0xde | 0xdf => {
                let count = self.length(2 << (marker - 0xde))?;
                self.map(count, depth)?
            }
            0xe0..=0xff => Value::Int(i8::from_be_bytes([marker]).into()),
        })
    }

    fn extension(&mut self, length: usize, depth: usize) -> Result<Value, MsgpackError> {
        let kind = i8::from_be_bytes(self.array()?);
        let payload = self.take(length)?;
        if kind != EXT_TUPLE {
            return Ok(Value::Ext(kind, payload.to_vec()));
        }
        let mut inner =
            MsgpackReader { rest: payload, limits: self.limits, values_left: self.values_left };
        match (inner.value(depth + 1)?, inner.rest.len()) {
            (Value::List(items), 0) => Ok(Value::Tuple(items)),
            _ => Err(MsgpackError::Malformed("a tuple that is not one array")),
        }
    }

    fn items(&mut self, count: usize, depth: usize) -> Result<Vec<Value>, MsgpackError> {
        self.admit(count)?;
        (0..count).map(|_| self.value(depth + 1)).collect()
    }

    fn map(&mut self, count: usize, depth: usize) -> Result<Value, MsgpackError> {
        self.admit(count.saturating_mul(2))?;
        let entries: Result<_, _> =
            (0..count).map(|_| Ok((self.value(depth + 1)?, self.value(depth + 1)?))).collect();
        Ok(Value::Map(entries?))
    }

    /// Refuses a count before its elements are allocated: each takes at least one byte and counts
    /// once.
    fn admit(&self, count: usize) -> Result<(), MsgpackError> {
        if count > self.rest.len() {
            return Err(MsgpackError::Incomplete);
        }
        if count > *self.values_left {
            return Err(MsgpackError::TooLarge { limit: self.limits.max_values, what: "values" });
        }
        Ok(())
    }

    fn text(&mut self, length: usize) -> Result<Value, MsgpackError> {
        match std::str::from_utf8(self.take(length)?) {
            Ok(text) => Ok(Value::str(text)),
            Err(_) => Err(MsgpackError::Malformed("text that is not UTF-8")),
        }
    }

    /// A big-endian length of 1, 2 or 4 bytes.
    fn length(&mut self, width: usize) -> Result<usize, MsgpackError> {
        let bytes = self.take(width)?;
        Ok(bytes.iter().fold(0, |length, &byte| length << 8 | usize::from(byte)))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], MsgpackError> {
        let (head, tail) = self.rest.split_at_checked(length).ok_or(MsgpackError::Incomplete)?;
        self.rest = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MsgpackError> {
        let (head, tail) = self.rest.split_first_chunk().ok_or(MsgpackError::Incomplete)?;
        self.rest = tail;
        Ok(*head)
    }
}
