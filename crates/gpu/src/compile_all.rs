//! Compiles every kernel file that a device can run, for a self-test.

use kintsugi_tensor::DType;

use crate::GpuBackend;
use crate::attention::{TENSOR_CORES, mfma_attention_definitions, tensor_attention_definitions};
use crate::cuda::hopper_attention::definitions as hopper_attention_definitions;
use crate::driver::Properties;
use crate::error::GpuError;
use crate::kernels::{
    HOPPER_ATTENTION_BACKWARD, HOPPER_ATTENTION_FORWARD, MFMA_ATTENTION_BACKWARD, MFMA_ATTENTION_FORWARD,
    SOURCES, Source, TENSOR_ATTENTION_BACKWARD, TENSOR_ATTENTION_FORWARD, architecture,
};

/// The compute capability of the files that name an architecture, which is `sm_90a`.
const HOPPER: (i32, i32) = (9, 0);

/// Widths of heads for which attention on matrix cores is compiled: one for each kind of tiles.
const HEAD_DIMS: [usize; 2] = [64, 128];

impl GpuBackend {
    /// Names of the kernel files that the device can run.
    pub fn kernel_files(&self) -> Vec<&'static str> {
        let properties = self.stream.properties();
        SOURCES.iter().filter(|source| runs(source, properties)).map(|source| source.name).collect()
    }

    /// Compiles and loads a kernel file. Attention on matrix cores is compiled for bf16, and for heads of 64 and of 128.
    pub fn compile_kernel_file(&self, name: &str) -> Result<(), GpuError> {
        let source = SOURCES.iter().find(|source| source.name == name).expect("a kernel file");
        for definitions in definitions(source)? {
            self.launcher.kernels().load(source, &definitions)?;
        }
        Ok(())
    }
}

fn runs(source: &Source, properties: &Properties) -> bool {
    if *source == MFMA_ATTENTION_FORWARD || *source == MFMA_ATTENTION_BACKWARD {
        return properties.mfma;
    }
    if *source == TENSOR_ATTENTION_FORWARD || *source == TENSOR_ATTENTION_BACKWARD {
        return properties.capability >= Some(TENSOR_CORES);
    }
    architecture(source.text).is_none() || properties.capability == Some(HOPPER)
}

/// The definitions of every compilation of a file.
fn definitions(source: &Source) -> Result<Vec<Vec<String>>, GpuError> {
    let for_heads =
        |of: &dyn Fn(usize) -> Result<Vec<String>, GpuError>| HEAD_DIMS.into_iter().map(of).collect();
    if *source == MFMA_ATTENTION_FORWARD || *source == MFMA_ATTENTION_BACKWARD {
        return for_heads(&|head_dim| mfma_attention_definitions(head_dim, DType::BF16));
    }
    if *source == TENSOR_ATTENTION_FORWARD || *source == TENSOR_ATTENTION_BACKWARD {
        return for_heads(&|head_dim| tensor_attention_definitions(head_dim, DType::BF16));
    }
    if *source == HOPPER_ATTENTION_FORWARD || *source == HOPPER_ATTENTION_BACKWARD {
        return for_heads(&|head_dim| Ok(hopper_attention_definitions(head_dim)));
    }
    Ok(vec![Vec::new()])
}
