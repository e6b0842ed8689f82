"""mask_mod -> BlockMask: coarse to fine on a CPU, generated kernels on a GPU."""
