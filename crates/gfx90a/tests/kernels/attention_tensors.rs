//! The tensors of an attention layer on random numbers, and what they must be by the CPU backend in fp64.

use kintsugi_gfx90a::{Argument, Grid};
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape, Scores};
use kintsugi_tensor::{Backend, Buffer, Category, DType};

use crate::support::{Both, Pair, distance, pointer, size, suffix};

/// One case. `document` is the length of packed documents; 0 for none.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub shape: AttentionShape,
    pub dtype: DType,
    pub plain: bool,
    pub document: usize,
}

impl Case {
    /// A case of flash attention, by batch, sequence, heads, key heads and head width.
    pub fn flash(sizes: [usize; 5], dtype: DType, document: usize) -> Self {
        Case { shape: shape(sizes), dtype, plain: false, document }
    }

    /// The same with a window and a soft cap.
    pub fn limited(self, window: Option<usize>, soft_cap: Option<f64>) -> Self {
        Case {
            shape: AttentionShape { scores: Scores { width: None, soft_cap, window }, ..self.shape },
            ..self
        }
    }

    /// Whether queries have a first key.
    pub fn is_masked(self) -> bool {
        self.document > 0 || self.shape.scores.window.is_some()
    }

    /// The definitions of the portable kernels.
    pub fn definitions(self) -> Vec<String> {
        self.shape.scores.soft_cap.into_iter().map(|cap| format!("SOFT_CAP={cap:?}f")).collect()
    }

    /// The first key that each query attends to.
    fn starts(self) -> Vec<u32> {
        let AttentionShape { batch, sequence, .. } = self.shape;
        let window = self.shape.scores.window.unwrap_or(sequence);
        let start = |row: usize| {
            let document = (row % sequence).checked_div(self.document).unwrap_or(0) * self.document;
            document.max((row % sequence + 1).saturating_sub(window)) as u32
        };
        (0..batch * sequence).map(start).collect()
    }

    /// The factor of the scores.
    pub fn scale(self) -> f32 {
        self.shape.scale() as f32
    }
}

pub fn shape([batch, sequence, heads, kv_heads, head_dim]: [usize; 5]) -> AttentionShape {
    AttentionShape { batch, sequence, heads, kv_heads, head_dim, scores: Scores::PLAIN }
}

/// Arguments and results of the kernels. `saved` holds probabilities in plain attention, else log-sum-exps.
pub struct Tensors {
    pub qkv: Both,
    pub dout: Both,
    pub out: Both,
    pub dqkv: Both,
    pub saved: Both,
    pub starts: Option<Both>,
    exact: Exact,
}

/// The results in fp64.
struct Exact {
    out: Buffer,
    dqkv: Buffer,
    saved: Buffer,
}

impl Tensors {
    pub fn new(pair: &mut Pair, case: Case) -> Self {
        let Case { shape, dtype, plain, .. } = case;
        let rows = shape.batch * shape.sequence;
        let out_len = rows * shape.heads * shape.head_dim;
        let qkv = pair.random("qkv", rows * (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype, 1);
        let dout = pair.random("dout", out_len, dtype, 2);
        let (out, dqkv) = (pair.blank("out", out_len, dtype), pair.blank("dqkv", qkv.cpu.len(), dtype));
        let saved = if plain {
            let scores = shape.batch * shape.heads * shape.sequence * shape.sequence;
            pair.blank("probabilities", scores, dtype)
        } else {
            pair.blank("log-sum-exps", rows * shape.heads, DType::F32)
        };
        let starts = case.is_masked().then(|| pair.tokens("starts", &case.starts()));
        let exact = Exact::new(pair, case, &qkv, &dout, starts.as_ref());
        Tensors { qkv, dout, out, dqkv, saved, starts, exact }
    }

    /// Compares the output and what is saved for the backward.
    pub fn check_forward(&self, pair: &Pair, case: Case) {
        let [forward, _] = tolerances(case.dtype);
        check(pair, &self.out, &self.exact.out, forward, &format!("forward, {case:?}"));
        let [saved, _] = tolerances(self.saved.cpu.dtype());
        check(pair, &self.saved, &self.exact.saved, saved, &format!("saved, {case:?}"));
    }

    /// Compares the gradients.
    pub fn check_backward(&self, pair: &Pair, case: Case) {
        let [_, backward] = tolerances(case.dtype);
        check(pair, &self.dqkv, &self.exact.dqkv, backward, &format!("backward, {case:?}"));
    }

    /// The relative error of the output.
    pub fn output_error(&self, pair: &Pair) -> f64 {
        distance(&pair.read(&self.out), &pair.cpu.read(self.exact.out.view()))
    }

    /// The relative errors of the gradients of queries, keys and values.
    pub fn gradient_errors(&self, pair: &Pair, shape: AttentionShape) -> [f64; 3] {
        let [ours, exact] = [pair.read(&self.dqkv), pair.cpu.read(self.exact.dqkv.view())];
        let (queries, keys) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        [0..queries, queries..queries + keys, queries + keys..queries + 2 * keys].map(|columns| {
            let part = |rows: &[f32]| -> Vec<f32> {
                rows.chunks(queries + 2 * keys).flat_map(|row| row[columns.clone()].to_vec()).collect()
            };
            distance(&part(&ours), &part(&exact))
        })
    }
}

impl Exact {
    fn new(pair: &Pair, case: Case, qkv: &Both, dout: &Both, starts: Option<&Both>) -> Self {
        let shape = case.shape;
        let blank = |len| pair.cpu.allocate(len, DType::F64, Category::Activations);
        let widened = |both: &Both| {
            let buffer = blank(both.cpu.len());
            pair.cpu.upload(&pair.cpu.read(both.cpu.view()), buffer.view());
            buffer
        };
        let [qkv, dout] = [qkv, dout].map(widened);
        let (out, dqkv) = (blank(dout.len()), blank(qkv.len()));
        let per_query = if case.plain { shape.sequence } else { 1 };
        let saved = blank(shape.batch * shape.heads * shape.sequence * per_query);
        let saved_view = if case.plain {
            AttentionSaved::Probabilities(saved.view())
        } else {
            AttentionSaved::LogSumExp(saved.view())
        };
        let starts = starts.map(|starts| starts.cpu.view());
        pair.cpu.attention(Attention { qkv: qkv.view(), starts, out: out.view(), saved: saved_view, shape });
        pair.cpu.attention_backward(AttentionBackward {
            qkv: qkv.view(),
            starts,
            out: out.view(),
            dout: dout.view(),
            saved: saved_view,
            dqkv: dqkv.view(),
            dbias: None,
            shape,
        });
        Exact { out, dqkv, saved }
    }
}

fn check(pair: &Pair, ours: &Both, exact: &Buffer, tolerance: f64, what: &str) {
    let error = distance(&pair.read(ours), &pair.cpu.read(exact.view()));
    println!("{what}: relative error {error:.2e}");
    assert!(error <= tolerance, "{what}: relative error {error}");
}

/// `Σ dout ∘ out` of every query, by the portable kernel, which `pair` has.
pub fn dots(pair: &mut Pair, shape: AttentionShape, dtype: DType, out: &Both, dout: &Both) -> Both {
    const THREADS: usize = 256;
    const ROWS_PER_BLOCK: usize = 16;
    let queries = shape.rows() * shape.heads;
    let dots = pair.blank("dots", queries, DType::F32);
    let sizes = [shape.sequence, shape.heads, shape.kv_heads, shape.head_dim];
    let sizes = sizes.map(|size| Argument::from(size as u32));
    let tensors = [pointer(out), pointer(dout), pointer(&dots), size(queries)];
    let scale = Argument::from(shape.scale() as f32);
    let grid = Grid::new(queries.div_ceil(ROWS_PER_BLOCK), THREADS);
    let arguments = [&tensors[..], &sizes, &[scale]].concat();
    pair.launch(&format!("attention_dots_{}", suffix(dtype)), grid, &arguments);
    dots
}

/// The errors of results and of gradients beside fp64: rounding of the format, and of sums in fp32.
pub fn tolerances(dtype: DType) -> [f64; 2] {
    match dtype {
        DType::BF16 => [2e-3, 3e-3],
        DType::F16 => [4e-4, 4e-4],
        _ => [5e-7, 5e-7],
    }
}
