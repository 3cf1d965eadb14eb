//! A plan written out as a configuration, every key given.

use kintsugi_spec::{ClusterSpec, FrameworkSpec, Level, LinkSpec, ModelSpec};

use super::cluster::CUSTOM;
use super::raw::{
    RawBatch, RawCluster, RawConfig, RawData, RawDevice, RawFramework, RawLink, RawLinks, RawMemory,
    RawModel, RawOptimizer, RawParallel, RawPrecision, RawRun, RawSharding,
};
use super::words::{Device, OptimizerName, Replicas, Scale, ShardLevel, Sources, Transport};
use crate::{Data, DataSource, DeviceKind, LossScale, Plan, Resume};

impl Plan {
    /// The TOML text that resolves to this plan, whatever the defaults.
    pub fn to_toml(&self) -> String {
        let raw = RawConfig {
            model: RawModel {
                init: self.init.as_ref().map(|folder| folder.display().to_string()),
                ..model(&self.model)
            },
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
            data: data(&self.data),
            cluster: cluster(&self.cluster),
            framework: framework(&self.framework),
            run: run(self),
        };
        toml::to_string(&raw).expect("a configuration is made of tables, numbers and words")
    }
}

fn preset(name: &str) -> Option<String> {
    (name != CUSTOM).then(|| name.to_owned())
}

/// A model, every key given but where its weights come from.
pub(super) fn model(model: &ModelSpec) -> RawModel {
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
        positions: Some(model.positions),
        tied: Some(model.tied),
        parallel_residual: Some(model.parallel_residual),
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

fn data(data: &Data) -> RawData {
    match data {
        Data::Demo => RawData { source: Some(Sources::One("demo".to_owned())), ..RawData::default() },
        Data::Tokens(tokens) => {
            let part = |source: &DataSource| (source.path.display().to_string(), source.weight);
            let blend = |sources: &[DataSource]| Sources::Blend(sources.iter().map(part).collect());
            RawData {
                source: Some(blend(&tokens.sources)),
                tokenizer: tokens.tokenizer.clone(),
                allow_other_tokenizer: Some(tokens.allow_other_tokenizer),
                end_of_document: tokens.end_of_document,
                validation: Some(blend(&tokens.validation)).filter(|_| !tokens.validation.is_empty()),
                split: Some(tokens.split),
                mask_documents: Some(tokens.mask_documents),
            }
        }
    }
}

fn cluster(cluster: &ClusterSpec) -> RawCluster {
    let link = |level: Level| {
        let found: Option<&LinkSpec> = cluster.links.iter().find(|link| link.level == level);
        found.map(|link| RawLink {
            bandwidth: link.bandwidth,
            latency: link.latency,
            efficiency: link.efficiency,
            start: link.start,
        })
    };
    let device = cluster.device.clone();
    RawCluster {
        preset: preset(&cluster.name),
        profile: None,
        nodes: cluster.nodes,
        per_package: Some(cluster.topology.per_package),
        per_node: cluster.topology.per_node,
        cores: cluster.cores,
        price: cluster.price,
        device: Some(RawDevice {
            name: Some(device.name),
            memory: device.memory,
            peak_16bit: device.peak_16bit,
            peak_fp32: device.peak_fp32,
            memory_bandwidth: device.memory_bandwidth,
            units: device.units,
            matmul: device.matmul,
            ramp: device.ramp,
            streaming: device.streaming,
            launch: device.launch,
            power_idle: device.power_idle,
            power_max: device.power_max,
            power_links: device.power_links,
            epilogue: device.epilogue,
            attention: Some(device.attention),
            products: Some(device.products),
            kernels: Some(device.kernels),
        }),
        links: Some(RawLinks {
            package: link(Level::Package),
            node: link(Level::Node),
            cluster: link(Level::Cluster),
        }),
        graph: Some(cluster.graph.clone()),
    }
}

fn framework(framework: &FrameworkSpec) -> RawFramework {
    let own = framework.name == FrameworkSpec::default().name;
    RawFramework {
        preset: (!own).then(|| framework.name.clone()),
        step: Some(framework.step),
        fills: Some(framework.fills),
        host: Some(framework.host),
        host_collective: Some(framework.host_collective),
        host_staged: Some(framework.host_staged),
        elementwise: Some(framework.elementwise),
        dropout: Some(framework.dropout),
        attention: Some(framework.attention),
        attention_again: Some(framework.attention_again),
        recompute_whole: Some(framework.recompute_whole),
        scatter_messages: Some(framework.scatter_messages),
        message: Some(framework.message),
        between_nodes: Some(framework.between_nodes),
        replicas_between_nodes: Some(framework.replicas_between_nodes),
        whole_sums: Some(framework.whole_sums),
        interference: Some(framework.interference),
        reserve: Some(framework.reserve),
        logit_bytes: Some(framework.logit_bytes),
        parameter_bytes: Some(framework.parameter_bytes),
        kept: Some(framework.kept),
        gathered: Some(framework.gathered),
        temporary: Some(framework.temporary),
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
        eval_tokens: Some(run.eval_tokens),
        max_skipped: Some(run.max_skipped),
        communication_timeout: Some(run.communication_timeout),
        deterministic: Some(run.deterministic),
        graph: Some(run.graph),
        device: Some(match run.device {
            DeviceKind::Cpu => Device::Cpu,
            DeviceKind::Cuda => Device::Cuda,
        }),
        transport: Some(match run.transport {
            crate::Transport::Threads => Transport::Threads,
        }),
    }
}
