//! A plan written out as a configuration, every key given.

use kintsugi_spec::{ClusterSpec, Level, LinkSpec, ModelSpec};

use super::cluster::CUSTOM;
use super::raw::{
    RawBatch, RawCluster, RawConfig, RawData, RawDevice, RawLink, RawLinks, RawMemory, RawModel,
    RawOptimizer, RawParallel, RawPrecision, RawRun, RawSharding,
};
use super::words::{Device, OptimizerName, Replicas, Scale, ShardLevel, Transport};
use crate::{DeviceKind, LossScale, Plan, Resume};

impl Plan {
    /// The TOML text that resolves to this plan, whatever the defaults.
    pub fn to_toml(&self) -> String {
        let raw = RawConfig {
            model: model(&self.model),
            batch: RawBatch {
                sequence: Some(self.batch.sequence),
                micro: Some(self.batch.micro),
                global: Some(self.batch.global),
            },
            parallel: parallel(self),
            sharding: sharding(self),
            precision: precision(self),
            memory: RawMemory {
                recompute: Some(self.memory.recompute),
                attention: Some(self.memory.attention),
            },
            optimizer: optimizer(self),
            data: RawData { source: Some("demo".into()), ..RawData::default() },
            cluster: cluster(&self.cluster),
            run: run(self),
        };
        toml::to_string(&raw).expect("a configuration is made of tables, numbers and words")
    }
}

fn preset(name: &str) -> Option<String> {
    (name != CUSTOM).then(|| name.to_owned())
}

fn model(model: &ModelSpec) -> RawModel {
    RawModel {
        preset: preset(&model.name),
        family: Some(model.family),
        layers: Some(model.layers),
        hidden: Some(model.hidden),
        heads: Some(model.heads),
        kv_heads: Some(model.kv_heads),
        head_dim: Some(model.head_dim),
        ffn: Some(model.ffn),
        vocab: Some(model.vocab),
        vocab_multiple: Some(model.vocab_multiple),
        tied: Some(model.tied),
        activation: Some(model.activation),
        norm_eps: Some(model.norm_eps),
        rotary_base: Some(model.rotary_base),
        rotary_fraction: Some(model.rotary_fraction),
        init: None,
    }
}

fn parallel(plan: &Plan) -> RawParallel {
    RawParallel {
        tp: Some(plan.mesh.tp),
        pp: Some(plan.mesh.pp),
        dp: Some(Replicas::Count(plan.mesh.dp)),
        schedule: Some(plan.pipeline.schedule),
        virtual_stages: Some(plan.pipeline.virtual_stages),
        layers_per_stage: Some(plan.pipeline.layers.clone()),
        sequence_parallel: Some(plan.sequence_parallel),
        prefetch: Some(plan.pipeline.prefetch),
        overlap: Some(plan.pipeline.overlap),
    }
}

fn sharding(plan: &Plan) -> RawSharding {
    let level = |shards| Some(if shards > 1 { ShardLevel::Cluster } else { ShardLevel::None });
    RawSharding {
        weights: level(plan.sharding.weights),
        gradients: level(plan.sharding.gradients),
        states: level(plan.sharding.states),
        gather: Some(plan.sharding.gather),
        reduce: Some(plan.sharding.reduce),
        ..RawSharding::default()
    }
}

fn precision(plan: &Plan) -> RawPrecision {
    RawPrecision {
        compute: Some(plan.precision.compute),
        gradients: Some(plan.precision.gradients),
        states: Some(plan.precision.states),
        loss_scale: Some(match plan.precision.loss_scale {
            LossScale::Dynamic => Scale::Dynamic,
            LossScale::Fixed(scale) => Scale::Fixed(scale),
        }),
    }
}

fn optimizer(plan: &Plan) -> RawOptimizer {
    let optimizer = plan.optimizer;
    RawOptimizer {
        name: Some(OptimizerName::Adamw),
        lr: Some(optimizer.lr),
        min_lr: Some(optimizer.min_lr),
        warmup: Some(optimizer.warmup),
        schedule: Some(optimizer.schedule),
        betas: Some(vec![optimizer.betas.0, optimizer.betas.1]),
        eps: Some(optimizer.eps),
        weight_decay: Some(optimizer.weight_decay),
        clip: Some(optimizer.clip),
    }
}

fn cluster(cluster: &ClusterSpec) -> RawCluster {
    let link = |level: Level| {
        let found: Option<&LinkSpec> = cluster.links.iter().find(|link| link.level == level);
        found.map(|link| RawLink { bandwidth: link.bandwidth, latency: link.latency })
    };
    let device = cluster.device.clone();
    RawCluster {
        preset: preset(&cluster.name),
        nodes: cluster.nodes,
        per_package: Some(cluster.topology.per_package),
        per_node: cluster.topology.per_node,
        price: None,
        device: Some(RawDevice {
            name: Some(device.name),
            memory: device.memory,
            peak_16bit: device.peak_16bit,
            peak_fp32: device.peak_fp32,
            memory_bandwidth: device.memory_bandwidth,
        }),
        links: Some(RawLinks {
            package: link(Level::Package),
            node: link(Level::Node),
            cluster: link(Level::Cluster),
        }),
    }
}

fn run(plan: &Plan) -> RawRun {
    let run = &plan.run;
    RawRun {
        steps: Some(run.steps),
        seed: Some(run.seed),
        out: Some(run.out.display().to_string()),
        resume: match &run.resume {
            Resume::No => None,
            Resume::Newest => Some(true.into()),
            Resume::From(path) => Some(path.display().to_string().into()),
        },
        checkpoint_every: Some(run.checkpoint_every),
        keep: Some(run.keep),
        eval_every: Some(run.eval_every),
        max_skipped: Some(run.max_skipped),
        deterministic: Some(run.deterministic),
        device: Some(match run.device {
            DeviceKind::Cpu => Device::Cpu,
            DeviceKind::Cuda => Device::Cuda,
        }),
        transport: Some(match run.transport {
            crate::Transport::Threads => Transport::Threads,
        }),
    }
}
