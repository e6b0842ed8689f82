"""Predicted times of context parallel attention, from the plan of flexattn.distributed and measured speeds.

`python -m benchmarks.context_parallel_model` runs on a CPU: it compares predictions with measurements on two GPUs, then
predicts more GPUs and hosts. `--ranks`, `--lengths` and the speeds are arguments. docs/distributed.md describes it.

A kernel takes the measured time of one GPU per cost of a block. Copies of rows are counted in the code of each scheme.
The gather and heads schemes wait for what arrives; the ring computes meanwhile. A run takes as long as its last rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.context_parallel import DOCUMENTS, WORKS, mask_of
from benchmarks.harness import table
from flexattn import BlockMask, create_block_mask
from flexattn.distributed.chunks import PER_RANK, Span, common, length_of, union
from flexattn.distributed.needs import FULL, PARTIAL, row_costs
from flexattn.distributed.plan import BLOCK, fastest_chunks

RESULTS = Path(__file__).parent / "results" / "2026-11-26-h200x2-context-parallel.json"
MEASURED_LENGTH = 262_144
HEADS, KV_HEADS, D, ITEM = 32, 8, 128, 2  # as measured, in bfloat16
KV_ROW, Q_ROW = KV_HEADS * 2 * D * ITEM, HEADS * D * ITEM  # bytes of a token
SCHEMES, DIRECTIONS = ("gather", "ring", "heads"), ("forward", "backward")


@dataclass(frozen=True)
class Machine:
    gpus_per_host: int = 8
    nvlink: float = 400e9  # bytes per second and direction, of a GPU
    network: float = 50e9  # the same between hosts
    memory: float = 3.5e12  # of copies, read and written
    message: float = 10e-6  # seconds for each peer
    part: float = 0.3e-3  # seconds for which the host is busy with a part


@dataclass(frozen=True)
class Shares:
    """What each rank computes and receives. Matrices are [rank, source], in float64."""

    costs: Tensor  # of blocks
    rows: Tensor  # keys received; 0 from itself
    parts: Tensor  # pairs of a chunk and neighboring keys
    queries: Tensor  # of rows of blocks with a block of a source's keys
    calls: Tensor  # [rank], of the gather scheme: a chunk and neighboring keys
    local: Tensor  # [rank], tokens
    gathered: Tensor  # [rank], keys in spans that need keys of other ranks
    added: Tensor  # [rank], gradients of keys beyond one for each needed key
    chunks: Tensor  # [rank]

    @property
    def ranks(self) -> int:
        return len(self.local)


@functools.cache
def mask_for(work: str, length: int) -> BlockMask:
    """Return the mask of a work. Longer sequences have more documents of the same mean length."""
    documents = max(1, DOCUMENTS * length // MEASURED_LENGTH)
    mod = mask_of(work, length, torch.device("cpu"), documents)
    return create_block_mask(mod, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)


def shares_of(mask: BlockMask, ranks: int, chunks_per_rank: int | None = None) -> Shares:
    """Return what create_cp_plan gives to the ranks, without a process group."""
    length = mask.seq_lengths[0]
    candidates = PER_RANK if chunks_per_rank is None else (chunks_per_rank,)
    chunks_of, _ = fastest_chunks(mask, row_costs(mask), ranks, candidates, length)
    tokens = [[chunk.tokens for chunk in own] for own in chunks_of]
    owned = [[(start // BLOCK, -(-stop // BLOCK)) for start, stop in spans] for spans in tokens]
    blocks_of = [span for spans in owned for span in spans]
    keys = dict(zip(blocks_of, [list(chunk.keys) for own in chunks_of for chunk in own], strict=True))
    costs, queries = costs_by_source(mask, owned)
    rows, parts = torch.zeros(ranks, ranks, dtype=torch.float64), torch.zeros(ranks, ranks, dtype=torch.float64)
    needs = [union(keys[span] for span in spans) for spans in owned]
    for rank, spans in enumerate(owned):
        for source in costs[rank].nonzero().flatten().tolist():
            rows[rank, source] = 0 if rank == source else length_of(common(needs[rank], tokens[source]))
            parts[rank, source] = sum(len(common(keys[span], tokens[source])) for span in spans)
    spans_of = [[span for chunk in own for span in chunk.keys] for own in chunks_of]
    shared = [
        union([span] for span in spans if common([span], own) != [span])
        for spans, own in zip(spans_of, tokens, strict=True)
    ]
    local, needed, spanned, gathered = (
        torch.tensor([length_of(x) for x in lists], dtype=torch.float64) for lists in (tokens, needs, spans_of, shared)
    )
    chunks = torch.tensor([len(spans) for spans in owned], dtype=torch.float64)
    calls = torch.tensor([sum(len(keys[span]) for span in spans) for spans in owned], dtype=torch.float64)
    return Shares(costs, rows, parts, queries, calls, local, gathered, spanned - needed, chunks)


def costs_by_source(mask: BlockMask, owned: Sequence[Sequence[Span]]) -> tuple[Tensor, Tensor]:
    """Return, [rank, source], the cost of blocks in a rank's rows and a source's columns, and tokens of these rows."""
    blocks = -(-mask.seq_lengths[0] // BLOCK)
    owner = torch.zeros(blocks, dtype=torch.int64)
    for rank, spans in enumerate(owned):
        for start, stop in spans:
            owner[start:stop] = rank
    costs, queries = (torch.zeros(len(owned), len(owned), dtype=torch.float64) for _ in range(2))
    lists = [
        (cost, runs.owners() % blocks, *runs.runs.long().unbind(1))
        for runs, cost in ((mask.kv_runs.partial, PARTIAL), (mask.kv_runs.full, FULL))
    ]
    for source in range(len(owned)):
        before = torch.zeros(blocks + 1, dtype=torch.int64)
        before[1:] = (owner == source).cumsum(0)
        of_rows = torch.zeros(blocks, dtype=torch.int64)
        for cost, row, first, last in lists:
            of_rows.index_add_(0, row, cost * (before[last] - before[first]))
        costs[:, source].index_add_(0, owner, of_rows.double())
        queries[:, source].index_add_(0, owner, BLOCK * (of_rows > 0).double())
    return costs, queries


def predicted(shares: Shares, scheme: str, direction: str, rate: float, machine: Machine) -> float | None:
    """Return seconds, None if the ranks cannot share the heads. `rate` is the seconds of a cost."""
    if scheme == "ring":
        return ring_time(shares, direction, rate, machine)
    if scheme == "gather":
        received, sent = KV_ROW * shares.rows.sum(1), KV_ROW * shares.rows.sum(0)
        several = shares.chunks > 1
        copied = 2 * several * Q_ROW * shares.local  # out, or the gradient of query
        if direction == "forward":
            copied += 2 * sent + 2 * KV_ROW * shares.gathered
        else:  # A row with two gradients takes 11 passes, in float32, and one with a single gradient 2.
            copied += 2 * received + 9 * (sent + KV_ROW * shares.added)
            copied += 2 * (several | (sent > 0)) * KV_ROW * shares.local
        compute = torch.maximum(rate * shares.costs.sum(1), machine.part * shares.calls)
        return float((compute + wire_time(KV_ROW * shares.rows, machine) + copied / machine.memory).max())
    if KV_HEADS % shares.ranks:
        return None
    moved = (2 * Q_ROW + KV_ROW) * shares.local[:, None] / shares.ranks * (1 - torch.eye(shares.ranks))
    passes = (10 * Q_ROW + 6 * KV_ROW) if direction == "forward" else (16 * Q_ROW + 16 * KV_ROW)
    compute = rate * shares.costs.sum() / shares.ranks
    return float((compute + wire_time(moved, machine) + passes * shares.local / machine.memory).max())


def wire_time(received: Tensor, machine: Machine) -> Tensor:
    """Return seconds of each rank for bytes received [rank, source], all at once."""
    same = same_host(len(received), machine)
    times = [
        torch.maximum((received * where).sum(0), (received * where).sum(1)) / speed
        for where, speed in ((same, machine.nvlink), (~same, machine.network))
    ]
    return torch.maximum(*times) + machine.message * (received > 0).sum(1)


def same_host(ranks: int, machine: Machine) -> Tensor:
    host = torch.arange(ranks) // machine.gpus_per_host
    return host[:, None] == host


def ring_time(shares: Shares, direction: str, rate: float, machine: Machine) -> float:
    """Return seconds. What the next step needs is under way while a step computes."""
    me, same = torch.arange(shares.ranks), same_host(shares.ranks, machine)
    back = direction == "backward"
    own, local = KV_ROW * shares.local, Q_ROW * shares.local
    copied = (14 * own + 5 * local) if back else 6 * own
    end = previous = copied / machine.memory
    arrived = torch.zeros_like(end)
    for turn in range(shares.ranks):
        source = (me - turn) % shares.ranks
        rows = KV_ROW * shares.rows[me, source]
        queries = Q_ROW * (shares.queries[me, source] if turn else shares.local)
        copies = (5 if back else 27 * (turn > 0)) * queries + (15 if back else 2) * rows
        compute = torch.maximum(rate * shares.costs[me, source], machine.part * shares.parts[me, source])
        sent = rows * 3 if back else rows  # the gradients of the rows go back in float32
        seconds = sent / torch.where(same[me, source], machine.nvlink, machine.network) + machine.message * (rows > 0)
        if turn:
            arrived = torch.maximum(torch.maximum(previous, previous[source]), arrived) + seconds
        previous, end = end, torch.maximum(end, arrived) + compute + copies / machine.memory
    return float(end.max())


def validate(results: Path, machine: Machine) -> list[list[str]]:
    """Return rows of measured and predicted milliseconds."""
    found = []
    record = json.loads(results.read_text())
    ranks, length = record["arguments"]["ranks"], record["arguments"]["length"]
    shares = {work: shares_of(mask_for(work, length), ranks) for work in WORKS}
    for row in record["results"]:
        work, scheme, direction = row["work"], row["scheme"], row["direction"]
        measured = statistics.median(map(max, row["milliseconds"]))
        rate = row["alone"] / 1e3 / float(shares[work].costs.sum())
        seconds = predicted(shares[work], scheme, direction, rate, machine)
        assert seconds is not None
        error = f"{100 * (1e3 * seconds / measured - 1):+.0f} %"
        found.append([work, scheme, direction, f"{measured:.1f}", f"{1e3 * seconds:.1f}", error])
    return found


def rates(results: Path) -> dict[tuple[str, str], float]:
    """Return the seconds of a cost, by work and direction, as one GPU was measured."""
    record = json.loads(results.read_text())
    length = record["arguments"]["length"]
    total = {work: sum(row_costs(mask_for(work, length))) for work in WORKS}
    return {(r["work"], r["direction"]): r["alone"] / 1e3 / total[r["work"]] for r in record["results"]}


def predict(
    work: str, length: int, ranks: int, rate: dict[tuple[str, str], float], machine: Machine,
    chunks_per_rank: int | None = None,
) -> list[str]:  # fmt: skip
    """Return a row: bytes that the busiest rank receives in a forward, and efficiencies forward / backward."""
    shares = shares_of(mask_for(work, length), ranks, chunks_per_rank)
    total = float(shares.costs.sum())
    gathered = float(shares.rows.sum(1).max()) * KV_ROW
    cells, best = [], ("", 0.0)
    for scheme in SCHEMES:
        both = []
        for direction in DIRECTIONS:
            seconds = predicted(shares, scheme, direction, rate[work, direction], machine)
            if seconds is not None:
                both.append(total * rate[work, direction] / shares.ranks / seconds)
        cells.append(" / ".join(f"{x:.2f}" for x in both) or "-")
        if both and sum(both) > best[1]:
            best = scheme, sum(both)
    alone = 1e3 * total * rate[work, "forward"] / ranks
    return [str(ranks), f"{length:,}", work, f"{gathered / 2**20:,.0f}", f"{alone:,.2f}", *cells, best[0]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_parallel_model", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--ranks", default="8,64,512")
    parser.add_argument("--lengths", default="262144,1048576,8388608")
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--chunks-per-rank", type=int, help="as in create_cp_plan")
    for name, default in vars(Machine()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args(arguments)
    machine = Machine(**{name: getattr(options, name) for name in vars(Machine())})
    print(table(["mask", "scheme", "direction", "measured ms", "predicted ms", "error"],
                validate(options.results, machine)), end="\n\n")  # fmt: skip
    rate = rates(options.results)
    rows = [
        predict(work, int(length), int(ranks), rate, machine, options.chunks_per_rank)
        for ranks in options.ranks.split(",")
        for length in options.lengths.split(",")
        for work in options.works.split(",")
    ]
    print("efficiencies are forward / backward")
    print(table(["GPUs", "tokens", "mask", "MiB received", "ideal ms", *SCHEMES, "best"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
