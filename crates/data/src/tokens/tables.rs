//! Checks and reads a whole index, for those who need the start of every document.
//!
//! Opening a file reads only the header, and a binary search finds a document. In an unsorted table the search would return
//! anything, so all three tables are read once before a run that masks documents.

use super::TokenFile;
use super::file::read_at;
use super::index::IndexHeader;
use crate::DataError;

/// Bytes that are read at once.
const CHUNK: usize = 1 << 16;

impl TokenFile {
    /// Fails if the sequences are not contiguous in the `.bin`, or if the documents do not cover all sequences in order.
    pub fn check_documents(&self) -> Result<(), DataError> {
        self.check_sequences()?;
        let IndexHeader { sequences, documents, .. } = self.head;
        let wrong = |found, expected: String| Err(DataError::foreign(&self.idx.0, found, expected));
        if self.documents() == 0 {
            let found = format!("no document for {sequences} sequences");
            return if sequences == 0 { Ok(()) } else { wrong(found, "at least one".to_owned()) };
        }
        let mut before = 0;
        self.each(self.head.document_at(0), documents, |place, bytes: [u8; 8]| {
            let first = i64::from_le_bytes(bytes);
            let least = if place + 1 == documents { sequences } else { before };
            let most = if place == 0 { 0 } else { sequences };
            let Some(found) = u64::try_from(first).ok().filter(|first| (least..=most).contains(first)) else {
                let found = format!("sequence {first} in place {place} of the table of documents");
                let range = if least == most { least.to_string() } else { format!("{least} to {most}") };
                return wrong(found, format!("{range}: documents follow each other"));
            };
            before = found;
            Ok(())
        })
    }

    /// The first token of every document. Checks the whole index.
    pub fn document_starts(&self) -> Result<Vec<u64>, DataError> {
        self.check_documents()?;
        let IndexHeader { sequences, kind, .. } = self.head;
        let mut starts = Vec::with_capacity(sequences as usize + 1);
        self.each(self.head.pointer_at(0), sequences, |_, bytes: [u8; 8]| {
            starts.push(u64::from_le_bytes(bytes) / kind.bytes() as u64);
            Ok(())
        })?;
        starts.push(self.tokens());
        let mut documents = Vec::with_capacity(self.documents() as usize);
        self.each(self.head.document_at(0), self.documents(), |_, bytes: [u8; 8]| {
            documents.push(starts[u64::from_le_bytes(bytes) as usize]);
            Ok(())
        })?;
        Ok(documents)
    }

    /// Checks that every sequence begins at the end of the previous one.
    fn check_sequences(&self) -> Result<(), DataError> {
        const BLOCK: u64 = (CHUNK / 8) as u64;
        let sequences = self.head.sequences;
        let mut end = 0_i64;
        let mut lengths = Vec::new();
        for first in (0..sequences).step_by(BLOCK as usize) {
            let count = BLOCK.min(sequences - first);
            lengths.clear();
            self.each(IndexHeader::length_at(first), count, |_, bytes: [u8; 4]| {
                lengths.push(i64::from(i32::from_le_bytes(bytes)));
                Ok(())
            })?;
            self.each(self.head.pointer_at(first), count, |at, bytes: [u8; 8]| {
                let (pointer, sequence) = (i64::from_le_bytes(bytes), first + at);
                if pointer != end {
                    let found = format!("byte {pointer} as the first of sequence {sequence}");
                    return Err(DataError::foreign(
                        &self.idx.0,
                        found,
                        format!("{end}, where the one before ends"),
                    ));
                }
                let length = lengths[at as usize];
                if length < 0 {
                    let found = format!("{length} tokens in sequence {sequence}");
                    return Err(DataError::foreign(&self.idx.0, found, "0 or more"));
                }
                end = end.saturating_add(length * self.head.kind.bytes() as i64);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Calls a function with each of the `count` numbers of the table at byte `start` of the index, and its place.
    fn each<const SIZE: usize>(
        &self,
        start: u64,
        count: u64,
        mut take: impl FnMut(u64, [u8; SIZE]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut chunk = vec![0; CHUNK];
        let most = (CHUNK / SIZE) as u64;
        for first in (0..count).step_by(most as usize) {
            let bytes = &mut chunk[..most.min(count - first) as usize * SIZE];
            read_at(&self.idx, bytes, start + first * SIZE as u64)?;
            for (number, bytes) in (first..).zip(bytes.chunks_exact(SIZE)) {
                take(number, bytes.try_into().expect("a chunk has this size"))?;
            }
        }
        Ok(())
    }
}
