//! Cross-entropy over one part of a vocabulary and over two.

use kintsugi_gfx90a::{Argument, Grid};
use kintsugi_tensor::ops::CrossEntropy;
use kintsugi_tensor::{Backend, DType};

use crate::support::{
    COMPUTE, Draw, PACK, Pair, WAVE, defined_kernels, kernels, pointer, random, random_cases, size, suffix,
};

const Z_LOSS: f64 = 0.0625;
const FACTOR: f64 = 0.25;

/// A vocabulary in one part: loss and gradient in one pass where a row is whole packs, and in three kernels.
#[test]
fn one_part() {
    for soft_cap in [None, Some(1.5)] {
        let definitions: Vec<String> = soft_cap.iter().map(|cap| format!("SOFT_CAP={cap:?}f")).collect();
        let Some(code) = defined_kernels("loss", &definitions) else { return };
        check_one_part(Pair::new(code, 1), soft_cap);
    }
}

fn check_one_part(mut pair: Pair, soft_cap: Option<f64>) {
    let mut draw = Draw::new(8);
    for dtype in COMPUTE {
        let drawn = (0..random_cases()).map(|_| {
            let (rows, columns) = draw.matrix(6, 3000);
            (rows, columns - draw.size(0..=(columns - 1).min(7)), columns)
        });
        for (rows, valid, columns) in [(3, 50, 50), (5, 1003, 1008)].into_iter().chain(drawn) {
            for whole in [false, true] {
                if whole && !columns.is_multiple_of(PACK) {
                    continue;
                }
                let what = format!("{rows} × {columns} in {dtype:?}, whole {whole}, soft cap {soft_cap:?}");
                let logits = pair.random("logits", rows * columns, dtype, 1);
                let targets: Vec<u32> = (0..rows as u32).map(|row| row * 17 % valid as u32).collect();
                let targets = pair.tokens("targets", &targets);
                let statistics = pair.blank("statistics", 3 * rows, DType::F32);
                let loss = pair.numbers("loss", &[0.5], DType::F32);
                let scale = pair.numbers("scale", &[3.0], DType::F32);
                pair.cpu.cross_entropy(CrossEntropy {
                    logits: logits.cpu.view(),
                    targets: targets.cpu.view(),
                    statistics: statistics.cpu.view(),
                    loss: loss.cpu.view(),
                    scale: Some(scale.cpu.view()),
                    factor: FACTOR,
                    z_loss: Z_LOSS,
                    parts: 1,
                    first: 0,
                    valid,
                    soft_cap,
                    rows,
                    columns,
                });
                let grid = Grid::new(rows, 2 * WAVE);
                let (name, wide) = (suffix(dtype), columns.is_multiple_of(PACK));
                let row: [Argument; 3] = [size(0), size(valid), size(columns)];
                let tensors = [pointer(&logits), pointer(&targets), pointer(&statistics)];
                let factors = [pointer(&scale), (FACTOR as f32).into(), (Z_LOSS as f32).into()];
                if whole {
                    let grid = grid.shared(columns * dtype.bytes());
                    let arguments = [&tensors[..], &factors, &row].concat();
                    pair.launch(&format!("cross_entropy_whole_{name}"), grid, &arguments);
                } else {
                    let arguments = [&tensors[..], &row, &[wide.into()]].concat();
                    pair.launch(&format!("loss_statistics_{name}"), grid, &arguments);
                }
                let sum = [pointer(&statistics), pointer(&loss), size(rows), 1_u32.into()];
                pair.launch("cross_entropy_loss", Grid::new(1, 1024), &sum);
                if !whole {
                    let shape = [size(0), size(valid), size(rows), size(columns), 1_u32.into(), wide.into()];
                    let arguments = [&tensors[..], &factors, &shape].concat();
                    pair.launch(&format!("cross_entropy_{name}"), grid, &arguments);
                }
                pair.agree(&loss, &format!("loss of {what}"));
                pair.agree(&statistics, &format!("statistics of {what}"));
                pair.agree(&logits, &format!("gradient of {what}"));
            }
        }
    }
}

/// Two ranks' parts: each has its own statistics, and both combine them.
#[test]
fn two_parts() {
    let Some(code) = kernels("loss") else { return };
    let mut pair = Pair::new(code, 2);
    let (rows, columns) = (6, 72);
    let targets = pair.tokens("targets", &[0, 71, 72, 100, 5, 143]);
    let statistics = pair.numbers("statistics", &vec![0.0; 2 * rows * 3], DType::F32);
    let scale = pair.numbers("scale", &[1.0], DType::F32);
    let logits: Vec<_> =
        (0..2).map(|part| pair.numbers("logits", &random(rows * columns, part), DType::F32)).collect();
    for (part, logits) in logits.iter().enumerate() {
        let at = statistics.address + (part * rows * 3 * 4) as u64;
        let arguments = [
            pointer(logits),
            pointer(&targets),
            at.into(),
            size(part * columns),
            size(columns),
            size(columns),
            true.into(),
        ];
        pair.launch("loss_statistics_f32", Grid::new(rows, WAVE), &arguments);
    }
    // The CPU backend combines the interpreter's statistics.
    let bytes = pair.machine.read(statistics.address, 2 * rows * 3 * 4);
    pair.cpu.upload_bytes(&bytes, statistics.cpu.view());
    for (part, logits) in logits.iter().enumerate() {
        let loss = pair.numbers("loss", &[0.0], DType::F32);
        pair.cpu.cross_entropy(CrossEntropy {
            logits: logits.cpu.view(),
            targets: targets.cpu.view(),
            statistics: statistics.cpu.view(),
            loss: loss.cpu.view(),
            scale: Some(scale.cpu.view()),
            factor: 1.0,
            z_loss: Z_LOSS,
            parts: 2,
            first: part * columns,
            valid: columns,
            soft_cap: None,
            rows,
            columns,
        });
        let sum = [pointer(&statistics), pointer(&loss), size(rows), 2_u32.into()];
        pair.launch("cross_entropy_loss", Grid::new(1, 1024), &sum);
        let arguments = [
            pointer(logits),
            pointer(&targets),
            pointer(&statistics),
            pointer(&scale),
            1.0_f32.into(),
            (Z_LOSS as f32).into(),
            size(part * columns),
            size(columns),
            size(rows),
            size(columns),
            2_u32.into(),
            true.into(),
        ];
        pair.launch("cross_entropy_f32", Grid::new(rows, WAVE), &arguments);
        pair.agree(&loss, "loss over two parts");
        pair.agree(logits, "gradient over two parts");
    }
}
