//! The device that a plan is for.

use kintsugi_plan::{DeviceKind, Plan};
use kintsugi_spec::Hardware;
use kintsugi_tensor::Device;

/// The device of each of `ranks` ranks of a plan's cluster. If the cluster does not describe its devices, they are
/// those of this machine, which has `cores` cores.
pub fn planned_device(plan: &Plan, ranks: usize, cores: usize) -> Device {
    let here = match plan.run.device {
        DeviceKind::Cpu => Hardware::Cpu,
        DeviceKind::Cuda | DeviceKind::Hip => Hardware::Gpu,
    };
    let device = match plan.cluster.device.kind.unwrap_or(here) {
        Hardware::Cpu => {
            let sharing = plan.cluster.ranks_of_machine(ranks);
            Device::Cpu { threads: (plan.cluster.cores.unwrap_or(cores) / sharing).max(1) }
        }
        Hardware::Gpu if plan.run.device == DeviceKind::Hip => Device::hip(),
        // `run.deterministic` applies to the planned GPUs only if the run itself uses GPUs.
        Hardware::Gpu => Device::cuda(here == Hardware::Gpu && plan.run.deterministic),
    };
    if plan.may_use_attention_library() { device } else { device.without_attention_library() }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;
    use crate::{Coverage, predict};

    #[test]
    fn a_plan_for_gpus_is_the_same_on_every_computer() {
        let plan = ConfigSource::demo().set("cluster.preset=h200").plan().unwrap();
        let [one, many] = [1, 64].map(|cores| planned_device(&plan, plan.mesh.ranks(), cores));
        assert_eq!(one, Device::cuda(false));
        assert_eq!(predict(&plan, one, Coverage::WholeStep), predict(&plan, many, Coverage::WholeStep));
    }

    #[test]
    fn a_plan_for_an_amd_gpu_has_the_workspace_of_its_backend() {
        let plan = ConfigSource::demo().set("run.device=hip").plan().unwrap();
        assert_eq!(planned_device(&plan, 1, 1), Device::hip());
        assert_ne!(Device::hip(), Device::cuda(false), "no scratch for cuDNN");
    }

    #[test]
    fn ranks_of_a_described_cpu_share_its_cores() {
        let threads = |settings: &[&str]| {
            let settings = [&["parallel.dp=2", "parallel.tp=1", "parallel.pp=1"], settings].concat();
            let plan = ConfigSource::demo().sets(settings).plan().unwrap();
            planned_device(&plan, plan.mesh.ranks(), 6)
        };
        assert_eq!(threads(&[]), Device::Cpu { threads: 3 }, "this machine's");
        assert_eq!(
            threads(&["cluster.device.kind=cpu", "cluster.cores=16", "cluster.per_node=2"]),
            Device::Cpu { threads: 8 }
        );
    }
}
