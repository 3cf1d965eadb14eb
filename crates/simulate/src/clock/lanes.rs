//! Numbers of several plans side by side, in vectors: what is done to one is done to all at once.
#![allow(clippy::inline_always, reason = "a call would take the numbers out of the registers")]

use std::ops::{Add, AddAssign, Index, IndexMut, Sub};

use wide::i64x4;

/// Lanes of a vector.
const WIDTH: usize = 4;

/// A number of each plan, in `V` vectors. Moments and durations are in picoseconds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Lanes<const V: usize>([i64x4; V]);

/// Some of the lanes: all bits or none.
#[derive(Clone, Copy)]
pub(super) struct Mask<const V: usize>(Lanes<V>);

impl<const V: usize> Lanes<V> {
    pub(super) const COUNT: usize = V * WIDTH;
    pub(super) const ZERO: Self = Lanes([i64x4::ZERO; V]);

    /// The larger of two numbers.
    #[inline(always)]
    pub(super) fn max(self, other: Self) -> Self {
        self.with(other, |a, b| a.simd_gt(b).select(a, b))
    }

    /// The smaller of two numbers.
    #[inline(always)]
    pub(super) fn min(self, other: Self) -> Self {
        self.with(other, |a, b| a.simd_gt(b).select(b, a))
    }

    /// Those of the lanes in a mask, zero in the others.
    #[inline(always)]
    pub(super) fn only(self, mask: Mask<V>) -> Self {
        self.with(mask.0, |a, inside| a & inside)
    }

    /// These in the lanes of a mask, and others elsewhere.
    #[inline(always)]
    pub(super) fn or(self, mask: Mask<V>, others: Self) -> Self {
        Lanes(std::array::from_fn(|i| mask.0.0[i].select(self.0[i], others.0[i])))
    }

    /// Where these are above others.
    #[inline(always)]
    pub(super) fn above(self, others: Self) -> Mask<V> {
        Mask(self.with(others, i64x4::simd_gt))
    }

    /// Where these are zero.
    #[inline(always)]
    pub(super) fn zero(self) -> Mask<V> {
        Mask(self.with(Self::ZERO, i64x4::simd_eq))
    }

    /// So many 1024ths, rounded down.
    #[inline(always)]
    pub(super) fn in_1024ths(self, count: i64) -> Self {
        // In two parts, as the product may not fit where the result does.
        let part = |number: i64| (number >> 10) * count + (((number & 1023) * count) >> 10);
        self.with(self, |a, _| i64x4::new(a.to_array().map(part)))
    }

    #[inline(always)]
    fn with(self, other: Self, of: impl Fn(i64x4, i64x4) -> i64x4) -> Self {
        Lanes(std::array::from_fn(|i| of(self.0[i], other.0[i])))
    }
}

impl<const V: usize> Mask<V> {
    pub(super) const NONE: Self = Mask(Lanes::ZERO);

    /// The lanes for which something holds.
    pub(super) fn of(inside: impl Fn(usize) -> bool) -> Self {
        let mut mask = Mask::NONE;
        (0..Lanes::<V>::COUNT).for_each(|lane| mask.set(lane, inside(lane)));
        mask
    }

    /// Takes a lane in, or out.
    pub(super) fn set(&mut self, lane: usize, inside: bool) {
        self.0[lane] = -i64::from(inside);
    }

    pub(super) fn has(self, lane: usize) -> bool {
        self.0[lane] != 0
    }

    /// The lanes that are in both.
    #[inline(always)]
    pub(super) fn and(self, other: Self) -> Self {
        Mask(self.0.only(other))
    }

    #[inline(always)]
    pub(super) fn any(self) -> bool {
        self.0.0.into_iter().fold(i64x4::ZERO, |any, lanes| any | lanes).any()
    }
}

impl<const V: usize> Add for Lanes<V> {
    type Output = Self;

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }
}

impl<const V: usize> Sub for Lanes<V> {
    type Output = Self;

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.with(other, |a, b| a - b)
    }
}

impl<const V: usize> AddAssign for Lanes<V> {
    #[inline(always)]
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl<const V: usize> Index<usize> for Lanes<V> {
    type Output = i64;

    fn index(&self, lane: usize) -> &i64 {
        &self.0[lane / WIDTH].as_array()[lane % WIDTH]
    }
}

impl<const V: usize> IndexMut<usize> for Lanes<V> {
    fn index_mut(&mut self, lane: usize) -> &mut i64 {
        &mut self.0[lane / WIDTH].as_mut_array()[lane % WIDTH]
    }
}
