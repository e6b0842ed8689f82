"""What kernels run on and are kept on: the target, the installed Triton, the kernel cache on disk."""
