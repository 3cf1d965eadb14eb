//! Compiles a graph: cuDNN's heuristics list engines, and the first one that compiles and fits into the workspace is
//! used.

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind,
    cudnnBackendHeurMode_t as Heuristic,
};

use super::descriptor::{Descriptor, Draft, Handle, Pointer};
use super::graph::{Graph, Role, Scalar};
use crate::error::GpuError;

/// A compiled graph.
#[derive(Debug)]
pub struct Plan {
    compiled: Descriptor,
    scalars: Box<Scalars>,
    /// The descriptors that the plan was built from, kept alive because cuDNN does not document whether it copies them.
    _made_from: (Graph, Descriptor, Descriptor),
    ids: Vec<i64>,
    roles: Vec<Role>,
}

/// The numbers that are passed by value, at a fixed address.
#[derive(Debug)]
struct Scalars {
    one: f32,
    scale: f32,
    minus_infinity: f32,
}

impl Plan {
    /// Compiles a graph, which takes about a second. Its kernel needs at most `workspace_bytes` of scratch.
    pub fn new(handle: &Handle, graph: Graph, scale: f32, workspace_bytes: u64) -> Result<Self, GpuError> {
        let operations = Draft::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .link_all(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, graph.operations())?
            .handle(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle)?
            .finish()?;
        let heuristics = Draft::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .link(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &operations)?
            .set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Heuristic::CUDNN_HEUR_MODE_A)?
            .finish()?;
        let engines =
            heuristics.list(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?;
        let mut refusal = GpuError::Unsupported("cuDNN has no engine for this attention".into());
        for engine in engines {
            match compile(handle, &engine, workspace_bytes) {
                Ok(compiled) => {
                    let (ids, roles) = graph.roles().iter().copied().unzip();
                    let scalars = Box::new(Scalars { one: 1.0, scale, minus_infinity: f32::NEG_INFINITY });
                    return Ok(Plan {
                        compiled,
                        scalars,
                        _made_from: (graph, operations, engine),
                        ids,
                        roles,
                    });
                }
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    /// Enqueues the kernel. `address` returns the address of each tensor.
    ///
    /// # Safety
    /// The addresses must be device memory with the shapes of the graph, and `workspace` must have as many bytes as the
    /// plan was allowed. All of it must live until the kernel has run.
    pub unsafe fn run(
        &self,
        handle: &Handle,
        workspace: u64,
        address: impl Fn(Role) -> u64,
    ) -> Result<(), GpuError> {
        let pointers: Vec<Pointer> = self
            .roles
            .iter()
            .map(|&role| match role {
                Role::Scalar(scalar) => Pointer(self.scalars.address(scalar)),
                role => Pointer(address(role)),
            })
            .collect();
        let pack = Draft::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .set_all(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &self.ids)?
            .set_all(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?
            .set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Pointer(workspace))?
            .finish()?;
        // SAFETY: the caller's promise, and the scalars live in this plan.
        unsafe { handle.execute(&self.compiled, &pack) }
    }
}

impl Scalars {
    fn address(&self, scalar: Scalar) -> u64 {
        let value: *const f32 = match scalar {
            Scalar::One => &raw const self.one,
            Scalar::Scale => &raw const self.scale,
            Scalar::MinusInfinity => &raw const self.minus_infinity,
        };
        value as u64
    }
}

/// The plan of one engine. Fails if it needs more scratch than `workspace_bytes`.
fn compile(handle: &Handle, engine: &Descriptor, workspace_bytes: u64) -> Result<Descriptor, GpuError> {
    let plan = Draft::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
        .handle(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle)?
        .link(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, engine)?
        .finish()?;
    let needed = plan.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
    if needed as u64 > workspace_bytes {
        return Err(GpuError::Unsupported(format!(
            "cuDNN's attention needs {needed} bytes of scratch where {workspace_bytes} were planned"
        )));
    }
    Ok(plan)
}
