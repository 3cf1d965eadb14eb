//! Which documents are for validation: a hash of a document's position draws them, and they are the last of a token file. Without
//! them the last share of the tokens is for validation, whatever its documents are.

use kintsugi_spec::splitmix64::GOLDEN;

use super::TokenFile;
use crate::DataError;

/// The share of the tokens that is for validation, if nobody sets another one.
pub const DEFAULT_SPLIT: f64 = 0.01;

/// Whether the document at a position is drawn for validation.
///
/// The hash multiplies by the golden ratio (Knuth, The Art of Computer Programming, section 6.4). Unlike random numbers, its
/// values for consecutive positions are spread evenly, so a small corpus has its share, too, and never its first document.
pub(crate) fn is_drawn(position: u64, share: f64) -> bool {
    // The conversion saturates.
    let drawn = (share * 2.0_f64.powi(64)) as u64;
    drawn > 0 && position.wrapping_mul(GOLDEN) > u64::MAX - drawn
}

/// Whether `drawn` of `tokens` tokens are about the wanted share. Documents differ in length, so a few of them may be far from
/// it.
pub(crate) fn is_about(share: f64, drawn: u64, tokens: u64) -> bool {
    let found = drawn as f64 / tokens as f64;
    (share / 2.0..=share * 2.0).contains(&found) && found <= 0.5
}

impl TokenFile {
    /// The first token for validation: of the last `split` of the tokens, or of the documents that were drawn if `split` is
    /// `None`. If none were drawn, [`DEFAULT_SPLIT`] is used.
    pub fn validation_start(&self, split: Option<f64>) -> Result<u64, DataError> {
        let tokens = self.tokens();
        let drawn = self.about().and_then(|about| about.validation);
        if let (None, Some(drawn)) = (split, drawn) {
            return Ok(tokens - drawn.tokens);
        }
        let kept = (tokens as f64 * split.unwrap_or(DEFAULT_SPLIT)).round() as u64;
        let cut = tokens - kept.min(tokens);
        // A document in both splits would leak. So the split falls between two documents, unless they are too long.
        let between = self.document_from(cut)?;
        Ok(if between < cut + kept / 2 { between } else { cut })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_a_corpus_has_its_share() {
        for share in [0.005, 0.01, 0.1, 0.5] {
            assert!(!is_drawn(0, share), "the only document of a corpus is trained on");
            for first in [0, 12_345, 1 << 40] {
                let drawn = (first..first + 10_000).filter(|&position| is_drawn(position, share)).count();
                assert!((drawn as f64 - 10_000.0 * share).abs() <= 4.0, "{drawn} of {share}");
            }
        }
        assert!((0..10_000).all(|position| !is_drawn(position, 0.0)));
    }

    #[test]
    fn a_share_is_met_within_a_factor_of_two() {
        let met = [4, 5, 10, 20, 21].map(|drawn| is_about(0.01, drawn, 1000));
        assert_eq!(met, [false, true, true, true, false]);
        assert!(!is_about(0.4, 600, 1000) && !is_about(0.0, 1, 1000));
    }
}
