//! The FLOPs of a step as papers report them: matrix products only, attention not halved for causality, and not beyond a window.
//!
//! For a GPT with `ffn = 4·h` this is `24·c·B·s·L·h²·(1 + s/(6h) + V/(16·L·h))` of arXiv 2104.04473 and 2312.12705,
//! with the vocabulary before padding. Other shapes count their own matrices by the same rule.

use kintsugi_spec::ModelSpec;
use serde::Serialize;

use crate::{Block, Compute, Plan, Recompute, Unit};

/// FLOPs of one step, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Flops {
    /// Without recomputation: forward and twice that for the backward.
    pub model: f64,
    /// With the second forward of full recomputation, and with logits that are computed again. Selective recomputation
    /// repeats no matrix product.
    pub hardware: f64,
}

impl Plan {
    /// FLOPs of one step.
    pub fn flops(&self) -> Flops {
        let Plan { model, batch, .. } = self;
        let (tokens, first) = (self.tokens_per_step() as f64, self.first_backward());
        // A forward, the gradient of the input, and that of the weights.
        let passes = |block, unit| {
            1.0 + f64::from(u8::from(block >= first)) + f64::from(u8::from(!self.is_frozen(unit)))
        };
        let repeats = self.memory.recompute == Recompute::Full;
        let again = |block| f64::from(u8::from(repeats && block >= first));
        let head = head_per_token(model);
        let output = if model.tied { Unit::Table } else { Unit::Head };
        let (mut own, mut repeated) = (passes(Block::Head, output) * head, again(Block::Head) * head);
        for layer in 0..model.layers {
            let (block, pass) = (Block::Layer(layer), layer_per_token(model, batch.sequence, layer));
            own += passes(block, Unit::Layer(layer)) * pass;
            repeated += again(block) * pass;
        }
        let logits = if self.divides_head() { 2.0 * (model.hidden * model.vocab) as f64 } else { 0.0 };
        Flops { model: tokens * own, hardware: tokens * (own + repeated + logits) }
    }

    /// The FLOPs of the head in units of a mean layer's, counting matrix products of the forward.
    pub fn head_in_layers(&self) -> f64 {
        2.0 * self.model.hidden as f64 * self.model.vocab as f64 * self.model.layers as f64
            / self.layers_per_token()
    }

    /// The FLOPs of one pass through all layers for one token.
    fn layers_per_token(&self) -> f64 {
        let layers = 0..self.model.layers;
        layers.map(|layer| layer_per_token(&self.model, self.batch.sequence, layer)).sum()
    }

    /// Model FLOPs utilisation of a step of this many seconds, if the peak of the devices is known.
    pub fn mfu(&self, step_s: f64) -> Option<f64> {
        let ranks = self.mesh.ranks() as f64;
        self.peak_flops().map(|peak| self.flops().model / step_s / ranks / peak)
    }

    /// The peak FLOP/s of one rank in the plan's compute type, if it is known. CPU ranks divide the peak of their node's
    /// cores.
    fn peak_flops(&self) -> Option<f64> {
        let device = &self.cluster.device;
        let peak = match self.precision.compute {
            Compute::Fp32 => device.peak_fp32,
            Compute::Bf16 | Compute::Fp16 => device.peak_16bit,
        };
        let ranks = self.cluster.topology.per_node.map_or(self.mesh.ranks(), |n| n.min(self.mesh.ranks()));
        let share = self.cluster.cores.map_or(1.0, |cores| cores as f64 / ranks as f64);
        peak.map(|peak| share * peak)
    }
}

/// FLOPs of one pass through the head for one token; all passes of a step count the same.
fn head_per_token(model: &ModelSpec) -> f64 {
    // Full recomputation does not repeat the output matrix: 6·h·V in total, which the formula spreads over four passes.
    1.5 * model.hidden as f64 * model.vocab as f64
}

/// The same for a layer. A token of a layer with a window attends to no more than its window.
fn layer_per_token(model: &ModelSpec, sequence: usize, layer: usize) -> f64 {
    let attended = model.window(layer).map_or(sequence, |window| window.min(sequence)) as f64;
    let [hidden, ffn] = [model.hidden, model.ffn].map(|n| n as f64);
    let [queries, keys] = [model.heads, model.kv_heads].map(|heads| (heads * model.head_dim) as f64);
    let mlp_matrices = if model.activation.is_gated() { 3.0 } else { 2.0 };
    let matrices = 2.0 * hidden * (2.0 * queries + 2.0 * keys + mlp_matrices * ffn);
    matrices + 4.0 * attended * queries
}

#[cfg(test)]
mod tests {
    use crate::config::ConfigSource;

    fn flops(sets: &[&str]) -> super::Flops {
        ConfigSource::text("").sets(sets).plan().unwrap().flops()
    }

    fn close(a: f64, b: f64) -> bool {
        (a / b - 1.0).abs() < 1e-12
    }

    #[test]
    fn a_gpt_has_the_flops_of_the_papers() {
        let full = flops(&["model.preset=gpt-175b", "batch.global=640", "memory.recompute=full"]);
        let [b, s, l, h, v] = [640.0, 2048.0, 96.0, 12288.0, 50257.0];
        let paper = |c: f64| 24.0 * c * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        assert!(close(full.model, paper(3.0)), "{full:?}");
        assert!(close(full.hardware, paper(4.0)), "{full:?}");
        let selective = flops(&["model.preset=gpt-175b", "batch.global=640", "memory.recompute=selective"]);
        assert!(close(selective.hardware, selective.model), "{selective:?}");
    }

    #[test]
    fn ranks_that_share_cores_share_their_peak() {
        let peak = |dp: usize| {
            let file = "[model]\npreset = \"demo\"\n[cluster]\ncores = 2\ndevice.peak_fp32 = 1e9\n";
            let source = ConfigSource::text(file).sets(["parallel.tp=1", "parallel.pp=1", "batch.global=32"]);
            source.set(format!("parallel.dp={dp}")).plan().unwrap().peak_flops()
        };
        assert_eq!([1, 2, 8].map(peak), [Some(2e9), Some(1e9), Some(0.25e9)]);
    }

    #[test]
    fn frozen_layers_have_a_forward_and_perhaps_the_gradient_of_their_input() {
        let of = |patterns: &[&str]| {
            let group = |pattern: &&str| format!("{{ parameters = \"{pattern}\", frozen = true }}");
            let groups: Vec<String> = patterns.iter().map(group).collect();
            flops(&["model.preset=llama3-8b", &format!("optimizer.groups=[{}]", groups.join(", "))]).model
        };
        // 32 layers: three passes each, and as much as 3 · 1.5 · 4096 · 128256 for the head.
        let (all, last) = (of(&[]), of(&["layer.31.*"]));
        let layer = all - last;
        assert!(close(of(&["table.*", "layer.0.*"]), all - 2.0 * layer), "no backward below layer 1");
        assert!(close(of(&["layer.0.*"]), all - layer), "the table needs a gradient");
    }

    #[test]
    fn a_window_limits_the_attention_of_its_layers() {
        let set = ["model.preset=mistral-7b", "batch.sequence=4096", "model.full_attention_every=4"];
        let of = |window: &str| flops(&[&set[..], &[window]].concat()).model;
        let [whole, half] = ["model.sliding_window=4096", "model.sliding_window=2048"].map(of);
        // Three of four layers attend to half of the tokens.
        let less = 3.0 * 4096.0 * 24.0 * 4.0 * 2048.0 * 4096.0;
        assert!(close(whole - half, less), "{whole:e} {half:e}");
    }

    #[test]
    fn grouped_queries_and_gated_mlps_count_their_own_matrices() {
        let flops = flops(&["model.preset=llama3-8b", "batch.sequence=1"]);
        let layer = 2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 4096;
        let pass = 32.0 * f64::from(layer) + 1.5 * 4096.0 * 128_256.0;
        assert!(close(flops.model, 3.0 * pass), "{flops:?}");
    }
}
