//! The header of a safetensors file: eight bytes of length, then JSON with the offsets of each tensor.

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::Path;

use kintsugi_spec::input;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::CheckpointError;

/// Bytes of the length field.
const LENGTH: usize = 8;
/// The first bytes of a Git LFS pointer file.
const LFS_POINTER: &[u8; LENGTH] = b"version ";
/// The data of a file is aligned to this.
const ALIGNMENT: usize = 8;

/// The bytes of a header with its length, for tensors in order of their offsets. `notes` is the metadata of the file.
pub(crate) fn encode(notes: Option<HashMap<String, String>>, tensors: Vec<(String, TensorInfo)>) -> Vec<u8> {
    let metadata = Metadata::new(notes, tensors).expect("tensors lie one after the other");
    let mut json = serde_json::to_vec(&metadata).expect("a header has string keys");
    json.resize(json.len().next_multiple_of(ALIGNMENT), b' ');
    [&(json.len() as u64).to_le_bytes()[..], &json].concat()
}

/// Reads a file's header. Returns it and the offset of the data.
pub(crate) fn read(path: &Path) -> Result<(Metadata, u64), CheckpointError> {
    let io = |error| CheckpointError::new(path, error);
    let mut file = input::open(path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    decode(&mut file, bytes).map_err(|error| CheckpointError::new(path, error))
}

/// Why a header cannot be used.
#[derive(Debug, thiserror::Error)]
enum HeaderError {
    #[error(transparent)]
    Read(#[from] io::Error),
    #[error("it is empty")]
    Empty,
    #[error("it is a Git LFS pointer, not the file itself; run git lfs pull to download the file")]
    LfsPointer,
    #[error("its header of {header} bytes is longer than the file of {file}")]
    TooLong { header: u64, file: u64 },
    #[error("its header is not a safetensors header: {0}")]
    Json(#[from] serde_json::Error),
    #[error("its header describes {described} bytes of data, but the file has {found}")]
    DataLength { described: u64, found: u64 },
}

/// The header of a file of `bytes` bytes.
fn decode(file: &mut impl Read, bytes: u64) -> Result<(Metadata, u64), HeaderError> {
    if bytes == 0 {
        return Err(HeaderError::Empty);
    }
    let mut length = [0; LENGTH];
    file.read_exact(&mut length)?;
    if length == *LFS_POINTER {
        return Err(HeaderError::LfsPointer);
    }
    let length = u64::from_le_bytes(length);
    // Never allocates more than the length of the file, whatever the length field says.
    let data = length
        .checked_add(LENGTH as u64)
        .filter(|&start| start <= bytes)
        .ok_or(HeaderError::TooLong { header: length, file: bytes })?;
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json)?;
    let metadata: Metadata = serde_json::from_slice(&json)?;
    let described = metadata.data_len() as u64;
    if data.checked_add(described) != Some(bytes) {
        return Err(HeaderError::DataLength { described, found: bytes - data });
    }
    Ok((metadata, data))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use safetensors::Dtype;

    use super::*;

    fn decode(bytes: &[u8]) -> Result<(Metadata, u64), HeaderError> {
        super::decode(&mut &bytes[..], bytes.len() as u64)
    }

    #[test]
    fn it_reads_what_it_wrote_and_other_programs_do() {
        let info = |shape: &[usize], data_offsets| TensorInfo {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            data_offsets,
        };
        let tensors = vec![("b".to_owned(), info(&[2, 3], (0, 24))), ("a".to_owned(), info(&[1], (24, 28)))];
        let file = [encode(None, tensors), vec![7; 28]].concat();
        let (metadata, data) = decode(&file).expect("a header");
        assert_eq!(
            (metadata.info("a").expect("a tensor").data_offsets, data as usize + 28),
            ((24, 28), file.len())
        );
        let tensors = safetensors::SafeTensors::deserialize(&file).expect("a safetensors file");
        assert_eq!(tensors.tensor("b").expect("a tensor").shape(), [2, 3]);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert!(decode(&bytes).is_err());
        }

        #[test]
        fn an_arbitrary_length_allocates_no_more_than_there_is(length in any::<u64>(), json in "[{}a-z0-9:\",\\[\\]]{0,60}") {
            let bytes = [&length.to_le_bytes()[..], json.as_bytes()].concat();
            prop_assert!(length == json.len() as u64 || decode(&bytes).is_err());
        }

        #[test]
        fn arbitrary_tensors_are_an_error_or_lie_in_the_file(
            shape in prop::collection::vec(any::<u64>(), 0..4), start in any::<u64>(), end in any::<u64>()
        ) {
            let json = format!(r#"{{"a":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{start},{end}]}}}}"#);
            let bytes = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[0; 16]].concat();
            prop_assert!(decode(&bytes).is_err() || (start, end) == (0, 16));
        }
    }
}
