"""KernelSource -> loaded kernel, and its launch."""
