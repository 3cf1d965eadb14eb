//! Graphs as cuDNN receives them. cuDNN checks every tensor and operation when it is finalized, with or without a GPU.

use cudarc::cudnn::sys::cudnnDataType_t as DataType;

use super::backward::backward;
use super::forward::forward;
use super::graph::{Graph, Role};
use crate::cuda::libraries;
use kintsugi_tensor::ops::{AttentionShape, Scores};
use kintsugi_testing::{Need, skip};

const SHAPE: AttentionShape =
    AttentionShape { batch: 2, sequence: 256, heads: 4, kv_heads: 4, head_dim: 64, scores: Scores::PLAIN };
const GROUPED: AttentionShape = AttentionShape { kv_heads: 2, ..SHAPE };

fn has(graph: &Graph, role: Role) -> bool {
    graph.roles().iter().any(|&(_, other)| other == role)
}

#[test]
fn cudnn_accepts_every_operation_of_the_graphs() {
    if let Err(missing) = libraries::CUDNN.require() {
        skip(Need::Gpu, missing);
        return;
    }
    for compute in [DataType::CUDNN_DATA_BFLOAT16, DataType::CUDNN_DATA_HALF] {
        for (shape, operations) in [(SHAPE, 22), (GROUPED, 24)] {
            assert_eq!(forward(shape, compute).unwrap().operations().len(), 14);
            let graph = backward(shape, compute, false).unwrap();
            assert_eq!(graph.operations().len(), operations);
            assert!(has(&graph, Role::DQuerySums));
            let ordered = backward(shape, compute, true).unwrap();
            assert_eq!(ordered.operations().len(), operations - 1);
            assert!(!has(&ordered, Role::DQuerySums), "sums in any order");
        }
    }
}
