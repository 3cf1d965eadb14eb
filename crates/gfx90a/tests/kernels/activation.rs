//! GELU in both forms, SwiGLU, and the epilogues of matrix products.

use kintsugi_gfx90a::Grid;
use kintsugi_tensor::ops::{GateFunction, Gated, GatedBackward};
use kintsugi_tensor::{Backend, DType};

use crate::support::{COMPUTE, Draw, NULL, PACK, Pair, WAVE, kernels, pointer, random_cases, size, suffix};

#[test]
fn gelu_in_both_forms() {
    let Some(code) = kernels("activation") else { return };
    let (mut pair, mut draw) = (Pair::new(code, 1), Draw::new(7));
    for dtype in COMPUTE {
        for wide in [false, true] {
            let len = draw.size(1..=3000);
            let from = pair.random("from", len, dtype, 1);
            let [to, exact] = [(); 2].map(|()| pair.blank("to", len, dtype));
            let d = pair.random("d", len, dtype, 2);
            pair.cpu.gelu(from.cpu.view(), to.cpu.view());
            pair.cpu.exact_gelu(from.cpu.view(), exact.cpu.view());
            pair.cpu.exact_gelu_backward(from.cpu.view(), d.cpu.view());
            for (name, result) in [("gelu", &to), ("exact_gelu", &exact), ("exact_gelu_backward", &d)] {
                let name = format!("{name}_{}", suffix(dtype));
                let arguments = [pointer(&from), pointer(result), size(len), wide.into()];
                pair.launch(&name, Grid::new(2, 256), &arguments);
                pair.agree(result, &format!("{name}, wide {wide}"));
            }
        }
    }
}

#[test]
fn gated_units_forward_and_backward() {
    let Some(code) = kernels("activation") else { return };
    let mut pair = Pair::new(code, 2);
    let mut draw = Draw::new(6);
    for dtype in COMPUTE {
        for (number, (rows, width)) in (0..2 * random_cases()).map(|_| draw.matrix(9, 700)).enumerate() {
            let gate = [GateFunction::Silu, GateFunction::Gelu][number % 2];
            let wide = width.is_multiple_of(PACK);
            let x = pair.random("x", 2 * rows * width, dtype, 1);
            let dout = pair.random("dout", rows * width, dtype, 2);
            let out = pair.blank("out", rows * width, dtype);
            let dx = pair.blank("dx", 2 * rows * width, dtype);
            pair.cpu.gated(Gated { x: x.cpu.view(), out: out.cpu.view(), gate, rows, width });
            pair.cpu.gated_backward(GatedBackward {
                dout: dout.cpu.view(),
                x: x.cpu.view(),
                dx: dx.cpu.view(),
                gate,
                rows,
                width,
            });
            let (unit, name, grid) = (gate.unit(), suffix(dtype), Grid::new(rows, WAVE));
            let arguments = [pointer(&x), pointer(&out), size(width), wide.into()];
            pair.launch(&format!("{unit}_{name}"), grid, &arguments);
            let arguments = [pointer(&dout), pointer(&x), pointer(&dx), size(width), wide.into()];
            pair.launch(&format!("{unit}_backward_{name}"), grid, &arguments);
            pair.agree(&out, &format!("{unit} of {width} in {dtype:?}"));
            pair.agree(&dx, &format!("backward of {unit} of {width} in {dtype:?}"));
        }
    }
}

/// GELU of the rounded sum of a product and its bias, and the derivative there.
#[test]
fn epilogues_of_products() {
    let Some(code) = kernels("epilogue") else { return };
    let (mut pair, mut draw) = (Pair::new(code, 3), Draw::new(8));
    for dtype in COMPUTE {
        let drawn = (0..random_cases()).map(|_| draw.matrix(9, 700));
        let named = [(7, 72, false), (7, 72, true)];
        let cases = drawn.map(|(rows, width)| (rows, width, width.is_multiple_of(PACK)));
        for (rows, width, wide) in named.into_iter().chain(cases) {
            let what = format!("{rows} × {width} in {dtype:?}, wide {wide}");
            let product = pair.random("product", rows * width, dtype, 1);
            let bias = pair.random("bias", width, dtype, 2);
            let [kept, d] =
                [pair.blank("kept", rows * width, dtype), pair.random("d", rows * width, dtype, 3)];
            let [x, b, dx] = [&product, &bias, &d].map(|both| pair.cpu.read(both.cpu.view()));
            let sums: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + b[i % width]).collect();
            pair.cpu.upload(&sums, kept.cpu.view());
            pair.cpu.gelu(kept.cpu.view(), product.cpu.view());
            let rounded = pair.cpu.read(kept.cpu.view());
            let derivatives: Vec<f32> = dx
                .iter()
                .zip(&rounded)
                .map(|(d, &k)| (f64::from(*d) * gelu_slope(k.into())) as f32)
                .collect();
            pair.cpu.upload(&derivatives, d.cpu.view());

            let shape = [size(rows * width), size(width), wide.into()];
            let arguments = [&[pointer(&product), pointer(&bias), pointer(&kept)][..], &shape].concat();
            pair.launch(&format!("bias_gelu_{}", suffix(dtype)), Grid::new(2, 256), &arguments);
            let arguments = [pointer(&d), pointer(&kept), size(rows * width), wide.into()];
            pair.launch(&format!("gelu_derivative_{}", suffix(dtype)), Grid::new(2, 256), &arguments);
            pair.agree(&kept, &format!("pre-activation, {what}"));
            pair.agree(&product, &format!("GELU, {what}"));
            pair.agree(&d, &format!("derivative, {what}"));
        }
    }
    // Without a bias and without a saved pre-activation nothing changes.
    let product = pair.random("product", 72, DType::F32, 1);
    let arguments = [pointer(&product), NULL.into(), NULL.into(), size(72), size(72), true.into()];
    pair.launch("bias_gelu_f32", Grid::new(1, 64), &arguments);
    pair.agree(&product, "no bias");
}

/// The derivative of GELU in its tanh form.
fn gelu_slope(x: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let tanh = (root * (x + 0.044_715 * x.powi(3))).tanh();
    let inner = root * (1.0 + 3.0 * 0.044_715 * x * x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
}
