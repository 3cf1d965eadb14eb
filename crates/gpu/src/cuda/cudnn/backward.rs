//! The graph of attention's backward pass, which recomputes the probabilities from the log-sum-exp.

use cudarc::cudnn::sys::{
    cudnnDataType_t as DataType, cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t as Reduction,
};

use super::forward::scaled_scores;
use super::graph::{Graph, Layout, Layouts, Role, Scalar, Tensor};
use crate::error::GpuError;
use kintsugi_tensor::ops::AttentionShape;

/// Gradients of queries, keys and values.
///
/// Without `deterministic`, blocks add the queries' gradients to an fp32 sum in any order. With it, cuDNN writes the
/// gradients of the scores to its workspace instead.
pub fn backward(shape: AttentionShape, compute: DataType, deterministic: bool) -> Result<Graph, GpuError> {
    let mut graph = Graph::new(compute);
    let layouts = Layouts::new(shape);
    let grouped = shape.heads != shape.kv_heads;
    let query = graph.stored(Role::Query, layouts.query)?;
    let key = graph.stored(Role::Key, layouts.key.transposed())?;
    let value = graph.stored(Role::Value, layouts.key.transposed())?;
    let dout = graph.stored(Role::DOut, layouts.out)?;
    let row_dots = row_dots(&mut graph, &layouts, dout)?;

    let probabilities = probabilities(&mut graph, &layouts, query, key)?;
    let dvalue = graph.stored(Role::DValue, layouts.key)?;
    by_key(&mut graph, &layouts, (probabilities, dout, dvalue), grouped)?;

    let dscores = dscores(&mut graph, &layouts, (dout, value), row_dots, probabilities)?;
    let dkey = graph.stored(Role::DKey, layouts.key)?;
    by_key(&mut graph, &layouts, (dscores, query, dkey), grouped)?;

    let rows_of_keys = graph.rounded(layouts.key)?;
    graph.reshape(key, rows_of_keys)?;
    let dquery = graph.stored(Role::DQuery, layouts.query)?;
    if deterministic {
        graph.matmul(dscores, rows_of_keys, dquery)?;
    } else {
        let sums = graph.stored_sums(Role::DQuerySums, layouts.vectors)?;
        graph.matmul(dscores, rows_of_keys, sums)?;
        graph.unary(Pointwise::CUDNN_POINTWISE_IDENTITY, sums, dquery)?;
    }
    Ok(graph)
}

/// `Σ dout ∘ out` for every query, stored in memory.
fn row_dots(graph: &mut Graph, layouts: &Layouts, dout: Tensor) -> Result<Tensor, GpuError> {
    let out = graph.stored(Role::Out, layouts.out)?;
    let products = graph.sums(layouts.vectors)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, dout, out, products)?;
    let dots = graph.sums(layouts.rows)?;
    graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, products, dots)?;
    let (one, stored) = (graph.scalar(Scalar::One)?, graph.stored_sums(Role::RowDots, layouts.rows)?);
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, dots, one, stored)
}

/// `exp(scores − log_sum_exp)`, causal.
fn probabilities(
    graph: &mut Graph,
    layouts: &Layouts,
    query: Tensor,
    key: Tensor,
) -> Result<Tensor, GpuError> {
    let scores = scaled_scores(graph, layouts, query, key)?;
    let log_sum_exp = graph.stored_sums(Role::LogSumExp, layouts.rows)?;
    let logs = graph.sums(layouts.scores)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, scores, log_sum_exp, logs)?;
    let logs = graph.causal(logs, layouts.scores)?;
    let probabilities = graph.sums(layouts.scores)?;
    graph.unary(Pointwise::CUDNN_POINTWISE_EXP, logs, probabilities)
}

/// `scale · probabilities ∘ (dout·valueᵀ − row_dots)`.
fn dscores(
    graph: &mut Graph,
    layouts: &Layouts,
    (dout, value): (Tensor, Tensor),
    row_dots: Tensor,
    probabilities: Tensor,
) -> Result<Tensor, GpuError> {
    let dprobabilities = graph.sums(layouts.scores)?;
    graph.matmul(dout, value, dprobabilities)?;
    let centred = graph.sums(layouts.scores)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_SUB, dprobabilities, row_dots, centred)?;
    let unscaled = graph.sums(layouts.scores)?;
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, centred, probabilities, unscaled)?;
    let (scale, dscores) = (graph.scalar(Scalar::Scale)?, graph.sums(layouts.scores)?);
    graph.binary(Pointwise::CUDNN_POINTWISE_MUL, unscaled, scale, dscores)
}

/// `to = pairsᵀ · vectors`, summed over the query heads of each key head if heads are grouped.
fn by_key(
    graph: &mut Graph,
    layouts: &Layouts,
    (pairs, vectors, to): (Tensor, Tensor, Tensor),
    grouped: bool,
) -> Result<(), GpuError> {
    let transposed: Layout = layouts.scores.columns_first();
    let rounded = graph.rounded(transposed)?;
    graph.reshape(pairs, rounded)?;
    if grouped {
        let by_query_head = graph.rounded(layouts.vectors)?;
        graph.matmul(rounded, vectors, by_query_head)?;
        graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, by_query_head, to)?;
    } else {
        graph.matmul(rounded, vectors, to)?;
    }
    Ok(())
}
