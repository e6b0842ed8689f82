"""dropout: which weights are dropped. This depends only on a seed and the position (b, h, q_idx, kv_idx).

The generator is Philox4x32-7 (Salmon et al., SC 2011; fewer rounds fail BigCrush). Its key is the seed, and its counter
is (kv_idx // 32 * 8 + kv_idx % 8, q_idx // 16 * 8 + q_idx % 8, b * Hq + h, 0). The four words of a counter belong to
four keys that are 8 apart, and the two halves of a word to two queries that are 8 apart. In the layout of tensor cores,
one thread owns all these positions of a product or of its transpose, so it generates only numbers that it needs. A
weight is dropped if its 16-bit number is below p * 65536.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn.call.arguments import as_float
from flexattn.errors import ArgumentError, message
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.transforms import outside, refuse_random_vmap
from flexattn.torch_state.uncompiled import uncompiled

STEPS = 65536  # number of random values
KEYS, QUERIES, APART = 32, 16, 8  # keys and queries of a group of counters; distance of those of one counter
ROUNDS = 7
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEYS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


@frozen(eq=False)
class Dropout:
    """The dropout probability, and the seed: one int64 on the device of the query.

    The offsets are those of the first query, key, and (b, h) of a part of a larger call, which drops the same weights.
    """

    drop_below: int  # numbers below this are dropped, of STEPS
    seed: Tensor  # [1]
    q_offset: int = 0  # a multiple of QUERIES
    kv_offset: int = 0  # a multiple of KEYS
    bh_offset: int = 0  # b * heads + h
    heads: int = 0  # of the larger call; 0: those of the query

    @property
    def place(self) -> tuple[int, int, int, int]:
        return self.q_offset, self.kv_offset, self.bh_offset, self.heads

    @property
    def keep_scale(self) -> float:
        """The factor of kept weights, which preserves the expectation; 0 if no weight is kept."""
        return STEPS / (STEPS - self.drop_below) if self.drop_below < STEPS else 0.0

    def keep(self, b: Tensor, h: Tensor, Hq: int, q_idx: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
        """Return bool [..., keys]: which weights are kept, for half-open ranges of keys.

        `b`, `h` and `q_idx` are integers that broadcast to [..., 1]. Hq is the number of heads of the query.
        """
        batch_head, queries = b.long() * (self.heads or Hq) + h.long() + self.bh_offset, q_idx.long() + self.q_offset
        spans = [(first + self.kv_offset, end + self.kv_offset) for first, end in keys]
        return torch.cat([self._keep(batch_head, queries, *span) for span in spans], -1)

    def _keep(self, batch_head: Tensor, q_idx: Tensor, first: int, end: int) -> Tensor:
        groups = torch.arange(first // KEYS, -(-end // KEYS), device=q_idx.device)
        counters = (groups[:, None] * APART + torch.arange(APART, device=q_idx.device)).flatten()
        queries = q_idx // QUERIES * APART + q_idx % APART
        words = torch.stack(_philox(self.seed.to(q_idx.device), counters, queries, batch_head), -1)
        numbers = words >> (q_idx // APART % 2 * 16)[..., None] & 0xFFFF  # [..., counters, 4]
        numbers = numbers.unflatten(-2, (-1, APART)).mT.flatten(-3)  # [..., keys]
        start = first % KEYS
        return numbers[..., start : start + end - first] >= self.drop_below


def _philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> tuple[Tensor, ...]:
    """Return four 32-bit words as int64. Products wrap around like unsigned ones."""
    c0, c1, c2 = torch.broadcast_tensors(c0, c1, c2)
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(ROUNDS):
        even, odd = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c1 = odd >> 32 & _WORD ^ c1 ^ k0, odd & _WORD
        c2, c3 = even >> 32 & _WORD ^ c3 ^ k1, even & _WORD
        k0, k1 = k0 + _KEYS[0] & _WORD, k1 + _KEYS[1] & _WORD
    return c0, c1, c2, c3


def check_dropout(dropout_p: object, device: torch.device, seeded: bool = True) -> Dropout | None:
    """Return a Dropout whose seed is drawn from the device's default generator; None if p is 0, without drawing.

    With `seeded=False` nothing is drawn, for calls that compute nothing.
    """
    if isinstance(dropout_p, Dropout):  # of a part of a larger call
        return dropout_p
    below = drop_below(dropout_p)
    if below is None:
        return None
    refuse_random_vmap("dropout_p")
    with outside():
        seed = torch.empty(1, dtype=torch.int64, device=device)
        # Selective checkpointing, a dispatch mode, stores results of operators, which must not change afterwards.
        draw = torch.ops.aten.random.default if torch._C._len_torch_dispatch_stack() else Tensor.random_
        seed = draw(seed) if seeded else seed.zero_()
    return Dropout(below, seed)


def drop_below(dropout_p: object) -> int | None:
    """Return the number, of STEPS, below which a weight is dropped; None if p is 0."""
    p = as_float("dropout_p", dropout_p, "a number", "Pass a Python float such as 0.1.")
    if not 0.0 <= p <= 1.0:
        fix = "It is the fraction of weights that is dropped."
        raise ArgumentError(message("dropout_p", p, "a number from 0 to 1", fix))
    return None if p == 0.0 else max(1, round(p * STEPS))


@uncompiled
def dropout_mask(
    dropout_p: float, shape: Sequence[int], device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the dense dropout mask of flex_attention. It advances torch's generator as flex_attention does.

    Args:
        dropout_p: fraction of weights that is dropped, in steps of 1 / 65536.
        shape: (B, Hq, M, N) of the weights.
        device: the device of the query.
        dtype: the dtype of the result.

    Returns:
        [B, Hq, M, N]: 0 or 1 / (1 - p).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dropout_mask(0.5, (1, 1, 2, 4)).unique().tolist()
        [0.0, 2.0]
    """
    if not isinstance(shape, Sequence) or len(shape) != 4 or not all(isinstance(n, int) and n >= 0 for n in shape):
        fix = "Pass the shape of the weights: (*query.shape[:3], key.shape[2])."
        raise ArgumentError(message("shape", repr(shape), "four ints (B, Hq, M, N)", fix))
    B, H, M, N = shape
    chosen = torch.device(device or torch.get_default_device())
    dropout = check_dropout(dropout_p, chosen)
    if dropout is None:
        return torch.ones(B, H, M, N, device=chosen, dtype=dtype)
    found = torch.empty(B, H, M, N, device=chosen, dtype=dtype)
    rows = torch.arange(M, device=chosen)[:, None]
    for i in range(B * H):
        b, h = (torch.full_like(rows, index) for index in divmod(i, H))
        found[i // H, i % H] = dropout.keep(b, h, H, rows, [(0, N)]).to(dtype) * dropout.keep_scale
    return found
