//! Token and position tables, forward and backward.

use kintsugi_gfx90a::{Argument, Grid};
use kintsugi_tensor::ops::{Embedding, EmbeddingBackward, Gradient, Positions, PositionsBackward};
use kintsugi_tensor::{Backend, DType};

use crate::support::{COMPUTE, Draw, GROUPS, LANES, PACK, Pair, WAVE, kernels, pointer, size, suffix};

/// Warps of a block of the index (`INDEX_WARPS` of `embedding.cu`).
const INDEX_WARPS: usize = 8;

/// Tokens of which some are frequent, some are missing and some belong to another part of the vocabulary.
fn tokens(rows: usize, vocabulary: usize) -> Vec<u32> {
    (0..rows).map(|row| if row % 3 == 0 { 7 } else { (row * row % (vocabulary + 9)) as u32 }).collect()
}

#[test]
fn tables_forward() {
    let Some(code) = kernels("embedding") else { return };
    let mut pair = Pair::new(code, 1);
    let (rows, vocabulary, sequence, first) = (20, 30, 6, 3);
    for dtype in COMPUTE {
        for width in [50_usize, 72] {
            let wide: Argument = width.is_multiple_of(PACK).into();
            let tokens = pair.tokens("tokens", &tokens(rows, vocabulary));
            let table = pair.random("table", vocabulary * width, dtype, 1);
            let positions = pair.random("positions", sequence * width, dtype, 2);
            let out = pair.blank("out", rows * width, dtype);
            let view = out.cpu.view();
            pair.cpu.embedding(Embedding {
                tokens: tokens.cpu.view(),
                table: table.cpu.view(),
                first,
                out: view,
                rows,
                width,
            });
            let table_view = positions.cpu.view();
            pair.cpu.positions(Positions { x: view, table: table_view, first_row: 2, sequence, rows, width });
            let (name, grid) = (suffix(dtype), Grid::new(rows, WAVE));
            let arguments = [
                pointer(&tokens),
                pointer(&table),
                pointer(&out),
                size(first),
                size(vocabulary),
                size(width),
                wide.clone(),
            ];
            pair.launch(&format!("embedding_{name}"), grid, &arguments);
            let arguments = [pointer(&out), pointer(&positions), size(2), size(sequence), size(width), wide];
            pair.launch(&format!("positions_{name}"), grid, &arguments);
            pair.agree(&out, &format!("tables of {width} in {dtype:?}"));
        }
    }
}

#[test]
fn gradient_of_the_position_table() {
    let Some(code) = kernels("embedding") else { return };
    let mut pair = Pair::new(code, 2);
    let (rows, sequence, first_row) = (21, 6, 4);
    for (dtype, gradients) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::F16, DType::F16)]
    {
        for (width, accumulate) in [(50, false), (72, true)] {
            let dx = pair.random("dx", rows * width, dtype, 1);
            let dtable = pair.random("dtable", (sequence + 2) * width, gradients, 2);
            let to = Gradient { view: dtable.cpu.view(), accumulate };
            let dx_view = dx.cpu.view();
            pair.cpu.positions_backward(PositionsBackward {
                dx: dx_view,
                dtable: to,
                first_row,
                sequence,
                rows,
                width,
            });
            let arguments = [
                pointer(&dx),
                pointer(&dtable),
                size(first_row),
                size(sequence),
                size(rows),
                size(width),
                accumulate.into(),
                width.is_multiple_of(PACK).into(),
            ];
            let name = format!("positions_backward_{}_{}", suffix(dtype), suffix(gradients));
            pair.launch(&name, Grid::new(sequence + 2, WAVE), &arguments);
            pair.agree(&dtable, &format!("{name} of {width}"));
        }
    }
}

#[test]
fn gradient_of_the_token_table() {
    let Some(code) = kernels("embedding") else { return };
    let (mut pair, mut draw) = (Pair::new(code, 3), Draw::new(11));
    let (first, range) = (3, 16);
    for (dtype, gradients) in [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::F16, DType::F32)]
    {
        for accumulate in [false, true] {
            let (rows, vocabulary) = (draw.size(390..=900), draw.size(8..=70));
            let (_, width) = draw.matrix(1, 100);
            let tokens = pair.tokens("tokens", &tokens(rows, vocabulary));
            let dout = pair.random("dout", rows * width, dtype, 1);
            let dtable = pair.random("dtable", vocabulary * width, gradients, 2);
            pair.cpu.embedding_backward(EmbeddingBackward {
                tokens: tokens.cpu.view(),
                dout: dout.cpu.view(),
                first,
                dtable: Gradient { view: dtable.cpu.view(), accumulate },
                rows,
                width,
            });
            let [starts, counts, frequent] = [(); 3].map(|()| pair.scratch(4 * vocabulary));
            let listed = pair.scratch(4 * rows);
            let heads = pair.machine.buffer("heads", vec![0; 8]);
            let arguments = [
                pointer(&tokens),
                size(rows),
                size(first),
                size(vocabulary),
                (range as u32).into(),
                starts.into(),
                counts.into(),
                listed.into(),
                frequent.into(),
                heads.into(),
            ];
            let grid = Grid::new(vocabulary.div_ceil(range), INDEX_WARPS * WAVE);
            pair.launch("embedding_index", grid.shared(INDEX_WARPS * range * 4), &arguments);

            let wide = width.is_multiple_of(PACK);
            let types = format!("{}_{}", suffix(dtype), suffix(gradients));
            let lists = [pointer(&dout), pointer(&dtable), starts.into(), counts.into(), listed.into()];
            let rest = [size(width), accumulate.into(), wide.into()];
            let arguments = [&lists[..], &rest].concat();
            pair.launch(&format!("embedding_gather_{types}"), Grid::new(vocabulary, WAVE), &arguments);
            let columns = width.div_ceil(LANES * if wide { PACK } else { 1 });
            let rest = [frequent.into(), heads.into(), size(width), accumulate.into()];
            let arguments = [&lists[..], &rest].concat();
            let name = format!("embedding_gather_frequent_{}{types}", if wide { "wide_" } else { "" });
            pair.launch(&name, Grid::new(1, LANES * GROUPS).blocks(2, columns, 1), &arguments);
            pair.agree(&dtable, &format!("gradient of {width}, {types}"));
        }
    }
}
