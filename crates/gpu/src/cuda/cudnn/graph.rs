//! cuDNN's operation graph, built step by step: each function adds one operation and returns its result tensor.
//!
//! Only tensors with a [`Role`] exist in memory. The others, including the full matrices of scores, are values inside
//! the one kernel that cuDNN generates from the graph.

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind, cudnnDataType_t as DataType,
    cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t as Reduction,
};

use super::descriptor::{Descriptor, Draft};
use crate::error::GpuError;
use kintsugi_tensor::ops::AttentionShape;

/// The role of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Queries.
    Query,
    /// Keys.
    Key,
    /// Values.
    Value,
    /// The output.
    Out,
    /// The natural log of each row's sum of exponentials.
    LogSumExp,
    /// Gradient of the output.
    DOut,
    /// Scratch: the dot product of each row of output and its gradient.
    RowDots,
    /// Scratch: gradients of the queries, summed in fp32 in any order.
    DQuerySums,
    /// Gradient of the queries.
    DQuery,
    /// Gradient of the keys.
    DKey,
    /// Gradient of the values.
    DValue,
    /// A number, passed by value from the host.
    Scalar(Scalar),
}

/// Scalars that a graph takes by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    /// One.
    One,
    /// One over the square root of the head's width.
    Scale,
    /// The value of masked scores.
    MinusInfinity,
}

/// Dimensions and strides of a tensor, always four of each.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    dims: [i64; 4],
    strides: [i64; 4],
}

impl Layout {
    fn packed(dims: [i64; 4]) -> Self {
        let [_, h, t, d] = dims;
        Layout { dims, strides: [h * t * d, t * d, d, 1] }
    }

    /// The same memory with the last two dimensions swapped.
    #[must_use]
    pub fn transposed(self) -> Self {
        let swap = |[a, b, c, d]: [i64; 4]| [a, b, d, c];
        Layout { dims: swap(self.dims), strides: swap(self.strides) }
    }

    /// The same dimensions, but stored in column-major order.
    #[must_use]
    pub fn columns_first(self) -> Self {
        Layout { dims: self.dims, strides: self.transposed().strides }
    }
}

/// The layouts of an attention operation, as `[batch, heads, sequence, ...]`.
#[derive(Clone, Copy, Debug)]
pub struct Layouts {
    /// Queries in the interleaved projections.
    pub query: Layout,
    /// Keys or values in the interleaved projections.
    pub key: Layout,
    /// Output, `[batch, sequence, heads, head_dim]` in memory.
    pub out: Layout,
    /// One element per pair of query and key.
    pub scores: Layout,
    /// One element per query.
    pub rows: Layout,
    /// One vector per query, packed by head.
    pub vectors: Layout,
}

impl Layouts {
    /// The layouts of `shape`.
    pub fn new(shape: AttentionShape) -> Self {
        let AttentionShape { batch, sequence, heads, kv_heads, head_dim, .. } = shape;
        let [b, t, h, hk, d] = [batch, sequence, heads, kv_heads, head_dim].map(|n| n as i64);
        let interleaved = |heads, row| Layout { dims: [b, heads, t, d], strides: [t * row, d, row, 1] };
        let row = shape.qkv_width() as i64;
        Layouts {
            query: interleaved(h, row),
            key: interleaved(hk, row),
            out: interleaved(h, h * d),
            scores: Layout::packed([b, h, t, t]),
            rows: Layout::packed([b, h, t, 1]),
            vectors: Layout::packed([b, h, t, d]),
        }
    }
}

/// A tensor of a [`Graph`].
#[derive(Clone, Copy, Debug)]
pub struct Tensor(usize);

/// Operations in the order in which they were added.
#[derive(Debug)]
pub struct Graph {
    compute: DataType,
    tensors: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    /// The descriptors that the operations link to, kept alive because cuDNN does not document whether it copies them.
    parts: Vec<Descriptor>,
    roles: Vec<(i64, Role)>,
}

impl Graph {
    /// An empty graph over tensors of type `compute`, bf16 or f16. Sums are fp32.
    pub fn new(compute: DataType) -> Self {
        let (tensors, operations, parts, roles) = Default::default();
        Graph { compute, tensors, operations, parts, roles }
    }

    /// All operations.
    pub fn operations(&self) -> &[Descriptor] {
        &self.operations
    }

    /// The tensors in memory, by cuDNN's unique id.
    pub fn roles(&self) -> &[(i64, Role)] {
        &self.roles
    }

    /// A tensor in memory, in the compute type.
    pub fn stored(&mut self, role: Role, layout: Layout) -> Result<Tensor, GpuError> {
        self.tensor(layout, self.compute, Some(role))
    }

    /// A tensor in memory, in fp32.
    pub fn stored_sums(&mut self, role: Role, layout: Layout) -> Result<Tensor, GpuError> {
        self.tensor(layout, DataType::CUDNN_DATA_FLOAT, Some(role))
    }

    /// A number that is passed by value.
    pub fn scalar(&mut self, scalar: Scalar) -> Result<Tensor, GpuError> {
        self.stored_sums(Role::Scalar(scalar), Layout::packed([1; 4]))
    }

    /// A value inside the kernel, in fp32.
    pub fn sums(&mut self, layout: Layout) -> Result<Tensor, GpuError> {
        self.tensor(layout, DataType::CUDNN_DATA_FLOAT, None)
    }

    /// A value inside the kernel, rounded to the compute type.
    pub fn rounded(&mut self, layout: Layout) -> Result<Tensor, GpuError> {
        self.tensor(layout, self.compute, None)
    }

    fn tensor(&mut self, layout: Layout, dtype: DataType, role: Option<Role>) -> Result<Tensor, GpuError> {
        let id = self.tensors.len() as i64 + 1;
        let descriptor = Draft::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, dtype)?
            .set_all(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &layout.dims)?
            .set_all(Name::CUDNN_ATTR_TENSOR_STRIDES, &layout.strides)?
            .set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, id)?
            .set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 16_i64)?
            .set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, role.is_none())?
            .set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, matches!(role, Some(Role::Scalar(_))))?
            .finish()?;
        self.roles.extend(role.map(|role| (id, role)));
        self.tensors.push(descriptor);
        Ok(Tensor(self.tensors.len() - 1))
    }

    /// `to = a · b`, over the last two dimensions.
    pub fn matmul(&mut self, a: Tensor, b: Tensor, to: Tensor) -> Result<Tensor, GpuError> {
        let product = Draft::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, DataType::CUDNN_DATA_FLOAT)?
            .finish()?;
        let operation = Draft::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &self.tensors[a.0])?
            .link(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &self.tensors[b.0])?
            .link(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &self.tensors[to.0])?
            .link(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &product)?
            .finish()?;
        self.add(operation, Some(product));
        Ok(to)
    }

    /// `to = mode(x)`.
    pub fn unary(&mut self, mode: Pointwise, x: Tensor, to: Tensor) -> Result<Tensor, GpuError> {
        self.pointwise(pointwise(mode, DataType::CUDNN_DATA_FLOAT)?.finish()?, x, [None, None], to)
    }

    /// `to = mode(x, y)`.
    pub fn binary(&mut self, mode: Pointwise, x: Tensor, y: Tensor, to: Tensor) -> Result<Tensor, GpuError> {
        self.pointwise(pointwise(mode, DataType::CUDNN_DATA_FLOAT)?.finish()?, x, [Some(y), None], to)
    }

    fn pointwise(
        &mut self,
        mode: Descriptor,
        x: Tensor,
        [second, mask]: [Option<Tensor>; 2],
        to: Tensor,
    ) -> Result<Tensor, GpuError> {
        let mut draft = Draft::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &mode)?
            .link(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &self.tensors[x.0])?
            .link(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &self.tensors[to.0])?;
        if let Some(second) = second {
            draft = draft.link(Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &self.tensors[second.0])?;
        }
        if let Some(mask) = mask {
            draft = draft.link(Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, &self.tensors[mask.0])?;
        }
        self.add(draft.finish()?, Some(mode));
        Ok(to)
    }

    /// `to` = the reduction of `x` over the dimensions in which `to` is smaller.
    pub fn reduce(&mut self, mode: Reduction, x: Tensor, to: Tensor) -> Result<Tensor, GpuError> {
        let reduction = Draft::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, DataType::CUDNN_DATA_FLOAT)?
            .set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, mode)?
            .finish()?;
        let operation = Draft::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &self.tensors[x.0])?
            .link(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &self.tensors[to.0])?
            .link(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &reduction)?
            .finish()?;
        self.add(operation, Some(reduction));
        Ok(to)
    }

    /// `to` = the elements of `x` in the layout of `to`.
    pub fn reshape(&mut self, x: Tensor, to: Tensor) -> Result<Tensor, GpuError> {
        let operation = Draft::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &self.tensors[x.0])?
            .link(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &self.tensors[to.0])?
            .finish()?;
        self.add(operation, None);
        Ok(to)
    }

    /// The scores if the key is not later than the query, else −∞.
    pub fn causal(&mut self, scores: Tensor, layout: Layout) -> Result<Tensor, GpuError> {
        let query = self.index(scores, layout, 2)?;
        let key = self.index(scores, layout, 3)?;
        let mask = self.tensor(layout, DataType::CUDNN_DATA_BOOLEAN, None)?;
        let compare = pointwise(Pointwise::CUDNN_POINTWISE_CMP_GE, DataType::CUDNN_DATA_BOOLEAN)?.finish()?;
        self.pointwise(compare, query, [Some(key), None], mask)?;
        let masked = self.scalar(Scalar::MinusInfinity)?;
        let to = self.sums(layout)?;
        let select = Pointwise::CUDNN_POINTWISE_BINARY_SELECT;
        let select = pointwise(select, DataType::CUDNN_DATA_FLOAT)?.finish()?;
        self.pointwise(select, scores, [Some(masked), Some(mask)], to)
    }

    /// The index of every element along a dimension.
    fn index(&mut self, of: Tensor, layout: Layout, dim: i64) -> Result<Tensor, GpuError> {
        let to = self.tensor(layout, DataType::CUDNN_DATA_INT32, None)?;
        let mode = pointwise(Pointwise::CUDNN_POINTWISE_GEN_INDEX, DataType::CUDNN_DATA_FLOAT)?
            .set(Name::CUDNN_ATTR_POINTWISE_AXIS, dim)?
            .finish()?;
        self.pointwise(mode, of, [None, None], to)
    }

    fn add(&mut self, operation: Descriptor, part: Option<Descriptor>) {
        self.operations.push(operation);
        self.parts.extend(part);
    }
}

fn pointwise(mode: Pointwise, precision: DataType) -> Result<Draft, GpuError> {
    Draft::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
        .set(Name::CUDNN_ATTR_POINTWISE_MODE, mode)?
        .set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, precision)
}
