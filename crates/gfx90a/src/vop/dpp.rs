//! DPP: the first source comes from other lanes of the wave.

use crate::assembly::Line;
use crate::wave::{LANES, Lanes};

/// Lanes of a row.
const ROW: usize = 16;

/// Which lanes read from which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dpp {
    control: Control,
    row_mask: u32,
    bank_mask: u32,
    /// A lane without a source reads zero; otherwise its destination does not change.
    zero_without_source: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    /// A permutation of every four lanes.
    Quad([usize; 4]),
    RowShiftLeft(usize),
    RowShiftRight(usize),
    RowRotateRight(usize),
    WaveShiftLeft,
    WaveShiftRight,
    WaveRotateLeft,
    WaveRotateRight,
    RowMirror,
    RowHalfMirror,
    /// Lane 15 of every row to the next row.
    RowBroadcast15,
    /// Lane 31 to the upper half.
    RowBroadcast31,
    /// One lane to all of its row.
    RowNewBroadcast(usize),
}

/// The modifiers of a line, if it has any of DPP.
pub(crate) fn decode(line: &Line) -> Option<Dpp> {
    Some(Dpp {
        control: control(line)?,
        row_mask: line.number("row_mask")? as u32,
        bank_mask: line.number("bank_mask")? as u32,
        zero_without_source: line.has("bound_ctrl"),
    })
}

fn control(line: &Line) -> Option<Control> {
    if let Some(list) = line.modifier("quad_perm") {
        let lanes: Vec<usize> = list
            .trim_matches(['[', ']'])
            .split(',')
            .map(|lane| lane.trim().parse())
            .collect::<Result<_, _>>()
            .ok()?;
        return Some(Control::Quad(lanes.try_into().ok()?));
    }
    let by = |name: &str| line.number(name).map(|count| count as usize);
    let shifts = [
        by("row_shl").map(Control::RowShiftLeft),
        by("row_shr").map(Control::RowShiftRight),
        by("row_ror").map(Control::RowRotateRight),
        by("row_newbcast").map(Control::RowNewBroadcast),
        by("row_bcast")
            .map(|lane| if lane == 15 { Control::RowBroadcast15 } else { Control::RowBroadcast31 }),
        by("wave_shl").map(|_| Control::WaveShiftLeft),
        by("wave_shr").map(|_| Control::WaveShiftRight),
        by("wave_rol").map(|_| Control::WaveRotateLeft),
        by("wave_ror").map(|_| Control::WaveRotateRight),
        line.has("row_mirror").then_some(Control::RowMirror),
        line.has("row_half_mirror").then_some(Control::RowHalfMirror),
    ];
    shifts.into_iter().flatten().next()
}

impl Dpp {
    /// The lane that a lane reads from.
    fn source(&self, lane: usize) -> Option<usize> {
        let (row, place) = (lane / ROW * ROW, lane % ROW);
        let in_row = |place: Option<usize>| place.filter(|&place| place < ROW).map(|place| row + place);
        match self.control {
            Control::Quad(lanes) => Some(lane / 4 * 4 + lanes[lane % 4]),
            Control::RowShiftLeft(by) => in_row(Some(place + by)),
            Control::RowShiftRight(by) => in_row(place.checked_sub(by)),
            Control::RowRotateRight(by) => Some(row + (place + ROW - by) % ROW),
            Control::WaveShiftLeft => Some(lane + 1).filter(|&from| from < LANES),
            Control::WaveShiftRight => lane.checked_sub(1),
            Control::WaveRotateLeft => Some((lane + 1) % LANES),
            Control::WaveRotateRight => Some((lane + LANES - 1) % LANES),
            Control::RowMirror => Some(row + ROW - 1 - place),
            Control::RowHalfMirror => Some(lane / 8 * 8 + 7 - lane % 8),
            Control::RowBroadcast15 => row.checked_sub(1),
            Control::RowBroadcast31 => (lane >= 32).then_some(31),
            Control::RowNewBroadcast(from) => Some(row + from),
        }
    }

    /// The source of every lane, and the lanes that write their result.
    pub(crate) fn apply(&self, values: &Lanes, exec: u64) -> (Lanes, u64) {
        let (mut moved, mut writing) = ([0; LANES], 0);
        for (lane, to) in moved.iter_mut().enumerate() {
            let enabled =
                self.row_mask >> (lane / ROW) & 1 == 1 && self.bank_mask >> (lane % ROW / 4) & 1 == 1;
            let from = self.source(lane).filter(|&from| exec >> from & 1 == 1);
            if enabled && (from.is_some() || self.zero_without_source) {
                writing |= 1 << lane;
            }
            *to = from.map_or(0, |from| values[from]);
        }
        (moved, writing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(control: Control, zero_without_source: bool) -> (Lanes, u64) {
        let values = std::array::from_fn(|lane| lane as u32);
        Dpp { control, row_mask: 15, bank_mask: 15, zero_without_source }.apply(&values, u64::MAX)
    }

    #[test]
    fn lanes_come_from_their_row() {
        let (moved, writing) = applied(Control::Quad([1, 0, 3, 2]), false);
        assert_eq!((&moved[..4], moved[63], writing), (&[1, 0, 3, 2][..], 62, u64::MAX));
        let (moved, writing) = applied(Control::RowShiftRight(1), false);
        assert_eq!((moved[17], moved[31], writing), (16, 30, 0xfffe_fffe_fffe_fffe));
        assert_eq!(applied(Control::RowShiftRight(1), true).1, u64::MAX);
        assert_eq!(applied(Control::RowRotateRight(4), false).0[16], 28);
        assert_eq!(applied(Control::RowHalfMirror, false).0[8], 15);
        assert_eq!(applied(Control::RowBroadcast15, false).0[40], 31);
    }
}
