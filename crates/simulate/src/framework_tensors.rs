//! The tensors that a framework holds and this engine does not, op by op: what a layer keeps for its backward, the copies of the
//! logits, and the gradient of a matrix before it is added to the sum.

use kintsugi_plan::{AttentionKind, BackwardPart, Block, Computation, Op, Plan, Recompute};
use kintsugi_spec::Fusion;
use kintsugi_tensor::{Arena, Block as MemoryBlock, Category, Memory};

/// Bytes of the tensors of a framework.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameworkTensors {
    /// A layer keeps them from its forward, or its recomputation, to its backward.
    layer: u64,
    /// Copies of the logits, from the loss to its backward.
    logits: u64,
    /// The gradient of a layer's largest matrix while it is added to the sum.
    layer_gradient: u64,
    /// The same of the output matrix.
    head_gradient: u64,
    recomputes: bool,
}

/// What an op does to the tensors of a framework.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Beside {
    /// Bytes that it keeps when it starts, or frees when it ends if negative.
    pub kept: i64,
    /// Whether these are activations; otherwise they are workspace.
    pub activations: bool,
    /// Bytes that it needs only while it runs.
    pub temporary: u64,
}

impl FrameworkTensors {
    /// The tensors of a plan's framework.
    pub fn new(plan: &Plan) -> Self {
        let (framework, model, tp) = (&plan.framework, &plan.model, plan.mesh.tp());
        let rows = plan.rows() as f64;
        let per_rank = |elements: usize| rows * elements as f64 / tp as f64;
        let stream = per_rank(model.hidden) * if plan.sequence_parallel { 1.0 } else { tp as f64 };
        let norms = if plan.sequence_parallel { framework.keeps.norms } else { 0.0 };
        let scores = if plan.memory.attention == AttentionKind::Plain {
            framework.keeps.scores * per_rank(plan.batch.sequence * model.heads)
        } else {
            0.0
        };
        let layer = (framework.keeps.stream + norms) * stream
            + framework.keeps.heads * per_rank(model.heads * model.head_dim)
            + framework.keeps.ffn * per_rank(model.ffn)
            + scores;
        let matrices = if model.activation.is_gated() { 2 } else { 1 };
        let vocab = model.padded_vocab(tp);
        let parts = if framework.whole_logits { 1 } else { tp };
        // Gradients that stay beside the sums are counted for all parameters.
        let own = framework.parameter_bytes <= 0.0;
        let apart = own && framework.kernels.accumulation != Fusion::Fused;
        let gradient =
            |exists: bool, width: usize| if exists { 2 * (width * model.hidden / tp) as u64 } else { 0 };
        FrameworkTensors {
            layer: layer as u64,
            logits: (framework.logit_bytes * (plan.rows() * vocab / parts) as f64) as u64,
            layer_gradient: gradient(apart, matrices * model.ffn),
            head_gradient: gradient(apart || (own && framework.layer_gradients > 0.0), vocab),
            recomputes: plan.memory.recompute == Recompute::Full,
        }
    }

    /// What an op does.
    pub fn beside(&self, op: Op) -> Beside {
        let [layer, logits] = [self.layer, self.logits].map(|bytes| rounded(bytes) as i64);
        let first = |part| part != BackwardPart::Weight;
        let activations = |kept, temporary| Beside { kept, activations: true, temporary: rounded(temporary) };
        let of_head = |kept, temporary| Beside { kept, activations: false, temporary: rounded(temporary) };
        let Op::Compute { kind, block, .. } = op else { return Beside::default() };
        match (block, kind) {
            (Block::Layer(_), Computation::Forward) if !self.recomputes => activations(layer, 0),
            (Block::Layer(_), Computation::Recompute) => activations(layer, 0),
            (Block::Layer(_), Computation::Backward(part)) => {
                activations(if first(part) { -layer } else { 0 }, self.layer_gradient)
            }
            (Block::Head, Computation::Forward) => of_head(logits, 0),
            (Block::Head, Computation::Evaluate) => of_head(0, self.logits),
            // The copies are freed before the product that makes the gradient.
            (Block::Head, Computation::Backward(part)) if first(part) => {
                of_head(-logits, self.head_gradient.saturating_sub(self.logits))
            }
            (Block::Head, Computation::Backward(_)) => of_head(0, self.head_gradient),
            (Block::Embedding | Block::Layer(_) | Block::Head, _) => Beside::default(),
        }
    }
}

/// The bytes that an allocation takes.
fn rounded(bytes: u64) -> u64 {
    if bytes == 0 { 0 } else { Arena::rounded(bytes) }
}

/// Allocates and frees the tensors of a framework while a rank runs on paper.
pub(crate) struct Allocations<'a> {
    tensors: FrameworkTensors,
    memory: &'a dyn Memory,
    /// Those of layers and of heads.
    kept: [Vec<MemoryBlock>; 2],
    /// Of the op that runs: its temporary tensor, and what it frees at its end.
    temporary: Option<MemoryBlock>,
    freed: Option<MemoryBlock>,
}

impl<'a> Allocations<'a> {
    /// Allocations in the memory of a rank.
    pub fn new(plan: &Plan, memory: &'a dyn Memory) -> Self {
        let tensors = FrameworkTensors::new(plan);
        Allocations { tensors, memory, kept: Default::default(), temporary: None, freed: None }
    }

    /// The op before has ended, and this one begins.
    pub fn begin(&mut self, op: Op) {
        self.end();
        let Beside { kept, activations, temporary } = self.tensors.beside(op);
        let held = &mut self.kept[usize::from(activations)];
        if kept > 0 {
            let category = if activations { Category::Activations } else { Category::Workspace };
            held.push(self.memory.allocate(kept as u64, category));
        } else if kept < 0 {
            self.freed = held.pop();
        }
        if temporary > 0 {
            self.temporary = Some(self.memory.allocate(temporary, Category::Workspace));
        }
    }

    /// The last op has ended.
    pub fn end(&mut self) {
        let ended = [self.temporary.take(), self.freed.take()];
        ended.into_iter().flatten().for_each(|block| self.memory.release(block));
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    fn tensors(sets: &[&str]) -> FrameworkTensors {
        let common =
            ["model.preset=demo", "parallel.tp=2", "parallel.pp=1", "parallel.dp=1", "batch.micro=1"];
        let own = ["framework.keeps.stream=2", "framework.keeps.norms=4", "framework.logit_bytes=4"];
        let source = ConfigSource::text("").sets(common).sets(own).sets(sets);
        FrameworkTensors::new(&source.plan().expect("a right configuration"))
    }

    #[test]
    fn masks_are_of_all_rows_unless_ranks_divide_the_rows() {
        let (whole, parts) = (tensors(&[]), tensors(&["parallel.sequence_parallel=true"]));
        assert_eq!(
            whole.layer,
            2 * 2 * parts.layer / 6,
            "no norms are kept twice, and masks are not divided"
        );
    }

    #[test]
    fn under_full_recomputation_only_the_recomputed_layer_keeps_tensors() {
        let tensors = tensors(&["memory.recompute=full"]);
        let beside = |kind: Computation| tensors.beside(kind.on(Block::Layer(0), 0));
        assert_eq!(beside(Computation::Forward), Beside::default());
        let again = beside(Computation::Recompute).kept;
        let back = beside(Computation::Backward(BackwardPart::Both)).kept;
        assert!(again > 0 && back == -again);
    }

    #[test]
    fn the_gradient_of_the_output_matrix_comes_after_the_copies_of_the_logits() {
        let tensors = tensors(&["framework.kernels.accumulation=kernel"]);
        let beside = |kind: Computation| tensors.beside(kind.on(Block::Head, 0));
        let loss = beside(Computation::Forward).kept as u64;
        let back = beside(Computation::Backward(BackwardPart::Both)).temporary;
        assert!(
            loss > 0 && loss + back == tensors.head_gradient.max(loss).next_multiple_of(Arena::ALIGNMENT)
        );
    }
}
