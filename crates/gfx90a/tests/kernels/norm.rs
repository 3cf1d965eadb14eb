//! `LayerNorm` and `RMSNorm`, forward and backward, with the sums of their partial gradients.
//!
//! Threads of a block are whole waves of 64: the backward's blocks are as wide as the row needs, rounded up to that.

use kintsugi_gfx90a::Grid;
use kintsugi_tensor::ops::{Gradient, Norm, NormBackward, RowDots, SplitNorm, SplitNormBackward};
use kintsugi_tensor::{Backend, DType};

use crate::support::{
    Both, COMPUTE, Draw, GROUPS, LANES, NULL, PACK, PART_GROUPS, Pair, WAVE, kernels, pointer, random_cases,
    size, suffix,
};

/// Packs of a row that a thread holds in the forward.
const HELD: usize = 2;

const EPSILON: f64 = 1e-5;

/// One case: a shape, whether it is `LayerNorm`, and whether there is a residual.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    width: usize,
    centred: bool,
    residual: bool,
    dtype: DType,
}

impl Case {
    fn threads(self, packs: usize) -> usize {
        self.width.div_ceil(PACK * packs).next_multiple_of(WAVE)
    }
}

/// Tensors of a case.
struct Tensors {
    x: Both,
    weight: Both,
    bias: Both,
    statistics: Both,
}

fn forward(pair: &mut Pair, case: Case) -> Tensors {
    let Case { rows, width, centred, dtype, .. } = case;
    let tensors = Tensors {
        x: pair.random("x", rows * width, dtype, 1),
        weight: pair.random("weight", width, dtype, 4),
        bias: pair.random("bias", width, dtype, 5),
        statistics: pair.blank("statistics", 2 * rows, DType::F32),
    };
    let out = pair.blank("out", rows * width, dtype);
    pair.cpu.norm(Norm {
        x: tensors.x.cpu.view(),
        weight: tensors.weight.cpu.view(),
        bias: centred.then_some(tensors.bias.cpu.view()),
        out: out.cpu.view(),
        statistics: tensors.statistics.cpu.view(),
        epsilon: EPSILON,
        rows,
        width,
    });
    let held = width.is_multiple_of(PACK);
    let (way, threads) = if held { ("held", case.threads(HELD)) } else { ("any", 2 * WAVE) };
    let arguments = [
        pointer(&tensors.x),
        pointer(&tensors.weight),
        if centred { pointer(&tensors.bias) } else { NULL.into() },
        pointer(&out),
        pointer(&tensors.statistics),
        size(rows),
        size(width),
        (EPSILON as f32).into(),
    ];
    pair.launch(&format!("norm_{way}_{}", suffix(dtype)), Grid::new(rows.min(2), threads), &arguments);
    pair.agree(&out, &format!("forward, {case:?}"));
    pair.agree(&tensors.statistics, &format!("statistics, {case:?}"));
    tensors
}

fn gradient(both: &Both) -> Gradient<'_> {
    Gradient { view: both.cpu.view(), accumulate: false }
}

fn backward(pair: &mut Pair, sums: &mut Pair, case: Case) {
    let Case { rows, width, centred, residual, dtype } = case;
    let tensors = forward(pair, case);
    let [dy, past] = [2, 3].map(|seed| pair.random("dy", rows * width, dtype, seed));
    let dx = pair.blank("dx", rows * width, dtype);
    let gradients = [(); 3].map(|()| sums.blank("a gradient", width, DType::F32));
    pair.cpu.norm_backward(NormBackward {
        dy: dy.cpu.view(),
        x: tensors.x.cpu.view(),
        statistics: tensors.statistics.cpu.view(),
        weight: tensors.weight.cpu.view(),
        residual: residual.then_some(past.cpu.view()),
        residual_sum: residual.then(|| gradient(&gradients[2])),
        dx: dx.cpu.view(),
        centred,
        dweight: Some(gradient(&gradients[0])),
        dbias: centred.then(|| gradient(&gradients[1])),
        rows,
        width,
    });
    // A block has at least one row.
    let parts = rows.min(2);
    let partial = pair.scratch(3 * parts * width * 4);
    let arguments = [
        pointer(&dy),
        pointer(&tensors.x),
        pointer(&tensors.statistics),
        pointer(&tensors.weight),
        if residual { pointer(&past) } else { NULL.into() },
        pointer(&dx),
        partial.into(),
        size(rows),
        size(width),
        centred.into(),
    ];
    let kernel = |way: &str| format!("norm_backward_{way}_{}", suffix(dtype));
    if width.is_multiple_of(PACK) {
        let sum = if residual { "_sum" } else { "" };
        let grid = Grid::new(parts, case.threads(1));
        pair.launch(&kernel(&format!("held1{sum}")), grid, &arguments);
    } else {
        let columns = width.div_ceil(LANES);
        let grid = Grid::new(1, LANES * GROUPS).blocks(columns, parts, 1);
        pair.launch(&kernel("any_weight"), grid, &arguments);
        pair.launch(&kernel("any_input"), Grid::new(rows, 2 * WAVE), &arguments);
    }
    pair.agree(&dx, &format!("dx, {case:?}"));
    let partial = pair.machine.read(partial, 3 * parts * width * 4);
    let partial = sums.machine.constant("the partial sums", partial);
    let arguments = [
        partial.into(),
        pointer(&gradients[0]),
        pointer(&gradients[1]),
        pointer(&gradients[2]),
        size(parts),
        size(width),
        0_u32.into(),
    ];
    let count = if residual { 3 } else { 2 };
    let grid = Grid::new(1, LANES * PART_GROUPS).blocks(width.div_ceil(LANES), count, 1);
    sums.launch("sum_partials_f32", grid, &arguments);
    for (gradient, wanted) in gradients.iter().zip([true, centred, residual]) {
        if wanted {
            sums.agree(gradient, &format!("gradient, {case:?}"));
        }
    }
}

#[test]
fn norms_and_their_backward() {
    let (Some(norm), Some(column_sum)) = (kernels("norm"), kernels("column_sum")) else { return };
    let (mut pair, mut sums) = (Pair::new(norm, 1), Pair::new(column_sum, 2));
    let mut draw = Draw::new(1);
    for dtype in COMPUTE {
        let named = [(3, 50), (4, 768)].into_iter();
        for (rows, width) in named.chain((0..random_cases()).map(|_| draw.matrix(9, 2000))) {
            for (centred, residual) in [(false, false), (true, true)] {
                backward(&mut pair, &mut sums, Case { rows, width, centred, residual, dtype });
            }
        }
    }
}

/// Rows whose columns are divided among ranks: sums over a rank's columns, and the norm with the sums of all.
#[test]
fn norms_of_parts_of_rows() {
    let Some(code) = kernels("split_norm") else { return };
    let (mut pair, rows, width, whole) = (Pair::new(code, 4), 5, 100, 230);
    for dtype in COMPUTE {
        let [x, dy] = [1, 2].map(|seed| pair.random("x", rows * width, dtype, seed));
        let weight = pair.random("weight", width, dtype, 3);
        let [dots, out, dx] = [
            pair.blank("dots", rows, DType::F32),
            pair.blank("out", rows * width, dtype),
            pair.blank("dx", rows * width, dtype),
        ];
        let sums: Vec<f32> = (0..rows).map(|row| 200.0 + row as f32).collect();
        let squares = pair.numbers("squares", &sums, DType::F32);
        let statistics = pair.blank("statistics", 2 * rows, DType::F32);
        let dweight = pair.blank("dweight", width, DType::F32);
        pair.cpu.row_dots(RowDots {
            x: dy.cpu.view(),
            y: x.cpu.view(),
            weight: Some(weight.cpu.view()),
            out: dots.cpu.view(),
            rows,
            width,
        });
        pair.cpu.split_norm(SplitNorm {
            x: x.cpu.view(),
            weight: weight.cpu.view(),
            squares: squares.cpu.view(),
            out: out.cpu.view(),
            statistics: statistics.cpu.view(),
            epsilon: EPSILON,
            rows,
            width,
            whole,
        });
        pair.cpu.split_norm_backward(SplitNormBackward {
            dy: dy.cpu.view(),
            x: x.cpu.view(),
            statistics: statistics.cpu.view(),
            weight: weight.cpu.view(),
            dots: dots.cpu.view(),
            dx: dx.cpu.view(),
            dweight: Some(Gradient { view: dweight.cpu.view(), accumulate: false }),
            rows,
            width,
            whole,
        });
        let (grid, name) = (Grid::new(rows, WAVE), suffix(dtype));
        let arguments = [pointer(&dy), pointer(&x), pointer(&weight), pointer(&dots), size(width)];
        pair.launch(&format!("row_dots_{name}"), grid, &arguments);
        let share = || (1.0 / whole as f32).into();
        let tensors = [&x, &weight, &squares, &out, &statistics].map(pointer);
        let arguments = [&tensors[..], &[size(width), share(), (EPSILON as f32).into()]].concat();
        pair.launch(&format!("split_norm_{name}"), grid, &arguments);
        let tensors = [&dy, &x, &statistics, &weight, &dots, &dx].map(pointer);
        let arguments = [&tensors[..], &[size(width), share()]].concat();
        pair.launch(&format!("split_norm_backward_{name}"), grid, &arguments);
        for result in [&dots, &out, &statistics, &dx] {
            pair.agree(result, &format!("norm of parts in {dtype:?}"));
        }
    }
}
