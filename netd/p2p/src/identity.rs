//! The key of the node: a file in libp2p's protobuf encoding, readable by hivemind as well.
//!
//! The file holds a `PrivateKey` message (field 1 key type, field 2 key). hivemind writes RSA-2048
//! keys, p2pd and this module Ed25519 keys; both are loaded. Source: `hivemind/p2p/p2p_daemon.py`
//! (`generate_identity`), <https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md>.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use libp2p::identity::Keypair;

/// No key that libp2p knows needs more: an RSA key of 8192 bits has about 4.7 KB.
const MAX_FILE_BYTES: u64 = 16 * 1024;

/// An identity file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file system refused.
    #[error("cannot access identity file {path}")]
    Access {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The file is something else.
    #[error("{path} is not an identity file of libp2p: {reason}")]
    Malformed {
        path: PathBuf,
        /// What the decoder says.
        reason: String,
    },
}

/// Loads the key at `path`; makes an Ed25519 key there, mode 0400, if there is no file.
///
/// # Errors
///
/// [`IdentityError`] names the file. A file that exists is never overwritten.
pub fn load_or_create(path: &Path) -> Result<Keypair, IdentityError> {
    match load(path) {
        Err(IdentityError::Access { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            create(path)
        }
        result => result,
    }
}

/// Loads the key at `path`.
///
/// # Errors
///
/// [`IdentityError`] names the file.
pub fn load(path: &Path) -> Result<Keypair, IdentityError> {
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|source| access(path, source))?;
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(|source| access(path, source))?;
    decode(&bytes).map_err(|reason| IdentityError::Malformed { path: path.to_owned(), reason })
}

/// Reads a key from the bytes of an identity file.
fn decode(bytes: &[u8]) -> Result<Keypair, String> {
    Keypair::from_protobuf_encoding(bytes).map_err(|error| error.to_string())
}

/// Makes a new key; the file appears under its name only when it is complete.
fn create(path: &Path) -> Result<Keypair, IdentityError> {
    let keypair = Keypair::generate_ed25519();
    let bytes = keypair.to_protobuf_encoding().map_err(|error| IdentityError::Malformed {
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let unfinished = path.with_file_name(name);
    write_new(&unfinished, &bytes)
        .and_then(|()| fs::hard_link(&unfinished, path))
        .map_err(|source| access(path, source))
        .inspect_err(|_| drop(fs::remove_file(&unfinished)))?;
    fs::remove_file(&unfinished).map_err(|source| access(&unfinished, source))?;
    Ok(keypair)
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn access(path: &Path, source: io::Error) -> IdentityError {
    IdentityError::Access { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;
    use crate::tests::unhex;

    #[test]
    fn identities_of_hivemind_have_the_peer_ids_of_python() {
        let json: serde_json::Value =
            serde_json::from_str(include_str!("testdata/identities.json")).expect("json");
        let vectors = json["vectors"].as_array().expect("array");
        assert_eq!(vectors.len(), 3);
        for vector in vectors {
            let directory = tempfile::tempdir().expect("directory");
            let path = directory.path().join("identity");
            let file = unhex(vector["identity_file_hex"].as_str().expect("hex"));
            fs::write(&path, file).expect("write");
            let peer = load_or_create(&path).expect("load").public().to_peer_id();
            assert_eq!(peer.to_base58(), vector["peer_id_base58"].as_str().expect("text"));
            assert_eq!(peer.to_bytes(), unhex(vector["peer_id_bytes_hex"].as_str().expect("hex")));
        }
    }

    #[test]
    fn a_created_identity_is_private_and_stays() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("identity");
        let created = load_or_create(&path).expect("create").public().to_peer_id();
        assert_eq!(fs::metadata(&path).expect("file").permissions().mode() & 0o777, 0o400);
        assert_eq!(fs::read_dir(directory.path()).expect("list").count(), 1, "only the identity");
        assert_eq!(load_or_create(&path).expect("load").public().to_peer_id(), created);
        assert!(created.to_base58().starts_with("12D3KooW"));
    }

    #[test]
    fn a_file_of_something_else_is_kept_and_named() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("identity");
        fs::write(&path, b"hello").expect("write");
        let error = load_or_create(&path).expect_err("no key");
        assert!(error.to_string().contains("identity"), "{error}");
        assert_eq!(fs::read(&path).expect("read"), b"hello");
        let missing = directory.path().join("no/such/identity");
        assert!(matches!(load_or_create(&missing), Err(IdentityError::Access { .. })));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(decode(&bytes));
        }
    }
}
