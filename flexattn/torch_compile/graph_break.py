"""graph_break: calls that torch.compile does not trace. Each computes as an uncompiled call does."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask, from_torch
from flexattn.call.call import Call
from flexattn.call.dropout import Dropout, drop_below
from flexattn.call.pose import pose
from flexattn.engines.autograd import attention
from flexattn.engines.choice import engine_of, form_for
from flexattn.errors import DtypeError, message
from flexattn.process.events import fallback
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.uncompiled import uncompiled

Results = tuple[Tensor, Tensor, Tensor | None]


# Not `api._through_all_stages`: that comes later in the order of imports, records in modes, and keeps calls for
# `repeated`, which is not consulted here.
@undisturbed("flex_attention")
def _apart(cause: str, *arguments: Any) -> Results:
    fallback("torch.compile", f"a call breaks the graph: {cause}")
    problem = pose(Call(*arguments))
    engine = engine_of(problem)
    return attention(engine, form_for(engine, problem))


# `uncompiled` writes its reason to the function itself, so each reason needs a function of its own.


def _breaking(cause: str, reason: str) -> Callable[..., Results]:
    """Return a call that torch.compile does not trace: why, for flexattn's events, and for Dynamo's."""

    def call(*arguments: Any) -> Results:
        return _apart(cause, *arguments)

    return uncompiled(call, reason)


call_with_graph_break = _breaking(
    "this version of torch lacks a private name",
    "this version of torch lacks a private name that flexattn needs inside of torch.compile, so each call of "
    "flex_attention is one graph break. Remove fullgraph=True, or use a version of torch that flexattn is tested with",
)


call_in_a_transform = _breaking(
    "it is inside of a transform of torch.func",
    "a call of flex_attention inside of torch.vmap, torch.func.grad or another transform is one graph break. Remove "
    "fullgraph=True, or leave the transform out of the compiled function",
)


def _with_untraced_mod(body: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Results:
    """Compute the call whose body Dynamo could not trace, because one of its mods breaks the graph."""
    given = inspect.getclosurevars(body).nonlocals
    options = dict(text.split("=", 1) for text in given["options"])
    dropout = given["dropout_p"]
    if (below := drop_below(dropout)) is not None:
        dropout = Dropout(below, given["seed"])  # which was drawn before the break
    return _apart(
        "Dynamo cannot trace a mod",
        query, key, value, given["score_mod"], given["block_mask"], given["scale"], given["enable_gqa"],
        {name: ast.literal_eval(value) for name, value in options.items()}, given["sink"], dropout,
        given["max_scores"], given["layout"],
    )  # fmt: skip


body_with_graph_break = uncompiled(
    _with_untraced_mod,
    "Dynamo cannot trace a mod of this call of flex_attention, so the call is one graph break. Remove fullgraph=True, "
    "or change the mod",
)


def as_prepared(block_mask: Any) -> BlockMask:
    """Return a mask of flexattn that is prepared for graphs."""
    if isinstance(block_mask, BlockMask):
        return block_mask.prepare()
    if isinstance(block_mask, upstream.BlockMask):
        return from_torch(block_mask).prepare()
    _refused(block_mask)


def _refused(block_mask: Any) -> NoReturn:
    fix = "Make one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."
    raise DtypeError(message("block_mask", f"a {type(block_mask).__name__}", "a BlockMask or None", fix))


def _prepared(block_mask: Any) -> BlockMask:
    fallback("torch.compile", "a call breaks the graph: block_mask is not prepared")
    return as_prepared(block_mask)


prepared = uncompiled(
    _prepared,
    "this BlockMask is not prepared for compiled graphs: it was not made by flexattn.create_block_mask, or was sliced, "
    "expanded, moved or edited since. Call block_mask.prepare() before the compiled function",
)
refused = uncompiled(
    _refused, "block_mask is not a BlockMask. Make one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
)
