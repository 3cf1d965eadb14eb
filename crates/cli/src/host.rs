//! The memory that this process can still allocate: what is free, and what its limits leave.

use std::fs;

use kintsugi_engine::platform;
use kintsugi_plan::{DeviceKind, Plan};
use kintsugi_tensor::Device;

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// GPUs that this process can use: their kind and their number. NVIDIA's come first.
pub fn gpus() -> (DeviceKind, usize) {
    let number = |kind| platform(kind).and_then(|platform| platform.devices().ok()).unwrap_or(0);
    let kinds = [DeviceKind::Cuda, DeviceKind::Hip].map(|kind| (kind, number(kind)));
    kinds.into_iter().find(|&(_, number)| number > 0).unwrap_or((DeviceKind::Cuda, 0))
}

/// The device of each of a plan's `ranks` ranks.
pub fn planned_device(plan: &Plan, ranks: usize) -> Device {
    kintsugi_simulate::planned_device(plan, ranks, cores())
}

/// A bound on memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Bytes that are left.
    pub bytes: u64,
    /// What sets the bound.
    pub holder: &'static str,
}

/// Descriptions of the bounds, printed after a number of bytes.
const MACHINE: &str = "available on this machine";
const CGROUP: &str = "left of the memory limit of this process's cgroup";
const GPU: &str = "free on the GPU";
const ADDRESS_SPACE: &str = "left of this process's address space, ulimit -v";

/// The tightest bound that the system reports.
pub fn memory() -> Option<Bound> {
    tightest(&|path| fs::read_to_string(path).ok())
}

/// The free memory of the first GPU of a kind, if there is one.
pub fn card_memory(kind: DeviceKind) -> Option<Bound> {
    let (bytes, _) = platform(kind)?.gpu(0).and_then(|gpu| gpu.memory()).ok()?;
    Some(Bound { bytes, holder: GPU })
}

/// The tightest of all bounds, with files read by `read`.
fn tightest(read: &Read) -> Option<Bound> {
    let named = |bytes: Option<u64>, holder| bytes.map(|bytes| Bound { bytes, holder });
    let bounds = [
        named(machine(read), MACHINE),
        named(cgroup(read), CGROUP),
        named(address_space(read), ADDRESS_SPACE),
    ];
    bounds.into_iter().flatten().min_by_key(|bound| bound.bytes)
}

/// Returns the text of a file, if it exists.
type Read<'a> = dyn Fn(&str) -> Option<String> + 'a;

fn machine(read: &Read) -> Option<u64> {
    kibibytes(&read("/proc/meminfo")?, "MemAvailable:")
}

/// The bytes that the limit on virtual memory leaves.
fn address_space(read: &Read) -> Option<u64> {
    let limits = read("/proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(kibibytes(&read("/proc/self/status")?, "VmSize:")?))
}

/// The file names of one version of control groups.
struct Control {
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The line of `memory.stat` with memory that is used, but reclaimed when needed.
    reclaimable: &'static str,
}

const VERSION_1: Control = Control {
    mount: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

const VERSION_2: Control = Control {
    mount: "/sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    reclaimable: "inactive_file",
};

/// The bytes that the control groups of this process leave: its own group and all its parents.
fn cgroup(read: &Read) -> Option<u64> {
    let groups = read("/proc/self/cgroup")?;
    let left = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let control = match controllers {
            "" => VERSION_2,
            _ if controllers.split(',').any(|name| name == "memory") => VERSION_1,
            _ => return None,
        };
        ancestors(path).filter_map(|group| left_in(read, &control, group)).min()
    });
    left.min()
}

/// A path and all its parents. Inside a container only the topmost may exist; it is then the container's own.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    let path = path.trim_end_matches('/');
    std::iter::successors(Some(path), |path| path.rfind('/').map(|end| &path[..end]))
}

fn left_in(read: &Read, control: &Control, group: &str) -> Option<u64> {
    let file = |name: &str| read(&format!("{}{group}/{name}", control.mount));
    let bytes = |name: &str| file(name)?.trim().parse::<u64>().ok();
    // Version 2 says "max" where there is no limit.
    let limit = bytes(control.limit)?;
    let used = bytes(control.used).unwrap_or(0);
    let reclaimable =
        file("memory.stat").and_then(|text| field(&text, control.reclaimable)?.parse::<u64>().ok());
    Some(limit.saturating_sub(used.saturating_sub(reclaimable.unwrap_or(0))))
}

/// The text after a name at the start of a line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
}

fn kibibytes(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: (&str, &str) = ("/proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");

    fn bound(files: &[(&str, &str)]) -> Option<Bound> {
        tightest(&|path| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned()))
    }

    #[test]
    fn a_machine_without_limits_gives_what_is_available() {
        let unlimited = [
            MEMINFO,
            (
                "/proc/self/limits",
                "Max address space         unlimited            unlimited            bytes\n",
            ),
            ("/proc/self/cgroup", "0::/user.slice\n"),
            ("/sys/fs/cgroup/user.slice/memory.max", "max\n"),
        ];
        assert_eq!(bound(&unlimited), Some(Bound { bytes: 8000 * 1024, holder: MACHINE }));
        assert_eq!(bound(&[]), None);
    }

    #[test]
    fn the_tightest_control_group_on_the_way_up_counts() {
        let nested = [
            MEMINFO,
            ("/proc/self/cgroup", "0::/job/step\n"),
            ("/sys/fs/cgroup/job/step/memory.max", "7000000\n"),
            ("/sys/fs/cgroup/job/step/memory.current", "1000000\n"),
            ("/sys/fs/cgroup/job/memory.max", "5000000\n"),
            ("/sys/fs/cgroup/job/memory.current", "3000000\n"),
            ("/sys/fs/cgroup/job/memory.stat", "anon 5\nactive_file 9\ninactive_file 500000\n"),
        ];
        assert_eq!(bound(&nested), Some(Bound { bytes: 2_500_000, holder: CGROUP }));
    }

    #[test]
    fn the_older_control_groups_count_too() {
        let container = [
            MEMINFO,
            ("/proc/self/cgroup", "5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n"),
            // The container sees its own group as the topmost.
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1500000\n"),
        ];
        assert_eq!(bound(&container), Some(Bound { bytes: 2_500_000, holder: CGROUP }));
    }

    #[test]
    fn the_address_space_counts_less_what_is_mapped() {
        let limited = [
            MEMINFO,
            (
                "/proc/self/limits",
                "Max stack size  1 2 bytes\nMax address space         3000000  4000000  bytes\n",
            ),
            ("/proc/self/status", "VmPeak:\t 2000 kB\nVmSize:\t    1000 kB\n"),
        ];
        assert_eq!(bound(&limited), Some(Bound { bytes: 3_000_000 - 1_024_000, holder: ADDRESS_SPACE }));
    }
}
