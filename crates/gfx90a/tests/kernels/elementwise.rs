//! Fills, copies, additions and the sums that end residual branches.

use kintsugi_gfx90a::Grid;
use kintsugi_tensor::Backend;
use kintsugi_tensor::ops::{Columns, CopyColumns, Residual};

use crate::support::{COMPUTE, Draw, NULL, PACK, Pair, kernels, pointer, random_cases, size, suffix};

/// Lengths within a wave, over several blocks, and with a rest, and random ones.
fn lengths(seed: u64) -> Vec<usize> {
    let mut draw = Draw::new(seed);
    [7, 5001].into_iter().chain((0..random_cases()).map(|_| draw.size(1..=3000))).collect()
}

#[test]
fn fills() {
    let Some(code) = kernels("elementwise") else { return };
    let mut pair = Pair::new(code, 1);
    for dtype in COMPUTE {
        for len in lengths(3) {
            for wide in [false, true] {
                let to = pair.blank("to", len, dtype);
                pair.cpu.fill(1.7, to.cpu.view());
                let arguments = [pointer(&to), size(len), 1.7_f32.into(), wide.into()];
                pair.launch(&format!("fill_{}", suffix(dtype)), Grid::new(3, 256), &arguments);
                pair.agree(&to, &format!("fill of {len} in {dtype:?}, wide {wide}"));
            }
        }
    }
}

#[test]
fn copies_and_additions_convert() {
    let Some(code) = kernels("elementwise") else { return };
    let mut pair = Pair::new(code, 2);
    for from in COMPUTE {
        for to in COMPUTE {
            for len in lengths(4) {
                for wide in [false, true] {
                    let source = pair.random("from", len, from, 1);
                    let [copied, sum] = [2, 3].map(|seed| pair.random("to", len, to, seed));
                    pair.cpu.copy(source.cpu.view(), copied.cpu.view());
                    pair.cpu.add(source.cpu.view(), sum.cpu.view());
                    for (operation, result) in [("copy", &copied), ("add", &sum)] {
                        let name = format!("{operation}_{}_{}", suffix(from), suffix(to));
                        let arguments = [pointer(&source), pointer(result), size(len), wide.into()];
                        pair.launch(&name, Grid::new(2, 256), &arguments);
                        pair.agree(result, &format!("{name} of {len}, wide {wide}"));
                    }
                }
            }
        }
    }
}

#[test]
fn copies_of_columns_leave_the_others() {
    let Some(code) = kernels("elementwise") else { return };
    let mut pair = Pair::new(code, 4);
    let mut draw = Draw::new(6);
    for dtype in COMPUTE {
        for wide in [false, true] {
            let unit = if wide { PACK } else { 1 };
            let [rows, columns, read, written] = [40, 9, 3, 3].map(|most| draw.size(1..=most));
            let [columns, read, written] = [columns, read, written].map(|size| unit * size);
            let [from_width, to_width] =
                [read, written].map(|first| first + columns + unit * draw.size(1..=4));
            let from = pair.random("from", rows * from_width, dtype, 1);
            let to = pair.random("to", rows * to_width, dtype, 2);
            pair.cpu.copy_columns(CopyColumns {
                from: Columns { view: from.cpu.view(), width: from_width, first: read },
                to: Columns { view: to.cpu.view(), width: to_width, first: written },
                rows,
                columns,
            });
            let mut arguments = vec![pointer(&from), pointer(&to), size(rows * columns)];
            arguments.extend([from_width, read, to_width, written, columns].map(size));
            arguments.push(wide.into());
            pair.launch(&format!("copy_columns_{}", suffix(dtype)), Grid::new(2, 256), &arguments);
            pair.agree(&to, &format!("{rows} rows of {columns} columns in {dtype:?}, wide {wide}"));
        }
    }
}

#[test]
fn residual_sums() {
    let Some(code) = kernels("elementwise") else { return };
    let mut pair = Pair::new(code, 3);
    let mut draw = Draw::new(5);
    for dtype in COMPUTE {
        for (addends, biases) in [(1, 0), (2, 2), (4, 1)] {
            let (rows, width) = (draw.size(1..=40), PACK * draw.size(1..=40));
            for wide in [false, true] {
                let x = pair.random("x", rows * width, dtype, 1);
                let out = pair.blank("out", rows * width, dtype);
                let addends: Vec<_> =
                    (0..addends).map(|i| pair.random("an addend", rows * width, dtype, 2 + i)).collect();
                let biases: Vec<_> =
                    (0..biases).map(|i| pair.random("a bias", width, dtype, 8 + i)).collect();
                let [addend_views, bias_views] =
                    [&addends, &biases].map(|all| all.iter().map(|both| both.cpu.view()).collect::<Vec<_>>());
                pair.cpu.residual(Residual {
                    x: x.cpu.view(),
                    addends: &addend_views,
                    biases: &bias_views,
                    out: out.cpu.view(),
                    rows,
                    width,
                });
                let mut arguments = vec![pointer(&x)];
                for ends in [&addends, &biases] {
                    arguments.extend((0..4).map(|i| ends.get(i).map_or(NULL.into(), pointer)));
                }
                arguments.extend([pointer(&out), size(rows * width), size(width), wide.into()]);
                pair.launch(&format!("residual_{}", suffix(dtype)), Grid::new(2, 256), &arguments);
                pair.agree(&out, &format!("residual in {dtype:?}, wide {wide}"));
            }
        }
    }
}
