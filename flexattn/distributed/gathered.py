"""gathered: a rank receives all keys that its queries need, then computes each of its chunks."""

from __future__ import annotations

from itertools import islice

from torch import Tensor

from flexattn.api import AuxOutput
from flexattn.distributed.chunks import length_of
from flexattn.distributed.exchange import keys_of_spans, with_backward_of
from flexattn.distributed.parts import Options, chunk_over_keys, joined_rows
from flexattn.distributed.plan import ContextPlan
from flexattn.distributed.transfer import calls_of


def attend_gathered(
    plan: ContextPlan, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, AuxOutput]:
    """Return attention of this rank's queries [B, Hq, local, D]. `key` and `value` are its own keys."""
    calls, pairs = calls_of(plan), keys_of_spans(plan, key, value)
    lengths, remaining = [length_of([call.tokens]) for call in calls], iter(pairs)
    queries = query.split(lengths, 2) if len(calls) > 1 else [query]  # the backward of a split copies
    found = [
        chunk_over_keys(plan, call, q, list(islice(remaining, len(call.keys))), options)
        for call, q in zip(calls, queries, strict=True)
    ]
    out, aux = joined_rows(found, options)
    # Other ranks wait for the gradients of their keys, also if no row here attends to a key.
    if aux.lse is not None:
        aux = aux._replace(lse=with_backward_of(pairs[0][0], aux.lse))
    return with_backward_of(pairs[0][0], out), aux
