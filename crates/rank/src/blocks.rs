//! Loading, forward, recomputation and backward of blocks.

use kintsugi_model::{embedding, head, layer};
use kintsugi_plan::parameters::ParameterKind;
use kintsugi_plan::{BackwardPart, Block, Recompute, Unit};
use kintsugi_tensor::ops::control;
use kintsugi_tensor::{Buffer, Category, DType};

use crate::in_flight::{BlockActivations, BlockWeightInputs};
use crate::rank::{LOSS, Rank, TokenSource, Tokens};

impl Rank {
    pub(crate) fn load_batch(&mut self, micro: usize, source: &mut dyn TokenSource) {
        let batch = source.batch(micro);
        let ([inputs, targets, starts], rows) = (self.loads(), self.shape.rows);
        let upload = |len: usize, loads: bool, ids: Option<&[u32]>| {
            let allocate = || self.backend.allocate(len, DType::U32, Category::Activations);
            let buffer = loads.then(allocate);
            if let (Some(buffer), Some(ids)) = (&buffer, ids) {
                self.backend.upload_tokens(ids, buffer.view());
            }
            buffer.map(|buffer| (micro, buffer))
        };
        self.in_flight.tokens.extend(upload(rows, inputs, batch.map(|batch| batch.inputs)));
        self.in_flight.targets.extend(upload(rows, targets, batch.map(|batch| batch.targets)));
        self.in_flight.starts.extend(upload(self.plan.starts_len(), starts, batch.map(|batch| batch.starts)));
    }

    /// Passes the tokens that [`Rank::load_batch`] uploads to `put`, in the same order.
    pub(crate) fn tokens_for_replay(
        &self,
        micro: usize,
        source: &mut dyn TokenSource,
        put: &mut dyn FnMut(&[u32]),
    ) {
        let Some(Tokens { inputs, targets, starts }) = source.batch(micro) else { return };
        let all = [inputs, targets, starts].into_iter().zip(self.loads());
        all.filter(|(_, loads)| *loads).for_each(|(ids, _)| put(ids));
    }

    /// Whether this rank loads inputs, targets and starts.
    fn loads(&self) -> [bool; 3] {
        [self.at.pp() == 0, self.at.pp() + 1 == self.plan.mesh.pp(), self.plan.loads_starts()]
    }

    pub(crate) fn forward(&mut self, block: Block, micro: usize) {
        let saved = match block {
            Block::Embedding => {
                let x = self.embed(micro);
                self.in_flight.inputs.insert((self.next(block), micro), x);
                return;
            }
            Block::Layer(i) => {
                let x = self.take_input(block, micro);
                let (ctx, unit) = (self.layer_context(micro, i), self.unit(Unit::Layer(i)));
                let (y, saved) = if self.shape.recompute == Recompute::Full {
                    let (y, x) = layer::evaluate(&ctx, x, &unit.weights());
                    (y, BlockActivations::Input(x))
                } else {
                    let (y, saved) = layer::forward(&ctx, x, &unit.weights());
                    (y, BlockActivations::Layer(saved))
                };
                self.in_flight.inputs.insert((self.next(block), micro), y);
                saved
            }
            Block::Head => {
                let (x, targets) = (self.take_input(block, micro), self.take_targets(micro));
                let (ctx, w) = (self.context(), self.head_weights());
                BlockActivations::Head(head::forward(&ctx, x, targets, &w, self.loss()))
            }
        };
        self.in_flight.activations.insert((block, micro), saved);
    }

    pub(crate) fn evaluate(&mut self, block: Block, micro: usize) {
        match block {
            Block::Embedding => {
                let x = self.embed(micro);
                self.in_flight.tokens.remove(&micro);
                self.in_flight.inputs.insert((self.next(block), micro), x);
            }
            Block::Layer(i) => {
                let x = self.take_input(block, micro);
                let unit = self.unit(Unit::Layer(i));
                let (y, _) = layer::evaluate(&self.layer_context(micro, i), x, &unit.weights());
                if block == self.last_layers.1 {
                    self.in_flight.starts.remove(&micro);
                }
                self.in_flight.inputs.insert((self.next(block), micro), y);
            }
            Block::Head => {
                let (x, targets) = (self.take_input(block, micro), self.take_targets(micro));
                head::evaluate(&self.context(), &x, targets.view(), &self.head_weights(), self.loss());
            }
        }
    }

    pub(crate) fn recompute(&mut self, block: Block, micro: usize) {
        let (Block::Layer(i), Some(BlockActivations::Input(x))) =
            (block, self.in_flight.activations.remove(&(block, micro)))
        else {
            panic!("{block} kept no input to recompute from");
        };
        let saved = layer::rebuild(&self.layer_context(micro, i), x, &self.unit(Unit::Layer(i)).weights());
        self.in_flight.activations.insert((block, micro), BlockActivations::Layer(saved));
    }

    pub(crate) fn backward(&mut self, block: Block, micro: usize, part: BackwardPart) {
        // The input part also writes gradients: those of norms, and of biases that are added after a reduction.
        self.make_gradients(block);
        if part == BackwardPart::Weight {
            return self.weight_part(block, micro);
        }
        let (dx, weight_inputs) = match block {
            Block::Embedding => {
                let dx = self.take_gradient(block, micro);
                self.in_flight.weight_inputs.insert((block, micro), BlockWeightInputs::Embedding(dx));
                if part == BackwardPart::Both {
                    self.weight_part(block, micro);
                }
                return;
            }
            Block::Layer(i) => {
                let dy = self.take_gradient(block, micro);
                let Some(BlockActivations::Layer(saved)) = self.in_flight.activations.remove(&(block, micro))
                else {
                    panic!("{block} kept nothing for its backward");
                };
                let (ctx, unit) = (self.layer_context(micro, i), self.unit(Unit::Layer(i)));
                let (dx, weight_inputs) =
                    layer::backward(&ctx, dy, saved, &unit.weights(), &unit.gradients(), part);
                if Some(block) == self.last_layers.0 {
                    self.in_flight.starts.remove(&micro);
                }
                (dx, weight_inputs.map(BlockWeightInputs::Layer))
            }
            Block::Head => {
                let Some(BlockActivations::Head(saved)) = self.in_flight.activations.remove(&(block, micro))
                else {
                    panic!("the head kept nothing for its backward");
                };
                let norm = self.unit(Unit::Head).gradients();
                let (dx, weight_inputs) = head::backward(
                    &self.context(),
                    saved,
                    &self.head_weights(),
                    self.loss().scale,
                    &norm,
                    &self.head_output(),
                    part,
                );
                (dx, weight_inputs.map(BlockWeightInputs::Head))
            }
        };
        if let Some(weight_inputs) = weight_inputs {
            self.in_flight.weight_inputs.insert((block, micro), weight_inputs);
        }
        if block > self.first_backward {
            self.in_flight.gradients.insert((self.previous(block), micro), dx);
        }
    }

    fn weight_part(&mut self, block: Block, micro: usize) {
        let weight_inputs =
            self.in_flight.weight_inputs.remove(&(block, micro)).expect("the input part came first");
        match (block, weight_inputs) {
            (Block::Embedding, BlockWeightInputs::Embedding(dx)) => {
                let tokens = self.in_flight.tokens.remove(&micro).expect("tokens stay until here");
                let table = self.unit(Unit::Table).gradients();
                let positions = self.has_positions.then(|| self.unit(Unit::Positions).gradients());
                embedding::backward(&self.context(), &dx, tokens.view(), &table, positions.as_ref());
            }
            (Block::Layer(i), BlockWeightInputs::Layer(weight_inputs)) => {
                layer::weight_part(&self.context(), weight_inputs, &self.unit(Unit::Layer(i)).gradients());
            }
            (Block::Head, BlockWeightInputs::Head(weight_inputs)) => {
                head::weight_part(&self.context(), &weight_inputs, &self.head_output());
            }
            _ => unreachable!("the saved inputs are of another block"),
        }
    }

    fn make_gradients(&mut self, block: Block) {
        for &i in &self.written_by[&block] {
            self.units[i].make_gradient(&*self.backend);
        }
    }

    fn embed(&self, micro: usize) -> Buffer {
        let table = self.unit(Unit::Table).weights();
        let positions = self.has_positions.then(|| self.unit(Unit::Positions).weights());
        embedding::forward(&self.context(), self.in_flight.tokens[&micro].view(), &table, positions.as_ref())
    }

    pub(crate) fn head_weights(&self) -> head::HeadWeights<'_> {
        let norm = self.unit(Unit::Head).weights();
        let output = if self.plan.model.tied {
            self.unit(Unit::Table).weights().get(ParameterKind::Table)
        } else {
            norm.get(ParameterKind::Output)
        };
        head::HeadWeights { norm, output }
    }

    fn head_output(&self) -> head::OutputGradient<'_> {
        let (unit, kind) = if self.plan.model.tied {
            (Unit::Table, ParameterKind::Table)
        } else {
            (Unit::Head, ParameterKind::Output)
        };
        head::OutputGradient { gradients: self.unit(unit).gradients(), kind }
    }

    fn loss(&self) -> head::Loss<'_> {
        head::Loss {
            sum: self.sums().slice(LOSS..LOSS + 1),
            scale: self.control.slice(control::LOSS_SCALE..control::LOSS_SCALE + 1),
        }
    }

    pub(crate) fn take_input(&mut self, block: Block, micro: usize) -> Buffer {
        self.in_flight.inputs.remove(&(block, micro)).expect("a block's input comes before it")
    }

    fn take_gradient(&mut self, block: Block, micro: usize) -> Buffer {
        self.in_flight.gradients.remove(&(block, micro)).expect("a block's output gradient comes before it")
    }

    fn take_targets(&mut self, micro: usize) -> Buffer {
        self.in_flight.targets.remove(&micro).expect("targets are loaded before the head")
    }

    /// The block after this one in the model.
    pub(crate) fn next(&self, block: Block) -> Block {
        let after = match block {
            Block::Embedding => 0,
            Block::Layer(i) => i + 1,
            Block::Head => unreachable!("nothing comes after the head"),
        };
        if after < self.plan.model.layers { Block::Layer(after) } else { Block::Head }
    }

    /// The block before this one in the model.
    fn previous(&self, block: Block) -> Block {
        match block {
            Block::Embedding => unreachable!("nothing comes before the embedding"),
            Block::Layer(0) => Block::Embedding,
            Block::Layer(i) => Block::Layer(i - 1),
            Block::Head => Block::Layer(self.plan.model.layers - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::sync::Arc;

    use kintsugi_comm::Solo;
    use kintsugi_plan::config::ConfigSource;
    use kintsugi_tensor::Backend;
    use kintsugi_tensor::cpu::CpuBackend;
    use kintsugi_tensor::cpu::memory::Heap;

    use super::*;
    use crate::Groups;
    use crate::in_flight::InFlight;

    struct CountingTokens([Vec<u32>; 3]);

    impl TokenSource for CountingTokens {
        fn batch(&mut self, _micro: usize) -> Option<Tokens<'_>> {
            let [inputs, targets, starts] = &self.0;
            Some(Tokens { inputs, targets, starts })
        }
    }

    #[test]
    fn what_is_handed_over_is_what_is_uploaded_in_its_order() {
        for mask in [false, true] {
            let mask = format!("data.mask_documents={mask}");
            let source = ConfigSource::demo().sets(["data.source=corpus", "batch.sequence=8", &mask]).sets([
                "parallel.tp=1",
                "parallel.pp=1",
                "parallel.dp=1",
            ]);
            let plan = Arc::new(source.plan().expect("a legal config"));
            let at = plan.mesh.coordinate(0);
            let backend: Rc<dyn Backend> = Rc::new(CpuBackend::new(Rc::new(Heap::default()), 1));
            let groups = Groups::new(&plan, at, |_, _| Box::new(Solo));
            let rows = plan.rows() as u32;
            let mut source = CountingTokens([0, 1, 2].map(|i| (i * rows..(i + 1) * rows).collect()));
            let mut rank = Rank::new(Arc::clone(&plan), at, backend, groups);
            rank.load_batch(0, &mut source);
            let InFlight { tokens, targets, starts, .. } = &rank.in_flight;
            let mut uploaded = Vec::new();
            for buffer in [tokens, targets, starts].into_iter().filter_map(|loaded| loaded.get(&0)) {
                let mut bytes = vec![0; buffer.view().bytes()];
                rank.backend.download(buffer.view(), &mut bytes);
                uploaded.extend(bytes.as_chunks().0.iter().map(|&id| u32::from_ne_bytes(id)));
            }
            let mut handed = Vec::new();
            rank.tokens_for_replay(0, &mut source, &mut |ids| handed.extend_from_slice(ids));
            assert_eq!(handed, uploaded);
            assert_eq!(handed.len(), plan.rows() * if plan.masks_documents() { 3 } else { 2 });
        }
    }
}
