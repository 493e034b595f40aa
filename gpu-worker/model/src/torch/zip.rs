//! The part of the zip format that `torch.save` uses (PKWARE APPNOTE 4.3, 4.4, 4.5.3): stored
//! entries, found through the central directory at the end, with 64-bit extensions.
//!
//! ```text
//! [local header, name, extra, data]*  [central header, name, extra]*  [end64, locator]?  end
//! ```
//! Entries that are compressed, encrypted, named twice, outside of the file or over each other are
//! refused, so that every byte belongs to one name at most and nothing grows when it is read.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Most entries of an archive: far more than storages of any checkpoint file.
const MAX_ENTRIES: u64 = 1 << 18;

/// Longest central directory, some 200 bytes for each of those.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;

/// The end record and the longest comment after it.
const MAX_END_BYTES: u64 = 22 + 0xffff;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const LOCATOR64: u32 = 0x0706_4b50;

/// Why an archive cannot be used.
#[derive(Debug)]
pub enum ZipError {
    /// It cannot be read.
    Io(io::Error),
    /// It is none, or none of ours; the end of a sentence about the file.
    Bad(String),
}

impl From<io::Error> for ZipError {
    fn from(error: io::Error) -> ZipError {
        ZipError::Io(error)
    }
}

fn bad<T>(reason: impl Into<String>) -> Result<T, ZipError> {
    Err(ZipError::Bad(reason.into()))
}

/// What a file of too few bytes, or of bytes that are not what they should be, most likely is.
const CUT: &str = "is no zip archive of torch, or was cut short; download it again";

/// Where the entries of an archive lie: first byte and length by name.
#[derive(Debug)]
pub struct Archive {
    entries: HashMap<String, (u64, u64)>,
}

/// What the directory says of an entry.
struct Listed {
    name: String,
    /// Of its local header.
    offset: u64,
    len: u64,
}

/// Where the directory lies.
struct Directory {
    offset: u64,
    len: u64,
    count: u64,
}

impl Archive {
    /// Reads the directory of `file`, and the local header of each entry.
    pub fn read(file: &File, file_len: u64) -> Result<Archive, ZipError> {
        let directory = find(file, file_len)?;
        if directory.count > MAX_ENTRIES || directory.len > MAX_DIRECTORY_BYTES {
            return bad(format!(
                "has an archive of {} entries, more than {MAX_ENTRIES}",
                directory.count
            ));
        }
        // Bounded above.
        let mut bytes = vec![0; directory.len as usize];
        file.read_exact_at(&mut bytes, directory.offset)?;
        let mut rest = Bytes(&bytes);
        let mut listed = Vec::new();
        for _ in 0..directory.count {
            listed.push(rest.listed().ok_or_else(|| ZipError::Bad(CUT.to_owned()))??);
        }
        listed.sort_by_key(|entry| entry.offset);
        let mut entries = HashMap::new();
        let mut end = 0;
        for entry in listed {
            if entry.offset < end {
                return bad(format!(
                    "has an archive in which {:?} lies over another entry",
                    shown(&entry.name)
                ));
            }
            let start = data_start(file, &entry, directory.offset)?;
            // Inside, as data_start checked.
            end = start + entry.len;
            if entries.insert(entry.name.clone(), (start, entry.len)).is_some() {
                return bad(format!("has an archive with two entries {:?}", shown(&entry.name)));
            }
        }
        Ok(Archive { entries })
    }

    /// What stands before `name` in the one entry of that name in a folder: the folder, with its
    /// slash.
    pub fn root(&self, name: &str) -> Result<String, String> {
        let folder = |entry: &String| {
            let folder = entry.strip_suffix(name)?;
            let is_folder = folder.ends_with('/') && folder.matches('/').count() == 1;
            is_folder.then(|| folder.to_owned())
        };
        let mut roots = self.entries.keys().filter_map(folder);
        match (roots.next(), roots.next()) {
            (Some(root), None) => Ok(root),
            (None, _) => Err(format!("is a zip archive without {name}, no checkpoint of torch")),
            (Some(_), Some(_)) => Err(format!("has an archive with several {name}")),
        }
    }

    /// First byte and length of an entry.
    pub fn entry(&self, name: &str) -> Option<(u64, u64)> {
        self.entries.get(name).copied()
    }

    /// The whole of an entry, if it is there.
    pub fn bytes(&self, file: &File, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ZipError> {
        let Some((start, len)) = self.entry(name) else {
            return Ok(None);
        };
        if len > limit {
            return bad(format!(
                "has an entry {:?} of {len} bytes, the limit is {limit}",
                shown(name)
            ));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, start)?;
        Ok(Some(bytes))
    }
}

/// Finds the directory through the record at the end of the file.
fn find(file: &File, file_len: u64) -> Result<Directory, ZipError> {
    let tail_len = file_len.min(MAX_END_BYTES);
    let mut tail = vec![0; tail_len as usize];
    file.read_exact_at(&mut tail, file_len - tail_len)?;
    let at = (0..tail.len().saturating_sub(21)).rev().find(|&at| {
        let mut end = Bytes(&tail[at..]);
        let comment = |end: &mut Bytes<'_>| {
            end.skip(16)?;
            end.u16()
        };
        // The comment reaches to the end of the file, or it is no end record.
        end.u32() == Some(END)
            && comment(&mut end).is_some_and(|len| at + 22 + usize::from(len) == tail.len())
    });
    let Some(at) = at else {
        return bad(CUT);
    };
    let cut = || ZipError::Bad(CUT.to_owned());
    let mut end = Bytes(&tail[at..]);
    let record = (|| {
        end.skip(4)?;
        let disks = (end.u16()?, end.u16()?);
        Some((disks, end.u16()?, end.u16()?, end.u32()?, end.u32()?))
    })();
    let (disks, here, count, len, offset) = record.ok_or_else(cut)?;
    let end_at = file_len - tail_len + at as u64;
    let mut directory =
        Directory { offset: u64::from(offset), len: u64::from(len), count: u64::from(count) };
    let mut limit = end_at;
    if count == u16::MAX || len == u32::MAX || offset == u32::MAX {
        (directory, limit) = find64(file, end_at)?;
    } else if disks != (0, 0) || here != count {
        return bad("is one of several files of an archive");
    }
    let fits = directory.offset.checked_add(directory.len).is_some_and(|end| end <= limit);
    if fits { Ok(directory) } else { bad(CUT) }
}

/// The directory by the 64-bit record, and where that record is.
fn find64(file: &File, end_at: u64) -> Result<(Directory, u64), ZipError> {
    let cut = || ZipError::Bad(CUT.to_owned());
    let mut locator = [0; 20];
    let at = end_at.checked_sub(20).ok_or_else(cut)?;
    file.read_exact_at(&mut locator, at)?;
    let mut locator = Bytes(&locator);
    if locator.u32() != Some(LOCATOR64) {
        return bad(CUT);
    }
    locator.skip(4).ok_or_else(cut)?;
    let record_at = locator.u64().filter(|r| r.checked_add(56).is_some_and(|end| end <= at));
    let record_at = record_at.ok_or_else(cut)?;
    let mut record = [0; 56];
    file.read_exact_at(&mut record, record_at)?;
    let mut record = Bytes(&record);
    if record.u32() != Some(END64) {
        return bad(CUT);
    }
    record.skip(20).ok_or_else(cut)?;
    let read = (|| Some((record.u64()?, record.u64()?, record.u64()?, record.u64()?)))();
    let (here, count, len, offset) = read.ok_or_else(cut)?;
    if here != count {
        return bad("is one of several files of an archive");
    }
    Ok((Directory { offset, len, count }, record_at))
}

/// First byte of the data of an entry, which must end before the directory at `limit`.
fn data_start(file: &File, entry: &Listed, limit: u64) -> Result<u64, ZipError> {
    let outside = || {
        ZipError::Bad(format!(
            "has an archive whose entry {:?} does not lie in it; it was cut short, download it again",
            shown(&entry.name)
        ))
    };
    let fits = |end: Option<u64>| end.filter(|&end| end <= limit).ok_or_else(outside);
    fits(entry.offset.checked_add(30))?;
    let mut head = [0; 30];
    file.read_exact_at(&mut head, entry.offset)?;
    let mut head = Bytes(&head);
    if head.u32() != Some(LOCAL) {
        return Err(outside());
    }
    head.skip(22).ok_or_else(outside)?;
    let (name, extra) = (head.u16().ok_or_else(outside)?, head.u16().ok_or_else(outside)?);
    let name_end = fits(entry.offset.checked_add(30 + u64::from(name)))?;
    let mut own = vec![0; usize::from(name)];
    file.read_exact_at(&mut own, entry.offset + 30)?;
    if own != entry.name.as_bytes() {
        return bad(format!(
            "has an archive whose entry {:?} has another name where it lies",
            shown(&entry.name)
        ));
    }
    let start = fits(name_end.checked_add(u64::from(extra)))?;
    fits(start.checked_add(entry.len))?;
    Ok(start)
}

fn shown(name: &str) -> String {
    name.chars().take(100).collect()
}

/// Bytes that are taken from the front.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(first)
    }

    fn skip(&mut self, len: usize) -> Option<()> {
        self.take(len).map(|_| ())
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2)?.try_into().ok().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    /// One entry of the directory; `None` when the bytes end too early.
    fn listed(&mut self) -> Option<Result<Listed, ZipError>> {
        if self.u32()? != CENTRAL {
            return Some(bad(CUT));
        }
        self.skip(4)?;
        let (flags, method) = (self.u16()?, self.u16()?);
        self.skip(8)?;
        let (packed, len) = (u64::from(self.u32()?), u64::from(self.u32()?));
        let (name, extra, comment) = (self.u16()?, self.u16()?, self.u16()?);
        self.skip(8)?;
        let offset = u64::from(self.u32()?);
        let name = self.take(usize::from(name))?;
        let extra = self.take(usize::from(extra))?;
        self.skip(usize::from(comment))?;
        let Ok(name) = std::str::from_utf8(name) else {
            return Some(bad("has an archive with names that are no text"));
        };
        let [len, packed, offset] = match wide([len, packed, offset], extra) {
            Some(values) => values,
            None => return Some(bad(CUT)),
        };
        // Bit 0: encrypted.
        if flags & 1 != 0 || method != 0 || packed != len {
            return Some(bad(format!(
                "has an archive whose entry {:?} is compressed or encrypted; torch stores entries as they are",
                shown(name)
            )));
        }
        Some(Ok(Listed { name: name.to_owned(), offset, len }))
    }
}

/// The 64-bit values of those fields that say so by having all bits set, in this order (APPNOTE
/// 4.5.3).
fn wide(mut fields: [u64; 3], extra: &[u8]) -> Option<[u64; 3]> {
    const ALL: u64 = u32::MAX as u64;
    if !fields.contains(&ALL) {
        return Some(fields);
    }
    let mut rest = Bytes(extra);
    while let Some(id) = rest.u16() {
        let len = rest.u16()?;
        let mut body = Bytes(rest.take(usize::from(len))?);
        if id == 1 {
            for field in fields.iter_mut().filter(|field| **field == ALL) {
                *field = body.u64()?;
            }
            return Some(fields);
        }
    }
    None
}
