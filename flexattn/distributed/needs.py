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


def key_blocks(mask: BlockMask, chunks: Sequence[Span]) -> list[list[Span]]:
    """Return the blocks of keys that each chunk of rows of blocks needs. Chunks are ascending and disjoint."""
    rows, columns = (-(-n // size) for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    steps = torch.zeros(len(chunks) + 1, columns + 1, dtype=torch.int64)
    chunk_of_row = torch.full((rows,), len(chunks))
    for i, (start, stop) in enumerate(chunks):
        chunk_of_row[start:stop] = i
    for runs in (mask.kv_runs.partial, mask.kv_runs.full):
        owner = chunk_of_row[runs.owners().cpu() % rows]
        ends = runs.runs.cpu().long()
        for column, sign in ((ends[:, 0], 1), (ends[:, 1], -1)):
            steps.index_put_((owner, column), torch.full_like(column, sign), accumulate=True)
    return [_spans(live) for live in steps[:-1, :].cumsum(1) > 0]


def query_blocks(mask: BlockMask, rows: Span, columns: Span) -> Span:
    """Return from the first to the last row of blocks in `rows` that needs a block of `columns`."""
    count = -(-mask.seq_lengths[0] // mask.BLOCK_SIZE[0])
    first, last = rows[1], rows[0]
    for runs in (mask.kv_runs.partial, mask.kv_runs.full):
        owner, ends = runs.owners() % count, runs.runs
        found = owner[
            (owner >= rows[0]) & (owner < rows[1]) & (ends[:, 0] < columns[1]) & (ends[:, 1] > columns[0])
        ].tolist()
        if found:
            first, last = min(first, min(found)), max(last, max(found) + 1)
    return (first, last) if first < last else (rows[0], rows[0])


def _spans(live: Tensor) -> list[Span]:
    """Return the true elements as spans. The last element is false."""
    edges = torch.cat([live.new_zeros(1), live]).to(torch.int8).diff().nonzero().flatten().tolist()
    return joined(zip(edges[::2], edges[1::2], strict=True), _LEAST_GAP)
