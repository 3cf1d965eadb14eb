//! What an operation of the vector unit computes: a function of whole waves, so that the loop over the lanes is inside.

use crate::operand::Type;
use crate::wave::{LANES, Lanes, WideLanes};

/// An operation: how it reads its sources, and what it computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) sources: [Type; 3],
    /// Sources that the text of the instruction names.
    pub(crate) count: usize,
    pub(crate) result: Type,
    pub(crate) run: Run,
    /// The destination is read as the last source.
    pub(crate) accumulates: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Run {
    /// Sources and result have up to 32 bits.
    Narrow(fn(&Lanes, &Lanes, &Lanes) -> Lanes),
    Wide(fn(&WideLanes, &WideLanes, &WideLanes) -> WideLanes),
}

impl Operation {
    pub(crate) fn new(sources: &[Type], result: Type, run: Run) -> Self {
        let mut all = [Type::B32; 3];
        all[..sources.len()].copy_from_slice(sources);
        Operation { sources: all, count: sources.len(), result, run, accumulates: false }
    }

    /// The destination is the last source: the text names one source less.
    pub(crate) fn accumulating(self) -> Self {
        Operation { accumulates: true, count: self.count - 1, ..self }
    }

    /// Whether a number in the first `count` sources is wider than 32 bits, or the result is.
    pub(crate) fn is_wide(&self) -> bool {
        matches!(self.run, Run::Wide(_))
    }
}

/// A value of every lane.
#[inline]
pub(crate) fn each(value: impl Fn(usize) -> u32) -> Lanes {
    let mut values = [0; LANES];
    for (lane, to) in values.iter_mut().enumerate() {
        *to = value(lane);
    }
    values
}

/// A 64-bit value of every lane.
#[inline]
pub(crate) fn each_wide(value: impl Fn(usize) -> u64) -> WideLanes {
    let mut values = [0; LANES];
    for (lane, to) in values.iter_mut().enumerate() {
        *to = value(lane);
    }
    values
}

/// An operation on the bits of sources of up to 32 bits: `bits!(B32; |a: B32, b: B32| a & b)`.
macro_rules! bits {
    ($result:ident; |$a:ident: $ta:ident| $body:expr) => {
        Operation::new(
            &[$ta],
            $result,
            Run::Narrow(|a, _, _| {
                each(|i| {
                    let $a = a[i];
                    $body
                })
            }),
        )
    };
    ($result:ident; |$a:ident: $ta:ident, $b:ident: $tb:ident| $body:expr) => {
        Operation::new(
            &[$ta, $tb],
            $result,
            Run::Narrow(|a, b, _| {
                each(|i| {
                    let ($a, $b) = (a[i], b[i]);
                    $body
                })
            }),
        )
    };
    ($result:ident; |$a:ident: $ta:ident, $b:ident: $tb:ident, $c:ident: $tc:ident| $body:expr) => {
        Operation::new(
            &[$ta, $tb, $tc],
            $result,
            Run::Narrow(|a, b, c| {
                each(|i| {
                    let ($a, $b, $c) = (a[i], b[i], c[i]);
                    $body
                })
            }),
        )
    };
}

/// The same if a source or the result has 64 bits. Narrow sources are extended by zeros.
macro_rules! wide {
    ($result:ident; |$a:ident: $ta:ident| $body:expr) => {
        Operation::new(
            &[$ta],
            $result,
            Run::Wide(|a, _, _| {
                each_wide(|i| {
                    let $a = a[i];
                    $body
                })
            }),
        )
    };
    ($result:ident; |$a:ident: $ta:ident, $b:ident: $tb:ident| $body:expr) => {
        Operation::new(
            &[$ta, $tb],
            $result,
            Run::Wide(|a, b, _| {
                each_wide(|i| {
                    let ($a, $b) = (a[i], b[i]);
                    $body
                })
            }),
        )
    };
    ($result:ident; |$a:ident: $ta:ident, $b:ident: $tb:ident, $c:ident: $tc:ident| $body:expr) => {
        Operation::new(
            &[$ta, $tb, $tc],
            $result,
            Run::Wide(|a, b, c| {
                each_wide(|i| {
                    let ($a, $b, $c) = (a[i], b[i], c[i]);
                    $body
                })
            }),
        )
    };
}

/// An operation on numbers in fp32.
macro_rules! f32s {
    (|$a:ident| $body:expr) => {
        bits!(F32; |$a: F32| { let $a = f32::from_bits($a); f32::to_bits($body) })
    };
    (|$a:ident, $b:ident| $body:expr) => {
        bits!(F32; |$a: F32, $b: F32| {
            let ($a, $b) = (f32::from_bits($a), f32::from_bits($b));
            f32::to_bits($body)
        })
    };
    (|$a:ident, $b:ident, $c:ident| $body:expr) => {
        bits!(F32; |$a: F32, $b: F32, $c: F32| {
            let ($a, $b, $c) = (f32::from_bits($a), f32::from_bits($b), f32::from_bits($c));
            f32::to_bits($body)
        })
    };
}

/// An operation on numbers in fp64.
macro_rules! f64s {
    (|$a:ident| $body:expr) => {
        wide!(F64; |$a: F64| { let $a = f64::from_bits($a); f64::to_bits($body) })
    };
    (|$a:ident, $b:ident| $body:expr) => {
        wide!(F64; |$a: F64, $b: F64| {
            let ($a, $b) = (f64::from_bits($a), f64::from_bits($b));
            f64::to_bits($body)
        })
    };
    (|$a:ident, $b:ident, $c:ident| $body:expr) => {
        wide!(F64; |$a: F64, $b: F64, $c: F64| {
            let ($a, $b, $c) = (f64::from_bits($a), f64::from_bits($b), f64::from_bits($c));
            f64::to_bits($body)
        })
    };
}

/// An operation on numbers in fp16, computed in fp32 and rounded once.
macro_rules! f16s {
    (|$a:ident| $body:expr) => {
        bits!(F16; |$a: F16| { let $a = half($a); to_half($body) })
    };
    (|$a:ident, $b:ident| $body:expr) => {
        bits!(F16; |$a: F16, $b: F16| { let ($a, $b) = (half($a), half($b)); to_half($body) })
    };
    (|$a:ident, $b:ident, $c:ident| $body:expr) => {
        bits!(F16; |$a: F16, $b: F16, $c: F16| {
            let ($a, $b, $c) = (half($a), half($b), half($c));
            to_half($body)
        })
    };
}

pub(crate) use {bits, f16s, f32s, f64s, wide};

/// The number in the low half of a register.
pub(crate) fn half(bits: u32) -> f32 {
    half::f16::from_bits(bits as u16).to_f32()
}

/// A number rounded to the nearest in fp16, ties to even; the upper half is zero.
pub(crate) fn to_half(value: f32) -> u32 {
    u32::from(half::f16::from_f32(value).to_bits())
}
