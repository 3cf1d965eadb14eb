//! Writes a plan as a configuration with every key.

use kintsugi_spec::{ClusterSpec, Level, LinkSpec, ModelSpec, Placement, presets};
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Table;

use super::cluster::CUSTOM;
use super::keys::{
    RawCluster, RawConfig, RawEmulatedLink, RawEmulatedLinks, RawLink, RawLinks, RawModel, RawParallel,
    RawPlacement, RawSharding,
};
use super::words::{Collectives, Replicas, ShardLevel};
use crate::{Plan, Sharding, data};

impl Plan {
    /// The TOML text that resolves to this plan, independent of the defaults.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.to_raw()).expect("a configuration is made of tables, numbers and words")
    }

    /// The same as a table.
    pub fn to_table(&self) -> Table {
        Table::try_from(self.to_raw()).expect("a configuration is made of tables, numbers and words")
    }

    fn to_raw(&self) -> RawConfig {
        RawConfig {
            model: RawModel {
                init: self.init.as_ref().map(|folder| folder.display().to_string()),
                ..model(&self.model)
            },
            batch: same_keys(&self.batch),
            parallel: parallel(self),
            sharding: sharding(self),
            precision: same_keys(&self.precision),
            memory: same_keys(&self.memory),
            optimizer: same_keys(&self.optimizer),
            data: data::keys(&self.data),
            cluster: cluster(&self.cluster),
            framework: self.framework.clone(),
            run: same_keys(&self.run),
        }
    }
}

/// A table of the configuration, from the part of the plan with the same keys.
fn same_keys<T: DeserializeOwned>(part: &impl Serialize) -> T {
    let table = Table::try_from(part).expect("a part of a plan is made of numbers and words");
    table.try_into().expect("its keys are those of its table")
}

fn preset(name: &str) -> Option<String> {
    (name != CUSTOM).then(|| name.to_owned())
}

/// A model with every key except `init`, and with the preset instead of the name if it has that of a preset.
pub(super) fn model(model: &ModelSpec) -> RawModel {
    let name = Some(model.name.clone()).filter(|name| name != CUSTOM);
    let (preset, name) = if presets::model(&model.name).is_ok() { (name, None) } else { (None, name) };
    RawModel { preset, name, ..same_keys(model) }
}

pub(super) fn parallel(plan: &Plan) -> RawParallel {
    RawParallel {
        tp: Some(plan.mesh.tp()),
        pp: Some(plan.mesh.pp()),
        dp: Some(Replicas::Count(plan.mesh.dp())),
        cp: Some(plan.mesh.cp()),
        cp_attention: Some(plan.cp_attention),
        schedule: Some(plan.pipeline.schedule),
        virtual_stages: Some(plan.pipeline.virtual_stages),
        layers_per_stage: Some(plan.pipeline.layers.clone()),
        sequence_parallel: Some(plan.sequence_parallel),
        prefetch: Some(plan.pipeline.prefetch),
        overlap: Some(plan.pipeline.overlap),
        overlap_tp: Some(plan.overlap_tp),
    }
}

pub(super) fn sharding(plan: &Plan) -> RawSharding {
    let Sharding { weights, gradients, states, secondary, secondary_use, gather, reduce, quantized, .. } =
        plan.sharding;
    // The innermost level with as many replicas; all replicas are the cluster's.
    let level = |ranks: usize| {
        let joins = |level: &Level| {
            let all = *level == Level::Cluster || ranks < plan.mesh.replicas();
            all && plan.mesh.replicas_inside(*level, plan.cluster.topology) == Some(ranks)
        };
        let level = Level::ALL.into_iter().find(joins).filter(|_| ranks > 1);
        Some(level.map_or(ShardLevel::None, ShardLevel::from))
    };
    let keys = |collectives| RawSharding {
        weights: level(weights),
        gradients: level(gradients),
        states: level(states),
        secondary: level(secondary),
        secondary_use: Some(secondary_use),
        gather: Some(gather),
        reduce: Some(reduce),
        collectives: Some(collectives),
        ..super::quantized::keys(quantized)
    };
    let ring = super::sharding::resolve(&keys(Collectives::Ring), plan.mesh, &plan.cluster, &plan.framework);
    keys(if ring.as_ref() == Ok(&plan.sharding) { Collectives::Ring } else { Collectives::Hierarchical })
}

fn cluster(cluster: &ClusterSpec) -> RawCluster {
    let link = |level: Level| {
        let found: Option<&LinkSpec> = cluster.links.iter().find(|link| link.level == level);
        found.map(|link| RawLink {
            bandwidth: link.bandwidth,
            latency: link.latency,
            inner_latency: link.inner_latency,
            efficiency: link.efficiency,
            start: link.start,
            short: link.short,
            rings: link.rings,
        })
    };
    let emulated = |level: Level| {
        cluster.emulated[level]
            .map(|link| RawEmulatedLink { bandwidth: Some(link.bandwidth), latency: Some(link.latency) })
    };
    RawCluster {
        preset: preset(&cluster.name),
        profile: None,
        nodes: cluster.nodes,
        per_package: Some(cluster.topology.per_package),
        per_node: cluster.topology.per_node,
        nodes_per_pod: cluster.topology.nodes_per_pod,
        cores: cluster.cores,
        price: cluster.price,
        device: Some(cluster.device.clone()),
        links: Some(RawLinks {
            package: link(Level::Package),
            node: link(Level::Node),
            pod: link(Level::Pod),
            cluster: link(Level::Cluster),
        }),
        graph: Some(cluster.graph.clone()),
        emulated: Some(RawEmulatedLinks {
            package: emulated(Level::Package),
            node: emulated(Level::Node),
            pod: emulated(Level::Pod),
            cluster: emulated(Level::Cluster),
        }),
        placement: cluster
            .placement
            .clone()
            .map(|Placement { nodes, pods }| RawPlacement { nodes: Some(nodes), pods: Some(pods) }),
    }
}
