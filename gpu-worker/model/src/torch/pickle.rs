//! A reader of the pickles of `torch.save` that can execute nothing: a stack machine over plain
//! values, with the opcodes of protocols 2 to 5 that dictionaries of tensors need (CPython
//! `Lib/pickletools.py`). A name that is imported is a value of its own kind, and it must be on the
//! list; calling one builds a tensor's description or an empty dictionary, and nothing else can be
//! called.
//!
//! Bounds: an opcode makes at most one value, a value holds indexes of others, so memory is linear
//! in the length of the pickle, and nothing recurses.

use std::collections::HashMap;

/// Sides of a tensor; those of blocks have one or two.
const MAX_SIDES: usize = 8;

/// Why a pickle cannot be used; the end of a sentence about the file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    /// It ends before it is whole, or its opcodes do not fit each other.
    #[error("has a pickle that is damaged at byte {0}; download the file again")]
    Damaged(usize),
    /// It wants something that tensors do not need.
    #[error(
        "has a pickle that imports {0}; only what tensors need is allowed, and nothing was executed"
    )]
    Import(String),
    /// An opcode that tensors do not need.
    #[error("has a pickle with opcode {0:#04x}, which tensors do not need; nothing was executed")]
    Opcode(u8),
    /// It is no dictionary of tensors.
    #[error("holds no dictionary of tensors: {0}")]
    Content(&'static str),
    /// Two tensors of one name.
    #[error("holds two tensors {0:?}")]
    Twice(String),
}

/// A tensor by what the pickle says of it; nothing of it is checked but the number of sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Kind of storage, for example `HalfStorage`.
    pub storage: String,
    /// Name of the storage in the archive.
    pub key: String,
    /// Elements of the storage.
    pub elements: u64,
    /// First element in the storage.
    pub offset: u64,
    /// Shape, slowest side first.
    pub shape: Vec<u64>,
    /// Elements from one to the next along each side.
    pub strides: Vec<u64>,
}

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageType {
    /// In the words of safetensors.
    pub word: &'static str,
    /// Bytes of an element.
    pub bytes: u64,
}

/// The element type of a kind of storage.
pub fn storage_type(name: &str) -> Option<StorageType> {
    let (word, bytes) = match name {
        "FloatStorage" => ("F32", 4),
        "HalfStorage" => ("F16", 2),
        "BFloat16Storage" => ("BF16", 2),
        "DoubleStorage" => ("F64", 8),
        "LongStorage" => ("I64", 8),
        "IntStorage" => ("I32", 4),
        "ShortStorage" => ("I16", 2),
        "CharStorage" => ("I8", 1),
        "ByteStorage" => ("U8", 1),
        "BoolStorage" => ("BOOL", 1),
        _ => return None,
    };
    Some(StorageType { word, bytes })
}

/// The tensors of the dictionary that `pickle` holds, in its order; values that are no tensors are
/// left out.
pub fn tensors(pickle: &[u8]) -> Result<Vec<(String, StoredTensor)>, PickleError> {
    let mut machine = Machine::new(pickle);
    let top = machine.run()?;
    let Some(Value::Dict(entries)) = machine.values.get(top) else {
        return Err(PickleError::Content("it is something else"));
    };
    let mut found: Vec<(String, StoredTensor)> = Vec::new();
    let mut names = HashMap::new();
    for (key, value) in entries {
        let (Some(Value::Text(name)), Some(Value::Tensor(tensor))) =
            (machine.values.get(*key), machine.values.get(*value))
        else {
            continue;
        };
        if names.insert(name.clone(), ()).is_some() {
            return Err(PickleError::Twice(name.chars().take(200).collect()));
        }
        found.push((name.clone(), tensor.clone()));
    }
    if found.is_empty() {
        return Err(PickleError::Content("there is no tensor in it"));
    }
    Ok(found)
}

type Index = usize;

#[derive(Debug)]
enum Value {
    None,
    Bool,
    Int(i64),
    /// Numbers and bytes that nothing looks at.
    Other,
    Text(String),
    Tuple(Vec<Index>),
    List,
    Dict(Vec<(Index, Index)>),
    Name(Name),
    Storage {
        kind: String,
        key: String,
        elements: u64,
    },
    Tensor(StoredTensor),
}

/// What may be imported.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(String),
}

impl Name {
    fn allowed(module: &str, name: &str) -> Option<Name> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Name::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Name::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Name::RebuildParameter,
            ("torch", kind) if storage_type(kind).is_some() => Name::Storage(kind.to_owned()),
            _ => return None,
        })
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Index>,
    /// Heights of the stack at the marks.
    marks: Vec<usize>,
    memo: HashMap<u64, Index>,
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8]) -> Machine<'a> {
        Machine {
            bytes,
            at: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        }
    }

    /// Runs up to STOP; the value on top then.
    fn run(&mut self) -> Result<Index, PickleError> {
        loop {
            let opcode = self.byte()?;
            if opcode == b'.' {
                return self.pop();
            }
            self.step(opcode)?;
        }
    }

    /// Executes one opcode; the names are those of Python's `pickle.py`.
    fn step(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            // PROTO, FRAME
            0x80 => self.protocol(),
            0x95 => self.take(8).map(|_| ()),
            // NONE, NEWTRUE, NEWFALSE, BININT1, BININT2, BININT, LONG1, BINFLOAT
            b'N' => self.push(Value::None),
            0x88 | 0x89 => self.push(Value::Bool),
            b'K' => self.unsigned(1),
            b'M' => self.unsigned(2),
            b'J' => self.signed(),
            0x8a => self.long(),
            b'G' => self.skipped(8),
            // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
            0x8c => self.text(1),
            b'X' => self.text(4),
            0x8d => self.text(8),
            // SHORT_BINBYTES, BINBYTES, SHORT_BINSTRING, BINSTRING
            b'C' | b'U' => self.skipped_text(1),
            b'B' | b'T' => self.skipped_text(4),
            // MARK, POP
            b'(' => self.mark(),
            b'0' => self.pop().map(|_| ()),
            // EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE
            b')' => self.tuple(0),
            0x85 => self.tuple(1),
            0x86 => self.tuple(2),
            0x87 => self.tuple(3),
            b't' => self.marked_tuple(),
            // EMPTY_LIST, APPEND, APPENDS
            b']' => self.push(Value::List),
            b'a' => self.append(),
            b'e' => self.append_marked(),
            // EMPTY_DICT, DICT, SETITEM, SETITEMS
            b'}' => self.push(Value::Dict(Vec::new())),
            b'd' => self.marked_dict(),
            b's' => self.set_one(),
            b'u' => self.set_marked(),
            // BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET
            b'q' => self.put(1),
            b'r' => self.put(4),
            0x94 => self.remember(self.memo.len() as u64),
            b'h' => self.get(1),
            b'j' => self.get(4),
            // GLOBAL, STACK_GLOBAL, BINPERSID, REDUCE, BUILD
            b'c' => self.global(),
            0x93 => self.stack_global(),
            b'Q' => self.persistent(),
            b'R' => self.reduce(),
            b'b' => self.build(),
            other => Err(PickleError::Opcode(other)),
        }
    }

    fn damaged(&self) -> PickleError {
        PickleError::Damaged(self.at)
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], PickleError> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        let part =
            end.and_then(|end| self.bytes.get(self.at..end)).ok_or_else(|| self.damaged())?;
        self.at += part.len();
        Ok(part)
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        self.number(1).map(|n| n as u8)
    }

    /// A little-endian number of up to 8 bytes.
    fn number(&mut self, bytes: u64) -> Result<u64, PickleError> {
        let part = self.take(bytes)?;
        Ok(part.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte)))
    }

    fn line(&mut self) -> Result<String, PickleError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let len = rest.iter().position(|byte| *byte == b'\n').ok_or_else(|| self.damaged())?;
        let line = String::from_utf8_lossy(rest.get(..len).unwrap_or_default()).into_owned();
        self.at += len + 1;
        Ok(line)
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        self.stack.push(self.values.len());
        self.values.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Index, PickleError> {
        // What is below a mark is out of reach until the mark is taken.
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(self.damaged());
        }
        self.stack.pop().ok_or_else(|| self.damaged())
    }

    fn above_mark(&mut self) -> Result<Vec<Index>, PickleError> {
        let mark = self.marks.pop().filter(|mark| *mark <= self.stack.len());
        mark.map(|mark| self.stack.split_off(mark)).ok_or_else(|| self.damaged())
    }

    fn top(&self) -> Option<Index> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack.last().copied().filter(|_| self.stack.len() > floor)
    }

    fn top_is(&self, is: impl Fn(&Value) -> bool) -> Result<(), PickleError> {
        let value = self.top().and_then(|top| self.values.get(top));
        if value.is_some_and(is) { Ok(()) } else { Err(self.damaged()) }
    }

    fn protocol(&mut self) -> Result<(), PickleError> {
        match self.byte()? {
            2..=5 => Ok(()),
            _ => Err(self.damaged()),
        }
    }

    fn unsigned(&mut self, bytes: u64) -> Result<(), PickleError> {
        let n = self.number(bytes)?;
        self.push(Value::Int(n as i64))
    }

    fn signed(&mut self) -> Result<(), PickleError> {
        let n = self.number(4)? as u32 as i32;
        self.push(Value::Int(i64::from(n)))
    }

    fn long(&mut self) -> Result<(), PickleError> {
        let len = u64::from(self.byte()?);
        if len > 8 {
            return self.skipped(len);
        }
        let bits = 8 * len;
        let n = self.number(len)?;
        let negative = bits > 0 && bits < 64 && n >> (bits - 1) & 1 == 1;
        let n = if negative { n | u64::MAX << bits } else { n };
        self.push(Value::Int(n as i64))
    }

    fn text(&mut self, prefix: u64) -> Result<(), PickleError> {
        let len = self.number(prefix)?;
        let bytes = self.take(len)?;
        let text = std::str::from_utf8(bytes).map_err(|_| self.damaged())?.to_owned();
        self.push(Value::Text(text))
    }

    fn skipped_text(&mut self, prefix: u64) -> Result<(), PickleError> {
        let len = self.number(prefix)?;
        self.skipped(len)
    }

    /// A value of `len` bytes that nothing looks at.
    fn skipped(&mut self, len: u64) -> Result<(), PickleError> {
        self.take(len)?;
        self.push(Value::Other)
    }

    fn mark(&mut self) -> Result<(), PickleError> {
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn tuple(&mut self, len: usize) -> Result<(), PickleError> {
        let mut items = Vec::with_capacity(len);
        for _ in 0..len {
            items.push(self.pop()?);
        }
        items.reverse();
        self.push(Value::Tuple(items))
    }

    fn marked_tuple(&mut self) -> Result<(), PickleError> {
        let items = self.above_mark()?;
        self.push(Value::Tuple(items))
    }

    fn append(&mut self) -> Result<(), PickleError> {
        self.pop()?;
        self.top_is(|value| matches!(value, Value::List))
    }

    fn append_marked(&mut self) -> Result<(), PickleError> {
        self.above_mark()?;
        self.top_is(|value| matches!(value, Value::List))
    }

    fn marked_dict(&mut self) -> Result<(), PickleError> {
        let items = self.above_mark()?;
        self.push(Value::Dict(Vec::new()))?;
        self.set(items)
    }

    fn set_one(&mut self) -> Result<(), PickleError> {
        let (value, key) = (self.pop()?, self.pop()?);
        self.set(vec![key, value])
    }

    fn set_marked(&mut self) -> Result<(), PickleError> {
        let items = self.above_mark()?;
        self.set(items)
    }

    fn set(&mut self, items: Vec<Index>) -> Result<(), PickleError> {
        let damaged = self.damaged();
        if !items.len().is_multiple_of(2) {
            return Err(damaged);
        }
        match self.top().and_then(|top| self.values.get_mut(top)) {
            Some(Value::Dict(entries)) => {
                entries.extend(items.as_chunks::<2>().0.iter().map(|[key, value]| (*key, *value)));
                Ok(())
            }
            _ => Err(damaged),
        }
    }

    fn put(&mut self, bytes: u64) -> Result<(), PickleError> {
        let key = self.number(bytes)?;
        self.remember(key)
    }

    fn remember(&mut self, key: u64) -> Result<(), PickleError> {
        let top = self.top().ok_or_else(|| self.damaged())?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn get(&mut self, bytes: u64) -> Result<(), PickleError> {
        let key = self.number(bytes)?;
        let value = self.memo.get(&key).copied().ok_or_else(|| self.damaged())?;
        self.stack.push(value);
        Ok(())
    }

    fn global(&mut self) -> Result<(), PickleError> {
        let (module, name) = (self.line()?, self.line()?);
        self.import(&module, &name)
    }

    fn stack_global(&mut self) -> Result<(), PickleError> {
        let (name, module) = (self.pop()?, self.pop()?);
        match (self.values.get(module), self.values.get(name)) {
            (Some(Value::Text(module)), Some(Value::Text(name))) => {
                let (module, name) = (module.clone(), name.clone());
                self.import(&module, &name)
            }
            _ => Err(self.damaged()),
        }
    }

    fn import(&mut self, module: &str, name: &str) -> Result<(), PickleError> {
        let shown = || format!("{module}.{name}").chars().take(100).collect();
        let name = Name::allowed(module, name).ok_or_else(|| PickleError::Import(shown()))?;
        self.push(Value::Name(name))
    }

    /// `('storage', type, key, device, elements)` becomes a storage (torch `serialization.py`,
    /// `persistent_load`).
    fn persistent(&mut self) -> Result<(), PickleError> {
        let id = self.pop()?;
        let Some(&[kind, of, key, _, elements]) = self.items(id) else {
            return Err(self.damaged());
        };
        let value = match (self.values.get(kind), self.values.get(of), self.values.get(key)) {
            (
                Some(Value::Text(word)),
                Some(Value::Name(Name::Storage(kind))),
                Some(Value::Text(key)),
            ) if word == "storage" => self.size(elements).map(|elements| Value::Storage {
                kind: kind.clone(),
                key: key.clone(),
                elements,
            }),
            _ => None,
        };
        let value = value.ok_or_else(|| self.damaged())?;
        self.push(value)
    }

    fn reduce(&mut self) -> Result<(), PickleError> {
        let (arguments, callable) = (self.pop()?, self.pop()?);
        let items = self.items(arguments).ok_or_else(|| self.damaged())?;
        let value = match (self.values.get(callable), items) {
            (Some(Value::Name(Name::OrderedDict)), []) => Some(Value::Dict(Vec::new())),
            (Some(Value::Name(Name::RebuildTensor)), [storage, offset, shape, strides, ..]) => {
                self.tensor(*storage, *offset, *shape, *strides)
            }
            // (data, requires_grad, backward_hooks)
            (Some(Value::Name(Name::RebuildParameter)), [data, ..]) => match self.values.get(*data)
            {
                Some(Value::Tensor(tensor)) => Some(Value::Tensor(tensor.clone())),
                _ => None,
            },
            _ => None,
        };
        let value = value.ok_or_else(|| self.damaged())?;
        self.push(value)
    }

    fn tensor(&self, storage: Index, offset: Index, shape: Index, strides: Index) -> Option<Value> {
        let Value::Storage { kind, key, elements } = self.values.get(storage)? else {
            return None;
        };
        let sides = |index| -> Option<Vec<u64>> {
            let items = self.items(index).filter(|items| items.len() <= MAX_SIDES)?;
            items.iter().map(|item| self.size(*item)).collect()
        };
        Some(Value::Tensor(StoredTensor {
            storage: kind.clone(),
            key: key.clone(),
            elements: *elements,
            offset: self.size(offset)?,
            shape: sides(shape)?,
            strides: sides(strides)?,
        }))
    }

    /// Attributes of a dictionary (a state dict has versions of modules there) are dropped; nothing
    /// else has any.
    fn build(&mut self) -> Result<(), PickleError> {
        self.pop()?;
        self.top_is(|value| matches!(value, Value::Dict(_)))
    }

    fn items(&self, tuple: Index) -> Option<&[Index]> {
        match self.values.get(tuple)? {
            Value::Tuple(items) => Some(items),
            _ => None,
        }
    }

    fn size(&self, index: Index) -> Option<u64> {
        match self.values.get(index)? {
            Value::Int(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }
}
