//! Loading, forward, recomputation and backward of blocks.

use kintsugi_model::{embedding, head, layer};
use kintsugi_plan::parameters::Slot;
use kintsugi_plan::{Block, Part, Recompute, Unit};
use kintsugi_tensor::ops::control;
use kintsugi_tensor::{Buffer, Category, DType};

use crate::flow::{Deferred, Saved};
use crate::rank::{LOSS, Rank, Source, Tokens};

impl Rank {
    pub(crate) fn load_batch(&mut self, micro: usize, source: &mut dyn Source) {
        let batch = source.batch(micro);
        let [inputs, targets, starts] = self.loads();
        let upload = |loads: bool, ids: Option<&[u32]>| {
            let allocate = || self.backend.allocate(self.shape.rows, DType::U32, Category::Activations);
            let buffer = loads.then(allocate);
            if let (Some(buffer), Some(ids)) = (&buffer, ids) {
                self.backend.upload_tokens(ids, buffer.view());
            }
            buffer.map(|buffer| (micro, buffer))
        };
        self.flow.tokens.extend(upload(inputs, batch.map(|batch| batch.inputs)));
        self.flow.targets.extend(upload(targets, batch.map(|batch| batch.targets)));
        self.flow.starts.extend(upload(starts, batch.map(|batch| batch.starts)));
    }

    /// Hands over what [`Rank::load_batch`] uploads, in the same order.
    pub(crate) fn hand_over(&self, micro: usize, source: &mut dyn Source, put: &mut dyn FnMut(&[u32])) {
        let Some(Tokens { inputs, targets, starts }) = source.batch(micro) else { return };
        let all = [inputs, targets, starts].into_iter().zip(self.loads());
        all.filter(|(_, loads)| *loads).for_each(|(ids, _)| put(ids));
    }

    /// Whether this rank loads inputs, targets, and the beginnings of documents.
    fn loads(&self) -> [bool; 3] {
        [self.at.pp == 0, self.at.pp + 1 == self.plan.mesh.pp, self.plan.masks_documents()]
    }

    pub(crate) fn forward(&mut self, block: Block, micro: usize) {
        let saved = match block {
            Block::Embedding => {
                let x = self.embed(micro);
                self.flow.inputs.insert((self.next(block), micro), x);
                return;
            }
            Block::Layer(i) => {
                let x = self.take_input(block, micro);
                let (ctx, unit) = (self.layer_context(micro), self.unit(Unit::Layer(i)));
                let (y, saved) = if self.shape.recompute == Recompute::Full {
                    let (y, x) = layer::evaluate(&ctx, x, &unit.weights());
                    (y, Saved::Input(x))
                } else {
                    let (y, saved) = layer::forward(&ctx, x, &unit.weights());
                    (y, Saved::Layer(saved))
                };
                self.flow.inputs.insert((self.next(block), micro), y);
                saved
            }
            Block::Head => {
                let (x, targets) = (self.take_input(block, micro), self.take_targets(micro));
                Saved::Head(head::forward(&self.context(), x, &self.head_weights(), self.loss(&targets)))
            }
        };
        self.flow.saved.insert((block, micro), saved);
    }

    pub(crate) fn evaluate(&mut self, block: Block, micro: usize) {
        match block {
            Block::Embedding => {
                let x = self.embed(micro);
                self.flow.tokens.remove(&micro);
                self.flow.inputs.insert((self.next(block), micro), x);
            }
            Block::Layer(i) => {
                let x = self.take_input(block, micro);
                let unit = self.unit(Unit::Layer(i));
                let (y, _) = layer::evaluate(&self.layer_context(micro), x, &unit.weights());
                if block == self.outer_layers[1] {
                    self.flow.starts.remove(&micro);
                }
                self.flow.inputs.insert((self.next(block), micro), y);
            }
            Block::Head => {
                let (x, targets) = (self.take_input(block, micro), self.take_targets(micro));
                head::evaluate(&self.context(), &x, &self.head_weights(), self.loss(&targets));
            }
        }
    }

    pub(crate) fn recompute(&mut self, block: Block, micro: usize) {
        let (Block::Layer(i), Some(Saved::Input(x))) = (block, self.flow.saved.remove(&(block, micro)))
        else {
            panic!("{block} kept no input to recompute from");
        };
        let saved = layer::rebuild(&self.layer_context(micro), x, &self.unit(Unit::Layer(i)).weights());
        self.flow.saved.insert((block, micro), Saved::Layer(saved));
    }

    pub(crate) fn backward(&mut self, block: Block, micro: usize, part: Part) {
        // The input part, too, writes gradients: those of norms and of the biases behind a reduction.
        self.make_gradients(block);
        if part == Part::Weight {
            return self.weight_part(block, micro);
        }
        let (dx, deferred) = match block {
            Block::Embedding => {
                let dx = self.take_gradient(block, micro);
                self.flow.deferred.insert((block, micro), Deferred::Embedding(dx));
                if part == Part::Both {
                    self.weight_part(block, micro);
                }
                return;
            }
            Block::Layer(i) => {
                let dy = self.take_gradient(block, micro);
                let Some(Saved::Layer(saved)) = self.flow.saved.remove(&(block, micro)) else {
                    panic!("{block} kept nothing for its backward");
                };
                let (ctx, unit) = (self.layer_context(micro), self.unit(Unit::Layer(i)));
                let (dx, deferred) =
                    layer::backward(&ctx, dy, saved, &unit.weights(), &unit.gradients(), part);
                if block == self.outer_layers[0] {
                    self.flow.starts.remove(&micro);
                }
                (dx, deferred.map(Deferred::Layer))
            }
            Block::Head => {
                let Some(Saved::Head(saved)) = self.flow.saved.remove(&(block, micro)) else {
                    panic!("the head kept nothing for its backward");
                };
                let norm = self.unit(Unit::Head).gradients();
                let (dx, deferred) = head::backward(
                    &self.context(),
                    saved,
                    &self.head_weights(),
                    &norm,
                    &self.head_output(),
                    part,
                );
                (dx, deferred.map(Deferred::Head))
            }
        };
        if let Some(deferred) = deferred {
            self.flow.deferred.insert((block, micro), deferred);
        }
        self.flow.gradients.insert((self.previous(block), micro), dx);
    }

    fn weight_part(&mut self, block: Block, micro: usize) {
        let deferred = self.flow.deferred.remove(&(block, micro)).expect("the input part came first");
        match (block, deferred) {
            (Block::Embedding, Deferred::Embedding(dx)) => {
                let tokens = self.flow.tokens.remove(&micro).expect("tokens stay until here");
                let table = self.unit(Unit::Table).gradients();
                let positions = self.has_positions.then(|| self.unit(Unit::Positions).gradients());
                embedding::backward(&self.context(), &dx, tokens.view(), &table, positions.as_ref());
            }
            (Block::Layer(i), Deferred::Layer(deferred)) => {
                layer::weight_part(&self.context(), deferred, &self.unit(Unit::Layer(i)).gradients());
            }
            (Block::Head, Deferred::Head(deferred)) => {
                head::weight_part(&self.context(), &deferred, &self.head_output());
            }
            _ => unreachable!("what is deferred belongs to its block"),
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
        embedding::forward(&self.context(), self.flow.tokens[&micro].view(), &table, positions.as_ref())
    }

    pub(crate) fn head_weights(&self) -> head::HeadWeights<'_> {
        let norm = self.unit(Unit::Head).weights();
        let output = if self.plan.model.tied {
            self.unit(Unit::Table).weights().get(Slot::Table)
        } else {
            norm.get(Slot::Output)
        };
        head::HeadWeights { norm, output }
    }

    fn head_output(&self) -> head::Output<'_> {
        let (unit, slot) =
            if self.plan.model.tied { (Unit::Table, Slot::Table) } else { (Unit::Head, Slot::Output) };
        head::Output { gradients: self.unit(unit).gradients(), slot }
    }

    fn loss<'a>(&'a self, targets: &'a Buffer) -> head::Loss<'a> {
        head::Loss {
            targets: targets.view(),
            sum: self.sums().slice(LOSS..LOSS + 1),
            scale: self.control.slice(control::LOSS_SCALE..control::LOSS_SCALE + 1),
        }
    }

    pub(crate) fn take_input(&mut self, block: Block, micro: usize) -> Buffer {
        self.flow.inputs.remove(&(block, micro)).expect("a block's input comes before it")
    }

    fn take_gradient(&mut self, block: Block, micro: usize) -> Buffer {
        self.flow.gradients.remove(&(block, micro)).expect("a block's output gradient comes before it")
    }

    fn take_targets(&mut self, micro: usize) -> Buffer {
        self.flow.targets.remove(&micro).expect("targets are loaded before the head")
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
    use crate::flow::Flow;

    struct Counted([Vec<u32>; 3]);

    impl Source for Counted {
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
            let groups = Groups::new(&plan, at, |_, _, _| Box::new(Solo));
            let rows = plan.rows() as u32;
            let mut source = Counted([0, 1, 2].map(|i| (i * rows..(i + 1) * rows).collect()));
            let mut rank = Rank::new(Arc::clone(&plan), at, backend, groups);
            rank.load_batch(0, &mut source);
            let Flow { tokens, targets, starts, .. } = &rank.flow;
            let mut uploaded = Vec::new();
            for buffer in [tokens, targets, starts].into_iter().filter_map(|loaded| loaded.get(&0)) {
                let mut bytes = vec![0; buffer.view().bytes()];
                rank.backend.download(buffer.view(), &mut bytes);
                uploaded.extend(bytes.as_chunks().0.iter().map(|&id| u32::from_ne_bytes(id)));
            }
            let mut handed = Vec::new();
            rank.hand_over(0, &mut source, &mut |ids| handed.extend_from_slice(ids));
            assert_eq!(handed, uploaded);
            assert_eq!(handed.len(), plan.rows() * if plan.masks_documents() { 3 } else { 2 });
        }
    }
}
