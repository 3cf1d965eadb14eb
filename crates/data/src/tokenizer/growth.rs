//! Limits how much normalizers may lengthen a text. Sixteen normalizers that double every `a` turn a few pages into gigabytes,
//! so the worst case of each is compared with a limit before it runs.

use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::pipeline::PipelineNormalizer;

/// The largest growth factor of all normalizers: more than those in use need. Unicode's normal forms turn one byte into up to
/// 11, and two of them may follow each other, with `SentencePiece`'s marks.
const MAX_GROWTH: usize = 256;

/// Additional bytes, for short texts.
const FIXED: usize = 1 << 16;

/// The most bytes of a normalized text, since offsets in the library may have 32 bits.
pub(super) fn most_bytes(text: &str) -> usize {
    text.len().saturating_mul(MAX_GROWTH).saturating_add(FIXED).min(u32::MAX as usize)
}

/// The normalized text could become too long.
#[derive(Debug, thiserror::Error)]
#[error(
    "its normalizers make {bytes} bytes of the text and could make {worst} with the next step; the limit is {MAX_GROWTH} bytes for \
     one and {FIXED} more, up to 4 GiB, here {most}"
)]
pub(super) struct GrowthError {
    bytes: usize,
    worst: usize,
    most: usize,
}

/// The worst case of a normalizer: it inserts `content` bytes at the end of a text and once in `every` bytes of it.
pub(super) struct Growth {
    content: usize,
    every: usize,
}

impl Growth {
    /// The worst case of this normalizer.
    pub(super) fn of(normalizer: &PipelineNormalizer) -> Growth {
        match normalizer {
            PipelineNormalizer::Replace(replace) => {
                let every = match replace.pattern() {
                    ReplacePattern::String(pattern) => pattern.len().max(1),
                    // A regular expression may match the empty string between any two bytes.
                    ReplacePattern::Regex(_) => 1,
                };
                Growth { content: replace.content.len(), every }
            }
            PipelineNormalizer::Prepend(prepend) => {
                Growth { content: prepend.prepend.len(), every: usize::MAX }
            }
            PipelineNormalizer::Precompiled(map) => {
                Growth { content: longest_entry(map.charsmap().unwrap_or_default()), every: 1 }
            }
            // Unicode's compatibility forms are the worst of the others, with 11 bytes for one.
            _ => Growth { content: 11, every: 1 },
        }
    }

    /// Fails if the normalized text of `bytes` bytes could be longer than `most`.
    pub(super) fn check(&self, bytes: usize, most: usize) -> Result<(), GrowthError> {
        let worst = (bytes / self.every + 1).saturating_mul(self.content).saturating_add(bytes);
        if worst > most { Err(GrowthError { bytes, worst, most }) } else { Ok(()) }
    }
}

/// The longest replacement in a `SentencePiece` map: the size of a search tree, the tree, and replacements that end in
/// zeros.
fn longest_entry(map: &[u8]) -> usize {
    let tree = map.first_chunk().map_or(0, |size| u32::from_le_bytes(*size) as usize / 4 * 4 + 4);
    let entries = map.get(tree..).unwrap_or(map);
    entries.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0)
}
