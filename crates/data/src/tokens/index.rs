//! The header of an `.idx` file, and the offsets of its three tables.
//!
//! The tables follow the header: the length of every sequence (i32, in tokens), its offset in the `.bin` (i64, in bytes), and
//! the first sequence of every document (i64), with one more entry for the end. All numbers are little-endian.

use std::path::Path;

use super::TokenType;
use crate::DataError;

/// The first bytes of every index.
const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;

/// The header of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IndexHeader {
    pub(super) kind: TokenType,
    pub(super) sequences: u64,
    /// Entries of the table of documents: the number of documents plus one.
    pub(super) documents: u64,
}

impl IndexHeader {
    /// Bytes of a header.
    pub(super) const BYTES: usize = 34;

    /// The header in the format of the file.
    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..9].copy_from_slice(MAGIC);
        bytes[9..17].copy_from_slice(&VERSION.to_le_bytes());
        bytes[17] = self.kind.code();
        bytes[18..26].copy_from_slice(&self.sequences.to_le_bytes());
        bytes[26..].copy_from_slice(&self.documents.to_le_bytes());
        bytes
    }

    /// Parses the header of `path` from its first bytes, and checks it against the length of the file.
    pub(super) fn read(path: &Path, bytes: &[u8], length: u64) -> Result<IndexHeader, DataError> {
        let foreign = |found: String, expected: String| DataError::foreign(path, found, expected);
        let Ok(bytes) = <&[u8; Self::BYTES]>::try_from(bytes) else {
            return Err(foreign(
                format!("{length} bytes"),
                format!("at least the {} of a head", Self::BYTES),
            ));
        };
        if !bytes.starts_with(MAGIC) {
            let found = format!("a file that begins with {:?}", String::from_utf8_lossy(&bytes[..9]));
            return Err(foreign(found, format!("{:?}", String::from_utf8_lossy(MAGIC))));
        }
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if number(9) != VERSION {
            return Err(foreign(format!("version {}", number(9)), format!("version {VERSION}")));
        }
        let Some(kind) = TokenType::from_code(bytes[17]) else {
            let expected = "1 to 5 or 8, one of the whole numbers";
            return Err(foreign(format!("tokens of type {}", bytes[17]), expected.to_owned()));
        };
        let head = IndexHeader { kind, sequences: number(18), documents: number(26) };
        match head.length() {
            Some(expected) if expected == length => Ok(head),
            expected => {
                let found = format!("{length} bytes");
                let size = expected.map_or("more than a file can have".to_owned(), |size| size.to_string());
                let IndexHeader { sequences, documents, .. } = head;
                Err(foreign(
                    found,
                    format!("{size} for {sequences} sequences and {documents} document marks"),
                ))
            }
        }
    }

    /// Offset of the entry with a sequence's offset.
    pub(super) fn pointer_at(self, sequence: u64) -> u64 {
        Self::BYTES as u64 + 4 * self.sequences + 8 * sequence
    }

    /// Offset of the entry with a sequence's length.
    pub(super) fn length_at(sequence: u64) -> u64 {
        Self::BYTES as u64 + 4 * sequence
    }

    /// Offset of the entry with a document's first sequence.
    pub(super) fn document_at(self, document: u64) -> u64 {
        self.pointer_at(self.sequences) + 8 * document
    }

    /// Bytes of the index.
    fn length(self) -> Option<u64> {
        let tables = self.sequences.checked_mul(12)?.checked_add(self.documents.checked_mul(8)?)?;
        tables.checked_add(Self::BYTES as u64)
    }
}
