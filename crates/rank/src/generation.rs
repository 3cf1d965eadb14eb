//! Generation: the KV caches, which stay from step to step, and the ops that run new tokens through the blocks.
//!
//! A step feeds each sample some new tokens, runs them with the caches, and samples the token after the last of them.
//! [`Rank::expect_tokens`] sets the number of new tokens before the step.

use std::collections::HashMap;

use kintsugi_comm::{Collective, Pending};
use kintsugi_model::{Context, KvCache, Shape, embedding, head, layer};
use kintsugi_plan::{Block, Group, Unit};
use kintsugi_tensor::{Buffer, Category, DType};

use crate::rank::{Rank, TokenSource};

/// The new tokens of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens<'a> {
    /// `[samples, tokens]` ids. Shorter samples are padded with arbitrary tokens.
    pub tokens: &'a [u32],
    /// `[samples, tokens]`: the position of each token in its sample.
    pub positions: &'a [u32],
    /// `[samples]`: the row of each sample's last token. The step samples the token after it.
    pub last: &'a [u32],
}

/// A rank's state during generation.
pub(crate) struct Generation {
    /// The sizes of a step's new tokens.
    pub shape: Shape,
    samples: usize,
    /// By layer and micro-batch.
    caches: HashMap<(usize, usize), KvCache>,
    /// The step's positions and last rows, by micro-batch.
    positions: HashMap<usize, Buffer>,
    last: HashMap<usize, Buffer>,
    /// The head's logits, by micro-batch.
    logits: HashMap<usize, Buffer>,
    /// The sampled tokens as floats, `[micro-batches, samples]`. They are zero on all stages but the last, so a sum over the
    /// stages gives them to all.
    chosen: Option<Buffer>,
    sharing: Option<Pending>,
}

/// Token ids up to this are exact as f32.
const MAX_TOKENS: usize = 1 << f32::MANTISSA_DIGITS;

impl Rank {
    /// Allocates KV caches for `micro_batches` of `samples` samples of up to `capacity` tokens, and discards the previous
    /// ones.
    pub fn start_generation(&mut self, micro_batches: usize, samples: usize, capacity: usize) {
        assert!(self.plan.model.vocab <= MAX_TOKENS, "tokens are shared as numbers below {MAX_TOKENS}");
        self.generation = None;
        let shape = self.shape.with_new_tokens(samples, 1);
        let mut caches = HashMap::new();
        for block in self.plan.stage_blocks(self.at.pp()) {
            if let Block::Layer(layer) = block {
                let cache = |micro| {
                    ((layer, micro), KvCache::new(&Context { shape: &shape, ..self.context() }, capacity))
                };
                caches.extend((0..micro_batches).map(cache));
            }
        }
        let accumulator = shape.compute.accumulator();
        let chosen = self.backend.allocate(micro_batches * samples, accumulator, Category::Communication);
        self.generation = Some(Generation {
            shape,
            samples,
            caches,
            positions: HashMap::new(),
            last: HashMap::new(),
            logits: HashMap::new(),
            chosen: Some(chosen),
            sharing: None,
        });
    }

    /// Sets the number of new tokens per sample of the following steps.
    pub fn expect_tokens(&mut self, tokens: usize) {
        let shape = self.shape.with_new_tokens(self.generation().samples, tokens);
        self.generation_mut().shape = shape;
    }

    /// The tokens that the last step sampled, `[micro-batches, samples]`. All ranks of a replica have the same.
    pub fn chosen(&self) -> Vec<u32> {
        let chosen = self.generation().chosen.as_ref().expect("tokens are here between steps");
        self.backend.read(chosen.view()).into_iter().map(|token| token as u32).collect()
    }

    /// Frees the KV caches.
    pub fn end_generation(&mut self) {
        self.generation = None;
    }

    /// Frees the buffers of the previous step, so that every step begins with the same memory in use.
    pub(crate) fn begin_generation_step(&mut self) {
        let Some(generation) = &mut self.generation else { return };
        generation.positions.clear();
        generation.last.clear();
        generation.logits.clear();
        let chosen = generation.chosen.as_ref().expect("tokens are here between steps");
        self.backend.fill(0.0, chosen.view());
    }

    pub(crate) fn feed(&mut self, micro: usize, source: &mut dyn TokenSource) {
        let new = source.new_tokens(micro);
        let upload = |len: usize, ids: Option<&[u32]>| {
            let buffer = self.backend.allocate(len, DType::U32, Category::Activations);
            if let Some(ids) = ids {
                self.backend.upload_tokens(ids, buffer.view());
            }
            buffer
        };
        let rows = self.shape().rows;
        let tokens = (self.at.pp() == 0).then(|| upload(rows, new.map(|new| new.tokens)));
        let positions = upload(rows, new.map(|new| new.positions));
        let is_last = self.at.pp() + 1 == self.plan.mesh.pp();
        let last = is_last.then(|| upload(self.shape().attention.batch, new.map(|new| new.last)));
        self.in_flight.tokens.extend(tokens.map(|tokens| (micro, tokens)));
        let generation = self.generation_mut();
        generation.positions.insert(micro, positions);
        generation.last.extend(last.map(|last| (micro, last)));
    }

    pub(crate) fn decode(&mut self, block: Block, micro: usize) {
        match block {
            Block::Embedding => {
                let tokens =
                    self.in_flight.tokens.remove(&micro).expect("tokens are fed before the embedding");
                let table = self.unit(Unit::Table).weights();
                let positions = self.has_positions.then(|| self.unit(Unit::Positions).weights());
                let at = self.generation().positions[&micro].view();
                let x = embedding::decode(&self.context(), tokens.view(), at, &table, positions.as_ref());
                self.in_flight.inputs.insert((self.next(block), micro), x);
            }
            Block::Layer(i) => {
                let x = self.take_input(block, micro);
                let generation = self.generation();
                let (cache, at) = (&generation.caches[&(i, micro)], generation.positions[&micro].view());
                let weights = self.unit(Unit::Layer(i)).weights();
                let y = layer::decode(&self.context(), &x, &weights, cache, at);
                self.in_flight.inputs.insert((self.next(block), micro), y);
            }
            Block::Head => {
                let x = self.take_input(block, micro);
                let last = self.generation().last[&micro].view();
                let logits = head::decode(&self.context(), &x, last, &self.head_weights());
                self.generation_mut().logits.insert(micro, logits);
            }
        }
    }

    pub(crate) fn choose(&mut self, micro: usize, source: &mut dyn TokenSource) {
        let logits = self.generation_mut().logits.remove(&micro).expect("the head has run");
        let (samples, part) = (self.generation().samples, self.shape().vocab);
        let parts = self.backend.read(logits.view());
        let parts: Vec<&[f32]> = parts.chunks_exact(part).collect();
        // [tp, samples, part of the vocabulary] to [samples, vocabulary], without the padding.
        let mut logits = Vec::with_capacity(samples * self.plan.model.vocab);
        for sample in 0..samples {
            let end = logits.len() + self.plan.model.vocab;
            parts[sample..].iter().step_by(samples).for_each(|part| logits.extend_from_slice(part));
            logits.truncate(end);
        }
        if let Some(cap) = self.shape().logit_soft_cap {
            let cap = cap as f32;
            for logit in &mut logits {
                *logit = cap * (*logit / cap).tanh();
            }
        }
        if let Some(tokens) = source.choose(micro, &logits) {
            let tokens: Vec<f32> = tokens.into_iter().map(|token| token as f32).collect();
            let chosen = self.generation().chosen.as_ref().expect("tokens are here between steps");
            self.backend.upload(&tokens, chosen.slice(micro * samples..(micro + 1) * samples));
        }
    }

    /// Starts an all-reduce over the stages. Only the last stage's numbers are not zero, so the sum is a broadcast.
    pub(crate) fn share_start(&mut self) {
        let chosen = self.generation_mut().chosen.take().expect("tokens are shared once a step");
        let all = 0..chosen.len();
        let sharing = self.groups.get(Group::PIPELINE).start(Collective::AllReduce, chosen, all);
        self.generation_mut().sharing = Some(sharing);
    }

    pub(crate) fn share_wait(&mut self) {
        let sharing = self.generation_mut().sharing.take().expect("a wait follows its start");
        let chosen = self.groups.get(Group::PIPELINE).wait(sharing);
        self.generation_mut().chosen = Some(chosen);
    }

    fn generation(&self) -> &Generation {
        self.generation.as_ref().expect("generation was started")
    }

    fn generation_mut(&mut self) -> &mut Generation {
        self.generation.as_mut().expect("generation was started")
    }
}
