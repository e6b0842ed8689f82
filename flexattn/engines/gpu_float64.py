"""The engine for float64 on a GPU, which has no Triton kernels: the tiles of the CPU engine, in torch operations there.

It is for checks such as torch.autograd.gradcheck. The lists of the mask come to the host, and the host waits for every
strip: so it cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from flexattn.engines.cpu import backward, forward

__all__ = ["backward", "forward"]
