//! The graph of attention's forward pass: scores, causal mask, softmax, values (arXiv 2205.14135).

use cudarc::cudnn::sys::{
    cudnnDataType_t as DataType, cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t as Reduction,
};

use super::graph::{Graph, Layouts, Role, Scalar, Tensor};
use crate::error::GpuError;
use kintsugi_tensor::ops::AttentionShape;

/// `out = softmax(scale · q·kᵀ, causal) · v`, and the log of each row's sum of exponentials.
pub fn forward(shape: AttentionShape, compute: DataType) -> Result<Graph, GpuError> {
    let mut graph = Graph::new(compute);
    let layouts = Layouts::new(shape);
    let query = graph.stored(Role::Query, layouts.query)?;
    let key = graph.stored(Role::Key, layouts.key.transposed())?;
    let value = graph.stored(Role::Value, layouts.key)?;
    let scores = scaled_scores(&mut graph, &layouts, query, key)?;
    let scores = graph.causal(scores, layouts.scores)?;
    let probabilities = softmax(&mut graph, &layouts, scores)?;
    let out = graph.stored(Role::Out, layouts.out)?;
    graph.matmul(probabilities, value, out)?;
    Ok(graph)
}

/// `scale · q·kᵀ`. Both passes start with it.
pub fn scaled_scores(
    graph: &mut Graph,
    layouts: &Layouts,
    query: Tensor,
    key: Tensor,
) -> Result<Tensor, GpuError> {
    let product = graph.sums(layouts.scores)?;
    graph.matmul(query, key, product)?;
    let (scale, scaled) = (graph.scalar(Scalar::Scale)?, graph.sums(layouts.scores)?);
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, product, scale, scaled)
}

/// The probabilities, rounded to the compute type. Also stores the log-sum-exp of every row.
fn softmax(graph: &mut Graph, layouts: &Layouts, scores: Tensor) -> Result<Tensor, GpuError> {
    let maximum = graph.sums(layouts.rows)?;
    graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_MAX, scores, maximum)?;
    let shifted = graph.sums(layouts.scores)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, scores, maximum, shifted)?;
    let exponentials = graph.sums(layouts.scores)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_EXP, shifted, exponentials)?;
    let sum = graph.sums(layouts.rows)?;
    graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, exponentials, sum)?;
    let log = graph.sums(layouts.rows)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_LOG, sum, log)?;
    let log_sum_exp = graph.stored_sums(Role::LogSumExp, layouts.rows)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_ADD, maximum, log, log_sum_exp)?;
    let probabilities = graph.rounded(layouts.scores)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_DIV, exponentials, sum, probabilities)
}
