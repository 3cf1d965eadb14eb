//! The limit on how much normalizers may lengthen a text. Sixteen that double every `a` make gigabytes of a
//! few pages, so the worst case of each is compared with a limit before it runs.

use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::pipeline::PipelineNormalizer;

/// More than any normalizers in use make of a text: Unicode's forms make up to 11 bytes of one, and two of them with
/// `SentencePiece`'s marks may follow each other.
const MOST_GROWTH: usize = 256;

/// Bytes beyond this, for short texts.
const FIXED: usize = 1 << 16;

/// The most bytes that normalizers may make of a text; a library's offsets may be of 32 bits.
pub(super) fn most_bytes(text: &str) -> usize {
    text.len().saturating_mul(MOST_GROWTH).saturating_add(FIXED).min(u32::MAX as usize)
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
                    // A regular expression may match nothing, between any two bytes.
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

    /// Refuses to normalize a text of `bytes` if more than `most` could come out.
    pub(super) fn check(&self, bytes: usize, most: usize) -> Result<(), String> {
        let worst = (bytes / self.every + 1).saturating_mul(self.content).saturating_add(bytes);
        if worst > most {
            return Err(format!(
                "its normalizers make {bytes} bytes of the text and could make {worst} with the next step; \
                 the limit is {MOST_GROWTH} bytes for one and {FIXED} more, up to 4 GiB, here {most}"
            ));
        }
        Ok(())
    }
}

/// The longest replacement in a `SentencePiece` map: the size of a search tree, the tree, and replacements that end in
/// zeros.
fn longest_entry(map: &[u8]) -> usize {
    let tree = map.first_chunk().map_or(0, |size| u32::from_le_bytes(*size) as usize / 4 * 4 + 4);
    let entries = map.get(tree..).unwrap_or(map);
    entries.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0)
}
