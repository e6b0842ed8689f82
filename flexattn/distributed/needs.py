"""needs: the cost of each row of blocks of a mask, and the keys that chunks of its queries need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.distributed.chunks import Span, joined

# Shorter gaps between the keys of a chunk are sent and masked, in blocks. Another call costs more than 1,024 keys.
_LEAST_GAP = 8


# A partial block takes about 1.25 times as long as a full one (causal and documents, D 128, H200).
FULL, PARTIAL = 4, 5


def row_costs(mask: BlockMask) -> list[int]:
    """Return the cost of each row of blocks, over all batches and heads of the mask. The host waits."""
    rows = -(-mask.seq_lengths[0] // mask.BLOCK_SIZE[0])
    lists = mask.kv_runs
    count = PARTIAL * lists.partial.count().long() + FULL * lists.full.count().long()
    return count.view(-1, rows).sum(0).tolist()


_AT_ONCE = 256  # chunks, which bounds memory


def key_blocks(mask: BlockMask, chunks: Sequence[Span]) -> list[list[Span]]:
    """Return the blocks of keys that each chunk of rows of blocks needs. Chunks are ascending and disjoint."""
    rows, columns = (-(-n // size) for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    lists = [(runs.owners().cpu() % rows, runs.runs.cpu().long()) for runs in (mask.kv_runs.partial, mask.kv_runs.full)]
    found: list[list[Span]] = []
    for first in range(0, len(chunks), _AT_ONCE):
        some = chunks[first : first + _AT_ONCE]
        chunk_of_row = torch.full((rows,), len(some))
        for i, (start, stop) in enumerate(some):
            chunk_of_row[start:stop] = i
        steps = torch.zeros(len(some) + 1, columns + 1, dtype=torch.int32)
        for owner, ends in lists:
            chunk = chunk_of_row[owner]
            for column, sign in ((ends[:, 0], 1), (ends[:, 1], -1)):
                signs = torch.full_like(column, sign, dtype=torch.int32)
                steps.index_put_((chunk, column), signs, accumulate=True)
        found += [_spans(live) for live in steps[:-1].cumsum(1) > 0]
    return found


def query_blocks(mask: BlockMask, rows: Span, spans: Sequence[Span]) -> list[Span]:
    """Return from the first to the last row of blocks in `rows` that needs one of the blocks, for each span of them."""
    count = -(-mask.seq_lengths[0] // mask.BLOCK_SIZE[0])
    owners, ends = [], []
    for runs in (mask.kv_runs.partial, mask.kv_runs.full):
        owner = runs.owners() % count
        inside = (owner >= rows[0]) & (owner < rows[1])
        owners.append(owner[inside].cpu())
        ends.append(runs.runs[inside].cpu())
    owner, run = torch.cat(owners), torch.cat(ends)
    found = []
    for start, stop in spans:
        needing = owner[(run[:, 0] < stop) & (run[:, 1] > start)]
        found.append((int(needing.min()), int(needing.max()) + 1) if len(needing) else (rows[0], rows[0]))
    return found


def _spans(live: Tensor) -> list[Span]:
    """Return the true elements as spans. The last element is false."""
    edges = torch.cat([live.new_zeros(1), live]).to(torch.int8).diff().nonzero().flatten().tolist()
    return joined(zip(edges[::2], edges[1::2], strict=True), _LEAST_GAP)
