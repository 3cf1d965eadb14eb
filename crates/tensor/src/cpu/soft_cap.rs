//! Scores and logits bounded by a soft cap: `cap · tanh(x / cap)`, as in Gemma 2 (arXiv 2408.00118).

use super::element::Real;

/// A bound of magnitudes.
#[derive(Clone, Copy)]
pub struct SoftCap<A>(A);

impl<A: Real> SoftCap<A> {
    /// The bound of an operation, if it has one.
    pub fn of(cap: Option<f64>) -> Option<Self> {
        cap.map(|cap| SoftCap(A::from_f64(cap)))
    }

    /// The bounded number.
    #[inline]
    pub fn bound(self, x: A) -> A {
        self.0 * (x / self.0).tanh()
    }

    /// The derivative of [`SoftCap::bound`], from its result.
    #[inline]
    pub fn slope(self, bounded: A) -> A {
        let share = bounded / self.0;
        A::ONE - share * share
    }
}
