"""The engine for float64 on a GPU, which has no Triton kernels: the CPU engine's tiles, in torch operations on the GPU.

It is for checks such as torch.autograd.gradcheck. The mask's lists are copied to the host, and the host waits for each
strip, so it cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from flexattn.engines.cpu import backward, forward

__all__ = ["backward", "forward"]
