"""What kernels run on and where they are stored: the target, the installed Triton, the kernel cache on disk."""
