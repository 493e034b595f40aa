//! The files of a manifest under construction, each listed once.

use std::fs::File;

use model::manifest::FileEntry;

/// The files of a manifest under construction.
#[derive(Default)]
pub(crate) struct Files {
    entries: Vec<FileEntry>,
    held: Vec<File>,
}

impl Files {
    pub(crate) fn index(&mut self, entry: &FileEntry) -> u32 {
        let position = self.entries.iter().position(|f| f == entry).unwrap_or_else(|| {
            self.entries.push(entry.clone());
            self.entries.len() - 1
        });
        u32::try_from(position).expect("a model has fewer files than blocks times tensors")
    }

    /// Keeps a file open, and the lock on it that marks it as in use.
    pub(crate) fn keep(&mut self, file: File) {
        self.held.push(file);
    }

    /// The list, and the files that are kept open.
    pub(crate) fn into_parts(self) -> (Vec<FileEntry>, Vec<File>) {
        (self.entries, self.held)
    }
}
