//! The settings of NCCL, and the environment variables that pass them on.

use std::env;

/// How much of a GPU the library may use for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclSettings {
    /// Channels of a communicator. Each keeps one block of the GPU busy during a transfer, and has buffers of its own.
    pub channels: u32,
    /// Bytes of a buffer. Every channel has one buffer for each neighbour.
    pub buffer: u64,
}

impl Default for NcclSettings {
    fn default() -> Self {
        NcclSettings { channels: 4, buffer: 1 << 20 }
    }
}

impl NcclSettings {
    /// Sets the variables that the library and the driver read when they start. A variable that the user has set stays.
    ///
    /// For the beginning of a process: no other thread may use the environment meanwhile.
    pub fn set_environment(self) {
        let variables = [
            ("NCCL_BUFFSIZE", self.buffer.to_string()),
            // Several ranks may share a GPU. NCCL 2.29 and newer allow it with this variable.
            ("NCCL_MULTI_RANK_GPU_ENABLE", "1".to_owned()),
            // A queue of the GPU for every stream: streams that share one wait for each other, and can do so in a circle.
            ("CUDA_DEVICE_MAX_CONNECTIONS", "32".to_owned()),
        ];
        for (name, value) in variables {
            if env::var_os(name).is_none() {
                // SAFETY: the process has just begun. Its other threads, if any, wait for work.
                unsafe { env::set_var(name, value) };
            }
        }
    }
}
