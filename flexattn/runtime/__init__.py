"""KernelSource -> a loaded kernel and its launch."""
