"""Cases of PyTorch's flash attention operators, dense and packed, with their result in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Results = tuple[Tensor, Tensor]  # out, lse


@dataclass(frozen=True)
class SdpaCase:
    """A dense call. `window` is the window of the operators, with the last query and the last key aligned."""

    M: int = 40
    N: int = 40
    Hq: int = 2
    Hkv: int = 2
    D: int = 16
    B: int = 2
    causal: bool = False
    scale: float | None = None
    window: tuple[int | None, int | None] = (None, None)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def tensors(self) -> list[Tensor]:
        """Return query, key and value, [B, H, S, D], that require gradients."""
        generator = torch.Generator().manual_seed(self.M + 7 * self.N)
        sizes = ((self.Hq, self.M), (self.Hkv, self.N), (self.Hkv, self.N))
        made = (torch.randn(self.B, h, s, self.D, generator=generator) for h, s in sizes)
        return [x.to(self.device, self.dtype).requires_grad_() for x in made]

    def expected(self, query: Tensor, key: Tensor, value: Tensor, factors: Tensor | None = None) -> Results:
        """Return out and lse in the dtype of the tensors. `factors` are those of dropout."""
        bounds = (-1 if self.window[0] is None else self.window[0], -1 if self.window[1] is None else self.window[1])
        left, right = bounds[0], 0 if self.causal else bounds[1]
        return attend(query, key, value, (left, right), self.scale, factors)


def attend(
    query: Tensor, key: Tensor, value: Tensor, window: tuple[int, int], scale: float | None,
    factors: Tensor | None = None,
) -> Results:  # fmt: skip
    """Return out and lse of [B, H, S, D] by the matrix of scores."""
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    M, N = query.size(2), key.size(2)
    distance = torch.arange(N, device=query.device) - torch.arange(M, device=query.device)[:, None] - (N - M)
    left, right = window
    hidden = ((left >= 0) & (distance < -left)) | ((right >= 0) & (distance > right))
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None].masked_fill(lse[..., None] == -torch.inf, 0.0)).exp()
    return (weights if factors is None else weights * factors.to(weights.dtype)) @ value, lse


DENSE = {
    "plain": SdpaCase(),
    "causal": SdpaCase(causal=True),
    "scale": SdpaCase(scale=0.7, causal=True),
    "gqa": SdpaCase(Hq=6, Hkv=2, causal=True),
    "more keys": SdpaCase(M=24, N=50, causal=True),
    "more queries": SdpaCase(M=50, N=24, causal=True),
    "one query": SdpaCase(M=1, N=50, causal=True, Hq=4),
    "window": SdpaCase(M=50, N=70, window=(12, 5)),
    "causal window": SdpaCase(M=50, N=50, window=(9, None), causal=True),
    "left": SdpaCase(window=(9, -1)),
    "odd head dim": SdpaCase(D=20, causal=True),
}
LENGTHS = {
    "equal": ((20, 0, 31), (20, 0, 31)),
    "different": ((5, 12, 0, 30), (17, 0, 9, 30)),
}


def cumulative(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    """Return where each sequence begins, and the end of the last."""
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=device)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[Sequence[int]], window: tuple[int, int],
    used: Sequence[int] | None = None,
) -> Results:  # fmt: skip
    """Return out [T_q, Hq, D] and lse [Hq, T_q] of sequences packed end to end, one dense computation for each."""
    parts = []
    keys = zip(key.split(list(lengths[1])), value.split(list(lengths[1])), strict=True)
    for i, (q, (k, v)) in enumerate(zip(query.split(list(lengths[0])), keys, strict=True)):
        end = len(k) if used is None else used[i]
        one = (x.transpose(0, 1)[None] for x in (q, k[:end], v[:end]))
        parts.append(attend(*one, window, None))
    return torch.cat([o[0].transpose(0, 1) for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
