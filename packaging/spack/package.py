# A recipe for Spack. It was not run. Put it into a repository of your own:
#   spack repo create ~/kintsugi-spack kintsugi
#   mkdir -p ~/kintsugi-spack/packages/kintsugi && cp package.py ~/kintsugi-spack/packages/kintsugi
#   spack repo add ~/kintsugi-spack && spack install kintsugi

from spack.package import *


class Kintsugi(Package):
    """Trains large language models on many GPUs, and predicts memory, traffic and time before the run."""

    # The clone that you have.
    git = "file:///path/to/kintsugi"

    license("MIT OR Apache-2.0")

    version("0.2.0", branch="main")

    depends_on("c", type="build")
    depends_on("rust@1.90:", type="build")

    # MPI, NCCL and the libraries of CUDA or HIP are loaded at run time, whichever the environment has: load their modules.
    requires("target=x86_64_v3:", when="platform=linux", msg="the kernels need AVX2 and FMA")

    def install(self, spec, prefix):
        cargo = which("cargo")
        cargo("install", "--locked", "--path", "crates/cli", "--root", prefix)
        kintsugi = Executable(join_path(prefix.bin, "kintsugi"))
        mkdirp(prefix.share.man.man1)
        with open(join_path(prefix.share.man.man1, "kintsugi.1"), "w") as page:
            kintsugi("man", output=page)
