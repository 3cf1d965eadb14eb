//! Writes the batches of a run to an `.npy` file, so that another program can train on the same data.

use std::path::Path;

use crate::tokens::PartialFile;
use crate::{DataError, Dataset, Split};

/// The batches to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRange {
    /// The first sample.
    pub first: u64,
    /// Steps.
    pub steps: u64,
    /// Samples per step.
    pub global: usize,
    /// Targets per sample.
    pub sequence: usize,
}

/// The first bytes of an `.npy` file: magic number and format version.
const MAGIC: [u8; 8] = *b"\x93NUMPY\x01\x00";
/// The data begins at a multiple of this.
const ALIGNMENT: usize = 64;

/// Writes the samples of training steps as unsigned 32-bit numbers, `[steps, global, sequence + 1]`. The inputs of a sample are
/// all tokens except the last, and its targets all except the first.
pub fn write_batches(path: &Path, dataset: &dyn Dataset, batches: BatchRange) -> Result<(), DataError> {
    let BatchRange { first, steps, global, sequence } = batches;
    let mut file = PartialFile::create(path)?;
    file.write(&header([steps, global as u64, sequence as u64 + 1]))?;
    let mut sample = vec![0; sequence + 1];
    let mut bytes = Vec::new();
    for index in first..first + steps * global as u64 {
        dataset.sample(Split::Train, index, &mut sample)?;
        bytes.clear();
        bytes.extend(sample.iter().flat_map(|token| token.to_le_bytes()));
        file.write(&bytes)?;
    }
    file.sync()?;
    file.publish(path)
}

fn header(shape: [u64; 3]) -> Vec<u8> {
    let [steps, global, tokens] = shape;
    let text =
        format!("{{'descr': '<u4', 'fortran_order': False, 'shape': ({steps}, {global}, {tokens}), }}");
    let length = (MAGIC.len() + 2 + text.len() + 1).next_multiple_of(ALIGNMENT) - MAGIC.len() - 2;
    let padded = format!("{text:<width$}\n", width = length - 1);
    [&MAGIC[..], &(length as u16).to_le_bytes(), padded.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Demo;
    use crate::testing::TestFolder;

    #[test]
    fn the_samples_of_the_steps_are_in_it() {
        let folder = TestFolder::new("batches");
        let path = folder.join("batches.npy");
        let demo = Demo::new(1);
        write_batches(&path, &demo, BatchRange { first: 6, steps: 2, global: 3, sequence: 8 }).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let data = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        let text = std::str::from_utf8(&bytes[10..data]).unwrap();
        assert_eq!(text.trim_end(), "{'descr': '<u4', 'fortran_order': False, 'shape': (2, 3, 9), }");
        assert!(data.is_multiple_of(64) && text.ends_with('\n'));
        let tokens: Vec<u32> =
            bytes[data..].chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().unwrap())).collect();
        let mut expected = Vec::new();
        for index in 6..12 {
            let mut sample = [0; 9];
            demo.sample(Split::Train, index, &mut sample).unwrap();
            expected.extend(sample);
        }
        assert_eq!(tokens, expected);
    }
}
