//! The tensors of attention of a part's slices on random numbers, and what they must be by the CPU backend in fp64 over all
//! keys.

use kintsugi_gfx90a::Argument;
use kintsugi_tensor::ops::{AttentionShape, Columns, SlicedAttention, SlicedAttentionBackward, Slices};
use kintsugi_tensor::{Backend, Buffer, Category, DType};

use crate::attention_tensors::shape;
use crate::support::{Both, NULL, Pair, pointer};

/// One case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub shape: AttentionShape,
    pub dtype: DType,
    pub slices: Slices,
    /// Length of packed documents; 0 for none.
    pub document: usize,
}

impl Case {
    pub fn new(sizes: [usize; 5], dtype: DType, [parts, part]: [usize; 2], document: usize) -> Self {
        Case { shape: shape(sizes), dtype, slices: Slices { parts, part }, document }
    }

    pub fn width(self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    /// Elements of one owner's keys and values.
    pub fn keys(self) -> usize {
        self.shape.rows() * 2 * self.shape.kv_heads * self.shape.head_dim
    }

    /// The position of the first token that each query attends to.
    fn starts(self) -> Vec<u32> {
        let own = self.shape.sequence;
        let position = |row: usize| self.slices.position(own, row % own);
        (0..self.shape.rows()).map(|row| (position(row) / self.document * self.document) as u32).collect()
    }

    /// The parts in the order in which their keys come around a ring, the part's own first.
    pub fn ring(self) -> impl Iterator<Item = usize> {
        let Slices { parts, part } = self.slices;
        (0..parts).map(move |step| (part + parts - step) % parts)
    }
}

/// What the kernels read, and the results in fp64.
pub struct Tensors {
    pub qkv: Both,
    pub keys: Both,
    pub dout: Both,
    starts: Option<Both>,
    pub exact: Exact,
}

pub struct Exact {
    pub out: Buffer,
    pub log_sums: Buffer,
    pub dqueries: Buffer,
    pub dkeys: Buffer,
}

impl Tensors {
    pub fn new(pair: &mut Pair, case: Case) -> Self {
        let Case { shape, dtype, slices, document } = case;
        let qkv = pair.random("qkv", shape.rows() * shape.qkv_width(), dtype, 1);
        let keys = pair.random("keys", slices.parts * case.keys(), dtype, 2);
        let dout = pair.random("dout", shape.rows() * case.width(), dtype, 3);
        let starts = (document > 0).then(|| pair.tokens("starts", &case.starts()));
        let exact = Exact::new(pair, case, [&qkv, &keys, &dout], starts.as_ref());
        Tensors { qkv, keys, dout, starts, exact }
    }

    pub fn starts(&self) -> Argument {
        self.starts.as_ref().map_or(NULL.into(), pointer)
    }

    /// The keys of one part.
    pub fn keys_of(&self, case: Case, owner: usize) -> Argument {
        (self.keys.address + (owner * case.keys() * case.dtype.bytes()) as u64).into()
    }
}

impl Exact {
    fn new(pair: &Pair, case: Case, inputs: [&Both; 3], starts: Option<&Both>) -> Self {
        let Case { shape, slices, .. } = case;
        let blank = |len| pair.cpu.allocate(len, DType::F64, Category::Activations);
        let [qkv, keys, dout] = inputs.map(|both| {
            let buffer = blank(both.cpu.len());
            pair.cpu.upload(&pair.cpu.read(both.cpu.view()), buffer.view());
            buffer
        });
        let (out, log_sums) = (blank(dout.len()), blank(shape.rows() * shape.heads));
        let (dqueries, dkeys) = (blank(dout.len()), blank(keys.len()));
        let starts = starts.map(|starts| starts.cpu.view());
        pair.cpu.sliced_attention(SlicedAttention {
            qkv: qkv.view(),
            keys: keys.view(),
            first_owner: 0,
            owners: slices.parts,
            starts,
            before: None,
            out: out.view(),
            log_sums: log_sums.view(),
            shape,
            slices,
        });
        pair.cpu.sliced_attention_backward(SlicedAttentionBackward {
            qkv: qkv.view(),
            keys: keys.view(),
            first_owner: 0,
            owners: slices.parts,
            starts,
            out: out.view(),
            dout: dout.view(),
            log_sums: log_sums.view(),
            dqueries: Columns { view: dqueries.view(), width: case.width(), first: 0 },
            add_queries: false,
            dkeys: dkeys.view(),
            add_keys: false,
            shape,
            slices,
        });
        Exact { out, log_sums, dqueries, dkeys }
    }
}
