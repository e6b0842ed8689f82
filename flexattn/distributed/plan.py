"""plan: which tokens of a sequence each rank has, and which keys it gets from others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from flexattn.block_mask import BlockMask
from flexattn.distributed.chunks import PER_RANK, Span, common, in_tokens, length_of, shares, union
from flexattn.distributed.needs import FULL, key_blocks, row_costs
from flexattn.errors import ArgumentError, DtypeError, message
from flexattn.mask_build.create import create_block_mask
from flexattn.process.frozen_class import frozen

_collectives: Any = collectives
_all_gather = (
    getattr(_collectives, "all_gather_single", None) or _collectives.all_gather_tensor
)  # renamed in torch 2.13
Scheme = Literal["gather", "ring", "heads"]
T = TypeVar("T")
BLOCK = 128  # tokens: chunks begin at multiples of it


@frozen
class Chunk:
    """Neighboring tokens of one rank, and the keys that their queries need."""

    tokens: Span
    keys: tuple[Span, ...]  # ascending and disjoint


@frozen(eq=False)
class ContextPlan:
    """How a sequence is sharded over the ranks of a mesh dimension. Make it with `create_cp_plan`.

    Tokens, labels and positions are sharded alike: `shard` takes the rows of this rank out of a whole tensor, and
    `unshard` puts the rows of all ranks back in order. `positions` are those of this rank's tokens.
    """

    mask: BlockMask | None  # of the whole sequence
    B: int | None
    H: int | None
    length: int
    device_mesh: DeviceMesh
    chunks: tuple[tuple[Chunk, ...], ...]  # of each rank
    costs: tuple[int, ...]  # of each rank: about 4 for each block of 128 x 128, of the mask's own batches and heads
    scheme: Scheme | None  # None: chosen for each call
    device: torch.device
    _kept: dict[object, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.device_mesh.get_local_rank()

    @property
    def ranks(self) -> int:
        return len(self.chunks)

    def tokens_of(self, rank: int) -> list[Span]:
        """Return the tokens of a rank, in the order of its rows."""
        return [chunk.tokens for chunk in self.chunks[rank]]

    def needs_of(self, rank: int) -> list[Span]:
        """Return the keys that a rank needs."""
        return union(chunk.keys for chunk in self.chunks[rank])

    def received(self, rank: int) -> list[int]:
        """Return how many keys a rank receives from each rank. Blocks that no row of it needs are not sent."""

        def compute() -> list[int]:
            needs = self.needs_of(rank)
            return [
                0 if other == rank else length_of(common(needs, self.tokens_of(other))) for other in range(self.ranks)
            ]

        return kept(self, ("received", rank), compute)

    @property
    def most_received(self) -> int:
        """The keys that the rank receives that receives most."""
        return kept(self, "most received", lambda: max(sum(self.received(rank)) for rank in range(self.ranks)))

    @property
    def positions(self) -> Tensor:
        """The positions of this rank's tokens, int64 [local length]."""
        return self._positions([self.rank])

    @property
    def permutation(self) -> Tensor:
        """The positions of the tokens of rank 0, then of rank 1 and so on, int64 [length]."""
        return self._positions(range(self.ranks))

    def _positions(self, ranks: Sequence[int]) -> Tensor:
        spans = [span for rank in ranks for span in self.tokens_of(rank)]
        found = [torch.arange(start, stop, device=self.device) for start, stop in spans]
        return torch.cat(found) if found else torch.arange(0, device=self.device)

    def shard(self, x: Tensor, seq_dim: int) -> Tensor:
        """Return this rank's rows of a tensor that every rank has whole, for example of tokens or labels.

        >>> plan.shard(tokens, 1)  # doctest: +SKIP
        """
        self._check_length("x", x, seq_dim, self.length)
        found = [x.narrow(seq_dim, start, stop - start) for start, stop in self.tokens_of(self.rank)]
        return torch.cat(found, seq_dim) if found else x.narrow(seq_dim, 0, 0)

    @torch.no_grad()
    def unshard(self, x: Tensor, seq_dim: int) -> Tensor:
        """Return the rows of all ranks in their order, from the rows of each. Not differentiable.

        Raises ArgumentError if x does not have this rank's number of rows. All ranks of the dimension call it.
        """
        lengths = [length_of(self.tokens_of(rank)) for rank in range(self.ranks)]
        self._check_length("x", x, seq_dim, lengths[self.rank])
        mine = x.detach().movedim(seq_dim, 0).contiguous()
        padded = mine.new_zeros((max(lengths), *mine.shape[1:]))
        padded[: len(mine)] = mine
        every = collectives.wait_tensor(_all_gather(padded, 0, self.device_mesh.get_group()))
        found = mine.new_empty((self.length, *mine.shape[1:]))
        for rank, part in enumerate(every.split(max(lengths))):
            at = 0
            for start, stop in self.tokens_of(rank):
                found[start:stop] = part[at : at + stop - start]
                at += stop - start
        return found.movedim(0, seq_dim)

    def _check_length(self, name: str, x: Tensor, seq_dim: int, expected: int) -> None:
        if not isinstance(x, Tensor):
            raise DtypeError(message(name, f"a {type(x).__name__}", "a tensor", "Pass the tensor of all tokens."))
        if not -x.dim() <= seq_dim < x.dim() or x.size(seq_dim) != expected:
            found = f"shape {tuple(x.shape)} with seq_dim {seq_dim}"
            raise ArgumentError(message(name, found, f"{expected} rows in that dimension", "Check seq_dim."))

    def __repr__(self) -> str:
        lines = [f"ContextPlan: {self.length:,} tokens on {self.ranks} ranks, scheme {self.scheme or 'by call'}"]
        total = max(1, max(self.costs))
        for rank in range(self.ranks):
            tokens = ", ".join(f"[{start:,}, {stop:,})" for start, stop in self.tokens_of(rank)) or "no tokens"
            sources = ", ".join(f"{n:,} of rank {other}" for other, n in enumerate(self.received(rank)) if n)
            share = f"{100 * self.costs[rank] / total:.0f} % of the longest"
            lines.append(f"    rank {rank}: {tokens}; {share}; receives keys: {sources or 'none'}")
        return "\n".join(lines)


def kept(plan: ContextPlan, name: object, compute: Callable[[], T]) -> T:
    """Return what the plan keeps under a name. The first call computes it."""
    if name not in plan._kept:
        plan._kept[name] = compute()
    return plan._kept[name]


def create_cp_plan(
    mask_mod: Callable[..., Any] | None,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: DeviceMesh,
    *,
    scheme: Scheme | None = None,
    chunks_per_rank: int | None = None,
    device: torch.device | str | None = None,
) -> ContextPlan:
    """Return how a sequence is sharded over a mesh dimension for self-attention with a mask.

    Each rank calls it with the same arguments; tensors that mask_mod captures have the same values on each. Nothing is
    communicated.

    Args:
        mask_mod: `(b, h, q_idx, kv_idx) -> bool` of positions in the whole sequence. None: every pair attends.
        B, H: batches and heads that mask_mod distinguishes, as in create_block_mask.
        Q_LEN, KV_LEN: the length of the whole sequence, twice.
        device_mesh: of one dimension, for example `mesh["cp"]`.
        scheme: "gather" sends keys and values to the ranks that need them, all before the first product. "ring" sends
            those of one rank at a time, while products run, and keeps none for the backward. "heads" sends queries,
            keys and values so that each rank has all tokens of some heads (Ulysses). None: chosen for each call.
        chunks_per_rank: into how many chunks of neighboring tokens a rank's share falls. None: as many as are estimated
            to take least time, with what is sent. With a causal mask that is 2: the first and the last (zig-zag).
        device: of the tensors; by default that of the mesh.

    Raises:
        ArgumentError if the lengths differ, or if the mesh has several dimensions.

    Example:
        >>> mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))  # doctest: +SKIP
        >>> plan = create_cp_plan(mods.causal, None, None, 65536, 65536, mesh)  # doctest: +SKIP
        >>> x = embed(plan.shard(tokens, 1))  # doctest: +SKIP
        >>> out = flexattn.distributed.flex_attention(q, k, v, plan=plan)  # doctest: +SKIP

    Source: the cost of a rank is that of its rows of blocks, and chunks are dealt longest first (Graham, 1969). Zig-zag
    for causal masks: Zhu (ring-flash-attention), Brandon et al., Striped Attention (2023).
    """
    if Q_LEN != KV_LEN:
        found = f"{KV_LEN}, and Q_LEN {Q_LEN}"
        raise ArgumentError(message("KV_LEN", found, "equal lengths", "Context parallel shards self-attention only."))
    if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 1:
        found = f"{device_mesh.ndim} dimensions" if isinstance(device_mesh, DeviceMesh) else type(device_mesh).__name__
        raise ArgumentError(message("device_mesh", found, "a DeviceMesh of one dimension", 'Pass mesh["cp"].'))
    if scheme is not None and scheme not in get_args(Scheme):
        fix = "Leave it out to let each call choose."
        raise ArgumentError(message("scheme", repr(scheme), f"one of {', '.join(get_args(Scheme))}, or None", fix))
    if chunks_per_rank is not None and (
        not isinstance(chunks_per_rank, int) or not 1 <= chunks_per_rank <= PER_RANK[-1]
    ):
        raise ArgumentError(message("chunks_per_rank", chunks_per_rank, f"1 to {PER_RANK[-1]}", "Leave it out."))
    where = torch.device(device) if device is not None else _device_of(device_mesh)
    blocks, ranks = -(-Q_LEN // BLOCK), device_mesh.size()
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=where, BLOCK_SIZE=BLOCK)
    costs = [FULL * blocks] * blocks if mask is None else row_costs(mask)
    chunks, of_ranks = fastest_chunks(
        mask, costs, ranks, PER_RANK if chunks_per_rank is None else (chunks_per_rank,), Q_LEN
    )
    return ContextPlan(mask, B, H, Q_LEN, device_mesh, chunks, of_ranks, scheme, where)


# In the unit of row_costs, for one head: receiving the keys of a block takes as long as 4 full blocks with groups of
# four query heads (300 GB/s, 600 TFLOP/s). A chunk costs a few launches, and half of the time in which one of 132
# multiprocessors computes the longest row of one of 32 heads. Only the order of magnitude matters.
_RECEIVED, _CHUNK, _TAIL = 16, 180, 2
_MOST_CANDIDATES = 2048  # chunks of all ranks, of ways to shard that are compared


def fastest_chunks(
    mask: BlockMask | None, costs: Sequence[int], ranks: int, candidates: Sequence[int], length: int
) -> tuple[tuple[tuple[Chunk, ...], ...], tuple[int, ...]]:
    """Return the chunks of each rank, and its cost, for the number of chunks per rank that takes least time."""
    best: tuple[float, tuple[tuple[Chunk, ...], ...], tuple[int, ...]] | None = None
    heads = 1 if mask is None else mask.B * mask.H
    for per_rank in candidates:
        if best is not None and ranks * per_rank > _MOST_CANDIDATES:
            break
        spans = shares(costs, ranks, per_rank)
        chunks = _chunks(mask, spans, length)
        of_ranks = tuple(sum(sum(costs[start:stop]) for start, stop in own) for own in spans)
        received = max(map(_received, chunks))
        ends = max(sum(_CHUNK + _TAIL * max(costs[start:stop]) for start, stop in own) for own in spans)
        time = max(of_ranks) + _RECEIVED * heads * received / BLOCK + ends
        if best is None or time < best[0]:
            best = time, chunks, of_ranks
    assert best is not None
    return best[1:]


def _received(own: Sequence[Chunk]) -> int:
    """Return how many keys a rank with these chunks receives."""
    needs = union(chunk.keys for chunk in own)
    return length_of(needs) - length_of(common(needs, [chunk.tokens for chunk in own]))


def _chunks(mask: BlockMask | None, spans: Sequence[Sequence[Span]], length: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of rows of blocks, with the keys that they need."""
    every = sorted(span for own in spans for span in own)
    of_chunks = [[(0, -(-length // BLOCK))]] * len(every) if mask is None else key_blocks(mask, every)
    needed = dict(zip(every, of_chunks, strict=True))
    return tuple(
        tuple(Chunk(in_tokens([span], BLOCK, length)[0], tuple(in_tokens(needed[span], BLOCK, length))) for span in own)
        for own in spans
    )


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
