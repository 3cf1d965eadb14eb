//! Sums over rows, by partial sums.

use kintsugi_gfx90a::Grid;
use kintsugi_tensor::ops::{ColumnSum, Gradient};
use kintsugi_tensor::{Backend, DType};

use crate::support::{
    COMPUTE, Draw, GROUPS, LANES, NULL, PACK, PART_GROUPS, Pair, kernels, pointer, random_cases, size, suffix,
};

#[test]
fn sums_of_columns_overwrite_or_add() {
    let Some(code) = kernels("column_sum") else { return };
    let mut pair = Pair::new(code, 1);
    let mut draw = Draw::new(2);
    for dtype in COMPUTE {
        let drawn: Vec<_> = (0..random_cases()).map(|_| (draw.matrix(200, 300), draw.size(1..=9))).collect();
        for ((rows, width), chunks) in [((5, 50), 1), ((100, 72), 3)].into_iter().chain(drawn) {
            for gradients in [DType::F32, dtype] {
                for accumulate in [false, true] {
                    let what = format!("{rows} × {width}, {dtype:?} to {gradients:?}, add {accumulate}");
                    let wide = width.is_multiple_of(PACK);
                    let x = pair.random("x", rows * width, dtype, 1);
                    let out = pair.random("out", width, gradients, 2);
                    let to = Gradient { view: out.cpu.view(), accumulate };
                    pair.cpu.column_sum(ColumnSum { x: x.cpu.view(), out: to, rows, width });
                    let partial = pair.scratch(chunks * width * 4);
                    let columns = width.div_ceil(LANES * if wide { PACK } else { 1 });
                    let grid = Grid::new(1, LANES * GROUPS).blocks(columns, chunks, 1);
                    let name = format!("column_sum_{}{}", if wide { "wide_" } else { "" }, suffix(dtype));
                    let arguments = [pointer(&x), partial.into(), size(rows), size(width)];
                    pair.launch(&name, grid, &arguments);
                    let grid = Grid::new(width.div_ceil(LANES), LANES * PART_GROUPS);
                    let arguments = [
                        partial.into(),
                        pointer(&out),
                        NULL.into(),
                        NULL.into(),
                        size(chunks),
                        size(width),
                        u32::from(accumulate).into(),
                    ];
                    pair.launch(&format!("sum_partials_{}", suffix(gradients)), grid, &arguments);
                    pair.agree(&out, &what);
                }
            }
        }
    }
}
